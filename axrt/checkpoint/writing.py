"""The files of a rank's layers and of their optimizer's state, written."""

# Either one bucket at a time is brought to the device and written from there, and no second copy of
# the state is made. Or a snapshot has copied all of it, and is written while training goes on. The
# steps are the same; where they run is said by `put`.
#
# A rank writes while it holds one bucket at a time, so files of a layer may be begun in one order
# and ended in another. With shards it writes layer by layer, as what other ranks have of one comes
# in; what they tell is written at once and let go.

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from axrt.device.queues import Queue
from axrt.errors import DataError, SaveError
from axrt.model.tensor_cuts import Parts
from axrt.runtime.coroutine import Put, Steps, at_once, begin_on, run_on
from axrt.runtime.shard_exchange import ShardExchange
from axrt.store.bucket import Bucket
from axrt.store.local_model import LocalModel
from axrt.store.saved_piece import SavedPiece, WholeParameter, copied_now
from axrt.store.state import ParameterState
from axrt.store.team_pieces import by_member, wholes_of_teams

from .layers import (
    File,
    Live,
    LiveTensors,
    States,
    all_weights,
    layer_of,
    optimizer_file,
    specs_of,
    weights_file,
)
from .manifest import FileRecord
from .pieces import piece_files
from .snapshot import Lent, Snapshot
from .tensor_file import check_types, write_file

Records = dict[str, FileRecord]  # of files, by name
Values = Callable[[LiveTensors], Iterator[tuple[str, Tensor]]]  # tensors with their names


def save_layers(
    directory: Path, model: LocalModel, snapshot: Snapshot | None = None, put: Put = at_once
) -> Steps[Records]:
    """Write the layers of this rank.

    Args:
        snapshot: snapshot to write from, which begins now; None: tensors are written as they are
            at the first step.
        put: function that puts the writing on a queue.
    Returns:
        Steps that come to the records of the files that were written.
    Raises:
        SaveError: a file cannot be written; raised by the steps.
        DataError: there is state that is neither a tensor nor a plain value, or a tensor of a type
            that no file can hold; raised by the steps where there is no snapshot.
    """
    if snapshot is None:
        return run_on(put, lambda: write_files(directory, _files(model)))
    files = [_copied(file, snapshot) for file in _files(model)]
    snapshot.begin()
    return after_copies(snapshot, run_on(put, lambda: write_files(directory, files)))


def save_shards(
    directory: Path,
    model: LocalModel,
    shards: ShardExchange,
    snapshot: Snapshot | None = None,
    put: Put = at_once,
) -> Steps[Records]:
    """Write the layers of this rank of which each rank keeps a shard; all ranks call it, and the
    first pipe's write. One layer at a time comes together. Arguments and results are those of
    `save_layers`."""
    weights = {
        place: {
            name: _Weight(live, _in_pieces(live))
            for name, live in of_layer.items()
            if shards.writes(model.stage_of(place)) or name in model.parts
        }
        for place, of_layer in all_weights(model).items()
        if shards.is_of_writers_team(model.stage_of(place))
    }
    if snapshot is None:
        return _save_shards(directory, model, shards, weights, model.pieces_of, put)
    copies = {
        place: {name: one.copied(snapshot) for name, one in of_layer.items()}
        for place, of_layer in weights.items()
    }
    pieces = {layer: _pieces(model, layer, snapshot) for _, layer in model.layers()}
    snapshot.begin()
    return after_copies(snapshot, _save_shards(directory, model, shards, copies, pieces.pop, put))


class _Weight(NamedTuple):
    """A weight or buffer of a layer whose parameters come together from shards."""

    live: Live  # what stands for it
    in_pieces: str  # name of the parameter whose masters come together to its value; "": it is here

    def copied(self, snapshot: Snapshot) -> "_Weight":
        """The same with the copy that a snapshot takes, where it is here."""
        if self.in_pieces:
            return self
        return self._replace(live=Live(snapshot.take(self.live), None))

    def as_written(self, wholes: Mapping[str, WholeParameter]) -> Live:
        """What a file has of it."""
        whole = wholes[self.in_pieces].master if self.in_pieces else None
        return Live(self.live.value if whole is None else whole, None)


def _in_pieces(live: Live) -> str:
    shard = live.bucket.shard if live.bucket else None
    place = shard.place_of(live.value) if shard else None
    if live.bucket is None or shard is None or place is None or not shard.has_masters_of(place):
        return ""
    return live.bucket.named[place][0]


