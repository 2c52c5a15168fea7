"""Which head of a rank starts next."""

# Of every row the head is the first task that has not started. Most heads count microbatches, and
# may become ready with any message: they are scanned each time. Those that count steps become ready
# only after an event that `_look` tells of. A piece behind a joint waits for slices alone, and asks
# nobody: its task was let in with its first piece.

from collections.abc import Sequence

from .policies import Policy
from .rank_view import RankView
from .rules import OnDevice, Queue, Row
from .rules.row import always
from .running import Running
from .table import Table
from .task import Task


class Picking(RankView):
    """The choice of one rank.

    Attributes:
        asked: number of microbatches that are wanted, counted from the first step of the run.
    """

    policy: Policy
    ranks: int
    rank: int
    asked: int
    _table: Table
    _running: Running
    _look: dict[Queue, bool]  # by queue: work of once a step may have become ready

    # Heads are scanned, not woken. Counters that wake the heads that wait for them were thought of.
    # A scan of the few rows of a rank makes no call, and nothing can be woken too late.
    def pick(self, queue: Queue = OnDevice.COMPUTE) -> Task | None:
        """The task that starts next on a queue: of all heads that may run now, the one with the
        least priority.

        Returns:
            None where no head of the queue may run. Nothing changes until `start`.
        """
        ready: list[tuple[Row, Task]] = []
        asked, apart, policy = self.asked, self._running.apart, self.policy
        for entry, kind, stage, heads, parts, needs in self._table.often[queue]:
            # Inputs of a step that was not asked for here may have come: another rank is in its
            # next call, and the user of this one may do something before.
            if (number := heads[kind]) >= asked or (apart and (kind, stage) in apart):
                continue
            for numbers, counter, _ in needs:  # `Counters.is_ready`, without a call for every row
                if numbers[counter] <= number:
                    break
            else:
                row, head = entry.row, entry.made
                if head is None or head.microbatch != number or head.part != parts[kind]:
                    head = entry.head()
                # `_admits`, without a call
                if head.part and row.held > 0:
                    ready.append((row, head))
                    continue
                may_run = not row.level or policy.admits(head, self)
                if may_run and (row.admitted is always or row.admitted(head, self)):
                    ready.append((row, head))
        if self._look[queue] or self._running.at_joints:
            ready += self._seldom_ready(queue)
        if not ready:
            return None
        _, head = ready[0]
        return self._least(ready) if len(ready) > 1 else head

    def _admits(self, row: Row, head: Task) -> bool:
        """The head of a row has room to run now, and the policy lets it, where it is asked. Of a
        forward in pieces the first alone asks: its memory is taken for all of them."""
        if head.part and (row.held > 0 or row.joints is not None):
            return True
        if row.level and not self.policy.admits(head, self):
            return False
        return row.admitted is always or row.admitted(head, self)

    def _least(self, ready: Sequence[tuple[Row, Task]]) -> Task:
        """The head with the least key; of equal ones the first."""
        least: tuple[int, ...] | None = None
        for row, head in ready:
            priority = row.priority
            key = priority(head, self) if priority else (row.level, *self.policy.key(head, self))
            if least is None or key < least:
                first, least = head, key
        return first

    def pick_piece(self, queue: Queue = OnDevice.COMPUTE) -> Task | None:
        """The piece behind a joint that starts next on a queue; None where none may run."""
        pieces = self._ready_pieces(queue)
        return self._least(pieces) if pieces else None

    def is_at_joint(self, queue: Queue = OnDevice.COMPUTE) -> bool:
        """A task of the queue stands between two of its pieces."""
        return any(of.row.queue is queue for of in self._running.at_joints.values())

    def _ready_pieces(self, queue: Queue) -> list[tuple[Row, Task]]:
        return [
            (of.row, of.head())
            for of in self._running.at_joints.values()
            if of.row.queue is queue and of.counters.is_joined(of.kind)
        ]

    def _seldom_ready(self, queue: Queue) -> list[tuple[Row, Task]]:
        """The heads of a queue that may run now, of pieces behind a joint and of once a step."""
        pieces = self._ready_pieces(queue) if self._running.at_joints else []
        return pieces + self._ready_of_a_step(queue) if self._look[queue] else pieces

    def _ready_of_a_step(self, queue: Queue) -> list[tuple[Row, Task]]:
        """The heads of a queue that may run now and do not count microbatches. It also notes
        whether it is worth looking again before an event that `_look_again` tells of."""
        once = []
        # `Counters.is_ready`, without a call for every row
        for entry, kind, heads_of, needs in self._table.once[queue]:
            past = heads_of[kind] + 1
            for numbers, counter, each in needs:
                if numbers[counter] < past * each:
                    break
            else:
                once.append(entry)
        heads = [(entry.row, entry.head()) for entry in once]
        ready = [
            (row, head)
            for row, head in heads
            if self.job.first_for(*head[:3]) < self.asked
            and self._admits(row, head)
            and self._resources.may_go(row, head)
            and self._resources.has_place(row)
        ]
        # Whether the others may run may change at any time, but for those that an event wakes.
        others = (entry.row.takes is None and not entry.row.fills for entry in once)
        self._look[queue] = bool(ready) or any(others)
        return ready
