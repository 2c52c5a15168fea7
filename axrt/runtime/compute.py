"""The engine that computes: starting a task and finishing it are two events."""

# Tasks are put on a queue (`queues.py`). On a CPU a task has ended when it has run, so the loop
# runs it without this engine (`at_once`). On a device `start` launches the task's kernels. Its end
# is told when the device has passed it, so the loop never waits for the device and keeps a few
# tasks ahead. On a thread a task may not even have begun when `start` returns.

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from axrt.device.device import CPU
from axrt.device.device_clock import Clock, DeviceClock, HostClock
from axrt.device.queues import LOOK_S, DeviceStream, Inline, Moment, Queue
from axrt.device.thread_queue import ThreadQueue
from axrt.scheduler.task import Task

# One that runs and one behind it; more would only take choices away from the policy.
_LAUNCH_DEPTH = 2


class Ended(NamedTuple):
    """A task that has ended."""

    task: Task  # the task
    # when it was started, or when the one before it had ended, whichever is later; in seconds
    # of `time.perf_counter`
    began_s: float
    ended_s: float  # when it had ended, on the same clock


class Compute:
    """Runs tasks on a queue, in the order in which they start.

    Args:
        depth: number of tasks that may have started and not ended.
        naps: True to pause where a task is asked for that has not ended.
        clock: clock that says when tasks have ended; None: the host's.
        now: the host's clock, in seconds.
    Attributes:
        at_once: a task ends as it is run; see `Queue.at_once`.
        running: tasks that have started and whose end was not told, each with the second of its
            start and the moment of its end.
    """

    def __init__(
        self,
        queue: Queue,
        depth: int = 1,
        naps: bool = True,
        clock: Clock | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.queue = queue
        self.at_once = queue.at_once
        self._depth, self._naps = depth, naps
        self._clock, self._now = clock or HostClock(), now
        self.running: deque[tuple[Task, float, Moment]] = deque()
        self._free_s = 0.0  # when the task before had ended

    @property
    def idle(self) -> bool:
        """There is room for another task."""
        return len(self.running) < self._depth

    def current(self) -> AbstractContextManager[Any]:
        """The context of the loop: what it launches itself is in order with the tasks."""
        return self.queue.current()

    @property
    def apart(self) -> bool:
        """Some task may be running on another thread."""
        return self.queue.apart and bool(self.running)

    def start(self, task: Task, run: Callable[[], object]) -> None:
        """Put the task behind those that have started.

        Args:
            run: function that runs it on the current device and stream; tasks that start later may
                use what it makes.
        """
        started_s = self._now()
        self.running.append((task, started_s, self.queue.put(run)))

    def finished(self) -> list[Ended]:
        """The tasks that have ended since the last call, in the order in which they started."""
        ended = []
        while self.running and self.running[0][-1].passed():
            task, started_s, moment = self.running.popleft()
            began_s = max(started_s, self._free_s)
            self._free_s = self._clock.time_of(moment, began_s)
            ended.append(Ended(task, began_s, self._free_s))
        if self._naps and not ended and self.running:
            time.sleep(LOOK_S)  # the core may serve a neighbour
        return ended

    def drain(self) -> None:
        """Wait for everything that was started, and forget it."""
        self.queue.drain()
        self.running.clear()


def compute_on(device: torch.device) -> Compute:
    """The engine of a device."""
    if device == CPU:
        return Compute(Inline())
    return Compute(DeviceStream(device, timed=True), _LAUNCH_DEPTH, clock=DeviceClock())


def copies_on(device: torch.device, apart: bool, name: str) -> Compute:
    """The engine of copies in one direction between a device and scratch.

    Args:
        apart: True where a copy holds up the thread that calls for it, as that of a disk does.
    """
    if apart:
        return Compute(ThreadQueue(f"axrt {name}", device), _LAUNCH_DEPTH, naps=False)
    if device == CPU:
        return Compute(Inline(), naps=False)
    stream = DeviceStream(device, timed=True)
    return Compute(stream, _LAUNCH_DEPTH, naps=False, clock=DeviceClock())


def host_steps() -> Compute:
    """The engine of optimizer steps on the host, beside the device's tasks."""
    return Compute(ThreadQueue("axrt steps"), _LAUNCH_DEPTH, naps=False)