def _pieces(model: LocalModel, layer: nn.Module, snapshot: Snapshot) -> list[SavedPiece]:
    """What this rank keeps of a layer, as a snapshot copies it."""
    return [
        piece
        for bucket in model.buckets_with(layer)
        for piece in bucket.state.pieces_of(layer, copied=partial(_taken, snapshot, bucket))
    ]


def _taken(snapshot: Snapshot, bucket: Bucket, live: Tensor) -> Tensor:
    return snapshot.take(Live(live, bucket))


def _save_shards(
    directory: Path,
    model: LocalModel,
    shards: ShardExchange,
    weights: Mapping[int, Mapping[str, _Weight]],
    pieces: Callable[[nn.Module], Sequence[SavedPiece]],
    put: Put,
) -> Steps[Records]:
    records: Records = {}
    faults: list[Exception] = []
    for place, layer in sorted(model.layers()):
        shapes, stage = model.shapes_of(layer), model.stage_of(place)
        mine = pieces(layer)
        parts = yield from shards.to_writer(stage, place, mine)
        del mine  # the writer has them
        of_members = None
        if any(layer_of(name) == place for name in model.parts):
            told = _parts_to_tell(model.parts, weights.get(place, {}))
            of_members = yield from shards.to_writer(stage, place, told)
        if parts is not None and not faults:  # else others go on all the same
            try:
                wholes = wholes_of_teams(shapes, by_member(parts, model.parts), model.parts)
                of_layer = {**weights[place], **_cut_weights(model.parts, of_members or ())}
                files = _whole_files(place, layer, of_layer, wholes)
                records.update((yield from run_on(put, partial(write_files, directory, files))))
            except (SaveError, DataError) as error:
                faults.append(error)
        yield from shards.written(stage, place)
    if faults:
        raise faults[0]
    return records


def _parts_to_tell(cut: Parts, weights: Mapping[str, _Weight]) -> list[tuple[str, Tensor]]:
    """What a member has of weights that are cut, and have no masters that come together."""
    return [
        (name, copied_now(one.live.value))
        for name, one in weights.items()
        if name in cut and not one.in_pieces
    ]


def _cut_weights(
    cut: Parts, of_members: Sequence[Sequence[tuple[str, Tensor]]]
) -> dict[str, _Weight]:
    """Whole weights, from what each member has of them."""
    values: dict[str, list[Tensor]] = {}
    for of in of_members:
        for name, value in of:
            values.setdefault(name, []).append(value)
    return {name: _Weight(Live(cut[name].whole(of), None), "") for name, of in values.items()}


def after_copies(snapshot: Snapshot, steps: Steps[Records]) -> Steps[Records]:
    """Steps that come after the copies of a snapshot, and end in an error where these are not what
    was to be saved."""
    yield snapshot.copied
    snapshot.end()
    records = yield from steps
    if snapshot.fault:
        raise SaveError(snapshot.fault)
    return records


def _copied(file: File, snapshot: Snapshot) -> File:
    """A file of the copies that a snapshot takes."""
    check_types(file.name, {name: live.value for name, live in file.tensors.items()})
    copies = {name: Live(snapshot.take(live), None) for name, live in file.tensors.items()}
    return file._replace(tensors=copies)


def keep_layers(directory: Path, model: LocalModel, queue: Queue) -> Steps[Records]:
    """Write the layers of this rank, of every pipe, or its pieces of them, from where their tensors
    are, while training goes on; a bucket's next step waits until that is done. It is for files in
    memory.

    Returns:
        Steps that come to the records of the files that were written.
    Raises:
        SaveError: a file cannot be written; raised by the steps.
        DataError: there is state that no file can hold.
    """
    made = piece_files(model) if model.is_in_parts else _files(model)
    files = [_with_what_changes(file) for file in made]
    lent = Lent([live for file in files for live in file.tensors.values()])
    return _until_returned(
        lent,
        begin_on(partial(lent.until, queue), lambda: write_files(directory, files, _at_rest)),
    )


def _until_returned(lent: Lent, steps: Steps[Records]) -> Steps[Records]:
    records = yield from steps
    lent.end()
    if lent.fault:
        raise SaveError(lent.fault)
    return records


