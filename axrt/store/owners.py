"""Who steps which parameter of a stage, where an optimizer looks at whole matrices and copies share
out what they step (ZeRO)."""

# Equal stretches of memory were the rule, as they are for elements. A step of a matrix costs more
# than its elements say, and a bucket holds few: of 12 blocks of width 768 the busiest of eight
# owners had 1.74 of the mean. So the dearest parameter that is left goes to the owner who has
# least (longest processing time first; Graham 1969). No bit changes with that. A bucket lists
# parameters by owner, so that what each one steps is a stretch of its memory again.

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from axrt.model.layers import Layer, TiedLayerSpec, tied_layer

from .assign import BucketSpec
from .shards import Cut

Owners = Mapping[str, int]  # the index of the shard that has each parameter of a stage, by name


@runtime_checkable
class CostsWhole(Protocol):
    """A factory of optimizers that look at whole parameters, and knows what stepping one costs."""

    def __call__(
        self, named: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer: ...  # the optimizer of a bucket

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        """A parameter is stepped as a whole."""
        ...

    def cost(self, name: str, parameter: nn.Parameter) -> float:
        """What a step of a parameter costs, in operations."""
        ...

    def num_bytes(self, name: str, parameter: Tensor) -> int:
        """What is kept of a parameter beside moments, in bytes."""
        ...


def owners_of(costs: Mapping[str, float], owners: int) -> dict[str, int]:
    """Share parameters out: the dearest first, each to the owner that has least.

    Args:
        costs: what stepping each parameter costs, by name.
        owners: number of owners.
    Returns:
        The owner of each, from 0. Of equal parameters the name decides, of equal owners the index.
    """
    found: dict[str, int] = {}
    load = [0.0] * owners
    for name in sorted(costs, key=lambda one: (-costs[one], one)):
        found[name] = min(range(owners), key=lambda owner: (load[owner], owner))
        load[found[name]] += costs[name]
    return found


def owners_of_stage(
    factory: Callable[..., object],
    layers: Sequence[Layer],
    named: Iterable[tuple[str, nn.Parameter]],
    shards: int,
) -> Owners:
    """The owners of a stage's parameters; {} where the optimizer steps each element by itself, or
    there is one shard. Tied weights have none: copies on other stages must cut them alike.

    Args:
        layers: layers of the model.
        named: trained parameters of the stage's layers by their names, of which only shapes are
            looked at.
    """
    if shards < 2 or not isinstance(factory, CostsWhole):
        return {}
    costs: dict[str, float] = {}
    seen: set[nn.Parameter] = set()  # of modules that several layers are
    for name, parameter in named:
        if parameter in seen:
            continue
        seen.add(parameter)
        place, _, within = name.partition(".")
        layer = layers[int(place)]
        if (
            not isinstance(layer, TiedLayerSpec)
            or within not in tied_layer(layers, int(place)).tied
        ):
            costs[name] = factory.cost(name, parameter)
    return owners_of(costs, shards)


class Owned(NamedTuple):
    """What an owner of a stage steps."""

    operations: float  # of a step, matrices and all else
    matrices: tuple[str, ...]  # names of the matrices


def owned_by(
    factory: CostsWhole, named: Iterable[tuple[str, nn.Parameter]], owners: Owners, shards: int
) -> tuple[Owned, ...]:
    """What each owner steps."""
    found = [Owned(0.0, ())] * shards
    for name, parameter in named:
        if name in owners:
            operations, matrices = found[owners[name]]
            is_matrix = factory.is_matrix(name, parameter)
            found[owners[name]] = Owned(
                operations + factory.cost(name, parameter), (*matrices, *[name] * is_matrix)
            )
    return tuple(found)


def by_owner(spec: BucketSpec, cut: Cut | None, owners: Owners) -> tuple[BucketSpec, Cut | None]:
    """A bucket with its parameters in the order of owners, and its shards."""
    if cut is None or not owners or any(name not in owners for name, _ in spec.named):
        return spec, cut
    order = sorted(range(len(spec.named)), key=lambda place: owners[spec.named[place][0]])
    named = [spec.named[place] for place in order]
    called = [spec.called[place] for place in order]
    of = tuple(owners[name] for name, _ in named)
    return spec._replace(named=named, called=called), cut._replace(whole=True, shift=0, owners=of)
