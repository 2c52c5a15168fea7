"""A reader whose replica shares microbatches with others: it gives some of its own away, and asks
for theirs when it has none left. `scheduler/sharing.py` decides."""

from collections import deque
from collections.abc import Callable
from typing import Any

from axrt.scheduler.job import Job
from axrt.scheduler.lacks import Coordinates, Lack
from axrt.scheduler.sharing import Choice, Hand
from axrt.scheduler.simulation.reader_messages import has_ended, has_read
from axrt.scheduler.task import Kind, Task
from axrt.transport.control import ControlMessage, Topic

from .reader import BatchReader, Read

_NOTHING = (None, None)  # the payload of an empty slot, for either end of the pipeline


# Readers steal. One rank that deals out for all was thought of: a microbatch would wait for an
# answer each time, and not only at the end of a step.
class SharingReader:
    """The reader of one replica, over all steps.

    Args:
        replica: index of this replica.
        tell: function that sends a control message with a payload to the reader of a replica.
    """

    serves = True

    def __init__(
        self, job: Job, replica: int, tell: Callable[[int, ControlMessage, Any], None]
    ) -> None:
        self._job, self._replica, self._tell = job, replica, tell
        self._own: BatchReader | None = None
        self._hand = Hand.of(job, replica)
        self._generation, self._step, self._slot = 0, -1, 0
        self._given: deque[Any] = deque()  # the items of the hand's `given`
        # Replicas that have asked, with the generation and the step: they may be a step ahead.
        self._asking: deque[tuple[int, tuple[int, int]]] = deque()

    def of_step(self, step: int, generation: int, own: BatchReader) -> "SharingReader":
        """This reader, which reads for a step from now on.

        Args:
            generation: number of the session, which tells a step from one that was dropped.
        """
        self._own, self._hand = own, Hand.of(self._job, self._replica)
        self._generation, self._step = generation, step
        self._given.clear()
        return self

    def __call__(self, number: int) -> Read | None:
        """The messages for a slot, with their payloads; None: another replica was asked, and has
        not answered."""
        slot, choice = number, self._hand.choice()
        if choice is Choice.ASK:
            self._ask()
        if choice in (Choice.ASK, Choice.WAIT):
            self._slot = slot
            return None
        if choice is Choice.LEAVE_EMPTY:
            return self._read(slot, None, _NOTHING)
        if choice is Choice.TAKE:
            return self._read(slot, self._hand.take(), self._given.popleft())
        index, item = self._draw()
        return self._ended(index) if item is None else self._read(slot, index, item)

    def serve(self) -> Read:
        """Answer the replicas that have asked. Returns the messages that the data has ended, where
        it has."""
        said: Read = []
        while self._asking and self._asking[0][1] <= (self._generation, self._step):
            replica, when = self._asking.popleft()
            if when == (self._generation, self._step):
                said += self._answer(replica)
        return said

    def lacks(self) -> list[Lack]:
        """What the next slot waits for, where another replica was asked."""
        if self._hand.asked is None or self._given:
            return []
        head = Task(Kind.FORWARD, 0, self._slot)
        rank = self._job.placement.rank_of(0)
        return [Lack(head, "a microbatch to share", Coordinates(self._hand.asked, rank))]

    def hear_ask(self, control: ControlMessage, generation: int) -> None:
        """A replica asks for a microbatch; it is answered when the user's code may run."""
        self._asking.append((control.about, (generation, control.number)))

    def hear_answer(self, control: ControlMessage, payload: Any) -> None:
        """The replica that was asked has answered: with an index over all replicas or None, how
        many it has to give then, and the item."""
        generation, index, left, item = payload
        if (generation, control.number) != (self._generation, self._step):
            return  # of a step that was dropped
        self._hand.answered(index, left)
        if index is not None:
            self._given.append(item)

    def _read(self, slot: int, index: int | None, item: Any) -> Read:
        """The messages for a slot that has this microbatch. The next one is asked for now, so that
        the answer is here when there is room."""
        if self._hand.asks_ahead(is_last=self._job.ends_a_step(slot)):
            self._ask()
        number = None if index is None else self._step * self._job.microbatches_in_all + index
        told = has_read(self._job, self._replica, slot)
        payloads = [(number, of) for of in item] * self._job.team
        return list(zip(told, payloads, strict=True))

    def _ended(self, index: int) -> Read:
        """The messages that this replica's data has ended, before a microbatch of this index."""
        drawn = index - self._replica * self._job.drawn
        number = self._job.first_of(self._step) + drawn
        told = has_ended(self._job, range(self._job.replicas), number)
        return [(message, None) for message in told]

    def _draw(self) -> tuple[int, Any]:
        """This replica's next microbatch: its index over all replicas, and the item or None."""
        assert self._own is not None
        index = self._hand.draw()
        return index, self._own.draw(self._step * self._job.microbatches_in_all + index)

    def _ask(self) -> None:
        control = ControlMessage(Topic.ASKS, self._replica, self._step)
        self._tell(self._hand.ask(), control, self._generation)

    def _answer(self, replica: int) -> Read:
        given: int | None = None
        item: Any = None
        ended: Read = []
        if self._hand.spare:
            index, item = self._draw()
            given = None if item is None else index
            ended = self._ended(index) if item is None else []
        control = ControlMessage(Topic.GIVES, self._replica, self._step)
        self._tell(replica, control, (self._generation, given, self._hand.spare, item))
        return ended
