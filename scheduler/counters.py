"""How far all work has come on a stage of this rank, or on a bucket of that stage."""

# Microbatches of all steps are numbered on (n = step * m + k), so "how far" says everything, and no
# task objects or graphs are kept. Where a replica has several pipes, only the microbatches of the
# stage's own pipe count; the stride between them is the number of pipes. Tasks of a kind run in
# order; the *head* of a kind is the first that has not started. It is ready when every counter that
# it needs has passed its number.

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from .job import StageCopy
from .message import Meaning
from .numbering import joints_before
from .task import AnyKind, Counts


class Gate(Enum):
    """Conditions that open work besides tasks and messages."""

    WEIGHTS = "weights"  # those of the step are in place; counts microbatches
    STORED = "stores"  # offloaded state of the step before is where it belongs; the same count
    REDUCED = "sums of the run before last"  # gradients that were let go; the same count
    REFRESHED = "refreshes"  # those that steps use; the same count
    # The same count, where whole weights come for a residency:
    FORWARDS = "whole weights for forwards"
    RECOMPUTES = "whole weights for recomputation"
    BACKWARDS = "whole weights for backwards"
    STEPPED = "new weights of the own shard"  # for residencies of the step; counts residencies
    LEFT = "the end of the residency before"  # counts residencies

    __hash__ = object.__hash__

    @property
    def counts(self) -> Counts:
        """What the gate counts."""
        of_residencies = self in (Gate.STEPPED, Gate.LEFT)
        return Counts.RESIDENCIES if of_residencies else Counts.MICROBATCHES


Counter = AnyKind | Meaning | Gate


class Passed(NamedTuple):
    """A need that counters can check."""

    numbers: Mapping[Counter, int]  # the `count` (started) or `finished`
    counter: Counter  # key of the number that must have passed the head
    counters: "Counters"  # what keeps `numbers`


class Joints(NamedTuple):
    """The joints of a kind of work on a stage that a team holds. A task has a piece more than
    joints; between two pieces slices of every other member come."""

    meaning: Meaning  # meaning of the messages that bring slices
    number: int  # joints of a task, at least 1
    members: tuple[StageCopy, ...]  # the other members, in order


