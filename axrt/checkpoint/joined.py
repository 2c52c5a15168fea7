"""Parts in memory of several ranks as one: what a rank of another layout goes on from."""

# It is a directory of whole layers, as a checkpoint has them. Files of whole layers are linked
# there; shards of a layer are read, put together and written, one layer at a time.

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor, nn

from axrt.errors import AxrtError, ConfigError, DamagedError, SaveError
from axrt.store.local_model import LocalModel
from axrt.store.saved_piece import MASTER, SavedPiece, WholeParameter, wholes_of

from .layers import Live, LiveTensors, checked_file, weights_file, weights_of
from .manifest import Manifest
from .pieces import Told, is_of_pieces, pieces_file, tensors_of, told_in
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
    first = manifests[parts[0]]
    rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir()
        if any(map(is_of_pieces, first.files)):
            return replace(first, files=_put_together(directory, manifests, model))
        files_of = {name: part for part in reversed(parts) for name in manifests[part].files}
        for name, part in files_of.items():
            os.link(part / name, directory / name)
    except OSError as error:
        raise SaveError(f"{directory}: {error.strerror}") from None
    except (ConfigError, SaveError):
        raise
    except AxrtError as error:  # a file has changed while it was read
        raise DamagedError(str(error)) from None
    return replace(
        first, files={name: manifests[part].files[name] for name, part in files_of.items()}
    )


def _put_together(
    directory: Path, manifests: Mapping[Path, Manifest], model: LocalModel
) -> dict[str, dict[str, Any]]:
    """Write whole layers from pieces. Returns the records of their files."""
    records: dict[str, dict[str, Any]] = {}
    for place, layer in model.layers():
        whole = _Layer(place, layer, manifests)
        files = layer_files(place, layer, whole.weights(), whole.states())
        records |= {name: asdict(of) for name, of in write_files(directory, files).items()}
    return records


class _Layer:
    """A layer whose pieces are in several parts.

    Args:
        place: index of the layer in the model.
        layer: the layer of this rank, for names and shapes.
        manifests: manifest of each part, by its directory.
    Raises:
        ConfigError: the pieces are those of another layer.
    """

    def __init__(self, place: int, layer: nn.Module, manifests: Mapping[Path, Manifest]) -> None:
        self._manifests, self._reader = manifests, SliceReader()
        self._mine = dict(weights_of(place, layer))
        self._files = list(self._checked(weights_file(place)))
        shapes = {name: one.shape for name, one in self._mine.items()}
        pieces = [
            [_piece(file, name, told) for name, told in told_in(file).items()]
            for file in self._checked(pieces_file(place))
        ]
        for piece in (one for of_part in pieces for one in of_part):
            if piece.name not in shapes:
                raise ConfigError(
                    f"copies in memory have {piece.name}, and the model has not; expected the same "
                    "model"
                )
        for name, shape in shapes.items():
            _check_whole(name, shape, [p for of in pieces for p in of if p.name == name])
        self._wholes: dict[str, WholeParameter] = wholes_of(shapes, pieces)

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

    def _checked(self, name: str) -> Iterator[CheckedFile]:
        for part, manifest in self._manifests.items():
            if manifest.record_of(name):
                yield checked_file(part / name, manifest, self._reader)

    def _value(self, name: str, whole: WholeParameter | None) -> Tensor:
        if whole is not None and whole.master is not None:
            return whole.master
        for file in self._files:
            if name in file.like:
                return file.tensor(name)
        raise ConfigError(f"copies in memory do not have {name}; expected the same model")


def _check_whole(name: str, shape: torch.Size, pieces: Sequence[SavedPiece]) -> None:
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
        raise ConfigError(
            f"copies in memory do not have all of {name}, shape {tuple(shape)}; expected those of "
            "the same model"
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
