"""The files of a rank's layers and of their optimizer's state, checked and taken."""

# They are checked before anything is changed: their bytes against their digests, and their tensors
# against the model. They are taken bucket by bucket, so masters and optimizer state of one bucket
# at a time need to be on the device, and no second copy of the state is made.

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from axrt.errors import ConfigError, DamagedError, DataError
from axrt.model.tensor_cuts import Parts
from axrt.scheduler.regular_file import MALFORMED, json_of
from axrt.store.bucket import Bucket
from axrt.store.local_model import LocalModel
from axrt.store.state import ParameterState

from .extra_state import encoded, give_back, is_extra, states_in
from .manifest import Manifest
from .parts_of_file import seen_by, states_of_parts
from .slices import SliceReader
from .tensor_file import CheckedFile, CheckedTensors, Look, Tensors, check_file, copy_all, look_away

_FILES = 3  # are read at a time, so that the disk has work while one of them ends
Weights = Mapping[int, Tensors]  # and buffers, by index of the layer and by name
Specs = dict[str, list[Any]]  # of tensors by name: [dtype, shape]
States = Mapping[str, ParameterState]  # by name of the parameter


class Live(NamedTuple):
    """A tensor of the model or of an optimizer that a file holds."""

    value: Tensor  # the tensor itself
    bucket: Bucket | None  # bucket that must be present for its values; None: they always count
    changes: bool = False  # forwards may write to it


LiveTensors = dict[str, Live]  # by the name of the tensor in its file


class File(NamedTuple):
    """A file to write."""

    name: str  # name of the file in its checkpoint
    metadata: dict[str, str]  # texts for its header, by name
    tensors: LiveTensors  # tensors by name


@dataclass(frozen=True, slots=True)
class CheckedLayers:
    """Files that have been checked, for the layers of one rank."""

    weights: Mapping[int, CheckedTensors]  # files of weights and buffers, by index of the layer
    optimizers: Mapping[int, CheckedTensors]  # files of optimizer state, by index of the layer
    # optimizer state with tensors that have no values, by name of the parameter; a parameter
    # that was frozen when it was saved has none
    states: States
    extra: Mapping[tuple[int, str], Any]  # extra state of modules, see `states_in`

    def states_of(self, bucket: Bucket) -> dict[str, ParameterState]:
        """Read the optimizer's state of the parameters of a bucket, by name.

        Raises:
            AxrtError: a file has changed since it was checked.
        """
        mine = {name: self.states[name] for name, _ in bucket.named if name in self.states}
        views = bucket.state.tensors_for(mine)
        copy_all(
            [
                (self.optimizers[layer_of(name)], f"{name}/{key}", view)
                for name, state in views.items()
                for key, view in state.tensors.items()
            ]
        )
        return views


def weights_file(place: int) -> str:
    """The name of the file with the weights and buffers of a layer."""
    return f"layer-{place:04}.safetensors"


def optimizer_file(place: int) -> str:
    """The name of the file with the optimizer's state of a layer."""
    return f"optimizer-{place:04}.safetensors"


def place_of(name: str) -> int:
    """The index of the layer that a file is of."""
    return int(Path(name).stem.rpartition("-")[2])


def files_of(layers: int) -> set[str]:
    """The names of all files with tensors of a model with that number of layers."""
    return {name(place) for place in range(layers) for name in (weights_file, optimizer_file)}


def check_layers(directory: Path, manifest: Manifest, model: LocalModel) -> CheckedLayers:
    """Read the files of this rank's layers, and change nothing.

    Raises:
        DamagedError: a file is missing, differs from the one that was saved, or holds weights that
            are no finite numbers.
        ConfigError: the checkpoint is of another model, or of another optimizer.
    """
    reader = SliceReader()
    mine, parts = _values(all_weights(model)), model.parts
    weights = check_weights(directory, manifest, mine, reader, parts)
    places = [place for place, _ in model.layers()]
    with ThreadPoolExecutor(_FILES) as several:
        files = several.map(
            lambda place: checked_file(directory / optimizer_file(place), manifest, reader), places
        )
        optimizers = dict(zip(places, files, strict=True))
    states: dict[str, ParameterState] = {}
    frozen: set[str] = set()
    for file in optimizers.values():
        of_layer, not_trained = _unpacked(file)
        states.update(states_of_parts(of_layer, parts))
        frozen.update(not_trained)
    for bucket in model.all_buckets:
        _check_optimizer(directory, bucket, states, frozen)
    seen = {place: seen_by(file, parts) for place, file in optimizers.items()}
    return CheckedLayers(weights, seen, states, states_in(weights))


