"""The safetensors files of a directory, read tensor by tensor and written in parts of a few
gigabytes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from shutil import copymode
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from axrt.errors import DataError
from axrt.scheduler.regular_file import json_of, opened, read_text

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PART_BYTES = 4 << 30


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        DataError: there is none.
    """
    try:
        found = json_of(read_text(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: {error}; expected a directory of a model, as transformers' save_pretrained "
            "makes it"
        ) from None
    if not isinstance(found, dict):
        raise DataError(f"{path} is no JSON object; expected that of a model")
    return found


class TheirWeights(ExitStack):
    """The tensors of a directory; used as a context.

    Attributes:
        names: names of all tensors.
    Raises:
        DataError: there are no such files, or one cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._files: dict[str, Any] = {}
        self.names: set[str] = set()

    def __enter__(self) -> Self:
        super().__enter__()
        index = self._directory / _INDEX
        files = set(read_json(index)["weight_map"].values()) if index.exists() else {_ONE}
        for name in sorted(files):
            self._open(self._directory / name)
        return self

    def _open(self, path: Path) -> None:
        try:
            opened(path).close()  # that library would wait for a pipe
            file: Any = self.enter_context(safe_open(path, "pt"))
        except (OSError, SafetensorError) as error:
            self.close()
            raise DataError(f"{path}: {error}; expected a whole safetensors file") from None
        self._files.update(dict.fromkeys(file.keys(), file))
        self.names.update(file.keys())

    def tensor(self, name: str) -> Tensor:
        """A tensor, float32."""
        if name not in self._files:
            raise DataError(
                f"{self._directory} has no {name}; expected all weights that {CONFIG} speaks of"
            )
        found: Tensor = self._files[name].get_tensor(name)
        return found.to(torch.float32)


def write_weights(
    directory: Path, sizes: Mapping[str, int], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write tensors.

    Args:
        directory: where to; it exists.
        sizes: bytes of each, by name, in the order in which they come.
        tensors: each with its name.
    """
    groups = list(_groups(sizes))
    names = (
        [_ONE]
        if len(groups) == 1
        else [
            f"model-{number:05}-of-{len(groups):05}.safetensors"
            for number in range(1, len(groups) + 1)
        ]
    )
    for name, group in zip(names, groups, strict=True):
        part = dict(next(tensors) for _ in group)
        save_file(part, directory / name, {"format": "pt"})
        # that library leaves others nothing; a directory's new files say what the user wants
        copymode(directory / CONFIG, directory / name)
    if len(groups) > 1:
        where = {one: name for name, group in zip(names, groups, strict=True) for one in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (directory / _INDEX).write_text(json.dumps(index, indent=1))


def _groups(sizes: Mapping[str, int], most: int = _PART_BYTES) -> Iterator[Sequence[str]]:
    group: list[str] = []
    so_far = 0
    for name, size in sizes.items():
        if group and so_far + size > most:
            yield group
            group, so_far = [], 0
        group.append(name)
        so_far += size
    yield group
