"""The layout that a run takes on fewer ranks than it was made for: the same samples in a step, on
fewer replicas, shorter pipelines or smaller teams."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from axrt.config import AUTO, Config, Parallel
from axrt.errors import ConfigError
from axrt.scheduler.simulation.costs import Costs, Work
from axrt.scheduler.simulation.simulator import simulate
from axrt.world.mesh import Mesh

_STEPS = 2


class Layout(NamedTuple):
    """Replicas, and ranks of a pipeline."""

    pipe: int  # ranks of a pipeline, or teams
    data: int  # replicas
    microbatches: int  # microbatches of a step and replica
    # time of a step by simulation, where a microbatch takes 3 on all ranks of a pipeline
    # together, and nothing travels for long
    step: float
    # replicas share microbatches, which one alone cannot; None: nobody asks for it
    share: bool | None = None
    tensor: int | None = None  # members of a team; None: nobody asks for teams

    @property
    def ranks_of_a_replica(self) -> int:
        """Number of ranks of each replica."""
        return self.pipe * (self.tensor or 1)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.ranks_of_a_replica * self.data

    @property
    def settings(self) -> list[str]:
        """The settings, as `section.key=value`."""
        share = [] if self.share is None else [f"schedule.share={str(self.share).lower()}"]
        tensor = [] if self.tensor is None else [f"parallel.tensor={self.tensor}"]
        return [
            f"parallel.pipe={self.pipe}",
            f"parallel.data={self.data}",
            f"schedule.microbatches={self.microbatches}",
            *tensor,
            *share,
        ]


def whole_layout(config: Config, ranks: int) -> Layout:
    """The layout that the settings ask for.

    Raises:
        ConfigError: they do not fit so many ranks.
    """
    of = config.parallel
    mesh = Mesh.of(0, ranks, of.pipe, of.data, "pipe", of.tensor)
    found = _simulated(config, mesh.pipe, mesh.data)
    assert found is not None
    return found._replace(share=config.schedule.share or None)


def smaller_layouts(config: Config, whole: Layout, ranks: int) -> list[Layout]:
    """The layouts with the same samples in a step on at most so many ranks, the fastest first.

    Teams stay as large as they are, and pipelines as long, if one fits: others need more memory a
    rank.
    """
    members = whole.tensor or 1
    for tensor in [of for of in range(members, 0, -1) if members % of == 0]:
        for pipe in range(min(whole.pipe, ranks // tensor), 0, -1):
            parallel = replace(config.parallel, pipe=pipe, tensor=tensor)
            found = list(_with_pipe(config, whole, parallel, ranks // tensor))
            if found:
                return sorted(found, key=lambda layout: layout.step)
    return []


def _with_pipe(config: Config, whole: Layout, parallel: Parallel, teams: int) -> Iterator[Layout]:
    samples, pipe = whole.data * whole.microbatches, parallel.pipe
    for data in range(min(teams // pipe, samples), 0, -1):
        if samples % data == 0:
            parallel = replace(parallel, data=data)
            share = config.schedule.share and data > 1
            schedule = replace(config.schedule, microbatches=samples // data, share=share)
            try:
                smaller = replace(config, parallel=parallel, schedule=schedule)
                found = _simulated(smaller, pipe, data)
            except ConfigError:  # a group that does not divide the replicas, for one
                continue
            if found:
                tensor = None if whole.tensor is None else parallel.tensor
                share_of = share if config.schedule.share else None
                yield found._replace(share=share_of, tensor=tensor)


def _simulated(config: Config, pipe: int, data: int) -> Layout | None:
    # A launcher simulates when it leaves a host out; until then it does without torch.
    from axrt.models.registry import model_of
    from axrt.planning.default_schedule import settled

    of = config.schedule
    policy = "" if of.policy == AUTO else of.policy
    schedule = replace(of, policy=policy, share=False, global_batch=0)
    # Of one replica: how sums travel depends on machines that nobody has measured.
    alone = replace(config.parallel, pipe=pipe, data=1, group=0)
    memory = replace(config.memory, zero=0)
    tensor, ranks = alone.tensor, pipe * alone.tensor
    _, job = settled(
        replace(config, parallel=alone, memory=memory, schedule=schedule),
        model_of(config),
        Mesh.of(0, ranks, pipe, 1, "pipe", tensor),
    )
    line = simulate(job, Costs(Work(1 / ranks, 1 / ranks, 1 / ranks)), steps=_STEPS)
    members = tensor if tensor > 1 else None
    return Layout(pipe, data, of.microbatches, line.makespan / _STEPS, tensor=members)
