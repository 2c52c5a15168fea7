"""Parts in memory of several ranks as one: what a rank of another layout goes on from."""

# It is a directory of whole layers, as a checkpoint has them. Files of whole layers are linked
# there; shards of a layer, and what members of a team have of it, are read, put together and
# written, one layer at a time.

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from axrt.errors import AxrtError, ConfigError, DamagedError, SaveError
from axrt.model.tensor_cuts import Parts
from axrt.store.local_model import LocalModel
from axrt.store.saved_piece import MASTER, SavedPiece, WholeParameter
from axrt.store.team_pieces import wholes_of_teams

from .layers import (
    Live,
    LiveTensors,
    checked_file,
    layer_of,
    optimizer_file,
    weights_file,
    weights_of,
)
from .manifest import Manifest
from .pieces import Told, parts_in, pieces_file, tensors_of, told_in
from .slices import SliceReader
from .tensor_file import CheckedFile
from .writing import layer_files, write_files


def join(directory: Path, parts: Sequence[Path], model: LocalModel) -> Manifest:
    """Put parts together.

    Args:
        directory: what they come to, which is removed and made anew.
        parts: directories of the parts, of one step of one job.
    Returns:
        The manifest of the directory.
    Raises:
        DamagedError: a file is missing, or differs from the one that was saved.
        ConfigError: the parts are of another model.
        SaveError: the directory cannot be written to.
    """
    manifests = {part: Manifest.read(part) for part in parts}
    rmtree(directory, ignore_errors=True)
    records: dict[str, dict[str, Any]] = {}
    try:
        directory.mkdir()
        for place, layer in model.layers():
            records |= _layer_of_parts(directory, place, layer, manifests, model)
    except OSError as error:
        raise SaveError(f"{directory}: {error.strerror}") from None
    except (ConfigError, SaveError):
        raise
    except AxrtError as error:  # a file has changed while it was read
        raise DamagedError(str(error)) from None
    return replace(manifests[parts[0]], files=records)


# One job may have kept layers in both ways: a stage of a team may have nothing that its members
# cut, and one under ZeRO nothing that is trained.
def _layer_of_parts(
    directory: Path,
    place: int,
    layer: nn.Module,
    manifests: Mapping[Path, Manifest],
    model: LocalModel,
) -> dict[str, dict[str, Any]]:
    """Link the files of a layer that some part has whole, or write what its pieces come to. Returns
    their records."""
    names = weights_file(place), optimizer_file(place)
    for part, manifest in manifests.items():
        if all(map(manifest.record_of, names)):
            for name in names:
                os.link(part / name, directory / name)
            return {name: manifest.files[name] for name in names}
    whole = _Layer(place, layer, model.parts, manifests)
    files = layer_files(place, layer, whole.weights(), whole.states())
    return {name: asdict(of) for name, of in write_files(directory, files).items()}


class _Kept(NamedTuple):
    """What a part has of a layer."""

    weights: CheckedFile  # those that are whole on its rank, or what the rank has cut of them
    pieces: Sequence[SavedPiece]
    cuts: Parts  # what the rank, a member of a team, has of each parameter that is cut


