"""Parts in memory of several ranks as one: what a rank of another layout goes on from.

It is a directory of whole layers, as a checkpoint has them. Files of whole layers are linked there;
shards of a layer are read, put together and written, one layer at a time.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from torch import Tensor, nn

from axrt.errors import ConfigError, SaveError
from axrt.local_model import LocalModel
from axrt.store.saved_piece import MASTER, SavedPiece, WholeParameter, wholes_of

from .layers import Live, LiveTensors, checked_file, layer_of, weights_file, weights_of
from .manifest import Manifest
from .pieces import Told, is_of_pieces, pieces_file, told_in
from .slices import SliceReader
from .tensor_file import CheckedFile
from .writing import layer_files, write_files


def join(directory: Path, parts: Sequence[Path], model: LocalModel) -> Manifest:
    """Put parts together.

    Args:
        directory: directory for what they come to, which is made anew.
        parts: directories of the parts, of one step.
        model: part of the model that this rank holds.
    Returns:
        The manifest of the directory.
    Raises:
        DamagedError: a file is missing, or differs from the one that was saved.
        ConfigError: the parts do not have all of a layer of this rank.
        SaveError: the directory cannot be written to.
    """
    manifests = {part: Manifest.read(part) for part in parts}
    first = manifests[parts[0]]
    rmtree(directory, ignore_errors=True)
    if any(map(is_of_pieces, first.files)):
        pieces = _Pieces(manifests)
        records: dict[str, Any] = {}
        for place, layer in model.layers():
            files = layer_files(place, layer, *pieces.whole(place, layer, model))
            records.update({name: asdict(of) for name, of in write_files(directory, files).items()})
        return replace(first, files=records)
    files_of = {name: part for part in reversed(parts) for name in manifests[part].files}
    try:
        directory.mkdir()
        for name, part in files_of.items():
            os.link(part / name, directory / name)
    except OSError as error:
        raise SaveError(f"{directory}: {error.strerror}") from None
    return replace(
        first, files={name: manifests[part].files[name] for name, part in files_of.items()}
    )


class _Pieces:
    """The pieces that some parts have.

    Args:
        manifests: manifest of each part, by its directory.
    """

    def __init__(self, manifests: Mapping[Path, Manifest]) -> None:
        self._manifests, self._reader = manifests, SliceReader()

    def whole(
        self, place: int, layer: nn.Module, model: LocalModel
    ) -> tuple[LiveTensors, dict[str, Any]]:
        """The weights of a layer, and the state of its parameters, as `layer_files` takes them."""
        parts = [list(map(_piece, *_of_file(file))) for file in self._files(pieces_file(place))]
        wholes = wholes_of(model.shapes_of(layer), parts)
        here = list(self._files(weights_file(place)))
        stepped = {
            id(one): name for bucket in model.buckets_with(layer) for name, one in bucket.named
        }
        weights = {
            name: Live(self._value(name, wholes.get(stepped.get(id(one), "")), here), None)
            for name, one in weights_of(place, layer)
        }
        mine = {name: of for name, of in wholes.items() if layer_of(name) == place}
        return weights, {name: (of.state, None) for name, of in mine.items()}

    def _files(self, name: str) -> Iterator[CheckedFile]:
        for part, manifest in self._manifests.items():
            if manifest.record_of(name):
                yield checked_file(part / name, manifest, self._reader)

    def _value(
        self, name: str, whole: WholeParameter | None, files: Sequence[CheckedFile]
    ) -> Tensor:
        if whole is not None and whole.master is not None:
            return whole.master
        for file in files:
            if name in file.like:
                return file.tensor(name)
        raise ConfigError(f"copies in memory do not have {name}; expected those of all ranks")


def _of_file(file: CheckedFile) -> tuple[list[CheckedFile], list[str], list[Told]]:
    told = told_in(file)
    return [file] * len(told), list(told), list(told.values())


def _piece(file: CheckedFile, name: str, told: Told) -> SavedPiece:
    """A piece as its rank has kept it."""
    keys = [key.rpartition("/")[2] for key in file.like if key.rpartition("/")[0] == name]
    tensors = {key: file.tensor(f"{name}/{key}") for key in keys}
    master = tensors.pop(MASTER, None)
    is_cut = not told["is_whole"]  # elsewise nothing is joined
    moments = {key: one for key, one in tensors.items() if is_cut and one.dim()}
    others = {key: one for key, one in tensors.items() if key not in moments}
    return SavedPiece(
        name,
        told["first"],
        told["is_whole"],
        master,
        moments,
        others,
        told["optimizer"],
        told["plain"],
        told["group"],
    )
