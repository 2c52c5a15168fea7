"""The parts that workers share: their contract, their mail, and the map from kinds to workers."""

# Facts are the brain's. Workers know the payloads of messages, and nothing of when anything runs.

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.task import AnyKind, Task

Made = Callable[[Message], Any]  # the payload of each message that follows from a task
Land = Callable[[Message, Sequence[Tensor]], None]  # says where the tensors of a message go


def nothing(message: Message) -> Any:
    """The payload of a task that makes none: None for every message."""
    return None


class Piece(NamedTuple):
    """The place of a task that is about to run among the pieces of its work."""

    more: bool = False  # True if another piece of the same work comes after it
    # indices of the buckets of its stage whose gradient of a step is complete with it; the last
    # piece completes all others
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

    def act_of(self, kind: AnyKind) -> Callable[[Task], Made]:
        """The function that does the tasks of a kind: `run`, or a part of it."""
        return self.run

    def piece_of(self, task: Task) -> Piece:
        """The place of a task that is about to run among the pieces of its work."""
        return WHOLE

    @property
    def in_known_pieces(self) -> Collection[AnyKind]:
        """Kinds whose tasks come in pieces, of which `piece_of` knows before the first has run."""
        return ()

    def ends(self, kind: AnyKind) -> bool:
        """`complete` does something for tasks of a kind."""
        return type(self).complete is not Worker.complete

    def complete(self, task: Task, made: Made) -> Made:
        """End a task that has finished on the device: values may be read, and what it made may
        leave.

        Returns:
            A function that gives the payload of each message to other ranks and to the host.
        """
        return made

    def posted(self, task: Task) -> None:
        """Note that all that follows from a task that has ended was given to the transport."""
        return None  # noqa: RET501 - a worker need not note it


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
        workers: workers, each of which runs some kinds.
        hears: function that hears a message and its payload at once, by meaning; other payloads go
            into the mail.
    Attributes:
        piece_of: function that gives the place of a task that is about to run among the pieces of
            its work, by kind.
        in_known_pieces: kinds whose tasks come in pieces, as is known before the first has run.
        in_pieces: these, and those of which it may be known then.
        told_of_posts: kinds whose worker is told when all that follows from a task has left.
    """

    def __init__(
        self,
        mail: Mail,
        workers: Sequence[Worker],
        hears: Mapping[Meaning, Callable[[Message, Any], None]] | None = None,
    ) -> None:
        self._put = mail.put
        self._worker_of = {kind: worker for worker in workers for kind in worker.kinds}
        self._act_of = {kind: worker.act_of(kind) for kind, worker in self._worker_of.items()}
        self.piece_of = {kind: worker.piece_of for kind, worker in self._worker_of.items()}
        self.in_known_pieces = {kind for worker in workers for kind in worker.in_known_pieces}
        may_be = {kind for kind in self._worker_of if kind.in_pieces}
        self.in_pieces = may_be | self.in_known_pieces
        self._ended = {kind for kind, worker in self._worker_of.items() if worker.ends(kind)}
        self.told_of_posts = {
            kind
            for kind, worker in self._worker_of.items()
            if type(worker).posted is not Worker.posted
        }
        self._hears = hears or {}
        # Of tasks that have run and not ended.
        self._made: dict[Task, Made] = {}
        self._pieces: dict[Task, Piece] = {}

    def keep(self, message: Message, payload: Any) -> None:
        """Keep the payload of a message until the task that needs it runs."""
        if message.meaning in self._hears:
            self._hears[message.meaning](message, payload)
        elif payload is not None:
            self._put(message, payload)

    def run(self, task: Task, here: Sequence[Message]) -> Made:
        """Run a task that has ended when it has run, and end it.

        Args:
            task: task to run; those that have started before have ended.
        Returns:
            The result of `Worker.complete`.
        """
        made = self._act_of[task.kind](task)
        for message in here:
            self.keep(message, made(message))
        return self._worker_of[task.kind].complete(task, made) if task.kind in self._ended else made

    def begin(self, task: Task, here: Sequence[Message]) -> None:
        """Run a task whose end comes later, see `Worker.run`, and keep the payloads of messages
        that follow from it on this rank. It is called where tasks run, behind those that have
        started before."""
        if task.kind.in_pieces and task.kind not in self.in_known_pieces:
            self._pieces[task] = self.piece_of[task.kind](task)
        self._made[task] = self._act_of[task.kind](task)
        if here:
            self.keep_made(task, here)

    def keep_made(self, task: Task, here: Iterable[Message]) -> None:
        """Keep what a task that has run made, for messages that follow from it on this rank."""
        for message in here:
            self.keep(message, self._made[task](message))

    def piece(self, task: Task) -> Piece:
        """The place of a task that has begun among the pieces of its work; to be asked for once."""
        return self._pieces.pop(task)

    def has_more_pieces(self, task: Task) -> bool:
        """The task would be a piece, and another piece of the same work comes after it; every task
        that has started has run."""
        return task.kind.in_pieces and self.piece_of[task.kind](task).more

    def complete(self, task: Task) -> Made:
        """End a task that has begun and finished on the device; see `Worker.complete`."""
        made = self._made.pop(task)
        return self._worker_of[task.kind].complete(task, made) if task.kind in self._ended else made

    def posted(self, task: Task) -> None:
        """Note that all that follows from a task has left; see `Worker.posted`."""
        self._worker_of[task.kind].posted(task)
