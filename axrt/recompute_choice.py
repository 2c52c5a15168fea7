"""Chooses `memory.recompute = "auto"`: how many layers of a stage run again, while what the others
save goes to scratch.

Layers and copies are measured. Then steps are simulated with more and more layers that run again,
by the rows that run. A copy costs nothing as long as its queue has time, so the fastest is often
neither none nor all.
"""

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import torch

from axrt.config import Config, Memory, Schedule
from axrt.copy_rates import Copies, copied_a_second
from axrt.known_costs import measured_costs
from axrt.model.module import PipelineModule
from axrt.model_job import of_one_replica
from axrt.rank import Rank, copies_apart
from axrt.scheduler.job import Job
from axrt.scheduler.model_costs import ModelCosts
from axrt.scheduler.recompute import recomputing
from axrt.step_prediction import AS_FAST, predicted
from axrt.store.scratch import refused_as_setting, scratch_tier

_MOST_TRIED = 9


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
            f"{_ms(took)} with {layers}"
            for layers, took in self.step_s.items()
            if layers != self.layers
        )
        return (
            f"memory.recompute = 'auto' takes {self.layers}: so many layers of a stage run again, "
            "and what the others save goes to memory.scratch. A step should take "
            f"{_ms(self.step_s[self.layers])}; {others}."
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
        ConfigError: there is no sample, a layer cannot be run by itself, or scratch cannot be used;
            raised on every rank.
    """
    exchange, device = rank.exchange, rank.device
    costs = measured_costs(config, model, rank, sample, None, "memory.recompute = 'auto'")
    rates = exchange.gathered(exchange.made_by_all(lambda: _rates(config.memory, device)))

    def decided() -> Choice:
        slowest = Copies(*map(min, zip(*(rates or ()), strict=True)))
        job = of_one_replica(schedule, config, model, rank.mesh.pipe)
        return fastest(schedule, job, costs, slowest, config.memory.activations_mb)

    return Choice(*exchange.agreed(lambda: tuple(decided())))


def _rates(memory: Memory, device: torch.device) -> tuple[float, float]:
    """Rates of copies on this rank, in scratch of its own, which no budget bounds."""
    with refused_as_setting():
        tier = scratch_tier(replace(memory, scratch_gb=0.0), device)
        try:
            into, out = copied_a_second(tier, device, copies_apart(memory, device))
            return into, out
        finally:
            tier.close()


def fastest(
    schedule: Schedule,
    job: Job,
    costs: ModelCosts,
    copies: Copies,
    activations_mb: float = 0.0,
) -> Choice:
    """The number of layers with which a simulated step is fastest; of those within 1 % of it, the
    least.

    Args:
        schedule, job: the schedule of the run, without recomputation.
        costs: what is known of layers, messages and the loop.
        copies: rates of the slowest rank.
        activations_mb: MiB that a rank may hold, in scratch or on the device; 0: any number. If no
            number of layers keeps to that, the one that holds least is taken.
    """
    found = {
        count: predicted(schedule, recomputing(job, count), costs, copies)
        for count in _tried(max(end - first for first, end in pairwise(job.cuts)))
    }
    limit = max(activations_mb or inf, min(one.held_mib for one in found.values()))
    step_s = {count: one.step_s for count, one in found.items() if one.held_mib <= limit}
    as_fast = AS_FAST * min(step_s.values())
    return Choice(min(count for count, took in step_s.items() if took <= as_fast), step_s)


def _tried(layers: int) -> list[int]:
    """Numbers of layers from none to all."""
    parts = min(layers, _MOST_TRIED - 1)
    return [layers * part // max(1, parts) for part in range(parts + 1)]


def with_layers(config: Config, choice: Choice) -> Config:
    """The settings with a number in place of "auto"."""
    return replace(config, memory=replace(config.memory, recompute=choice.layers))


def _ms(seconds: float) -> str:
    number = 1e3 * seconds
    return f"{number:.0f} ms" if number >= 100 else f"{number:.3g} ms"
