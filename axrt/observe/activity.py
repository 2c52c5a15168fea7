"""What a rank does at the moment. The loop writes it, and whoever wants to know reads it, also from
another thread: a task costs no call for that."""

import time
from dataclasses import dataclass, field

from axrt.scheduler.task import Task
from axrt.transport.control import News


# Observers of waits do not hear of tasks. Inspection, diagnosis, idle shares and the heartbeat were
# told of every start and end, ten calls a task, to note that a wait had not begun.
@dataclass(slots=True)
class Activity:
    """What the loop of a rank does.

    Attributes:
        task: task that runs or has run last; None before the first.
        since_s: when it has started, or ended, or the call of the engine has begun, whichever is
            latest; in seconds of `time.perf_counter`.
        under_way: number of tasks on a device or a thread that have started and not ended.
        heard: rank and message that were heard last; None before the first.
        waits: the rank does nothing until something arrives.
    """

    task: Task | None = None
    since_s: float = field(default_factory=time.perf_counter)
    under_way: int = 0
    heard: tuple[int, News] | None = None
    waits: bool = False
