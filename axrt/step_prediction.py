"""What a step of a schedule takes and keeps, by simulation on known costs of layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import hypot
from statistics import median

from axrt.config import Schedule
from axrt.copy_rates import Copies
from axrt.known_costs import KnownCosts
from axrt.plan_from_costs import pieces_of, work_of
from axrt.scheduler.cost_table import LayerCosts
from axrt.scheduler.job import Job
from axrt.scheduler.policies import Fixed
from axrt.scheduler.simulator import Costs, simulate

AS_FAST = 1.01  # candidates within this of the fastest count as fast as it
_STEPS = 3
_MOST_MICROBATCHES = 4  # times the ranks
_MIB = 2**20
_FREE = Copies()


Simulated = tuple[float, tuple[float, ...]]  # seconds a step, MiB that each rank holds


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with the figures that a simulation predicts for it.

    Args:
        schedule: settings of the schedule, its policy and cap filled in.
        step_s: seconds that a step takes.
        busy: share of them in which the busiest rank computes.
        held: largest amount of activations that each rank holds, in MiB.
    """

    schedule: Schedule
    step_s: float
    busy: float
    held: tuple[float, ...]

    @property
    def held_mib(self) -> float:
        """The largest amount of activations that any rank holds, in MiB."""
        return max(self.held)

    def __str__(self) -> str:
        cap = f" max_held {self.schedule.max_held}" if self.schedule.max_held else ""
        return (
            f"{self.schedule.policy}{cap}: {self.step_s * 1e3:.1f} ms a step, busy "
            f"{self.busy:.2f}, {self.held_mib:.1f} MiB"
        )


def predicted(
    schedule: Schedule,
    job: Job,
    of: KnownCosts,
    copies: Copies = _FREE,
) -> Candidate:
    """The figures of a schedule by simulation.

    Args:
        schedule, job: the schedule, cut into stages.
        of: costs of the layers, of messages and of the loop.
        copies: rates of copies of activations, where some leave the device.
    """
    layers = of.layers
    stages = [layers[first:end] for first, end in pairwise(job.cuts)]

    def saved(stage: int) -> int:
        again = job.recomputed.get(stage, 0)
        return sum(layer.stash_bytes for layer in stages[stage][again:])

    spread = median(layer.spread for layer in layers)
    whole = _is_whole(job.microbatches, job.ranks)
    costs = Costs(
        tuple(map(work_of, stages)),
        recomputed={stage: _share(stages[stage], count) for stage, count in job.recomputed.items()},
        offload=tuple([saved(stage) / copies.out for stage in range(job.stages)]),
        reload=tuple([saved(stage) / copies.into for stage in range(job.stages)]),
        task=of.task_s,
        edge=of.edge,
        edges=dict(of.edges),
        jitter=spread if whole else hypot(spread, of.lengths),
        lengths=of.lengths if whole else 0.0,
        pieces=pieces_of([sum(layer.pieces for layer in stage) for stage in stages]),
    )

    def simulated(microbatches: int) -> Simulated:
        line = simulate(replace(job, microbatches=microbatches), costs, steps=_STEPS)
        return line.makespan / _STEPS, tuple(line.stash(kept, recomputed))

    def kept(stage: int) -> float:
        count, first = job.recomputed.get(stage, 0), job.cuts[stage]
        came_in = layers[first - 1].sent_bytes if count and first else 0
        return (came_in + saved(stage)) / _MIB

    def recomputed(stage: int) -> float:
        return (
            sum(layer.stash_bytes for layer in stages[stage][: job.recomputed.get(stage, 0)]) / _MIB
        )

    given = isinstance(job.policy, Fixed)  # its order has that number of microbatches
    step_s, held = (
        simulated(job.microbatches) if given else _at(job.microbatches, job.ranks, simulated)
    )
    return Candidate(
        schedule, step_s, job.microbatches * costs.of_busiest(job.placement) / step_s, held
    )


def _is_whole(microbatches: int, ranks: int) -> bool:
    """Steps of so many microbatches are simulated as they are. Longer ones are foretold from two
    shorter ones, which must vary alike: lengths are jitter there, which all stages even out."""
    return microbatches <= _MOST_MICROBATCHES * ranks


def _at(microbatches: int, ranks: int, simulated: Callable[[int], Simulated]) -> Simulated:
    """The time and memory of a long step, on a straight line through two shorter ones: its middle
    repeats itself."""
    shorter, longer = 2 * ranks, _MOST_MICROBATCHES * ranks
    if _is_whole(microbatches, ranks):
        return simulated(microbatches)
    far = (microbatches - longer) / (longer - shorter)
    (step_s, held), (less_s, less) = simulated(longer), simulated(shorter)
    grown = [most + far * (most - before) for most, before in zip(held, less, strict=True)]
    return step_s + far * (step_s - less_s), tuple(grown)


def _share(layers: Sequence[LayerCosts], count: int) -> float:
    """The share of a stage's forward that its first layers take."""
    whole = sum(layer.forward_s for layer in layers)
    return sum(layer.forward_s for layer in layers[:count]) / whole if whole else 0.0
