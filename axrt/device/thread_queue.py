"""A queue on a thread of its own: for work that would hold up the loop, such as a wait that cannot
be polled, and to try on a CPU what holds on a device, where starting and having run are not the
same."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from .device import CPU
from .queues import NOW, Moment, current_stream, wait_for


class ThreadQueue:
    """Runs functions one after the other on a thread, on the CPU, in the grad mode and under the
    autocast of the caller of `put`.

    What a function launches on a device has run when its moment passes.

    When one fails, those behind it do not run, and the moment of each raises its error; `drain`
    makes the queue new. The thread ends when nobody holds the queue any more.

    Args:
        device: device that functions launch work on.
    """

    apart, at_once = True, False

    def __init__(self, name: str, device: torch.device = CPU) -> None:
        self._device = device
        self._after: list[Moment] = []
        self._last: _Put | None = None
        self._work = _Work()
        threading.Thread(target=self._work.run, name=name, daemon=True).start()
        weakref.finalize(self, self._work.waiting.put, None).atexit = False

    def put(self, run: Callable[[], object]) -> Moment:
        after, self._after = self._after, []
        self._last = _Put(_as_the_caller(self._whole(run)), after)
        self._work.waiting.put(self._last)
        return self._last

    def _whole(self, run: Callable[[], object]) -> Callable[[], object]:
        """The function, and then a wait for what it has launched."""
        if self._device == CPU:
            return run

        def running() -> None:
            run()
            current_stream(self._device).synchronize()

        return running

    def moment(self) -> Moment:
        return self._last or NOW

    def after(self, moment: Moment) -> None:
        self._after.append(moment)

    @contextmanager
    def current(self) -> Iterator[None]:
        """What the caller does within the context may run beside what was put; what it does
        afterwards does not."""
        try:
            yield
        finally:
            self._wait()

    def drain(self) -> None:
        self._wait()
        self._after, self._last, self._work.failure = [], None, None

    def _wait(self) -> None:
        if self._last is not None:
            self._last.ended.wait()


class _Put:
    """What was put, and the moment at its end.

    Args:
        run: function to run.
    """

    __slots__ = ("_after", "_failure", "_run", "ended")

    def __init__(self, run: Callable[[], object], after: list[Moment]) -> None:
        self._run, self._after = run, after
        self._failure: BaseException | None = None
        self.ended = threading.Event()

    def passed(self) -> bool:
        ended = self.ended.is_set()
        if self._failure is not None:
            raise self._failure
        return ended

    def do(self) -> None:
        for moment in self._after:
            wait_for(moment)
        self._run()

    def end(self, failure: BaseException | None) -> None:
        """Tell the end, and let go of what was put."""
        self._failure = failure
        self._run, self._after = _nothing, []
        self.ended.set()


class _Work:
    """What the thread does; it does not hold the queue, whose end is the thread's."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[_Put | None] = SimpleQueue()
        self.failure: BaseException | None = None

    def run(self) -> None:
        while (one := self.waiting.get()) is not None:
            try:
                if self.failure is None:
                    one.do()
            except BaseException as failure:  # raised where somebody asks whether it has passed
                self.failure = failure
            one.end(self.failure)
            del one  # or the thread would hold what it did last


def _nothing() -> None:
    pass


def _as_the_caller(run: Callable[[], object]) -> Callable[[], object]:
    """The function in the modes of now, which torch keeps for each thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    mixed, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def running() -> None:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", dtype=dtype, enabled=mixed),
        ):
            run()

    return running
