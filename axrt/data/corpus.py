"""Tokens to train on and tokens held out: text as bytes, or token files. The names of files alone
decide which of them are held out."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from axrt.config import Data
from axrt.errors import DataError
from axrt.scheduler.plural import plural
from axrt.scheduler.regular_file import read_bytes

from .identity import identity_of
from .prepared import Prepared
from .row import Row, unknown_in_row
from .tokens import Tokens, is_token_file, map_tokens

_MASKED = ", or data.masked = true where axrt prepare was given --prompt-field"
_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens to train on and tokens held out, integers, rows of shape (number,): one of each
    source. What is held out may be in fewer rows, or in none."""

    training: tuple[Tokens, ...]
    held_out: tuple[Tokens, ...]


class _Split(NamedTuple):
    """The tokens of one source, and those of them that are held out."""

    training: Tokens
    held_out: Tokens


class _Source(NamedTuple):
    """A place that tokens come from."""

    key: str  # key of the configuration that names it, for errors
    name: str  # value of that key
    files: str  # glob pattern that selects files of a directory
    dtype: str  # type of tokens without an index, `data.dtype`


def load(config: Data, context: int, vocab: int = 256) -> Corpus:
    """Read the data that `[data]` names.

    Args:
        context: number of tokens of a sequence; each part must hold at least one sequence and its
            next token.
    Raises:
        DataError: there is no data, too little of it, it has tokens that the model does not know,
            or it is of two tokenizers.
    """
    check_prepared(config, vocab)
    sources, validations = _sources(config)
    share = 0.0 if validations else config.held_out
    split = [_split(source, share, vocab) for source in sources]
    for source, of in zip(sources, split, strict=True):
        _check(source, of.training, "to train on", context, vocab, config.masked)
    if validations:
        held_out = [(source, _split(source, 0.0, vocab).training) for source in validations]
    else:
        held_out = [(source, of.held_out) for source, of in zip(sources, split, strict=True)]
    if config.validates:
        for source, row in held_out:
            _check(source, row, "held out", context, vocab, config.masked)
    return Corpus(tuple(of.training for of in split), tuple(row for _, row in held_out))


def _sources(config: Data) -> tuple[list[_Source], list[_Source]]:
    return (
        [_Source("data.source", name, config.files, config.dtype) for name in config.sources],
        [
            _Source("data.validation", name, config.files, config.dtype)
            for name in config.validations
        ],
    )


def check_prepared(config: Data, vocab: int) -> None:
    """Check what `axrt prepare` says of the data: the type of the tokens is known, the model knows
    all tokens of their tokenizer, and all are of one tokenizer. Of files of other tools nothing is
    said, and nothing checked. Text is of bytes, all of which the model knows.

    Raises:
        DataError: an index is missing, the model knows fewer, or there are two tokenizers or two
            ends of documents.
    """
    if not config.is_of_tokens and vocab < 256:
        raise DataError(
            f"model.vocab = {vocab}, but text as bytes has tokens up to 255; set model.vocab = 256"
        )
    known = [(source, told) for source in _all_sources(config) if (told := _told_of(source))]
    for source, told in known:
        if not (index := Path(source.name).with_suffix(".idx")).exists():
            raise DataError(
                f"{index}: no such file; expected it beside {source.name}, since axrt prepare has "
                "made both and it says the type of the tokens. Copy it, too, or prepare them again"
            )
        if told.vocab > vocab:
            raise DataError(
                f"{source.key} = {source.name!r} has a tokenizer of {plural(told.vocab, 'token')}, "
                f"and model.vocab is {vocab}; expected model.vocab = {told.vocab}"
            )
    for (one, of_one), (other, of_other) in pairwise(known):
        if not of_one.same_tokenizer(of_other):
            raise DataError(
                f"{one.key} = {one.name!r} is of the tokenizer {_named(of_one)}, and {other.key} = "
                f"{other.name!r} of {_named(of_other)}; expected one tokenizer. Prepare one of "
                "them again: axrt prepare --tokenizer"
            )
        if of_one.end != of_other.end:
            raise DataError(
                f"{one.key} = {one.name!r} has token {of_one.end} behind each document, and "
                f"{other.key} = {other.name!r} token {of_other.end}; expected one end. Prepare one "
                "of them again: axrt prepare --end"
            )


