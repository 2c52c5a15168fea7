"""Chooses `memory.recompute = "auto"`: how many layers of a stage run again, while what the others
save goes to scratch.

Layers and copies are measured. Then steps are simulated with more and more layers that run again,
by the rows that run. A copy costs nothing as long as its queue has time, so the fastest is often
neither none nor all.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from axrt.autoschedule import Copies, measured_edge, of_one_replica, predicted
from axrt.config import Config, Schedule
from axrt.copy_rates import copied_a_second
from axrt.model.costs import LayerCosts, measure
from axrt.model.module import PipelineModule
from axrt.model.precision import types_of
from axrt.preflight import checked_sample
from axrt.rank import Rank
from axrt.scheduler.job import Job
from axrt.scheduler.recompute import recomputing
from axrt.scheduler.simulator import Edge
from axrt.store.scratch import scratch_tier

_MOST_TRIED = 9
_AS_FAST = 1.01  # of numbers within this of the fastest, the least


class Choice(NamedTuple):
    """A number of layers.

    Args:
        layers: value of `memory.recompute`.
        step_s: seconds that a step should take, by the number of layers that run again.
    """

    layers: int
    step_s: dict[int, float]

    def __str__(self) -> str:
        others = ", ".join(
            f"{1e3 * took:.3g} ms with {layers}"
            for layers, took in self.step_s.items()
            if layers != self.layers
        )
        return (
            f"memory.recompute = 'auto' takes {self.layers}: so many layers of a stage run again, "
            "and what the others save goes to memory.scratch. A step should take "
            f"{1e3 * self.step_s[self.layers]:.3g} ms; {others}."
        )


def layers_chosen(
    config: Config, model: PipelineModule, schedule: Schedule, rank: Rank, sample: Any
) -> Choice:
    """The number of layers for a run; every rank calls it, and the main one decides.

    Args:
        config: settings of the run.
        model: layers and loss, the same on every rank.
        schedule: settings of the schedule, with its policy.
        rank: this rank.
        sample: a microbatch, (inputs, targets); only the main rank's counts.
    Raises:
        ConfigError: there is no sample; raised on every rank.
    """
    layers: list[LayerCosts] = []

    def measured() -> None:
        given = checked_sample(sample, "memory.recompute = 'auto' measures the layers")
        types = types_of(config.precision)
        layers.extend(measure(model, config.run.seed, given, rank.generator, types))

    with rank.generator.borrowed():
        rank.exchange.agreed(measured)
    tier = scratch_tier(config.memory, rank.device)
    rates = rank.exchange.gathered(copied_a_second(tier, rank.device))
    tier.close()
    edge = measured_edge(rank.exchange, rank.device) if rank.size > 1 else Edge()
    found = None
    if rates is not None:
        slowest = Copies(*map(min, zip(*rates, strict=True)))
        job = of_one_replica(schedule, config, model, rank.mesh.pipe)
        found = tuple(fastest(schedule, job, layers, edge, slowest))
    return Choice(*rank.exchange.broadcast(found))


def fastest(
    schedule: Schedule, job: Job, layers: Sequence[LayerCosts], edge: Edge, copies: Copies
) -> Choice:
    """The number of layers with which a simulated step is fastest; of those within 1 % of it, the
    least.

    Args:
        schedule, job: the schedule of the run, without recomputation.
        layers: measured cost of each layer.
        edge: link between two ranks, in seconds and bytes.
        copies: rates of the slowest rank.
    """
    step_s = {
        count: predicted(schedule, recomputing(job, count), layers, edge, copies).step_s
        for count in _tried(max(end - first for first, end in pairwise(job.cuts)))
    }
    limit = _AS_FAST * min(step_s.values())
    return Choice(min(count for count, took in step_s.items() if took <= limit), step_s)


def _tried(layers: int) -> list[int]:
    """Numbers of layers from none to all."""
    parts = min(layers, _MOST_TRIED - 1)
    return [layers * part // max(1, parts) for part in range(parts + 1)]


def with_layers(config: Config, choice: Choice) -> Config:
    """The settings with a number in place of "auto"."""
    return replace(config, memory=replace(config.memory, recompute=choice.layers))