def _with_what_changes(file: File) -> File:
    """A file with copies of what forwards write to."""
    check_types(file.name, {name: live.value for name, live in file.tensors.items()})
    kept = {
        name: Live(live.value.detach().to("cpu", copy=True), None) if live.changes else live
        for name, live in file.tensors.items()
    }
    return file._replace(tensors=kept)


def write_files(directory: Path, files: Iterable[File], values: Values | None = None) -> Records:
    """Write files.

    Args:
        directory: their directory; it is made where there is none.
        values: function that gives the values of a file's tensors; None: each bucket is present for
            its own.
    Raises:
        SaveError: a file cannot be written.
    """
    records = {}
    with Presence() as presence:
        for name, metadata, tensors in files:
            path = directory / name
            like = {key: live.value for key, live in tensors.items()}
            found = values(tensors) if values else _by_bucket(tensors, presence)
            try:
                directory.mkdir(exist_ok=True)
                records[name] = write_file(path, like, metadata, found)
            except OSError as error:
                raise SaveError(f"{path}: {error.strerror or error}") from None
    return records


class Presence(ExitStack):
    """Context in which one bucket at a time is present, until another one is asked for."""

    _bucket: Bucket | None = None

    def bring(self, bucket: Bucket) -> None:
        """Let a bucket be present."""
        if bucket is not self._bucket:
            self.close()
            self.enter_context(bucket.route.present())
            self._bucket = bucket


def _by_bucket(tensors: LiveTensors, presence: Presence) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their names, while the bucket of each is present."""
    for bucket, names in _names_of(tensors).items():
        if bucket is not None:
            presence.bring(bucket)
        yield from ((name, tensors[name].value) for name in names)


def _at_rest(tensors: LiveTensors) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their names, as they are between steps; any thread may ask."""
    for bucket, names in _names_of(tensors).items():
        live = [tensors[name].value for name in names]
        yield from zip(names, bucket.route.at_rest(live) if bucket else live, strict=True)


def _names_of(tensors: LiveTensors) -> dict[Bucket | None, list[str]]:
    by_bucket: dict[Bucket | None, list[str]] = {}
    for name, live in tensors.items():
        by_bucket.setdefault(live.bucket, []).append(name)
    return by_bucket


def _files(model: LocalModel) -> Iterator[File]:
    """Two files for each layer: its weights, and its optimizer's state."""
    weights = all_weights(model)
    states = {
        name: (state, bucket)
        for bucket in model.all_buckets
        for name, state in bucket.state.saved()
    }
    for place, layer in model.layers():
        of_layer = {name: of for name, of in states.items() if layer_of(name) == place}
        yield from layer_files(place, layer, weights[place], of_layer)


def _whole_files(
    place: int,
    layer: nn.Module,
    weights: Mapping[str, _Weight],
    wholes: Mapping[str, WholeParameter],
) -> Iterator[File]:
    """The files of a layer that has come together from shards."""
    here = {name: one.as_written(wholes) for name, one in weights.items()}
    mine = {name: of for name, of in wholes.items() if layer_of(name) == place}
    states = {name: (of.state, None) for name, of in mine.items()}
    yield from layer_files(place, layer, here, states)


def layer_files(
    place: int,
    layer: nn.Module,
    weights: LiveTensors,
    states: Mapping[str, tuple[ParameterState, Bucket | None]],
) -> Iterator[File]:
    """The two files of a layer.

    Args:
        place: index of the layer in the model.
        states: the optimizer's state of each parameter, with the bucket that must be present.
    """
    parameters = [name for name, _ in layer.named_parameters(prefix=str(place))]
    yield File(weights_file(place), {"parameters": json.dumps(parameters)}, weights)
    frozen = [name for name in parameters if name not in states]
    told = _told({name: state for name, (state, _) in states.items()}, frozen)
    tensors = {
        f"{name}/{key}": Live(value, bucket)
        for name, (state, bucket) in states.items()
        for key, value in state.tensors.items()
    }
    yield File(optimizer_file(place), told, tensors)


def _told(states: States, frozen: Sequence[str]) -> dict[str, str]:
    """The metadata of a file of optimizer state: all that is no tensor."""
    told: dict[str, Any] = {
        name: {
            "optimizer": state.optimizer,
            "plain": state.plain,
            "group": state.group,
            "tensors": specs_of(state.tensors),
        }
        for name, state in states.items()
    }
    # Sorted: after a load torch keeps state in another order, and equal states have equal files.
    return {"parameters": json.dumps(told, sort_keys=True), "frozen": json.dumps(frozen)}
