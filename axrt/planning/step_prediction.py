"""What a step of a schedule takes and keeps, by simulation on known costs of layers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import hypot
from typing import NamedTuple

from axrt.config import Schedule
from axrt.scheduler.job import Job
from axrt.scheduler.policies import Fixed
from axrt.scheduler.simulation.bound import least_makespan
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.model_costs import ModelCosts, world_of
from axrt.scheduler.simulation.one_member import one_member
from axrt.scheduler.simulation.simulator import simulate

from .few_joints import exchanges_of, with_few_joints

AS_FAST = 1.01  # candidates within this of the fastest count as fast as it
_STEPS = 3
_MOST_MICROBATCHES = 4  # times the ranks
_MIB = 2**20


Simulated = tuple[float, tuple[float, ...]]  # seconds a step, MiB that each rank holds


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with the figures that a simulation predicts for it."""

    schedule: Schedule  # settings of the schedule, its policy and cap filled in
    step_s: float  # seconds that a step takes
    busy: float  # share of them in which the busiest rank computes
    held: tuple[float, ...]  # largest amount of activations that each rank holds, in MiB

    @property
    def held_mib(self) -> float:
        """The largest amount of activations that any rank holds, in MiB."""
        return max(self.held)

    def __str__(self) -> str:
        cap = f" max_held {self.schedule.max_held}" if self.schedule.max_held else ""
        return (
            f"{self.schedule.policy}{cap}: {self.step_s * 1e3:.1f} ms a step expected, ranks busy "
            f"{self.busy:.0%}, {self.held_mib * _MIB / 1e6:.1f} MB of activations"
        )


def predicted(
    schedule: Schedule,
    job: Job,
    of: ModelCosts,
) -> Candidate:
    """The figures of a schedule by simulation, with two members where a team has more."""
    job, of = with_few_joints(job, of)
    stages = list(_stages(job, of.layers))
    costs = _costs(job, of, stages)
    busiest_s = costs.of_busiest(job.placement)
    job, costs = one_member(job, costs)

    def simulated(microbatches: int) -> Simulated:
        line = simulate(replace(job, microbatches=microbatches), costs, steps=_STEPS)
        held = line.stash(lambda n: stages[n].kept / _MIB, lambda n: stages[n].made_again / _MIB)
        # The last step ends with its optimizer steps, where they take any time.
        end_s = max(span.end for span in line.on_device()) if costs.step_of else line.makespan
        return end_s / _STEPS, tuple(held)

    given = isinstance(job.policy, Fixed)  # its order has that number of microbatches
    step_s, held = (
        simulated(job.microbatches)
        if given
        else _at(job.microbatches, job.ranks, simulated, busiest_s)
    )
    return Candidate(schedule, step_s, job.microbatches * busiest_s / step_s, held)


class _Stage(NamedTuple):
    """A stage, some of whose forwards may run again."""

    again: Sequence[LayerCosts]  # its first layers, whose forwards run again
    rest: Sequence[LayerCosts]  # its other layers
    came_in: int  # bytes that those that run again begin with

    @property
    def kept(self) -> int:
        """Bytes that a microbatch keeps from its forward on."""
        return self.came_in + sum(layer.stash_bytes for layer in self.rest)

    @property
    def made_again(self) -> int:
        """Bytes that a microbatch keeps from its recomputation on."""
        return sum(layer.stash_bytes for layer in self.again)

    @property
    def share_again(self) -> float:
        """The share of the forward's time that runs again."""
        again_s, rest_s = (sum(of.forward_s for of in layers) for layers in (self.again, self.rest))
        return again_s / (again_s + rest_s) if again_s else 0.0


def _stages(job: Job, layers: Sequence[LayerCosts]) -> Iterator[_Stage]:
    for stage, (first, end) in enumerate(pairwise(job.cuts)):
        count = job.recomputed.get(stage, 0)
        came_in = layers[first - 1].sent_bytes if count and first else 0
        yield _Stage(layers[first : first + count], layers[first + count : end], came_in)


def least_step_s(job: Job, of: ModelCosts) -> float:
    """Seconds that a step takes at least, whatever the policy, on a steady machine; see
    `predicted`, which takes the average of some steps."""
    job, of = with_few_joints(job, of)
    steady = [replace(layer, spread=0.0) for layer in of.layers]
    costs = _costs(job, of._replace(layers=steady), list(_stages(job, of.layers)))
    return least_makespan(job.placement, costs, job.microbatches, _STEPS) / _STEPS


def _costs(job: Job, of: ModelCosts, stages: Sequence[_Stage]) -> Costs:
    costs = world_of(job.placement, job.cuts, of).costs
    if not _is_whole(job.microbatches, job.ranks):
        costs = replace(costs, jitter=hypot(costs.jitter, costs.lengths), lengths=0.0)
    return replace(
        costs,
        recomputed={stage: stages[stage].share_again for stage in job.recomputed},
        exchange_of=exchanges_of(job, of) if job.team > 1 else (),
    )


def _is_whole(microbatches: int, ranks: int) -> bool:
    """Steps of so many microbatches are simulated as they are. Longer ones are foretold from two
    shorter ones, which must vary alike: lengths are jitter there, which all stages even out."""
    return microbatches <= _MOST_MICROBATCHES * ranks


def _at(
    microbatches: int, ranks: int, simulated: Callable[[int], Simulated], least_s: float
) -> Simulated:
    """The time and memory of a long step, on a straight line through two shorter ones: its middle
    repeats itself.

    Args:
        least_s: seconds that one more microbatch takes at least.
    """
    shorter, longer = 2 * ranks, _MOST_MICROBATCHES * ranks
    if _is_whole(microbatches, ranks):
        return simulated(microbatches)
    far = (microbatches - longer) / (longer - shorter)
    (step_s, held), (less_s, less) = simulated(longer), simulated(shorter)
    grown = [most + far * (most - before) for most, before in zip(held, less, strict=True)]
    # The shorter of two steps may wait so much that the line would be too flat.
    more_s = max(step_s - less_s, (longer - shorter) * least_s)
    return step_s + far * more_s, tuple(grown)
