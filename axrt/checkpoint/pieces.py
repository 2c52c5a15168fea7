"""The files of a rank's own pieces, where each rank keeps a shard of the state (ZeRO), or what a
member of a team has: for copies in memory, which a rank of the same layout takes back as they are.
"""

#   layer-0003.safetensors    weights and buffers of layer 3 that are whole on this rank: in their
#                             full types those that are not trained, else in the layers' own
#   pieces-0003.safetensors   of each piece its tensors, by `SavedPiece.tensors`
#
# What members of a team have cut is their part in both, and the second tells how it was cut.
# Ranks of another layout put whole layers together from the pieces of all ranks.
#
# No rank needs another one to write or to take these: copies in memory are made every few steps,
# and messages for whole layers would cost as much as a step of ZeRO 3 each time.

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Size, Tensor, nn

from axrt.errors import ConfigError, DamagedError
from axrt.model.joints import Team
from axrt.model.tensor_cuts import Part
from axrt.scheduler.regular_file import MALFORMED, json_of
from axrt.store.local_model import LocalModel
from axrt.store.saved_piece import MASTER, SavedPiece, itself
from axrt.store.state import ParameterState

from .durable import digits_of
from .extra_state import give_back, is_extra, states_in
from .layers import File, Live, LiveTensors, checked_file, layer_of, weights_file, weights_of
from .manifest import Manifest
from .slices import SliceReader
from .tensor_file import CheckedFile, copy_all

Told = dict[str, Any]  # of a piece: all that is no tensor
_PIECES = "pieces-"


def pieces_file(place: int) -> str:
    """The name of the file with a rank's pieces of a layer."""
    return f"{_PIECES}{place:04}.safetensors"


def cut_of(model: LocalModel) -> str:
    """A digest of which shards and parts a rank has; "" where it has whole layers."""
    if not model.is_in_parts:
        return ""
    cut = [
        piece[:3]
        for _, layer in model.layers()
        for bucket in model.buckets_with(layer)
        for piece in bucket.state.pieces_of(layer, with_state=False, copied=itself)
    ]
    parts = sorted((name, *part) for name, part in model.parts.items())
    return digits_of(zlib.crc32(repr((cut, parts)).encode()))


def piece_files(model: LocalModel) -> Iterator[File]:
    """Two files for each layer: its weights that are whole here, and what this rank steps of it.

    Raises:
        DataError: some of the state is neither a tensor nor a plain value.
    """
    for place, layer in model.layers():
        yield File(weights_file(place), {}, _whole_here(model, place, layer))
        tensors: LiveTensors = {}
        told: dict[str, Told] = {}
        for bucket in model.buckets_with(layer):
            for piece in bucket.state.pieces_of(layer, copied=itself):
                told[piece.name] = _told(piece)
                tensors.update(
                    {f"{piece.name}/{key}": Live(one, bucket) for key, one in piece.tensors}
                )
        cuts = {name: of for name, of in model.parts.items() if layer_of(name) == place}
        metadata = {"pieces": json.dumps(told, sort_keys=True), "cuts": json.dumps(cuts)}
        yield File(pieces_file(place), metadata, tensors)


def _whole_here(model: LocalModel, place: int, layer: nn.Module) -> LiveTensors:
    bucket_of, full = model.bucket_of(), model.full()
    found: LiveTensors = {}
    for name, value in weights_of(place, layer):
        bucket = bucket_of(value)
        if bucket is None:  # narrow ones are published from their originals
            found[name] = Live(full(value), None, not isinstance(value, nn.Parameter))
        elif not bucket.has_residencies:
            found[name] = Live(value, bucket)
    return found


def _told(piece: SavedPiece) -> Told:
    return {
        "first": piece.first,
        "is_whole": piece.is_whole,
        "moments": sorted(piece.moments),
        "optimizer": piece.optimizer,
        "plain": piece.plain,
        "group": piece.group,
    }