def check_weights(
    directory: Path,
    manifest: Manifest,
    layers: Weights,
    reader: SliceReader,
    parts: Parts | None = None,
) -> dict[int, CheckedTensors]:
    """Read the files of weights and buffers of some layers, by index of the layer; errors are those
    of `check_layers`.

    Args:
        layers: the layers' own tensors, which the files must fit.
        parts: what this member of a team has of some; None: all.
    """
    with ThreadPoolExecutor(_FILES) as several:
        files = several.map(
            lambda place: _checked_weights(directory / weights_file(place), manifest, reader),
            layers,
        )
        found = dict(zip(layers, files, strict=True))
    seen = {place: seen_by(file, parts or {}) for place, (file, _) in found.items()}
    for place, mine in layers.items():
        _check(seen[place], mine)
        _check_finite(*found[place])
    return seen


def take_layers(checked: CheckedLayers, model: LocalModel) -> None:
    """Copy what `check_layers` has checked into the layers and the optimizers.

    Raises:
        AxrtError: a file has changed since it was checked; part of it has been taken.
    """
    mine = all_weights(model)
    for bucket in model.all_buckets:
        with bucket.route.present(changes=True):
            of_bucket = _values(_within(bucket, mine))
            if bucket.shard:
                for place, tensors in of_bucket.items():
                    for name, whole in tensors.items():
                        bucket.shard.take_whole(whole, checked.weights[place].tensor(name))
            else:
                take_weights(checked.weights, of_bucket)
            bucket.publish_if_changed()
            bucket.state.restore(checked.states_of(bucket))
    take_weights(checked.weights, _values(_within(None, mine)))
    model.publish()
    give_back(model.layers(), checked.extra)


def take_weights(checked: Mapping[int, CheckedTensors], layers: Weights) -> None:
    """Copy what `check_weights` has checked into the layers' own tensors.

    Raises:
        AxrtError: a file has changed since it was checked; part of it has been taken.
    """
    copy_all(
        [
            (checked[place], name, value)
            for place, mine in layers.items()
            for name, value in mine.items()
            if not is_extra(name)  # see `give_back`
        ]
    )


def fault_in(checkpoint: Path) -> str:
    """Read every file of a checkpoint, without its model: those of layers, and whatever else its
    manifest lists, which no load asks for.

    Returns:
        A text about the first damage; "" where there is none.
    Raises:
        ConfigError: the checkpoint has another format.
    """
    try:
        manifest, reader = Manifest.read(checkpoint), SliceReader()
        layers = range(len(manifest.layers))
        for place in layers:
            _check_finite(*_checked_weights(checkpoint / weights_file(place), manifest, reader))
            _unpacked(checked_file(checkpoint / optimizer_file(place), manifest, reader))
        for name in sorted(manifest.files.keys() - files_of(len(layers))):
            checked_file(checkpoint / name, manifest, reader)
    except DamagedError as error:
        return str(error)
    return ""


def fault_in_files(directory: Path, manifest: Manifest) -> str:
    """Read the files that a manifest lists, whatever is in them.

    Returns:
        A text about the first one that is not as it was saved; "" where all are.
    """
    reader = SliceReader()
    try:
        for name in manifest.files:
            checked_file(directory / name, manifest, reader)
    except DamagedError as error:
        return str(error)
    return ""


def _check_optimizer(
    directory: Path, bucket: Bucket, states: Mapping[str, ParameterState], frozen: set[str]
) -> None:
    kinds = bucket.state.kinds  # of a shard, what is stepped here; whoever steps the rest looks
    for name, _ in bucket.named:
        if name not in states:
            if name in frozen:
                continue  # it was not trained then, and begins anew
            raise DamagedError(
                f"{directory} has no optimizer state of {name}; expected that of every parameter"
            )
        was = states[name].optimizer
        if was != kinds.get(name, was):
            raise ConfigError(
                f"{directory}: the optimizer of {name} was {was}, and is {kinds[name]} here; "
                "expected the same (optimizer.name, optimizer.matrices)"
            )


