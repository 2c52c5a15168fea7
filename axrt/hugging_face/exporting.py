"""A trained model as a directory that `transformers` loads. One layer at a time is read."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from axrt.checkpoint.layers import check_weights, weights_file
from axrt.checkpoint.manifest import Manifest
from axrt.checkpoint.slices import SliceReader
from axrt.checkpoint.tensor_file import CheckedTensors
from axrt.config import Config, Model
from axrt.data.tokenizer import tokenizer_of
from axrt.errors import ConfigError
from axrt.ledger.skeleton import Skeletons
from axrt.models.gpt import gpt

from . import files
from .files import write_weights
from .model_config import kind_of, their_config
from .names import Entry, entries
from .text_files import text_ends, write_text_files


def export_model(
    checkpoint: Path,
    out: Path,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | None = None,
    run: Path | None = None,
) -> None:
    """Write the model of a checkpoint.

    Args:
        out: directory to make; there is none yet.
        tokenizer: file of the tokenizer; None: there is none.
        run: directory of the run; None: that which the checkpoint lies in.
    Raises:
        ConfigError: no family that is known has such a model, or the directory exists.
        DataError: what the run keeps of an imported model cannot be read.
        DamagedError: the checkpoint is damaged.
        OSError: something cannot be written.
    """
    if out.exists():
        raise ConfigError(f"--hf {out} exists; expected a name that is free")
    manifest = Manifest.read(checkpoint)
    config = Config.read(manifest.config)
    if config.model.factory:
        raise ConfigError(
            f"model.factory = {config.model.factory!r}; expected the built-in model, since others "
            "have no counterpart"
        )
    said = their_config(config.model)
    table = list(entries(config.model, kind_of(said)))
    run = run or checkpoint
    ends = text_ends(run, config.data, lambda: _end_of(tokenizer))
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    named = {str(dtype).removeprefix("torch."): dtype}
    said |= {"dtype": next(iter(named)), **ends.as_dict()}
    (partial / files.CONFIG).write_text(json.dumps(said, indent=1))
    write_text_files(run, partial, tokenizer, ends)
    reader = _Reader(checkpoint, manifest, config)
    sizes = {
        name: shape.numel() * dtype.itemsize
        for entry in table
        for name, shape in reader.shapes_of(entry).items()
    }
    tensors = ((name, t.to(dtype)) for entry in table for name, t in reader.tensors_of(entry))
    write_weights(partial, sizes, tensors)
    partial.rename(out)


def _end_of(tokenizer: Path | None) -> int | None:
    """The token behind documents; None where nobody knows it, as without the library."""
    with suppress(ConfigError):
        return None if tokenizer is None else tokenizer_of(str(tokenizer)).end
    return None


class _Reader:
    """The weights of a checkpoint by their names there; files are checked when they are opened."""

    def __init__(self, checkpoint: Path, manifest: Manifest, config: Config) -> None:
        self._checkpoint, self._manifest, self._model = checkpoint, manifest, config.model
        self._skeletons, self._slices = Skeletons(gpt(config).layers), SliceReader()
        self._open: dict[int, CheckedTensors] = {}

    def shapes_of(self, entry: Entry) -> Mapping[str, torch.Size]:
        """The shapes of what an entry is there."""
        like = self._skeletons.layer(entry.place).state_dict()[entry.name]
        return {name: part.shape for name, part in _theirs(entry, like, self._model)}

    def tensors_of(self, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        """What an entry is there."""
        whole = self._file(entry.place).tensor(f"{entry.place}.{entry.name}")
        for name, part in _theirs(entry, whole, self._model):
            yield name, part.contiguous()

    def _file(self, place: int) -> CheckedTensors:
        if place not in self._open:
            layer = self._skeletons.layer(place)
            mine = {f"{place}.{name}": value for name, value in layer.state_dict().items()}
            found = check_weights(self._checkpoint, self._manifest, {place: mine}, self._slices)
            assert found[place].path.name == weights_file(place)
            self._open = found
        return self._open[place]


def _theirs(entry: Entry, whole: Tensor, model: Model) -> Iterator[tuple[str, Tensor]]:
    """The parts of a weight, by their names there."""
    if len(entry.theirs) == 1:
        yield entry.theirs[0], whole.t() if entry.is_transposed else whole
        return
    features = model.features_of_a_head
    rows = [features * heads for heads in (model.heads, *[model.kv_heads or model.heads] * 2)]
    yield from zip(entry.theirs, torch.split(whole, rows), strict=True)
