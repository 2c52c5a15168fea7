"""The layers of a rank and their optimizer's state, as files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from axrt.errors import ConfigError, DataError
from axrt.holding import Holding
from axrt.optim.bucket import Bucket

from .manifest import write_durably


@dataclass(slots=True)
class State:
    """The optimizer's, of one parameter.

    Args:
        optimizer: the class.
        tensors: moments and the like.
        plain: values that are no tensors.
        group: what the optimizer itself has changed in the parameter's group; not the learning rate, which follows from the step.
    """

    optimizer: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Any] = field(default_factory=dict)


def weights_file(place: int) -> str:
    return f"layer-{place:04}.safetensors"


def optimizer_file(place: int) -> str:
    return f"optimizer-{place:04}.safetensors"


def files_of(layers: int) -> set[str]:
    """The names of all files with tensors, of a model with so many layers."""
    return {name(place) for place in range(layers) for name in (weights_file, optimizer_file)}


def save_layers(directory: Path, holding: Holding) -> None:
    """Write the layers of this rank.

    Raises:
        DataError: state that is neither a tensor nor a plain value.
    """
    directory.mkdir(exist_ok=True)
    states = {name: state for bucket in holding.all_buckets for name, state in _states(bucket)}
    for place, layer in holding.layers():
        write_durably(directory / weights_file(place), save({name: _on_cpu(value) for name, value in _weights(place, layer)}))
        of_layer = {name: state for name, state in states.items() if int(name.partition(".")[0]) == place}
        write_durably(directory / optimizer_file(place), _packed(of_layer))


def load_layers(directory: Path, holding: Holding) -> None:
    """Read the layers of this rank; what does not fit is refused before anything is changed.

    Raises:
        ConfigError: a file is missing or broken, or holds other tensors than the layer has.
    """
    states: dict[str, State] = {}
    for place, _ in holding.layers():
        states.update(_unpacked(*_read(directory / optimizer_file(place))))
    for bucket in holding.all_buckets:
        _check_optimizer(directory, bucket, states)
    load_weights(directory, list(holding.layers()))
    for bucket in holding.all_buckets:
        _set_states(bucket, states)


def load_weights(directory: Path, layers: Sequence[tuple[int, nn.Module]]) -> None:
    """Read weights and buffers of layers, given by their places; errors as in `load_layers`."""
    found = {place: _read(directory / weights_file(place))[0] for place, _ in layers}
    for place, layer in layers:
        _check(directory / weights_file(place), dict(_weights(place, layer)), found[place])
    with torch.no_grad():
        for place, layer in layers:
            for name, value in _weights(place, layer):
                value.copy_(found[place][name])


def _states(bucket: Bucket) -> Iterable[tuple[str, State]]:
    """(parameter's name, its state) of every parameter of a bucket."""
    if bucket.optimizer is None:
        return
    names = {parameter: name for name, parameter in bucket.named}
    for group, initial in zip(bucket.groups, bucket.initial_groups, strict=True):
        changed = {key: value for key, value in group.items() if key not in ("params", "lr") and _differs(value, initial.get(key))}
        for parameter in group["params"]:
            state = bucket.optimizer.state.get(parameter, {})
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            _check_plain(names[parameter], {**plain, **changed})
            yield names[parameter], State(type(bucket.optimizer).__name__, tensors, plain, changed)


def _differs(value: object, initial: object) -> bool:
    return isinstance(value, Tensor) or isinstance(initial, Tensor) or value != initial


def _check_plain(name: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if not (value is None or type(value) in (bool, int, float, str)):
            raise DataError(
                f"optimizer state {name}/{key} is {type(value).__name__}; expected tensors and plain values, which can be saved by name"
            )


def _check_optimizer(directory: Path, bucket: Bucket, states: Mapping[str, State]) -> None:
    mine = type(bucket.optimizer).__name__
    for name, _ in bucket.named:
        if name in states and states[name].optimizer != mine:
            raise ConfigError(
                f"{directory}: the optimizer of {name} was {states[name].optimizer}, and is {mine} here; expected the same (optimizer.name)"
            )


def _set_states(bucket: Bucket, states: Mapping[str, State]) -> None:
    if bucket.optimizer is None:
        return
    names = {parameter: name for name, parameter in bucket.named}
    ordered = [names[parameter] for group in bucket.groups for parameter in group["params"]]
    # By torch's own rules of which state is of which type and on which device.
    whole = bucket.optimizer.state_dict()
    whole["state"] = {
        number: {**states[name].tensors, **states[name].plain}
        for number, name in enumerate(ordered)
        if name in states and (states[name].tensors or states[name].plain)
    }
    for group, initial in zip(whole["param_groups"], bucket.initial_groups, strict=True):
        changed = [states[ordered[number]].group for number in group["params"] if ordered[number] in states]
        group.update({key: value for key, value in initial.items() if key != "params"}, **(changed[0] if changed else {}))
    bucket.optimizer.load_state_dict(whole)


def _weights(place: int, layer: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, value in layer.state_dict(prefix=f"{place}.").items():
        if not isinstance(value, Tensor):
            raise DataError(
                f"{name} of layer {place} is {type(value).__name__}; expected tensors only, since nothing in a checkpoint is code"
            )
        yield name, value


def _on_cpu(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True).contiguous()


def _packed(states: Mapping[str, State]) -> bytes:
    tensors = {f"{name}/{key}": _on_cpu(value) for name, state in states.items() for key, value in state.tensors.items()}
    rest = {name: {"optimizer": state.optimizer, "plain": state.plain, "group": state.group} for name, state in states.items()}
    return save(tensors, {"parameters": json.dumps(rest)})


def _unpacked(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> dict[str, State]:
    states = {name: State(**rest) for name, rest in json.loads(metadata.get("parameters", "{}")).items()}
    for key, value in tensors.items():
        name, _, what = key.rpartition("/")
        states[name].tensors[what] = value
    return states


def _read(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: {error}; expected a file of a whole checkpoint") from None


def _check(path: Path, mine: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name in sorted(mine.keys() ^ found.keys()):
        where = "in the model and not in the checkpoint" if name in mine else "in the checkpoint and not in the model"
        raise ConfigError(f"{path}: {name} is {where}; expected a checkpoint of the same model")
    for name, value in mine.items():
        if value.shape != found[name].shape:
            raise ConfigError(
                f"{path}: {name} has shape {tuple(found[name].shape)}, and {tuple(value.shape)} in the model; "
                "expected a checkpoint of the same model"
            )
