"""The parts that workers share: their contract, their mail, and the map from kinds to workers.

Facts are the brain's. Workers know the payloads of messages, and nothing of when anything runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from axrt.compute import Made
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.task import AnyKind, Task


def nothing(message: Message) -> Any:
    """The payload of a task that makes none: None for every message."""
    return None


class Piece(NamedTuple):
    """The place of a task that is about to run among the pieces of its work.

    Args:
        more: True if another piece of the same work comes after it.
        completes: indices of the buckets of its stage whose gradient of a step is complete with it;
            the last piece completes all others.
    """

    more: bool = False
    completes: tuple[int, ...] = ()


WHOLE = Piece()


class Worker(Protocol):
    """The contract of what runs a family of kinds."""

    @property
    def kinds(self) -> Sequence[AnyKind]:
        """The kinds of task that the worker runs."""
        ...

    def run(self, task: Task) -> Made:
        """Do the task on the current device and stream; its inputs are in the mail.

        Returns:
            A function that gives the payload of each message that follows from the task, for later
            tasks of this device.
        """
        ...

    def piece_of(self, task: Task) -> Piece:
        """The place of a task that is about to run among the pieces of its work."""
        return WHOLE

    def complete(self, task: Task, made: Made) -> Made:
        """End a task that has finished on the device: values may be read, and what it made may
        leave.

        Args:
            task: task that has finished.
            made: result of `run`.
        Returns:
            A function that gives the payload of each message to other ranks and to the host.
        """
        return made


class Mail:
    """Payloads that wait for a task, by meaning, stage, number and bucket of their message.

    The pipe is no part of the key: a rank holds each stage for one pipe only.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Meaning, int, int, int], Any] = {}

    def put(self, message: Message, payload: Any) -> None:
        """Keep the payload of a message; None is not kept."""
        if payload is not None:
            meaning, stage, number, _, bucket = message
            self._kept[meaning, stage, number, bucket] = payload

    def take(self, meaning: Meaning, stage: int, number: int, bucket: int = 0) -> Any:
        """The payload of a message, which is let go; None where nothing came with it."""
        return self._kept.pop((meaning, stage, number, bucket), None)


class Workers:
    """All workers of a session.

    Args:
        mail: payloads of the session.
        workers: workers, each of which runs some kinds.
        hears: function that hears a message and its payload at once, by meaning; other payloads go
            into the mail.
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
        """Keep the payload of a message until the task that needs it runs."""
        self._hears.get(message.meaning, self._mail.put)(message, payload)

    def run(self, task: Task) -> Made:
        """Run a task; see `Worker.run`."""
        made = self._made[task] = self._worker_of[task.kind].run(task)
        return made

    def piece_of(self, task: Task) -> Piece:
        """The place of a task that is about to run among the pieces of its work."""
        return self._worker_of[task.kind].piece_of(task) if task.kind.in_pieces else WHOLE

    def has_more_pieces(self, task: Task) -> bool:
        """The task is a piece, and another piece of the same work comes after it."""
        return self.piece_of(task).more

    def complete(self, task: Task) -> Made:
        """End a task that has finished on the device; see `Worker.complete`."""
        return self._worker_of[task.kind].complete(task, self._made.pop(task))
