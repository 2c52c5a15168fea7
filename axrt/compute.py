"""The engine that computes: starting a task and finishing it are two events.

On a CPU a task has run when `start` returns, and its end is told when the loop asks next. On a GPU
`start` puts the task's kernels on a stream and an event behind them. Its end is told when the
device has passed the event, so the loop never waits for the device and keeps a few tasks ahead.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from axrt.scheduler.message import Message
from axrt.scheduler.task import Task

Made = Callable[[Message], Any]  # the payload of each message that follows from a task
Run = Callable[[Task], Made]

_LAUNCH_DEPTH = (
    2  # one that runs and one behind it; more would only take choices away from the policy
)


class Compute(Protocol):
    """The contract of an engine, as the loop uses it."""

    @property
    def idle(self) -> bool:
        """There is room for another task."""
        ...

    @property
    def busy(self) -> bool:
        """Some tasks have started and their end was not told."""
        ...

    def current(self) -> AbstractContextManager[Any]:
        """The context of the loop: copies that it makes on the device are in order with the
        tasks."""
        ...

    def start(self, task: Task, run: Run) -> Made:
        """Put the task behind those that have started.

        Args:
            task: task to run.
            run: function that runs it on the current device and stream.
        Returns:
            The result of `run`; tasks that start later may use what it holds.
        """
        ...

    def finished(self) -> list[Task]:
        """The tasks that have ended since the last call, in the order in which they started."""
        ...

    def drain(self) -> None:
        """Wait for everything that was started, and forget it."""
        ...


class OnCpu:
    """Runs a task when it is started."""

    def __init__(self) -> None:
        self._ended: list[Task] = []

    @property
    def idle(self) -> bool:
        return not self._ended

    @property
    def busy(self) -> bool:
        return bool(self._ended)

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def start(self, task: Task, run: Run) -> Made:
        made = run(task)
        self._ended.append(task)
        return made

    def finished(self) -> list[Task]:
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        self._ended.clear()


class OnCuda:
    """Puts tasks on a stream and follows them with events."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._running: deque[tuple[Task, torch.cuda.Event]] = deque()

    @property
    def idle(self) -> bool:
        return len(self._running) < _LAUNCH_DEPTH

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def current(self) -> AbstractContextManager[Any]:
        # what the user has put there, weights above all
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def start(self, task: Task, run: Run) -> Made:
        with torch.cuda.stream(self._stream):
            made = run(task)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._running.append((task, event))
        return made

    def finished(self) -> list[Task]:
        ended = []
        while self._running and self._running[0][1].query():  # type: ignore[no-untyped-call]
            ended.append(self._running.popleft()[0])
        if not ended and self._running:
            time.sleep(20e-6)  # a kernel takes longer than this, and the core may serve a neighbour
        return ended

    def drain(self) -> None:
        self._stream.synchronize()
        self._running.clear()


def compute_on(device: torch.device) -> Compute:
    """The engine of a device: `OnCuda` for a GPU, else `OnCpu`."""
    return OnCuda(device) if device.type == "cuda" else OnCpu()
