"""The layout that a run takes on fewer ranks than it was made for: the same samples in a step, on
fewer replicas or shorter pipelines."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from axrt.config import AUTO, Config
from axrt.errors import ConfigError
from axrt.models.registry import model_of
from axrt.planning.default_schedule import settled
from axrt.scheduler.simulation.costs import Costs, Work
from axrt.scheduler.simulation.simulator import simulate
from axrt.world.mesh import Mesh

_STEPS = 2


class Layout(NamedTuple):
    """Replicas and ranks of a pipeline."""

    pipe: int  # ranks of a pipeline
    data: int  # replicas
    microbatches: int  # microbatches of a step and replica
    # time of a step by simulation, where a microbatch takes 3 on all ranks of a pipeline
    # together, and nothing travels for long
    step: float
    # replicas share microbatches, which one alone cannot; None: nobody asks for it
    share: bool | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.pipe * self.data

    @property
    def settings(self) -> list[str]:
        """The settings, as `section.key=value`."""
        share = [] if self.share is None else [f"schedule.share={str(self.share).lower()}"]
        return [
            f"parallel.pipe={self.pipe}",
            f"parallel.data={self.data}",
            f"schedule.microbatches={self.microbatches}",
            *share,
        ]


def whole_layout(config: Config, ranks: int) -> Layout:
    """The layout that the settings ask for.

    Raises:
        ConfigError: they do not fit so many ranks.
    """
    if config.parallel.tensor > 1:
        raise ConfigError(
            f"parallel.tensor = {config.parallel.tensor} on fewer ranks than the run was made for, "
            "which is not there yet; expected as many ranks"
        )
    mesh = Mesh.of(0, ranks, config.parallel.pipe, config.parallel.data, "pipe")
    found = _simulated(config, mesh.pipe, mesh.data)
    assert found is not None
    return found._replace(share=config.schedule.share or None)


def smaller_layouts(config: Config, whole: Layout, ranks: int) -> list[Layout]:
    """The layouts with the same samples in a step on at most so many ranks, the fastest first.

    Pipelines stay as long as they are if one fits, since shorter ones need more memory a rank.
    """
    for pipe in range(min(whole.pipe, ranks), 0, -1):
        found = list(_with_pipe(config, whole, pipe, ranks))
        if found:
            return sorted(found, key=lambda layout: layout.step)
    return []


def _with_pipe(config: Config, whole: Layout, pipe: int, ranks: int) -> Iterator[Layout]:
    samples = whole.data * whole.microbatches
    for data in range(min(ranks // pipe, samples), 0, -1):
        if samples % data == 0:
            parallel = replace(config.parallel, pipe=pipe, data=data)
            share = config.schedule.share and data > 1
            schedule = replace(config.schedule, microbatches=samples // data, share=share)
            try:
                smaller = replace(config, parallel=parallel, schedule=schedule)
                found = _simulated(smaller, pipe, data)
            except ConfigError:  # a group that does not divide the replicas, for one
                continue
            if found:
                yield found._replace(share=share if config.schedule.share else None)


def _simulated(config: Config, pipe: int, data: int) -> Layout | None:
    of = config.schedule
    policy = "" if of.policy == AUTO else of.policy
    schedule = replace(of, policy=policy, share=False, global_batch=0)
    # Of one replica: how sums travel depends on machines that nobody has measured.
    alone = replace(config.parallel, pipe=pipe, data=1, group=0)
    memory = replace(config.memory, zero=0)
    _, job = settled(
        replace(config, parallel=alone, memory=memory, schedule=schedule),
        model_of(config),
        Mesh.of(0, pipe, pipe, 1, "pipe"),
    )
    line = simulate(job, Costs(Work(1 / pipe, 1 / pipe, 1 / pipe)), steps=_STEPS)
    return Layout(pipe, data, of.microbatches, line.makespan / _STEPS)