class CheckedPieces:
    """Files of a rank's own pieces that have been checked.

    Raises:
        DamagedError: a file is missing, or differs from the one that was saved.
        ConfigError: this rank has other layers or pieces now.
    """

    def __init__(self, directory: Path, manifest: Manifest, model: LocalModel) -> None:
        self._directory, self._model, reader = directory, model, SliceReader()
        places = [place for place, _ in model.layers()]
        self._weights, self._pieces = (
            {place: checked_file(directory / name(place), manifest, reader) for place in places}
            for name in (weights_file, pieces_file)
        )
        self._told = {
            name: (file, told)
            for file in self._pieces.values()
            for name, told in told_in(file).items()
        }
        self._extra = states_in(self._weights)
        self._check()

    def _check(self) -> None:
        for place, layer in self._model.layers():
            mine = _whole_here(self._model, place, layer)
            weights = {name: live.value for name, live in mine.items()}
            self._fit(weights, self._weights[place].like)
            for bucket in self._model.buckets_with(layer):
                for piece in bucket.state.pieces_of(layer, with_state=False, copied=itself):
                    file, told = self._told.get(piece.name, (None, {}))
                    is_same = (told.get("first"), told.get("is_whole")) == piece[1:3]
                    if file is None or not is_same:
                        raise self._is_of_another(piece.name)
                    if told["optimizer"] != piece.optimizer:
                        raise ConfigError(
                            f"{self._directory}: the optimizer of {piece.name} was "
                            f"{told['optimizer']}, and is {piece.optimizer} here; expected the "
                            "same (optimizer.name, optimizer.matrices)"
                        )
                    masters = {f"{piece.name}/{key}": one for key, one in piece.tensors}
                    self._fit(masters, {name: file.like.get(name) for name in masters})

    def _fit(self, mine: Mapping[str, Tensor], found: Mapping[str, Tensor | None]) -> None:
        for name in sorted(mine.keys() | found.keys()):
            here, there = mine.get(name), found.get(name)
            if here is None or there is None:
                raise self._is_of_another(name)
            is_alike = (here.shape, here.dtype) == (there.shape, there.dtype)
            if not is_alike and not is_extra(name):
                raise self._is_of_another(name)

    def _is_of_another(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self._directory} has another {name} than this rank; expected the same layout, "
            "optimizer and types"
        )

    def take(self) -> None:
        """Make them this rank's own.

        Raises:
            AxrtError: a file has changed since it was checked; part of it has been taken.
        """
        # All of them first: what is written to originals is lost when these are asked for again.
        mine = {place: _whole_here(self._model, place, one) for place, one in self._model.layers()}
        for place, of_layer in mine.items():
            # `.data`: it is no change by a layer or by the user
            values = [
                (name, live.value.data) for name, live in of_layer.items() if not is_extra(name)
            ]
            copy_all([(self._weights[place], name, value) for name, value in values])
        for bucket in self._model.all_buckets:
            with bucket.route.present(changes=True):
                mine_told = [
                    (name, one, *self._told[name])
                    for name, one in bucket.state.stepped_by_name.items()
                ]
                copy_all(
                    [
                        (file, f"{name}/{MASTER}", stepped)
                        for name, stepped, file, _ in mine_told
                        if f"{name}/{MASTER}" in file.like
                    ]
                )
                bucket.publish_if_changed()
                bucket.state.restore_own(
                    {name: _state(name, file, told) for name, _, file, told in mine_told}
                )
        self._model.publish()
        give_back(self._model.layers(), self._extra)


def told_in(file: CheckedFile) -> dict[str, Told]:
    """What a file tells of each piece, by the name of its parameter.

    Raises:
        DamagedError: it does not tell that.
    """
    try:
        return dict(json_of(file.metadata["pieces"]))
    except MALFORMED as error:
        raise DamagedError(f"{file.path} does not tell its pieces ({error!r})") from None


def parts_in(file: CheckedFile) -> dict[str, Part]:
    """What the member of a team whose file it is has of each parameter that they share out.

    Raises:
        DamagedError: it does not tell that.
    """
    try:
        told = json_of(file.metadata["cuts"])
        return {
            name: Part(dim, Size(shape), Team(*team), tuple(blocks))
            for name, (dim, shape, team, blocks) in told.items()
        }
    except MALFORMED as error:
        raise DamagedError(f"{file.path} does not tell what is cut ({error!r})") from None


def tensors_of(name: str, file: CheckedFile) -> dict[str, Tensor]:
    """The tensors of a parameter's piece, by the names that the piece has for them.

    Raises:
        AxrtError: the file has changed since it was checked.
    """
    keys = [key for key in file.like if key.rpartition("/")[0] == name]
    return {key.rpartition("/")[2]: file.tensor(key) for key in keys}


def _state(name: str, file: CheckedFile, told: Told) -> ParameterState:
    tensors = tensors_of(name, file)
    tensors.pop(MASTER, None)
    return ParameterState(told["optimizer"], tensors, told["plain"], told["group"])
