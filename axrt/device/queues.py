"""Queues: what runs beside the loop, in order."""

# What is put on a queue has a *moment* at its end: it may be asked whether it has passed, and never
# waits. Another queue may be told to go on only after a moment. Starting and having run are two
# things: on a device `put` only launches, and a thread (`thread_queue.py`) runs later.
#
# What a task makes for this rank is kept where the task runs, for the tasks behind it. The user's
# reader waits while a task runs on a thread, since both draw from torch's generator. A reduce
# counts as under way until its sums are with the transport. `scripts/test_queues` runs the engine's
# tests on a thread, which finds what a GPU would. No rank trains so: the thread is for waits that
# cannot be polled.
#
# On a device there are four queues, and one for a library's collectives: tasks, two deep; the
# user's batches in; copies out; copies in. Steps on the host have a thread. The host waits for none
# of them.
#
#   a copy out   waits for its own task, which the host has seen end: no later task holds it up
#   a copy in    waits for nothing: a task finds its input there
#   a parcel     waits for its copy; parcels to other ranks do not wait for it, so a vote overtakes
#                a large gradient
#   a task       waits for the user's stream when a call begins, and for batches: his weights and
#                data are there
#
# Three classes keep this contract, and one set of checks holds them to it
# (`tests/queue_contract.py`). `Inline` runs at once what is put, and its moment has passed.
# `DeviceStream` launches at once, and the moment passes with the stream's event. `ThreadQueue` runs
# it later, and a failure is raised by the moment.

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .device import is_on_host

T = TypeVar("T")
LOOK_S = 20e-6  # pause of a thread that waits for a moment; a kernel takes longer


class Moment(Protocol):
    """A point in a queue."""

    def passed(self) -> bool:
        """Everything before it has run. It never waits; the host may read results once it is
        True."""
        ...


class Queue(Protocol):
    """The contract of a queue."""

    @property
    def apart(self) -> bool:
        """What is put runs on another thread, some time after `put`. Otherwise the function has
        run, and with it what it does on the host, when `put` returns."""
        ...

    @property
    def at_once(self) -> bool:
        """What is put has ended when `put` returns, so that nobody need ask its moment. The loop
        runs a task of such a queue itself, and does not put it."""
        ...

    def put(self, run: Callable[[], object]) -> Moment:
        """Run a function behind what was put before; returns its end."""
        ...

    def moment(self) -> Moment:
        """The end of everything that was put so far."""
        ...

    def after(self, moment: Moment) -> None:
        """Let what is put from now on run after a moment of another queue. A queue that cannot wait
        for it by itself lets the caller wait."""
        ...

    def current(self) -> AbstractContextManager[Any]:
        """Context in which the calling thread's own launches are put on this queue, behind what it
        has launched before; what it launches afterwards is behind this queue."""
        ...

    def drain(self) -> None:
        """Wait until everything that was put has run."""
        ...


class Now:
    """The moment that has passed."""

    def passed(self) -> bool:
        return True


NOW = Now()


class Inline:
    """Runs a function when it is put."""

    apart, at_once = False, True

    def put(self, run: Callable[[], object]) -> Moment:
        run()
        return NOW

    def moment(self) -> Moment:
        return NOW

    def after(self, moment: Moment) -> None:
        wait_for(moment)

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def drain(self) -> None:
        """Everything has run."""


class StreamEvent:
    """The moment of a stream's event.

    Args:
        timed: True if `seconds_after` will be asked.
    """

    __slots__ = ("event",)

    def __init__(self, stream: torch.Stream, timed: bool = False) -> None:
        self.event = torch.Event(stream.device, enable_timing=timed)
        self.event.record(stream)

    def passed(self) -> bool:
        return self.event.query()

    def seconds_after(self, other: "StreamEvent") -> float:
        """The time from another moment to this one by the device's clock; both are timed and have
        passed."""
        return other.event.elapsed_time(self.event) / 1e3


class DeviceStream:
    """Puts kernels and copies on a stream of a device, and follows them with events.

    Args:
        timed: True if the ends of what is put are timed by the device's clock.
    """

    apart = at_once = False

    def __init__(self, device: torch.device, timed: bool = False) -> None:
        self.stream, self._timed = torch.Stream(device), timed

    def put(self, run: Callable[[], object]) -> Moment:
        _, end = self.launch(run)
        return end

    def launch(self, run: Callable[[], T]) -> tuple[T, Moment]:
        """Put a function; returns what it gave when it launched its kernels, and its end."""
        with self._as_current():
            made = run()
        return made, StreamEvent(self.stream, self._timed)

    def moment(self) -> Moment:
        return StreamEvent(self.stream)

    def after(self, moment: Moment) -> None:
        if isinstance(moment, StreamEvent):
            self.stream.wait_event(moment.event)
        else:
            wait_for(moment)

    @contextmanager
    def current(self) -> Iterator[None]:
        users = current_stream(self.stream.device)
        self.stream.wait_stream(users)
        try:
            with self._as_current():
                yield
        finally:
            users.wait_stream(self.stream)

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        # Not `with self.stream`, which torch 2.9 refuses within itself.
        before = current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def drain(self) -> None:
        self.stream.synchronize()


def wait_for(moment: Moment) -> None:
    """Let the calling thread wait for a moment."""
    while not moment.passed():
        time.sleep(LOOK_S)


def moment_of(tensors: Iterable[Tensor]) -> Moment:
    """The moment at which tensors have what the calling thread has launched for them so far."""
    on_device = [tensor for tensor in tensors if not is_on_host(tensor)]
    return StreamEvent(current_stream(on_device[0].device)) if on_device else NOW


def wait_on_device(moment: Moment) -> None:
    """Let what the calling thread launches from now on run after a moment."""
    if isinstance(moment, StreamEvent):
        current_stream(moment.event.device).wait_event(moment.event)


def go_after(moment: Moment) -> None:
    """Let what the calling thread does from now on come after a moment: what it launches on a
    device, or all of it where no device can wait for that."""
    if isinstance(moment, StreamEvent):
        wait_on_device(moment)
    else:
        wait_for(moment)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that the calling thread launches on."""
    return torch.accelerator.current_stream(device)