class Counters:
    """One row of counters; `RankState` adds what the rules name.

    Args:
        a_step: function that gives the number of what is counted in a step, such as microbatches
            over all pipes of the replica.
        pipe, pipes: index of the counted pipe within its replica, and number of pipes there.
    Attributes:
        count: number of the next task to start or message to come, by counter.
        finished: number of the task that finishes next, by kind.
        part: `Task.part` of the head, a bucket or a piece, by kind.
        needs: numbers that must have passed the head, each with the counters that keep it, by kind.
        joints: joints of the stage, by kind; those without any are left out.
    """

    __slots__ = (
        "_a_step",
        "_after",
        "_early",
        "_per_step",
        "_pipe",
        "_pipes",
        "_senders",
        "_skipped",
        "_stride",
        "count",
        "finished",
        "joints",
        "name",
        "needs",
        "part",
    )

    def __init__(
        self, name: str, a_step: Callable[[Counts], int], pipe: int = 0, pipes: int = 1
    ) -> None:
        self.name = name
        self._a_step, self._pipe, self._pipes = a_step, pipe, pipes
        self.needs: dict[AnyKind, tuple[Passed, ...]] = {}
        self.joints: dict[AnyKind, Joints] = {}
        self.count: dict[Counter, int] = {}
        self.finished: dict[Counter, int] = {}
        self.part: dict[AnyKind, int] = {}
        self._stride: dict[Counter, int] = {}
        self._per_step: dict[Counter, int] = {}
        self._early: dict[Meaning, set[int]] = {}
        self._senders: dict[Meaning, Sequence[StageCopy]] = {}
        self._after: dict[Meaning, AnyKind] = {}
        self._skipped: dict[AnyKind, set[int]] = {}

    # Counters.

    def count_tasks(self, kind: AnyKind, bucket: int = 0) -> None:
        """Tasks of a kind are counted here."""
        self._count(kind, kind.counts)
        self.finished[kind] = self.count[kind]
        self.part[kind] = bucket

    def count_messages(
        self, meaning: Meaning, senders: Sequence[StageCopy], after: AnyKind | None
    ) -> None:
        """Messages of a meaning are counted here, from these senders; see `rules.row.Need`."""
        self._count(meaning, meaning.counts, 1 if meaning.of_a_microbatch else len(senders))
        self._early.setdefault(meaning, set())
        self._senders[meaning] = senders
        if after is not None:
            self._after[meaning] = after

    def count_gate(self, gate: Gate, count: int) -> None:
        """A gate is open up to that number."""
        self._count(gate, gate.counts)
        self.count[gate] = count

    def _count(self, counter: Counter, counts: Counts, senders: int = 1) -> None:
        """Add a counter; of several senders each has a number of its own."""
        of_microbatches = counts is Counts.MICROBATCHES
        self.count.setdefault(counter, self._pipe if of_microbatches else 0)
        self._stride[counter] = self._pipes if of_microbatches else 1
        self._per_step[counter] = self._a_step(counts) * senders

    def begin_at(self, step: int) -> None:
        """Set every counter as if the first `step` steps had been done."""
        for counter in self.count:
            self.count[counter] += step * self._per_step[counter]
        # in place: needs refer to it
        self.finished.update({kind: self.count[kind] for kind in self.finished})

    # Messages.

    def step_of(self, meaning: Meaning, number: int) -> int:
        """The step to which a message belongs."""
        return number // self._per_step[meaning]

    def refusal(self, meaning: Meaning, number: int) -> str:
        """Why that message cannot be true here; "" where it can."""
        if meaning not in self._early:
            return "is nothing that is waited for"
        if number < self.count[meaning] or number in self._early[meaning]:
            return "has come before"
        if (number - self.count[meaning]) % self._stride[meaning]:
            return "is of another pipe"
        after = self._after.get(meaning)
        if after is not None and number >= self.count[after]:
            return f"before its {after.label}"
        return ""

    def arrive(self, meaning: Meaning, number: int) -> None:
        """Count a message. Messages may overtake each other; the counter stops at the first gap."""
        early = self._early[meaning]
        if number > self.count[meaning]:
            early.add(number)
            return
        self.count[meaning] += self._stride[meaning]
        while self.count[meaning] in early:
            early.remove(self.count[meaning])
            self.count[meaning] += self._stride[meaning]

    def owner(self, counter: Counter) -> StageCopy | None:
        """The sender that owes the next message of a counter; None where the counter is this rank's
        work."""
        senders = self._senders.get(counter) if isinstance(counter, Meaning) else None
        return senders[self.count[counter] % len(senders)] if senders else None

    # Tasks.

    def is_ready(self, kind: AnyKind) -> bool:
        """The head of a kind has all it needs."""
        if not kind.of_a_microbatch:
            return not any(self.missing(kind))
        if kind in self.joints and self.part[kind]:
            return self.is_joined(kind)
        head = self.count[kind]
        for numbers, counter, _ in self.needs[kind]:  # noqa: SIM110 - a generator costs as much as all the comparisons
            if numbers[counter] <= head:
                return False
        return True

    def numbers_of_a_task(
        self, kind: AnyKind
    ) -> tuple[tuple[Mapping[Counter, int], Counter, int], ...]:
        """The needs of a kind that counts no microbatches, each with how many one task is for, as
        `missing` has it. They stay as they are once all rows are there."""
        a_step = self._per_step[kind]
        return tuple(
            [
                (numbers, counter, counters._per_step[counter] // a_step)
                for numbers, counter, counters in self.needs[kind]
            ]
        )

    def is_joined(self, kind: AnyKind) -> bool:
        """All slices of the joint before the piece at the head are here."""
        meaning, number, members = self.joints[kind]
        passed = joints_before(self.count[kind], self.part[kind], number, self._pipes)
        return self.count[meaning] >= passed * len(members)

    def missing(self, kind: AnyKind) -> Iterator[tuple["Counters", Counter]]:
        """The counters that keep the head of a kind from running, each with where it is kept.

        A kind that counts steps, reductions or residencies needs the counters to have passed all
        numbers of its own. A piece behind a joint needs the slices of that joint alone.
        """
        if kind in self.joints and self.part[kind]:
            if not self.is_joined(kind):
                yield self, self.joints[kind].meaning
            return
        past, a_step = self.count[kind] + 1, self._per_step[kind]
        for numbers, counter, counters in self.needs[kind]:
            each = 1 if kind.of_a_microbatch else counters._per_step[counter] // a_step
            if numbers[counter] < past * each:
                yield counters, counter

    def start(self, kind: AnyKind, more: bool) -> bool:
        """Count the head as started.

        Args:
            more: the head is a piece, and not the last of its task.
        Returns:
            False if more pieces of the task are to come.
        """
        if kind.may_be_piece:
            self.part[kind] = self.part[kind] + 1 if more else 0
            if more:
                return False
        self.count[kind] += self._stride[kind]
        if kind in self._skipped:
            self._pass(self.count, kind)
        return True

    def finish(self, kind: AnyKind) -> None:
        """Count the first unfinished task of a kind as finished."""
        self.finished[kind] += self._stride[kind]
        if kind in self._skipped:
            self._pass(self.finished, kind)

    def skip(self, kind: AnyKind, number: int) -> None:
        """Let there be no task of a kind with that number, which is not behind the head."""
        self._skipped.setdefault(kind, set()).add(number)
        self._pass(self.count, kind)
        self._pass(self.finished, kind)

    def _pass(self, numbers: dict[Counter, int], kind: AnyKind) -> None:
        """Let a counter go on to the next number that has a task."""
        skipped = self._skipped[kind]
        while numbers[kind] in skipped:
            if numbers is self.finished:  # the last of the two to come there
                skipped.remove(numbers[kind])
            numbers[kind] += self._stride[kind]

    def __str__(self) -> str:
        ran = [
            f"{kind.value} {self.count[kind]} started {finished} finished"
            for kind, finished in self.finished.items()
        ]
        came = [
            f"{meaning.value}s {self.count[meaning]}" + (f" and {sorted(early)}" if early else "")
            for meaning, early in self._early.items()
        ]
        return f"{self.name}: {', '.join(ran)}; came: {', '.join(came)}"
