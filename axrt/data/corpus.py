"""Tokens to train on and tokens held out: text as bytes, or token files; which files are held out depends on their names alone."""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from axrt.config import Data
from axrt.errors import DataError

from .tokens import Tokens, is_token_file, map_tokens

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
    if config.validation:
        corpus = Corpus(
            _read_corpus(config.source, config.files, 0.0).training, _read_corpus(config.validation, config.files, 0.0).training
        )
    else:
        corpus = _read_corpus(config.source, config.files, config.held_out)
    _check("data.source", config.source, corpus.training, "to train on", context, vocab)
    if config.validates:
        _check(
            *(("data.validation", config.validation) if config.validation else ("data.source", config.source)),
            corpus.held_out,
            "held out",
            context,
            vocab,
        )
    return corpus


def _read_corpus(source: str, files: str, held_out: float) -> Corpus:
    path = Path(source)
    if source == "stdlib":
        library = Path(sysconfig.get_paths()["stdlib"])
        return _of_files(
            library, [p for p in library.glob("**/*.py") if not _NOT_SOURCE & set(p.relative_to(library).parts)], files, held_out
        )
    if path.is_dir():
        return _of_files(path, _matching(path, files), files, held_out)
    tokens = map_tokens(path) if is_token_file(path) else _joined([path])
    cut = len(tokens) - int(len(tokens) * held_out)
    return Corpus(tokens[:cut], tokens[cut:])


def _check(key: str, source: str, tokens: Tokens, what: str, context: int, vocab: int) -> None:
    if len(tokens) <= context:
        raise DataError(
            f"{key} = {source!r} has {len(tokens)} tokens {what}; expected more than model.context = {context}. "
            "Give it more text, or lower model.context or data.held_out"
        )
    if (
        tokens.dtype == np.uint8 and int(tokens.max()) >= vocab
    ):  # of token files, which may be huge, each sample is looked at when it is read
        raise DataError(f"{key} = {source!r} has token {tokens.max()} {what}; expected less than model.vocab = {vocab}")


def _matching(root: Path, pattern: str) -> list[Path]:
    try:
        return [path for path in root.glob(pattern) if path.is_file()]
    except (NotImplementedError, ValueError) as error:
        raise DataError(f"data.files = {pattern!r}: {error}; expected a pattern inside data.source, such as '**/*.txt'") from None


def _of_files(root: Path, paths: Iterable[Path], files: str, held_out: float) -> Corpus:
    ordered = sorted(paths)
    if not ordered:
        raise DataError(f"no file of {root} matches data.files = {files!r}; expected a pattern such as '**/*.txt'")
    away = [_share(path.relative_to(root)) < held_out for path in ordered]
    if held_out and len(ordered) > 1 and len(set(away)) == 1:  # few files: by lot none or all
        away = [path == ordered[-1] for path in ordered]
    return Corpus(
        _joined(p for p, out in zip(ordered, away, strict=True) if not out), _joined(p for p, out in zip(ordered, away, strict=True) if out)
    )


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
