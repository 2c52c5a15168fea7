"""How much of their stash and messages ranks hold at one time, by a simulation of the schedule.

The simulation has tasks of equal length on all ranks. A real run may hold less, and a policy's
bound allows some of them more.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

from axrt.offload.arena import PAGE_BYTES
from axrt.scheduler.job import Job
from axrt.scheduler.policies import Fixed
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.simulation.timeline import Timeline
from axrt.scheduler.task import Kind

from .activations import StashBytes

_SHORTER, _LONGER = 2, 4  # times the ranks; a longer step repeats its middle


class Occupancy(NamedTuple):
    """The most that a rank of a pipeline holds at one time, in bytes."""

    stash: int  # what its microbatches keep
    messages: int  # activations and gradients that have come and wait for their task
    scratch: int = 0  # what of the stash is in scratch


class _Arrival(NamedTuple):
    """A time at which a rank has more bytes that wait, or less."""

    time: float
    is_less: bool
    rank: int
    num_bytes: int


class Occupancies:
    """Simulates schedules, each once."""

    def __init__(self) -> None:
        self._lines: dict[tuple[object, ...], Timeline] = {}

    def of_ranks(self, job: Job, sizes: Sequence[StashBytes]) -> list[Occupancy]:
        """The most that each rank of a pipeline holds.

        Steps of many microbatches are not simulated: what they hold lies on a straight line through
        two shorter ones. A fixed order has its own number of microbatches, and is simulated.

        Args:
            sizes: sizes of a microbatch on each stage.
        """
        # Where stashes leave the device, it is full in both.
        # Some policies take multiples of the ranks alone.
        full = ceil(job.held_on_device / job.ranks) * job.ranks
        shorter, longer = _SHORTER * job.ranks + full, _LONGER * job.ranks + 2 * full
        if job.microbatches <= longer or isinstance(job.policy, Fixed):
            return self._simulated(job, sizes, job.microbatches)
        far = (job.microbatches - longer) / (longer - shorter)
        return [
            Occupancy(
                ceil(more.stash + far * (more.stash - less.stash)),
                ceil(more.messages + far * (more.messages - less.messages)),
                ceil(more.scratch + far * (more.scratch - less.scratch)),
            )
            for more, less in zip(
                self._simulated(job, sizes, longer),
                self._simulated(job, sizes, shorter),
                strict=True,
            )
        ]

    def most_open(self, job: Job, rank: int, whole: Mapping[int, int]) -> int:
        """The most that gradients of a rank take at one time, where those of a stage are let go
        with each reduction.

        Args:
            rank: index of the rank in its pipeline.
            whole: bytes of the whole gradient of each stage.
        """
        most_simulated = job.microbatches if isinstance(job.policy, Fixed) else _LONGER * job.ranks
        line = self._alone(job, min(job.microbatches, most_simulated))
        spans = defaultdict(list)
        for span in line.computing():
            if span.rank == rank and span.task.kind not in (Kind.FORWARD, Kind.RECOMPUTE):
                spans[span.task.stage, job.run_of(span.task.microbatch)].append(span)
        changes = [
            change
            for (stage, _), of_run in spans.items()
            for change in (
                (min(span.start for span in of_run), whole[stage]),
                (max(span.end for span in of_run), -whole[stage]),
            )
        ]
        now = most = 0
        for _, num_bytes in sorted(changes):  # what ends at a time goes before what begins then
            now += num_bytes
            most = max(most, now)
        return most

    def _simulated(
        self, job: Job, sizes: Sequence[StashBytes], microbatches: int
    ) -> list[Occupancy]:
        line = self._alone(job, microbatches)
        stash = line.stash(lambda stage: sizes[stage].kept, lambda stage: sizes[stage].again)
        again = line.stash(lambda stage: 0.0, lambda stage: sizes[stage].again)
        # Inputs of layers that run again stay on the device, whatever else leaves.
        inputs = line.stash(
            lambda stage: sizes[stage].kept - _leaves(job, stage, sizes), lambda stage: 0.0
        )
        messages = _most_waiting(line, job, sizes)
        for rank in range(job.ranks) if job.team > 1 else ():
            mine = [sizes[stage] for stage in job.placement.stages_of(rank)]
            messages[rank] += 2 * max(of.slices for of in mine)  # of a forward and a backward
            # While a backward waits at a joint, layers of the next microbatch run again.
            stash[rank] += max(of.again for of in mine)
            again[rank] += max(of.again for of in mine)
        most = [
            _most_on_device(job, rank, sizes) + again[rank] + inputs[rank]
            for rank in range(job.ranks)
        ]
        scratch = _most_in_scratch(line, sizes)
        return [
            Occupancy(int(min(kept, most[rank])), messages[rank], scratch[rank])
            for rank, kept in enumerate(stash)
        ]

    def _alone(self, job: Job, microbatches: int) -> Timeline:
        """A step of so many microbatches, as of one replica."""
        # Members of a team hold what one rank would: a microbatch is held from its first piece on.
        job = replace(
            job.alone(),
            team=1,
            joints={},
            microbatches=microbatches,
            votes=job.votes,
            held_on_device=job.held_on_device,
        )
        key = (
            job.policy,
            job.placement,
            job.microbatches,
            *sorted(job.recomputed),
            job.votes,
            job.held_on_device,
        )
        if key not in self._lines:
            self._lines[key] = simulate(job, Costs(pieces=1), steps=1)
        return self._lines[key]


def _most_on_device(job: Job, rank: int, sizes: Sequence[StashBytes]) -> float:
    """The most bytes of stashes for which a rank has room on the device, recomputation aside: those
    of its largest stage, and one that is gathered on its way down."""
    if not job.offloads_stash(rank):
        return inf
    stages = job.placement.stages_of(rank)
    gathered = max(_pages(sizes[stage].saved) for stage in stages)
    largest = max(_leaves(job, stage, sizes) for stage in stages)
    return (job.held_on_device - 1) * largest + gathered


def _leaves(job: Job, stage: int, sizes: Sequence[StashBytes]) -> int:
    """What a place is for: all that a microbatch keeps, but for the input of layers that run
    again."""
    of = sizes[stage]
    return min(of.saved, of.kept) if stage in job.recomputed else of.kept


def _most_in_scratch(line: Timeline, sizes: Sequence[StashBytes]) -> dict[int, int]:
    """By rank, the bytes that its stages take of scratch, where copies take no time: each keeps as
    many stretches as it has needed at a time."""
    now: Counter[tuple[int, int]] = Counter()
    most: Counter[tuple[int, int]] = Counter()
    events = [(span.start, 1, span) for span in line.spans if span.task.kind is Kind.OFFLOAD] + [
        (span.end, 0, span) for span in line.spans if span.task.kind is Kind.RELOAD
    ]
    for _, is_more, (rank, task, *_) in sorted(events, key=lambda event: event[:2]):
        now[rank, task.stage] += 1 if is_more else -1
        most[rank, task.stage] = max(most[rank, task.stage], now[rank, task.stage])
    in_all: dict[int, int] = defaultdict(int)
    for (rank, stage), count in most.items():
        in_all[rank] += count * _pages(sizes[stage].saved)
    return in_all


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _most_waiting(line: Timeline, job: Job, sizes: Sequence[StashBytes]) -> dict[int, int]:
    """By rank, the most bytes of activations and gradients that have come and wait."""
    now: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    for _, is_less, rank, num_bytes in sorted(_arrivals(line, job, sizes)):
        now[rank] += -num_bytes if is_less else num_bytes
        most[rank] = max(most[rank], now[rank])
    return most


def _arrivals(line: Timeline, job: Job, sizes: Sequence[StashBytes]) -> Iterator[_Arrival]:
    """What one rank sends to another: it waits from the end of a task to the start of the next."""
    for span in line.computing():
        kind, stage, number, _ = span.task
        if kind is Kind.WEIGHT or kind is Kind.RECOMPUTE:
            continue
        pipe, step = number % job.placement.pipes, 1 if kind is Kind.FORWARD else -1
        for other, time, is_less in (
            (stage - step, span.start, True),
            (stage + step, span.end, False),
        ):
            if not 0 <= other < job.stages:
                continue
            rank_of_other = job.placement.rank_of(other, pipe)
            if rank_of_other != span.rank:
                of_boundary = sizes[min(stage, other)]
                num_bytes = of_boundary.sent if step == 1 else of_boundary.sent_back
                yield _Arrival(time, is_less, span.rank if is_less else rank_of_other, num_bytes)