def _all_sources(config: Data) -> list[_Source]:
    sources, validations = _sources(config)
    return sources + validations


def _told_of(source: _Source) -> Prepared | None:
    path = Path(source.name)
    return Prepared.beside(path) if is_token_file(path) else None


def _named(prepared: Prepared) -> str:
    return f"{prepared.tokenizer!r} ({plural(prepared.vocab, 'token')})"


def identities(config: Data) -> dict[str, str]:
    """What identifies the data of each source by now, see `identity_of`.

    Raises:
        DataError: a file cannot be read.
    """
    try:
        return {of.name: identity_of(*_files(of)) for of in _all_sources(config)}
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; expected a readable file") from None


def _files(source: _Source) -> tuple[Path, list[Path]]:
    """The directory of a source, and its files in order; a file has that which it is in."""
    path = Path(source.name)
    if source.name == "stdlib":
        library = Path(sysconfig.get_paths()["stdlib"])
        found = library.glob("**/*.py")
        return library, sorted(
            path for path in found if not _NOT_SOURCE & set(path.relative_to(library).parts)
        )
    if path.is_dir():
        return path, sorted(_matching(path, source))
    return path.parent, [path]


def _split(source: _Source, held_out: float, vocab: int) -> _Split:
    path, (root, paths) = Path(source.name), _files(source)
    if paths != [path]:
        return _of_files(root, paths, source, held_out)
    if is_token_file(path):
        tokens = map_tokens(path, source.key, source.dtype, vocab)
    else:
        tokens = _joined([path], source)
    cut = len(tokens) - int(len(tokens) * held_out)
    return _Split(tokens[:cut], tokens[cut:])


def _check(
    source: _Source, tokens: Tokens, what: str, context: int, vocab: int, masked: bool
) -> None:
    if len(tokens) <= context:
        raise DataError(
            f"{source.key} = {source.name!r} has {plural(len(tokens), 'token')} {what}; expected "
            f"more than model.context = {context}. Give it more, or lower "
            f"model.context{' or data.held_out' if source.key == 'data.source' else ''}"
        )
    row = Row(tokens)
    found = unknown_in_row(row, vocab, masked)
    if found:
        raise DataError(
            f"{source.key} = {source.name!r} has token {found.token} {what}"
            f"{row.where(found.place)}; expected 0 or more and less than model.vocab = "
            f"{vocab}{_MASKED if found.token < 0 and not masked else ''}"
        )


def _matching(root: Path, source: _Source) -> list[Path]:
    try:
        return [path for path in root.glob(source.files) if path.is_file()]
    except (NotImplementedError, ValueError) as error:
        raise DataError(
            f"data.files = {source.files!r}: {error}; expected a pattern inside {source.key}, such "
            "as '**/*.txt'"
        ) from None


def _of_files(root: Path, ordered: list[Path], source: _Source, held_out: float) -> _Split:
    if not ordered:
        raise DataError(
            f"no file of {source.key} = {str(root)!r} matches data.files = {source.files!r}; "
            "expected a file, or another pattern"
        )
    away = [_share(path.relative_to(root)) < held_out for path in ordered]
    if held_out and len(ordered) > 1 and len(set(away)) == 1:  # few files: by lot none or all
        away = [path == ordered[-1] for path in ordered]
    training, out = (
        [path for path, is_out in zip(ordered, away, strict=True) if is_out == part]
        for part in (False, True)
    )
    return _Split(_joined(training, source), _joined(out, source))


def _share(path: Path) -> float:
    """A number in [0, 1) that a file's name alone decides."""
    return (
        int.from_bytes(hashlib.blake2b(os.fsencode(path.as_posix()), digest_size=6).digest())
        / 2**48
    )


def _joined(paths: Iterable[Path], source: _Source) -> Tokens:
    return np.frombuffer(b"".join(_read(paths, source)), dtype=np.uint8)


def _read(paths: Iterable[Path], source: _Source) -> Iterator[bytes]:
    for path in paths:
        try:
            yield read_bytes(path, sys.maxsize)
        except OSError as error:
            raise DataError(
                f"{path.absolute()}: {error.strerror}; expected a readable text file ({source.key})"
            ) from None