class _Layer:
    """A layer whose pieces are in several parts.

    Args:
        place: index of the layer in the model.
        layer: the layer of this rank, for names and shapes.
        parts: what this rank, a member of a team, has of each parameter that is cut.
        manifests: manifest of each part, by its directory.
    Raises:
        ConfigError: the pieces are those of another layer.
        DamagedError: a file is missing, or differs from the one that was saved.
    """

    def __init__(
        self, place: int, layer: nn.Module, parts: Parts, manifests: Mapping[Path, Manifest]
    ) -> None:
        self._mine, reader = dict(weights_of(place, layer)), SliceReader()
        self._kept = [
            _kept_in(part, place, manifest, reader)
            for part, manifest in manifests.items()
            if manifest.record_of(pieces_file(place))
        ]
        # Which member each is of is told by what is kept.
        self._cuts = {name: part for kept in self._kept for name, part in kept.cuts.items()}
        shapes = {name: one.shape for name, one in self._mine.items()}
        shapes |= {name: of.shape for name, of in parts.items() if layer_of(name) == place}
        for name in (one.name for kept in self._kept for one in kept.pieces):
            if name not in shapes:
                raise ConfigError(
                    f"copies in memory have {name}, and the model has not; expected the same model"
                )
        for name, shape in shapes.items():
            self._check_whole(name, shape)
        of_members = [[kept.pieces for kept in of_member] for of_member in self._by_member()]
        of_first = {
            name: _shape_of_first(name, shape, self._cuts) for name, shape in shapes.items()
        }
        wholes = wholes_of_teams(of_first, of_members, self._cuts)
        self._wholes = {name: of for name, of in wholes.items() if name in self._mine}

    def _by_member(self) -> list[list[_Kept]]:
        """What is kept, by the member of a team whose it is."""
        size = next((part.team.size for part in self._cuts.values()), 1)
        found: list[list[_Kept]] = [[] for _ in range(size)]
        for kept in self._kept:
            found[next((part.team.member for part in kept.cuts.values()), 0)].append(kept)
        return found

    def _check_whole(self, name: str, shape: torch.Size) -> None:
        """Check that all of a parameter is there."""
        cut = self._cuts.get(name)
        if cut is None:
            _check_pieces(name, shape, _of_name(name, self._kept))
            return
        if cut.shape != shape:
            raise _not_all_of(name, shape)
        of_first = _shape_of_first(name, shape, self._cuts)
        members = self._by_member()
        of_all = [_of_name(name, of) for of in (members if cut.dim is not None else members[:1])]
        if len(set(map(bool, of_all))) > 1:
            raise _not_all_of(name, shape)
        for pieces in of_all:
            _check_pieces(name, of_first, pieces)

    def weights(self) -> LiveTensors:
        """Its weights and buffers."""
        named = {
            id(one): name for name, one in reversed(self._mine.items())
        }  # the first of aliases
        return {
            name: Live(self._value(name, self._wholes.get(named[id(one)])), None)
            for name, one in self._mine.items()
        }

    def states(self) -> dict[str, Any]:
        """The optimizer's state of each parameter that was trained."""
        return {name: (of.state, None) for name, of in self._wholes.items()}

    def _value(self, name: str, whole: WholeParameter | None) -> Tensor:
        if whole is not None and whole.master is not None:
            return whole.master
        cut = self._cuts.get(name)
        files = [
            next((kept.weights for kept in of_member if name in kept.weights.like), None)
            for of_member in self._by_member()
        ]
        there = [file for file in files if file is not None]
        is_cut = cut is not None and cut.dim is not None
        if not there or (is_cut and len(there) < len(files)):
            raise ConfigError(f"copies in memory do not have {name}; expected the same model")
        if cut is None or not is_cut:
            return there[0].tensor(name)
        return cut.whole([file.tensor(name) for file in there])


def _of_name(name: str, kept: Sequence[_Kept]) -> list[SavedPiece]:
    return [piece for of in kept for piece in of.pieces if piece.name == name]


def _shape_of_first(name: str, shape: torch.Size, cuts: Parts) -> torch.Size:
    """The shape of what the first member of a team has."""
    whole = torch.empty(shape, device="meta")
    return cuts[name].of_member(0, whole).shape if name in cuts else shape


def _kept_in(part: Path, place: int, manifest: Manifest, reader: SliceReader) -> _Kept:
    weights, pieces = (
        checked_file(part / name(place), manifest, reader) for name in (weights_file, pieces_file)
    )
    told = [_piece(pieces, name, of) for name, of in told_in(pieces).items()]
    return _Kept(weights, told, parts_in(pieces))


def _check_pieces(name: str, shape: torch.Size, pieces: Sequence[SavedPiece]) -> None:
    """Check that pieces are all of a parameter."""
    cut = {
        piece.first: sizes[0].numel()
        for piece in pieces
        if not piece.is_whole
        and (sizes := [*([] if piece.master is None else [piece.master]), *piece.moments.values()])
    }
    end = 0
    for first in sorted(cut):
        end = end + cut[first] if first == end else -1
    whole = [piece for piece in pieces if piece.is_whole and piece.master is not None]
    fits = all(piece.master is not None and piece.master.shape == shape for piece in whole)
    if (cut and end != prod(shape)) or not fits:
        raise _not_all_of(name, shape)


def _not_all_of(name: str, shape: torch.Size) -> ConfigError:
    return ConfigError(
        f"copies in memory do not have all of {name}, shape {tuple(shape)}; expected those of the "
        "same model"
    )


def _piece(file: CheckedFile, name: str, told: Told) -> SavedPiece:
    """A piece as its rank has kept it."""
    tensors = tensors_of(name, file)
    master = tensors.pop(MASTER, None)
    moments = {key: tensors.pop(key) for key in told["moments"]}
    return SavedPiece(
        name,
        told["first"],
        told["is_whole"],
        master,
        moments,
        tensors,
        told["optimizer"],
        told["plain"],
        told["group"],
    )
