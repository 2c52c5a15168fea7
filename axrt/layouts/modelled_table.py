"""A modelled table of costs: of a model on a cluster, by degree and size of microbatches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from axrt.config import Config
from axrt.model.module import PipelineModule
from axrt.planning.known_costs import settings_of
from axrt.scheduler.cluster.cluster import Cluster
from axrt.scheduler.simulation.cost_table import MODELLED, CostTable, LayerCosts
from axrt.scheduler.simulation.costs import Edge
from axrt.scheduler.simulation.model_costs import TASK_S

from .modelled_costs import modelled


def modelled_table(
    config: Config,
    model: PipelineModule,
    cluster: Cluster,
    degrees: Sequence[int],
    sizes: Sequence[int],
    sample_of: Callable[[Config], Any],
) -> CostTable:
    """The costs of every layer on a cluster.

    Args:
        degrees: numbers of members that hold each layer.
        sizes: numbers of samples in a microbatch.
        sample_of: function that makes a microbatch of settings, (inputs, targets).
    Raises:
        ConfigError: members cannot share out the layers, or a layer cannot be modelled.
    """
    found: dict[int, dict[int, tuple[LayerCosts, ...]]] = {}
    for degree in degrees:
        of_degree = with_degree(config, model, degree)
        for size in sizes:
            of = replace(of_degree, schedule=replace(config.schedule, microbatch_size=size))
            layers = modelled(model, of, sample_of(of), cluster.device, degree)
            found.setdefault(degree, {})[size] = tuple(layers)
    link = cluster.across if cluster.nodes > 1 else cluster.within
    return CostTable(
        found.pop(1, {}),
        Edge(link.latency, link.bandwidth),
        task_s=TASK_S,
        settings=settings_of(config),
        teams=found,
        source=MODELLED,
        cluster=cluster.digest,
    )


def with_degree(config: Config, model: PipelineModule, degree: int) -> Config:
    """The settings with so many members of a team.

    Raises:
        ConfigError: they cannot share out the model.
    """
    of = replace(config, parallel=replace(config.parallel, tensor=degree))
    model.check_settings(of)
    return of
