"""Text from files, as bytes; which files are held out depends on their names alone."""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from axrt.config import Data
from axrt.errors import DataError

Tokens = NDArray[np.uint8]
_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens to train on and tokens held out, each shape (number,)."""

    training: Tokens
    held_out: Tokens


def load(config: Data, context: int, vocab: int = 256) -> Corpus:
    """Read what `[data]` names.

    Args:
        config: the section.
        context: tokens a sequence; each part must hold at least one and its next token.
        vocab: how many different tokens the model knows.
    Raises:
        DataError: nothing there, nothing in it, too little, or tokens that the model does not know.
    """
    if config.source == "stdlib":
        library = Path(sysconfig.get_paths()["stdlib"])
        corpus = _of_files(library, [p for p in library.glob("**/*.py") if not _NOT_SOURCE & set(p.relative_to(library).parts)], config)
    elif Path(config.source).is_dir():
        root = Path(config.source)
        corpus = _of_files(root, _matching(root, config.files), config)
    else:
        corpus = _of_one_file(Path(config.source), config)
    for name, tokens in (("to train on", corpus.training), *([("held out", corpus.held_out)] if config.held_out else [])):
        if len(tokens) <= context:
            raise DataError(
                f"data.source = {config.source!r} has {len(tokens)} bytes {name}; expected more than model.context = {context}. "
                "Give it more text, or lower model.context or data.held_out"
            )
        if int(tokens.max()) >= vocab:
            raise DataError(f"data.source = {config.source!r} has token {tokens.max()} {name}; expected less than model.vocab = {vocab}")
    return corpus


def _matching(root: Path, pattern: str) -> list[Path]:
    try:
        return [path for path in root.glob(pattern) if path.is_file()]
    except (NotImplementedError, ValueError) as error:
        raise DataError(f"data.files = {pattern!r}: {error}; expected a pattern inside data.source, such as '**/*.txt'") from None


def _of_files(root: Path, paths: Iterable[Path], config: Data) -> Corpus:
    ordered = sorted(paths)
    if not ordered:
        raise DataError(f"no file of {root} matches data.files = {config.files!r}; expected a pattern such as '**/*.txt'")
    away = [_share(path.relative_to(root)) < config.held_out for path in ordered]
    if config.held_out and len(ordered) > 1 and len(set(away)) == 1:  # few files: by lot none or all
        away = [path == ordered[-1] for path in ordered]
    return Corpus(
        _joined(p for p, out in zip(ordered, away, strict=True) if not out), _joined(p for p, out in zip(ordered, away, strict=True) if out)
    )


def _of_one_file(path: Path, config: Data) -> Corpus:
    tokens = _joined([path])
    cut = len(tokens) - int(len(tokens) * config.held_out)
    return Corpus(tokens[:cut], tokens[cut:])


def _share(path: Path) -> float:
    """A number in [0, 1) that a file's name alone decides."""
    return int.from_bytes(hashlib.blake2b(path.as_posix().encode(), digest_size=6).digest()) / 2**48


def _joined(paths: Iterable[Path]) -> Tokens:
    return np.frombuffer(b"".join(_read(paths)), dtype=np.uint8)


def _read(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        try:
            yield path.read_bytes()
        except OSError as error:
            raise DataError(f"{path.absolute()}: {error.strerror}; expected a readable text file (data.source)") from None
