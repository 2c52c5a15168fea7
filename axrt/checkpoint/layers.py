"""The layers of a rank and their optimizer's state, as files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from axrt.errors import ConfigError, DataError
from axrt.holding import Holding

from .manifest import write_durably

State = dict[str, Any]  # of one parameter: tensors, and plain values


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
    states = dict(optimizer_states(holding))
    for place, layer in holding.layers():
        write_durably(directory / weights_file(place), save({name: _on_cpu(value) for name, value in _weights(place, layer)}))
        of_layer = {name: state for name, state in states.items() if int(name.partition(".")[0]) == place}
        write_durably(directory / optimizer_file(place), _packed(of_layer))


def load_layers(directory: Path, holding: Holding) -> None:
    """Read the layers of this rank; what does not fit is refused before anything is changed.

    Raises:
        ConfigError: a file is missing or broken, or holds other tensors than the layer has.
    """
    states = [_unpacked(*_read(directory / optimizer_file(place))) for place, _ in holding.layers()]
    load_weights(directory, list(holding.layers()))
    _set_optimizer_states(holding, {name: state for of_layer in states for name, state in of_layer.items()})


def load_weights(directory: Path, layers: Sequence[tuple[int, nn.Module]]) -> None:
    """Read weights and buffers of layers, given by their places; errors as in `load_layers`."""
    found = {place: _read(directory / weights_file(place))[0] for place, _ in layers}
    for place, layer in layers:
        _check(directory / weights_file(place), dict(_weights(place, layer)), found[place])
    with torch.no_grad():
        for place, layer in layers:
            for name, value in _weights(place, layer):
                value.copy_(found[place][name])


def optimizer_states(holding: Holding) -> Iterable[tuple[str, State]]:
    """(parameter's name, its state) of every parameter that has one."""
    for bucket in holding.all_buckets:
        if bucket.optimizer is not None:
            yield from ((name, dict(bucket.optimizer.state[p])) for name, p in bucket.named if p in bucket.optimizer.state)


def _set_optimizer_states(holding: Holding, states: Mapping[str, State]) -> None:
    for bucket in holding.all_buckets:
        if bucket.optimizer is None:
            continue
        names = {parameter: name for name, parameter in bucket.named}
        ordered = [names[parameter] for group in bucket.optimizer.param_groups for parameter in group["params"]]
        # By torch's own rules of which state is of which type and on which device.
        whole = bucket.optimizer.state_dict()
        whole["state"] = {number: states[name] for number, name in enumerate(ordered) if name in states}
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
    tensors = {
        f"{name}/{key}": _on_cpu(value) for name, state in states.items() for key, value in state.items() if isinstance(value, Tensor)
    }
    plain = {f"{name}/{key}": value for name, state in states.items() for key, value in state.items() if not isinstance(value, Tensor)}
    for key, value in plain.items():
        if not (value is None or type(value) in (bool, int, float, str)):
            raise DataError(
                f"optimizer state {key} is {type(value).__name__}; expected tensors and plain values, which can be saved by name"
            )
    return save(tensors, {"plain": json.dumps(plain)})


def _unpacked(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> dict[str, State]:
    states: dict[str, State] = {}
    for key, value in {**tensors, **json.loads(metadata.get("plain", "{}"))}.items():
        name, _, what = key.rpartition("/")
        states.setdefault(name, {})[what] = value
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
