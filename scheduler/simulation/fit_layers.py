"""Costs of layers from a run: a timeline tells what stages take, and layers that are measured alone
tell how to share that out."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from ..planning.balance import Stages
from ..plural import plural
from .cost_table import FITTED, CostTable, LayerCosts
from .costs import Costs, Work


def fitted(table: CostTable, samples: int, costs: Costs, cuts: Sequence[int]) -> CostTable:
    """A table in which the layers of each stage take together what the stage has taken.

    Args:
        samples: number of samples in a microbatch of the run; the table has such microbatches.
        costs: costs that were fitted to the run, in seconds, with those of each stage.
    Raises:
        ValueError: the run's layers are more or fewer than the table's.
    """
    if cuts[-1] != len(table.layers[samples]):
        raise ValueError(
            f"the run had {plural(cuts[-1], 'layer')}, and the model has "
            f"{len(table.layers[samples])}; expected a run of this model"
        )
    assert not isinstance(costs.work, Work)  # fitted costs are of stages
    layers: list[LayerCosts] = []
    for work, (first, end) in zip(costs.work, pairwise(cuts), strict=True):
        layers += _shared_out(work, table.layers[samples][first:end], costs.jitter)
    of = {samples: tuple(layers)}
    return CostTable(of, costs.edge, task_s=costs.task, lengths=costs.lengths, source=FITTED)


# A fitted table may have a slow rank in its layers, since a timeline cannot tell the two apart.
# What layers take alone can: a rank that took 1.5 times as much of that as the middle one is named,
# and the user keeps the cut. The fit does not correct it by itself: the rank is as slow as it was,
# and the plan for that cut should know.
def slowness(
    table: CostTable, samples: int, costs: Costs, cuts: Sequence[int], held: Stages
) -> list[float]:
    """How long each rank has taken for its layers, as a multiple of what they take alone; that of
    the middle rank counts as 1.

    Args:
        held: stages of each rank.
    """
    assert not isinstance(costs.work, Work)
    layers, found = table.layers[samples], []
    for stages in held:
        took = sum(sum(costs.work[stage][:3]) for stage in stages)
        alone = sum(
            layer.forward_s + layer.input_s + layer.weight_s
            for stage in stages
            for layer in layers[cuts[stage] : cuts[stage + 1]]
        )
        found.append(took / alone if alone else 1.0)
    middle = median(found) or 1.0
    return [one / middle for one in found]


def _shared_out(work: Work, layers: Sequence[LayerCosts], jitter: float) -> list[LayerCosts]:
    forward = _shares([layer.forward_s for layer in layers])
    back = _shares([layer.input_s for layer in layers])
    weight = _shares([layer.weight_s for layer in layers])
    return [
        replace(
            layer,
            forward_s=work.forward * forward[place],
            input_s=work.input * back[place],
            weight_s=work.weight * weight[place],
            spread=jitter,
        )
        for place, layer in enumerate(layers)
    ]


def _shares(seconds: Sequence[float]) -> list[float]:
    whole = sum(seconds)
    return [one / whole if whole else 1 / len(seconds) for one in seconds]
