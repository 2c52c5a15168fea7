"""What is common to workers: what they promise, their mail, and who runs what.

What is true is the brain's. Workers know what messages carry, and nothing of when anything runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.task import AnyKind, Task

Made = Callable[[Message], Any]  # the payload of each message that follows from a task


def nothing(message: Message) -> Any:
    """A task that makes nothing which travels."""
    return None


class Piece(NamedTuple):
    """What a task that is about to run is of the whole.

    Args:
        more: another piece of the same comes after it.
        completes: buckets of its stage whose gradient of a step is complete with it, besides those
            that are with the last one.
    """

    more: bool = False
    completes: tuple[int, ...] = ()


WHOLE = Piece()


class Worker(Protocol):
    """Runs a family of kinds."""

    @property
    def kinds(self) -> Sequence[AnyKind]:
        """The kinds of task that it runs."""
        ...

    def run(self, task: Task) -> Made:
        """Do the task on the current device and stream; its inputs are in the mail.

        Returns:
            The payloads, for later tasks of this device; asked only for messages that follow from
            the task.
        """
        ...

    def piece_of(self, task: Task) -> Piece:
        """What the task, which is about to run, is of the whole."""
        return WHOLE

    def complete(self, task: Task, made: Made) -> Made:
        """The task has finished on the device: values may be read, and what it made may leave.

        Args:
            task: has run.
            made: what `run` returned.
        Returns:
            The payloads for other ranks and for the host.
        """
        return made


class Mail:
    """Payloads that wait for a task, by what they came with; a rank has each stage of one pipe
    only."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Meaning, int, int, int], Any] = {}

    def put(self, message: Message, payload: Any) -> None:
        """Keep what came with a message; None is not kept."""
        if payload is not None:
            meaning, stage, number, _, bucket = message
            self._kept[meaning, stage, number, bucket] = payload

    def take(self, meaning: Meaning, stage: int, number: int, bucket: int = 0) -> Any:
        """What came with a message, and is let go; None where nothing came with it."""
        return self._kept.pop((meaning, stage, number, bucket), None)


class Workers:
    """All workers of a session.

    Args:
        mail: of the session.
        workers: each kind of task is run by one of them.
        hears: what is heard at once and not put into the mail, by meaning.
    """

    def __init__(
        self,
        mail: Mail,
        workers: Sequence[Worker],
        hears: Mapping[Meaning, Callable[[Message, Any], None]] | None = None,
    ) -> None:
        self._mail = mail
        self._worker_of = {kind: worker for worker in workers for kind in worker.kinds}
        self._hears = hears or {}
        self._made: dict[Task, Made] = {}

    def keep(self, message: Message, payload: Any) -> None:
        """Keep what came with a message until the task that needs it runs."""
        self._hears.get(message.meaning, self._mail.put)(message, payload)

    def run(self, task: Task) -> Made:
        """Do a task; see `Worker.run`."""
        made = self._made[task] = self._worker_of[task.kind].run(task)
        return made

    def piece_of(self, task: Task) -> Piece:
        """What the task, which is about to run, is of the whole."""
        return self._worker_of[task.kind].piece_of(task) if task.kind.in_pieces else WHOLE

    def has_more_pieces(self, task: Task) -> bool:
        """The task is a piece, and another one of the same comes after it."""
        return self.piece_of(task).more

    def complete(self, task: Task) -> Made:
        """The task has finished on the device; see `Worker.complete`."""
        return self._worker_of[task.kind].complete(task, self._made.pop(task))
