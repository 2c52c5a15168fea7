"""The layers of a rank and their optimizer's state, as files.

Files are checked before anything is changed: their bytes against their digests, and their tensors
against the model.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from axrt.errors import ConfigError, DamagedError, DataError, SaveError
from axrt.local_model import LocalModel
from axrt.store.bucket import Bucket
from axrt.store.state import ParameterState

from .durable import digest_of_file, write_durably
from .manifest import FileRecord, Manifest

Weights = Mapping[int, Mapping[str, Tensor]]  # and buffers, by index of the layer and by name
Specs = dict[str, list[Any]]  # of tensors by name: [dtype, shape]


@dataclass(frozen=True, slots=True)
class LoadedLayers:
    """Tensors that have been read and checked, for the layers of one rank.

    Args:
        weights: weights and buffers by name, by index of their layer.
        states: optimizer state, by name of the parameter; a parameter that was frozen when it was
            saved has none.
    """

    weights: Weights
    states: dict[str, ParameterState]


def weights_file(place: int) -> str:
    """The name of the file with the weights and buffers of a layer."""
    return f"layer-{place:04}.safetensors"


def optimizer_file(place: int) -> str:
    """The name of the file with the optimizer's state of a layer."""
    return f"optimizer-{place:04}.safetensors"


def files_of(layers: int) -> set[str]:
    """The names of all files with tensors of a model with that number of layers."""
    return {name(place) for place in range(layers) for name in (weights_file, optimizer_file)}


def save_layers(directory: Path, model: LocalModel) -> dict[str, FileRecord]:
    """Write the layers of this rank.

    Args:
        directory: directory of the checkpoint while it is written.
        model: part of the model that this rank holds.
    Returns:
        The records of the files that were written, by name.
    Raises:
        SaveError: a file cannot be written.
        DataError: there is state that is neither a tensor nor a plain value.
    """
    records = {}
    for name, data in _packed_layers(model):
        try:
            directory.mkdir(exist_ok=True)
            write_durably(directory / name, data)
        except OSError as error:
            raise SaveError(f"{directory / name}: {error.strerror}") from None
        records[name] = FileRecord.of(data)
    return records


def _packed_layers(model: LocalModel) -> Iterator[tuple[str, bytes]]:
    """The name and the bytes of two files for each layer: its weights, and its optimizer state."""
    states = {name: state for bucket in model.all_buckets for name, state in bucket.saved()}
    full = model.full()
    for place, layer in model.layers():
        parameters = [name for name, _ in layer.named_parameters(prefix=str(place))]
        weights = {name: _on_cpu(value) for name, value in weights_of(place, layer, full)}
        yield weights_file(place), save(weights, {"parameters": json.dumps(parameters)})
        frozen = [name for name in parameters if name not in states]
        of_layer = {
            name: state for name, state in states.items() if int(name.partition(".")[0]) == place
        }
        yield optimizer_file(place), _packed(of_layer, frozen)


def read_layers(directory: Path, manifest: Manifest, model: LocalModel) -> LoadedLayers:
    """Read the layers of this rank from a checkpoint, and change nothing.

    Args:
        directory: directory of the checkpoint.
        manifest: manifest of the checkpoint.
        model: part of the model that this rank holds.
    Raises:
        DamagedError: a file is missing, differs from the one that was saved, or holds weights that
            are no finite numbers.
        ConfigError: the checkpoint is of another model, or of another optimizer.
    """
    weights = read_weights(directory, manifest, _all_weights(model))
    states: dict[str, ParameterState] = {}
    frozen: set[str] = set()
    for place, _ in model.layers():
        path = directory / optimizer_file(place)
        of_layer, not_trained = _unpacked(path, *_read(path, manifest))
        states.update(of_layer)
        frozen.update(not_trained)
    for bucket in model.all_buckets:
        _check_optimizer(directory, bucket, states, frozen)
    return LoadedLayers(weights, states)


def read_weights(directory: Path, manifest: Manifest, layers: Weights) -> Weights:
    """Read weights and buffers of some layers, by index of the layer and name; errors are those of
    `read_layers`.

    Args:
        directory: directory of the checkpoint.
        manifest: manifest of the checkpoint.
        layers: the layers' own tensors, which the files must fit.
    """
    found = {}
    for place, mine in layers.items():
        path = directory / weights_file(place)
        found[place], metadata = _read(path, manifest)
        _check(path, mine, found[place])
        _check_finite(path, found[place], metadata)
    return found


def take_layers(loaded: LoadedLayers, model: LocalModel) -> None:
    """Copy what `read_layers` gave into the layers and the optimizers."""
    take_weights(loaded.weights, _all_weights(model))
    model.publish()
    for bucket in model.all_buckets:
        bucket.restore(loaded.states)


def take_weights(found: Weights, layers: Weights) -> None:
    """Copy what `read_weights` gave into the layers' own tensors."""
    with torch.no_grad():
        for place, mine in layers.items():
            for name, value in mine.items():
                value.copy_(found[place][name])


def fault_in(checkpoint: Path) -> str:
    """Read every file of a checkpoint, without its model.

    Returns:
        A text about the first damage; "" where there is none.
    Raises:
        ConfigError: the checkpoint has another format.
    """
    try:
        manifest = Manifest.read(checkpoint)
        for name in sorted(files_of(len(manifest.layers))):
            path = checkpoint / name
            tensors, metadata = _read(path, manifest)
            if name.startswith("optimizer"):
                _unpacked(path, tensors, metadata)
            else:
                _check_finite(path, tensors, metadata)
    except DamagedError as error:
        return str(error)
    return ""


