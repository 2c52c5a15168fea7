"""A model of `transformers` as a run that has done no step: `axrt generate` speaks with it, and a
training begins from it. One layer at a time is in memory."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor, nn

from axrt.checkpoint.durable import write_durably
from axrt.checkpoint.layers import Live
from axrt.checkpoint.manifest import Manifest
from axrt.checkpoint.writing import layer_files, write_files
from axrt.config import Config
from axrt.errors import ConfigError, DataError
from axrt.ledger.skeleton import Skeletons
from axrt.model.layers import name_of
from axrt.models.gpt import gpt

from . import files
from .files import TheirWeights, read_json
from .model_config import kind_of, model_keys
from .names import Entry, entries
from .text_files import keep_text_files

# What is no weight of the model: masks and frequencies of old files, and a head that is tied.
_LEFT = re.compile(r".*(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
_TIED = "lm_head.weight"
# How a trained model is usually gone on with: a tenth or less of the rate that it was made with.
GOES_ON = {"lr": 2e-5, "warmup_steps": 50, "clip": 1.0}
_PREFIX = "transformer."  # which some files of GPT-2 leave away


# A model of transformers becomes a run that has done no step. A key that names its directory was
# thought of. But then every command would read two kinds of weights; a checkpoint whose parameters
# all begin anew is one that loads, resumes, verifies and generates already know.
def import_model(theirs: Path, out: Path, context: int = 0) -> Config:
    """Make a run of a directory of `transformers`.

    Args:
        out: directory of the run; there is none yet.
    Returns:
        The configuration of the run.
    Raises:
        ConfigError: the built-in model cannot be that one, or the directory exists.
        DataError: something is missing there, or is none of the model's.
        OSError: something cannot be written.
    """
    if out.exists():
        raise ConfigError(f"--out {out} exists; expected a name that is free")
    said = read_json(theirs / files.CONFIG)
    model, run = model_keys(said, context), {"out": str(out)}
    config = Config.read({"model": model, "run": run, "optimizer": GOES_ON})
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    checkpoint = partial / "checkpoints" / "step-00000000"
    checkpoint.mkdir(parents=True)
    with TheirWeights(theirs) as weights:
        _write_layers(checkpoint, config, kind_of(said), weights)
    write_durably(
        partial / "config.toml", tomli_w.dumps(config.as_dict()).encode(errors="surrogateescape")
    )
    keep_text_files(theirs, partial)
    partial.rename(out)
    return config


def _write_layers(checkpoint: Path, config: Config, kind: str, weights: TheirWeights) -> None:
    names = _Names(weights, list(entries(config.model, kind)), config.model.tied)
    layers = gpt(config).layers
    skeletons, records = Skeletons(layers), dict[str, Any]()
    for place in range(len(layers)):
        layer = skeletons.layer(place)
        found = names.of_layer(place)
        _check(place, layer, found)
        live = {f"{place}.{name}": Live(value, None) for name, value in found.items()}
        records |= write_files(checkpoint, layer_files(place, layer, live, {}))
    manifest = Manifest.of(0, 0, 0.0, [name_of(layer) for layer in layers], config, {})
    files_of = {name: asdict(record) for name, record in records.items()}
    replace(manifest, files=files_of).write(checkpoint)


class _Names:
    """The weights of layers, out of their files.

    Raises:
        DataError: there is a weight that is none of the model's.
    """

    def __init__(self, weights: TheirWeights, table: list[Entry], tied: bool) -> None:
        self._weights, self._table = weights, table
        self._cut = not any(name.startswith(_PREFIX) for name in weights.names)
        self._tied = table[0] if tied else None
        self._last = max(entry.place for entry in table)
        known = {self._as_there(name) for entry in table for name in entry.theirs}
        left = {name for name in weights.names if _LEFT.match(name) or (tied and name == _TIED)}
        if tied and _TIED in weights.names:
            self._check_head(weights, table[0])
        if unknown := sorted(weights.names - known - left):
            raise DataError(
                f"{unknown[0]} is none of the model's weights; expected those that config.json "
                "speaks of"
            )

    def _check_head(self, weights: TheirWeights, embedding: Entry) -> None:
        """A head that is said to be tied is the embedding's weight."""
        if not torch.equal(weights.tensor(_TIED), self._of(embedding)):
            raise DataError(
                f"{_TIED} differs from the embedding, and config.json says tie_word_embeddings; "
                "expected the same weight, or tie_word_embeddings = false"
            )

    def _as_there(self, name: str) -> str:
        return name.removeprefix(_PREFIX) if self._cut else name

    def of_layer(self, place: int) -> dict[str, Tensor]:
        """The weights of a layer, by their names there."""
        found = {entry.name: self._of(entry) for entry in self._table if entry.place == place}
        if self._tied and place == self._last:
            found["logits.weight"] = self._of(self._tied)
        return found

    def _of(self, entry: Entry) -> Tensor:
        whole = [self._weights.tensor(self._as_there(name)) for name in entry.theirs]
        joined = torch.cat(whole) if len(whole) > 1 else whole[0]
        return joined.t().contiguous() if entry.is_transposed else joined


def _check(place: int, layer: nn.Module, found: Mapping[str, Tensor]) -> None:
    for name, value in layer.state_dict().items():
        if name not in found or found[name].shape != value.shape:
            shape = tuple(found[name].shape) if name in found else None
            raise DataError(
                f"layer {place}: {name} has shape {shape} there; expected {tuple(value.shape)}"
            )
