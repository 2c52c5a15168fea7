"""Modelled tables of costs: of a model on a cluster, by degree and size of microbatches."""

# Layers are counted for a few sizes, and the others follow: what an operation computes and moves
# has a part for each sample and one for all, so two sizes say what any size does. Three are counted
# of each degree: 2 and 4 samples, and 1 by itself, since torch leaves out some copies there. That
# a line goes through them is checked at 8. Where it does not, as of a loss that compares each
# sample of a microbatch with each other one, every size is counted.

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.model.module import PipelineModule
from axrt.planning.known_costs import settings_of
from axrt.scheduler.cluster.cluster import Cluster
from axrt.scheduler.simulation.cost_table import MODELLED, CostTable, LayerCosts
from axrt.scheduler.simulation.costs import Edge
from axrt.scheduler.simulation.model_costs import TASK_S

from .counted_layers import LayerCounts, counted_layers, different
from .roofline import Counted

_FEW, _MORE, _CHECKED = 2, 4, 8  # samples that a line goes through
Counts = Sequence[LayerCounts]


class ModelledTable:
    """The costs of every layer on a cluster, found out when they are asked for.

    Args:
        sample_of: function that makes a microbatch of settings, (inputs, targets).
    """

    def __init__(
        self,
        config: Config,
        model: PipelineModule,
        cluster: Cluster,
        sample_of: Callable[[Config], Any],
    ) -> None:
        self._config, self._model, self._cluster = config, model, cluster
        self._sample_of = sample_of
        self._known: dict[tuple[int, int], Counts] = {}
        self._lines: dict[int, bool] = {}  # whether sizes of a degree are on a line

    def of(self, degree: int, samples: int) -> tuple[LayerCosts, ...]:
        """The costs of every layer.

        Args:
            degree: number of members that hold each layer.
            samples: number of samples in a microbatch.
        Raises:
            ConfigError: members cannot share out the layers, a layer cannot run without values, or
                the device's operations a second are not known of a type that is computed in.
        """
        counts = self._counts(degree, samples)
        try:
            made = {id(one): one.on(self._cluster.device) for one in different(counts)}
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return tuple(made[id(one)] for one in counts)

    def written(self, degrees: Sequence[int], sizes: Sequence[int]) -> CostTable:
        """The table of some degrees and sizes; errors are those of `of`."""
        found = {degree: {size: self.of(degree, size) for size in sizes} for degree in degrees}
        cluster = self._cluster
        link = cluster.across if cluster.nodes > 1 else cluster.within
        return CostTable(
            found.pop(1, {}),
            Edge(link.latency, link.bandwidth),
            task_s=TASK_S,
            settings=settings_of(self._config),
            teams=found,
            source=MODELLED,
            cluster=cluster.device.digest,
        )

    def _counts(self, degree: int, samples: int) -> Counts:
        if samples in (1, _FEW, _MORE, _CHECKED) or not self._is_line(degree):
            return self._counted(degree, samples)
        return self._on_line(degree, samples)

    def _on_line(self, degree: int, samples: int) -> Counts:
        few, more = self._counted(degree, _FEW), self._counted(degree, _MORE)
        # Layers may share one of a size, and not of the other: shapes tell them apart.
        made: dict[tuple[int, int], LayerCounts] = {}
        for one, other in zip(few, more, strict=True):
            if (id(one), id(other)) not in made:
                made[id(one), id(other)] = _along(one, other, samples)
        return [made[id(one), id(other)] for one, other in zip(few, more, strict=True)]

    def _is_line(self, degree: int) -> bool:
        if degree not in self._lines:
            few, more = self._counted(degree, _FEW), self._counted(degree, _MORE)
            alike = all(map(_are_alike, few, more))
            checked = self._counted(degree, _CHECKED)
            self._lines[degree] = alike and self._on_line(degree, _CHECKED) == list(checked)
        return self._lines[degree]

    def _counted(self, degree: int, samples: int) -> Counts:
        key = degree, samples
        if key not in self._known:
            of = with_degree(self._config, self._model, degree)
            of = replace(of, schedule=replace(of.schedule, microbatch_size=samples))
            found = counted_layers(self._model, of, self._sample_of(of), degree)
            self._known[key] = found
        return self._known[key]


def with_degree(config: Config, model: PipelineModule, degree: int) -> Config:
    """The settings with so many members of a team.

    Raises:
        ConfigError: they cannot share out the model.
    """
    of = replace(config, parallel=replace(config.parallel, tensor=degree))
    model.check_settings(of)
    return of


def _are_alike(few: LayerCounts, more: LayerCounts) -> bool:
    """Both sizes take the same operations, in the same types."""
    parts = zip(few[:3], more[:3], strict=True)
    return all([of[:2] for of in one] == [of[:2] for of in other] for one, other in parts)


def _along(few: LayerCounts, more: LayerCounts, samples: int) -> LayerCounts:
    """What a layer does with so many samples, where the operations are alike."""

    def line(first: int, second: int) -> int:
        return first + (second - first) * (samples - _FEW) // (_MORE - _FEW)

    def part(one: Sequence[Counted], other: Sequence[Counted]) -> tuple[Counted, ...]:
        return tuple(
            Counted(*a[:2], line(a.operations, b.operations), line(a.num_bytes, b.num_bytes))
            for a, b in zip(one, other, strict=True)
        )

    a, b = few.costs, more.costs
    return LayerCounts(
        part(few.forward, more.forward),
        part(few.back, more.back),
        part(few.weight, more.weight),
        replace(
            a,
            sent_bytes=line(a.sent_bytes, b.sent_bytes),
            stash_bytes=line(a.stash_bytes, b.stash_bytes),
            until_weight_bytes=line(a.until_weight_bytes, b.until_weight_bytes),
            operations=line(a.operations, b.operations),
            joints=tuple(map(line, a.joints, b.joints)),
            back_joints=tuple(map(line, a.back_joints, b.back_joints)),
        ),
    )