def _check_optimizer(
    directory: Path, bucket: Bucket, states: Mapping[str, ParameterState], frozen: set[str]
) -> None:
    mine = type(bucket.optimizer).__name__
    for name, _ in bucket.named:
        if name not in states:
            if name in frozen:
                continue  # it was not trained then, and begins anew
            raise DamagedError(
                f"{directory} has no optimizer state of {name}; expected that of every parameter"
            )
        if states[name].optimizer != mine:
            raise ConfigError(
                f"{directory}: the optimizer of {name} was {states[name].optimizer}, and is {mine} "
                "here; expected the same (optimizer.name)"
            )


def weights_of(
    place: int, layer: nn.Module, full: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, Tensor]]:
    """The name and value of each weight and buffer of a layer.

    Args:
        place: index of the layer in the model.
        layer: the layer.
        full: function that gives what stands for a tensor in its full type, see `LocalModel.full`.
    Raises:
        DataError: its state has what is no tensor.
    """
    for name, value in layer.state_dict(prefix=f"{place}.", keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise DataError(
                f"{name} of layer {place} is {type(value).__name__}; expected tensors only, since "
                "nothing in a checkpoint is code"
            )
        yield name, full(value)


def _all_weights(model: LocalModel) -> Weights:
    full = model.full()
    return {place: dict(weights_of(place, layer, full)) for place, layer in model.layers()}


def _on_cpu(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True).contiguous()


def _packed(states: Mapping[str, ParameterState], frozen: Sequence[str]) -> bytes:
    tensors = {
        f"{name}/{key}": _on_cpu(value)
        for name, state in states.items()
        for key, value in state.tensors.items()
    }
    told = {
        name: {
            "optimizer": state.optimizer,
            "plain": state.plain,
            "group": state.group,
            "tensors": _specs(state.tensors),
        }
        for name, state in states.items()
    }
    # Sorted: after a load torch keeps state in another order, and equal states have equal files.
    return save(
        tensors, {"parameters": json.dumps(told, sort_keys=True), "frozen": json.dumps(frozen)}
    )


def _specs(tensors: Mapping[str, Tensor]) -> Specs:
    return {key: [str(value.dtype), list(value.shape)] for key, value in tensors.items()}


def _unpacked(
    path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, ParameterState], list[str]]:
    """The optimizer state by parameter, and the parameters that were not trained; the tensors must
    be those that the metadata lists."""
    try:
        told, frozen = json.loads(metadata["parameters"]), json.loads(metadata["frozen"])
        states = {
            name: ParameterState(of["optimizer"], {}, of["plain"], of["group"])
            for name, of in told.items()
        }
        for key, value in tensors.items():
            name, _, what = key.rpartition("/")
            states[name].tensors[what] = value
        differing = [
            name for name, of in told.items() if _specs(states[name].tensors) != of["tensors"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{path} does not tell what its tensors are ({error!r}); expected a file of optimizer "
            "state"
        ) from None
    if differing:
        name = differing[0]
        raise DamagedError(
            f"{path}: the state of {name} is {_specs(states[name].tensors)}, and "
            f"{told[name]['tensors']} was saved; expected what was saved"
        )
    return states, frozen


def _read(path: Path, manifest: Manifest) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    record = manifest.record_of(path.name)
    if record is None:
        raise DamagedError(
            f"{path} is not in the manifest; expected every file of a checkpoint there"
        )
    try:
        size = path.stat().st_size
        if size != record.size_bytes:
            raise DamagedError(
                f"{path} has {size} bytes, and {record.size_bytes} were saved; expected the file "
                "as it was saved"
            )
        if digest_of_file(path) != record.crc32:
            raise DamagedError(
                f"{path} has other bytes than were saved: its crc32 does not fit; expected the "
                "file as it was saved"
            )
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise DamagedError(
            f"{path}: {error.strerror}; expected a file of a whole checkpoint"
        ) from None
    except SafetensorError as error:
        raise DamagedError(f"{path}: {error}; expected a file of a whole checkpoint") from None


def _check(path: Path, mine: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name in sorted(mine.keys() ^ found.keys()):
        where = (
            "in the model and not in the checkpoint"
            if name in mine
            else "in the checkpoint and not in the model"
        )
        raise ConfigError(f"{path}: {name} is {where}; expected a checkpoint of the same model")
    for name, value in mine.items():
        for what, its, here in (
            ("shape", tuple(found[name].shape), tuple(value.shape)),
            ("type", found[name].dtype, value.dtype),
        ):
            if its != here:
                raise ConfigError(
                    f"{path}: {name} has {what} {its}, and {here} in the model; expected a "
                    "checkpoint of the same model"
                )


def _check_finite(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Check parameters alone: buffers, such as masks, may hold infinities."""
    try:
        parameters = [(name, tensors[name]) for name in json.loads(metadata["parameters"])]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(
            f"{path} does not tell its parameters ({error!r}); expected a file of weights"
        ) from None
    for name, value in parameters:
        if (value.is_floating_point() or value.is_complex()) and not bool(value.isfinite().all()):
            raise DamagedError(
                f"{path}: {name} holds what is no finite number; expected weights that a run can "
                "go on from"
            )
