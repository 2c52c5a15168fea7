"""The layouts of a run that there are to choose from: how ranks are shared out, and what saves
memory there."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.model.module import PipelineModule
from axrt.scheduler.cluster.cluster import Cluster
from axrt.scheduler.placement import Placement
from axrt.scheduler.policies import NAMES, placement_for, policy_by_name

from .modelled_table import with_degree

_ALONE = "1f1b"  # on one rank all policies are the same
# Policies that others have replaced: the same placement, no faster, and no less to hold.
_REPLACED = ("axonn", "gpipe", "merak", "varuna")
_STAGES_OF_ZERO = (0, 1, 2)


# Keys that the prediction knows nothing of: a plan would be for another run than the user's.
_UNKNOWN = (
    *("parallel.tensor_shards", "parallel.gather_again", "parallel.group"),
    *("parallel.collectives", "parallel.activations"),
    *("schedule.placement", "schedule.chunks", "schedule.max_held", "schedule.order"),
    *("schedule.share", "schedule.costs", "schedule.also"),
    *("memory.offload_activations", "memory.offload_parameters", "memory.activations_mb"),
    *("memory.reductions", "run.compile"),
)


# Keys that are chosen and may be pinned, with their names here and in `Shape`.
PINNED = {
    "parallel.tensor": "tensor",
    "parallel.pipe": "pipe",
    "parallel.data": "data",
    "schedule.microbatch_size": "samples",
    "schedule.microbatches": "microbatches",
    "schedule.policy": "policy",
    "memory.zero": "zero",
    "memory.recompute": "recompute",
    "memory.offload": "offload",
}
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Shape(NamedTuple):
    """How ranks and the samples of a step are shared out."""

    tensor: int  # members of a team
    pipe: int  # ranks of a pipeline, each of them a team
    data: int  # replicas
    samples: int  # of a microbatch
    microbatches: int  # of a step and replica


class Saving(NamedTuple):
    """What saves memory, and takes time."""

    recompute: str
    offload: str


def check_known(config: Config) -> None:
    """Check that a run has no keys that predictions know nothing of.

    Raises:
        ConfigError: it has one.
    """
    found, by_itself = config.as_dict(), Config().as_dict()
    for name in _UNKNOWN:
        section, key = name.split(".")
        value, off = found[section][key], by_itself[section][key]
        if value != off:
            raise ConfigError(f"axrt plan does not take {name} = {value!r}; expected {off!r}")
    if config.optimizer.steps_matrices:
        raise ConfigError(
            f"axrt plan does not take optimizer.name = {config.optimizer.name!r}, whose products "
            "it would not count; expected adamw, adam or sgd"
        )


def check_tried(pinned: Mapping[str, Any], cluster: Cluster) -> None:
    """Check that keys are pinned to what a search can try.

    Args:
        pinned: values of some keys, by their name in `PINNED`.
    Raises:
        ConfigError: one is not tried, whatever the shape.
    """
    of_savings = zip(*savings(cluster), strict=True)
    tried: dict[str, Sequence[Any]] = {
        "policy": [name for name in NAMES if _holds_once(name)],
        "zero": _STAGES_OF_ZERO,
        **dict(zip(Saving._fields, map(list, map(dict.fromkeys, of_savings)), strict=True)),
    }
    for key, name in PINNED.items():
        if name in pinned and name in tried and pinned[name] not in tried[name]:
            away = " (and 'stream' on a cluster with device.expanded_memory)"
            more = away if name == "offload" and not cluster.device.expanded_memory else ""
            raise ConfigError(
                f"{key} = {pinned[name]!r}, which is not tried; expected one of "
                f"{', '.join(map(repr, tried[name]))}{more}"
            )


def _holds_once(name: str) -> bool:
    """A policy has one pipe: no rank holds weights that another one of its pipeline has."""
    return placement_for(policy_by_name(name), 2, 2).pipes == 1


def shapes(
    config: Config, model: PipelineModule, cluster: Cluster, pinned: Mapping[str, Any] = NOTHING
) -> Iterator[Shape]:
    """All shapes of a step with the samples that the settings say, on all devices of a cluster.

    Members of a team are on one node.

    Args:
        pinned: values of some keys, by their name in `PINNED`.
    """
    asked = {name: pinned[name] for name in Shape._fields if name in pinned}
    for shape in _all_shapes(config, model, cluster):
        if asked.items() <= shape._asdict().items():
            yield shape


def _all_shapes(config: Config, model: PipelineModule, cluster: Cluster) -> Iterator[Shape]:
    ranks, samples = cluster.num_devices, config.global_batch
    for tensor in _divisors(ranks):
        if cluster.devices % tensor or not can_share_out(config, model, tensor):
            continue
        for pipe in _divisors(ranks // tensor):
            data = ranks // tensor // pipe
            if pipe > len(model.layers) or samples % data:
                continue
            for of_one in _divisors(samples // data):
                yield Shape(tensor, pipe, data, of_one, samples // data // of_one)


def can_share_out(config: Config, model: PipelineModule, tensor: int) -> bool:
    """So many members of a team can share out the model."""
    with suppress(ConfigError):
        with_degree(config, model, tensor)
        return True
    return False


def policies(shape: Shape, asked: str = "") -> Iterator[tuple[str, Placement]]:
    """The policies that fit, each with its placement. Those of two pipes hold all weights twice,
    which is for the user to want.

    Args:
        asked: name of the only one that is wanted.
    """
    tried = [name for name in NAMES if name not in _REPLACED] if shape.pipe > 1 else [_ALONE]
    for name in [asked] if asked else tried:
        with suppress(ValueError):
            policy = policy_by_name(name)
            placement = placement_for(policy, shape.pipe, shape.microbatches)
            if placement.pipes == 1:
                yield name, placement


def savings(cluster: Cluster) -> list[Saving]:
    """What saves memory, in the order in which it is tried: a layout that fits needs no more."""
    found = [Saving("none", "none"), Saving("full", "none")]
    if cluster.device.expanded_memory:
        found += [Saving("none", "stream"), Saving("full", "stream")]
    return found


def stages_of_zero(shape: Shape) -> tuple[int, ...]:
    """The values of `memory.zero` that are tried."""
    return _STAGES_OF_ZERO if shape.data > 1 else (0,)


def rank_orders(shape: Shape, cluster: Cluster) -> tuple[str, ...]:
    """The values of `parallel.rank_order` that make a difference."""
    return ("pipe", "data") if cluster.nodes > 1 and min(shape.pipe, shape.data) > 1 else ("pipe",)


def fills(config: Config, shape: Shape) -> tuple[str, ...]:
    """The values of `schedule.fill` that make a difference."""
    return ("always", "never") if shape.tensor > 1 else (config.schedule.fill,)


def laid_out(config: Config, shape: Shape, cuts: Sequence[int] | str, **keys: Any) -> Config:
    """The settings in a shape.

    Args:
        cuts: indices of the layers at which stages begin, then the number of layers; or a value of
            `parallel.partition`.
        keys: keys of sections with their values, as far as they are to change.
    Raises:
        ConfigError: they do not go together.
    """
    parallel = replace(
        config.parallel,
        tensor=shape.tensor,
        pipe=shape.pipe,
        data=shape.data,
        partition=cuts if isinstance(cuts, str) else tuple(cuts),
        **_of(("rank_order",), keys),
    )
    schedule = replace(
        config.schedule,
        microbatches=shape.microbatches,
        microbatch_size=shape.samples,
        **_of(("policy", "fill"), keys),
    )
    memory = replace(config.memory, **_of(("zero", "recompute", "offload"), keys))
    return replace(config, parallel=parallel, schedule=schedule, memory=memory)


def _of(names: Sequence[str], keys: dict[str, Any]) -> dict[str, Any]:
    return {name: keys[name] for name in names if name in keys}


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