def weights_of(place: int, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The name and value of each weight and buffer of a layer, and of the extra state of modules
    its bytes.

    Args:
        place: index of the layer in the model.
    Raises:
        DataError: its state has what is no tensor, or extra state that no file can hold.
    """
    for name, value in layer.state_dict(prefix=f"{place}.", keep_vars=True).items():
        if is_extra(name):
            yield name, encoded(name, value)
            continue
        if not isinstance(value, Tensor):
            raise DataError(
                f"{name} of layer {place} is {type(value).__name__}; expected tensors only, since "
                "nothing in a checkpoint is code"
            )
        yield name, value


def all_weights(model: LocalModel) -> dict[int, LiveTensors]:
    """What stands for each weight and buffer in its full type, by layer."""
    full, bucket_of = model.full(), model.bucket_of()
    return {
        place: {
            name: Live(full(value), bucket_of(value), not isinstance(value, nn.Parameter))
            for name, value in weights_of(place, layer)
        }
        for place, layer in model.layers()
    }


def _values(layers: Mapping[int, LiveTensors]) -> Weights:
    return {
        place: {name: live.value for name, live in tensors.items()}
        for place, tensors in layers.items()
    }


def _within(bucket: Bucket | None, layers: Mapping[int, LiveTensors]) -> dict[int, LiveTensors]:
    """What is in a bucket; None: in none."""
    return {
        place: {name: live for name, live in tensors.items() if live.bucket is bucket}
        for place, tensors in layers.items()
    }


def layer_of(name: str) -> int:
    """The index of the layer that a parameter of that name belongs to."""
    return int(name.partition(".")[0])


def specs_of(tensors: Tensors) -> Specs:
    """The type and shape of each tensor, as the metadata has them."""
    return {key: [str(value.dtype), list(value.shape)] for key, value in tensors.items()}


def _unpacked(file: CheckedFile) -> tuple[dict[str, ParameterState], list[str]]:
    """The optimizer state by parameter, with tensors that have no values, and the parameters that
    were not trained; the tensors must be those that the metadata lists."""
    try:
        told, frozen = json_of(file.metadata["parameters"]), json_of(file.metadata["frozen"])
        states = {
            name: ParameterState(of["optimizer"], {}, of["plain"], of["group"])
            for name, of in told.items()
        }
        for key, value in file.like.items():
            name, _, what = key.rpartition("/")
            states[name].tensors[what] = value
        differing = [
            name for name, of in told.items() if specs_of(states[name].tensors) != of["tensors"]
        ]
    except MALFORMED as error:
        raise DamagedError(
            f"{file.path} does not tell what its tensors are ({error!r}); expected a file of "
            "optimizer state"
        ) from None
    if differing:
        name = differing[0]
        raise DamagedError(
            f"{file.path}: the state of {name} is {specs_of(states[name].tensors)}, and "
            f"{told[name]['tensors']} was saved; expected what was saved"
        )
    return states, frozen


def checked_file(
    path: Path, manifest: Manifest, reader: SliceReader, look: Look = look_away
) -> CheckedFile:
    """A file that is as the manifest says; errors are those of `check_file`."""
    record = manifest.record_of(path.name)
    if record is None:
        raise DamagedError(
            f"{path} is not in the manifest; expected every file of a checkpoint there"
        )
    return check_file(path, record, look, reader)


def _checked_weights(
    path: Path, manifest: Manifest, reader: SliceReader
) -> tuple[CheckedFile, set[str]]:
    """A file of weights, and the names of tensors with what is no finite number."""
    infinite: set[str] = set()

    def look(name: str, part: Tensor) -> None:
        is_number = part.is_floating_point() or part.is_complex()
        # a sum is no finite number where an element is none, and takes no memory
        if is_number and not bool(part.sum().isfinite()) and not bool(part.isfinite().all()):
            infinite.add(name)

    return checked_file(path, manifest, reader, look), infinite


def _check(file: CheckedTensors, mine: Tensors) -> None:
    path, found = file.path, file.like
    for name in sorted(mine.keys() ^ found.keys()):
        where = (
            "in the model and not in the checkpoint"
            if name in mine
            else "in the checkpoint and not in the model"
        )
        raise ConfigError(f"{path}: {name} is {where}; expected a checkpoint of the same model")
    for name, value in mine.items():
        if is_extra(name):  # it may have grown
            continue
        for what, its, here in (
            ("shape", tuple(found[name].shape), tuple(value.shape)),
            ("type", found[name].dtype, value.dtype),
        ):
            if its != here:
                raise ConfigError(
                    f"{path}: {name} has {what} {its}, and {here} in the model; expected a "
                    "checkpoint of the same model"
                )


def _check_finite(file: CheckedFile, infinite: set[str]) -> None:
    """Check parameters alone: buffers, such as masks, may hold infinities."""
    try:
        there = file.like
        parameters = {name: there[name] for name in json_of(file.metadata["parameters"])}
    except MALFORMED as error:
        raise DamagedError(
            f"{file.path} does not tell its parameters ({error!r}); expected a file of weights"
        ) from None
    for name in parameters:
        if name in infinite:
            raise DamagedError(
                f"{file.path}: {name} holds what is no finite number; expected weights that a run "
                "can go on from"
            )
