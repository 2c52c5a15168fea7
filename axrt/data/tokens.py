"""Token files: mapped into memory, and read only where samples are cut.

Megatron's have an index: `NAME.bin` is a row of tokens, and `NAME.idx` beside it says their type
and the length of each sequence; samples are cut from the row as it is, across the ends of
sequences, as Megatron's own are. Of those without an index `bare_tokens.py` says the type.
"""

import mmap
import os
import struct
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from axrt.errors import DataError
from axrt.scheduler.plural import plural
from axrt.scheduler.regular_file import opened

from .bare_tokens import AUTO, Form, bytes_before, form_of

Tokens = NDArray[np.integer[Any]]
_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, documents
_AT_ONCE = 1 << 22  # lengths of sequences that are read at a time
_LONGEST = (1 << 31) - 1  # tokens of a sequence, which the index has as int32
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class Mapped(NamedTuple):
    """The place of mapped tokens, from which another process can map them again."""

    path: str  # path of the file
    dtype: str  # type of the tokens, as numpy writes it
    offset: int  # place of the first token in the file, in bytes
    number: int  # number of tokens

    @classmethod
    def of(cls, tokens: Tokens) -> Self | None:
        """The place of a row of tokens that is mapped as it is, or of a contiguous part of one;
        None for a row in memory."""
        if not isinstance(tokens, np.memmap) or tokens.filename is None:
            return None
        start = np.frombuffer(tokens._mmap, np.uint8).ctypes.data  # type: ignore[attr-defined]
        before = tokens.offset - tokens.offset % mmap.ALLOCATIONGRANULARITY  # is not mapped
        offset = before + tokens.ctypes.data - start
        return cls(str(tokens.filename), tokens.dtype.str, offset, len(tokens))

    def where(self, place: int) -> str:
        """Where a token stands, as errors say it."""
        size = np.dtype(self.dtype).itemsize
        begin, path = self.offset + place * size, Path(self.path)
        before = 0 if path.with_suffix(".idx").exists() else bytes_before(path)
        return f" at byte {begin} of {path} (token {(begin - before) // size} from 0)"


def is_token_file(path: Path) -> bool:
    """The name says that the file holds tokens: it ends in .bin."""
    return path.suffix == ".bin"


def counted(tokens: Tokens) -> Tokens:
    """The same tokens where none is masked: one that does not count in the loss is stored as its
    complement, ~token, which is negative."""
    return np.where(tokens < 0, ~tokens, tokens) if tokens.dtype.kind == "i" else tokens


class Unknown(NamedTuple):
    """A token that a model does not know."""

    token: int  # the token; of a masked one the token that it masks
    place: int  # how many tokens stand before it


def unknown(tokens: Tokens, vocab: int, masked: bool = False) -> Unknown | None:
    """A token of an array, not empty, that is not among 0 .. vocab - 1; None where there is none.

    Args:
        masked: True if some may be masked, see `counted`.
    """
    plain = counted(tokens) if masked else tokens
    if int(plain.max()) >= vocab:
        return _at(plain, int(plain.argmax()))
    if plain.dtype.kind == "i" and int(plain.min()) < 0:
        return _at(plain, int(plain.argmin()))
    return None


def _at(tokens: Tokens, place: int) -> Unknown:
    return Unknown(int(tokens[place]), place)


def map_tokens(
    path: Path, key: str = "data.source", dtype: str = AUTO, vocab: int = 1 << 16
) -> Tokens:
    """The tokens of a file, shape (number,), of the type that they are stored in.

    Args:
        dtype: `data.dtype`, the type of tokens without an index.
    Raises:
        DataError: there is no such file, its length does not fit its type or its index, or its
            type is not known.
    """
    index = path.with_suffix(".idx")
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
        if index.exists():
            form = _of_index(path, size, index, dtype)
        else:
            form = form_of(path, size, dtype, vocab)
    except OSError as error:
        raise DataError(
            f"{path.absolute()}: {error.strerror}; expected a readable token file ({key})"
        ) from None
    if not form.number:
        return np.empty(0, form.dtype)
    return np.memmap(path, form.dtype, "r", form.offset, (form.number,))


def _of_index(path: Path, size: int, index: Path, dtype: str) -> Form:
    """How tokens stand in a file beside which there is an index."""
    found, number = _read_index(index)
    if dtype not in (AUTO, found.name):
        raise DataError(
            f"{index} says tokens of {found}, and data.dtype is {dtype!r}; expected 'auto' or "
            f"{found.name!r}"
        )
    if size != number * found.itemsize:
        raise DataError(
            f"{path} has {size} bytes, but {index} says {plural(number, 'token')} of {found}; "
            "expected the whole file (is one of the two cut off, or of another data set?)"
        )
    return Form(found, 0, number)


def index_of(dtype: np.dtype[Any], lengths: NDArray[np.int64]) -> bytes:
    """Megatron's index of a row of documents, each of which is one sequence, or several where it
    has 2**31 tokens or more.

    Args:
        lengths: number of tokens of each document, shape (documents,).
    """
    code = next(code for code, of in _TYPES.items() if of == dtype)
    parts = np.maximum(1, -(-lengths // _LONGEST))
    documents = np.concatenate([[0], np.cumsum(parts)]).astype(np.int64)
    sequences = np.full(documents[-1], _LONGEST, np.int64)
    sequences[documents[1:] - 1] = lengths - (parts - 1) * _LONGEST
    ends = np.cumsum(sequences) * dtype.itemsize
    head = _HEAD.pack(_MAGIC, 1, code, len(sequences), len(documents))
    pointers = np.concatenate([[0], ends[:-1]]) if len(sequences) else ends
    return b"".join(
        (
            head,
            sequences.astype(np.int32).tobytes(),
            pointers.astype(np.int64).tobytes(),
            documents.tobytes(),
        )
    )


def _read_index(index: Path) -> tuple[np.dtype[Any], int]:
    """The type of the tokens and their number, from a Megatron index."""
    with opened(index) as file:
        return _indexed(index, file)


def _indexed(index: Path, file: BufferedReader) -> tuple[np.dtype[Any], int]:
    head, size = file.read(_HEAD.size), os.fstat(file.fileno()).st_size
    if len(head) < _HEAD.size or head[:9] != _MAGIC:
        raise DataError(
            f"{index} does not begin as Megatron's index does; expected that of the .bin beside "
            "it, or none for a row of uint16"
        )
    _, version, code, sequences, _ = _HEAD.unpack(head)
    if version != 1 or code not in _TYPES:
        raise DataError(
            f"{index} is of version {version} with tokens of type {code}; expected version 1 and "
            "integers"
        )
    if size < _HEAD.size + 4 * sequences:
        raise DataError(
            f"{index} is cut off; expected the lengths of {plural(sequences, 'sequence')}"
        )
    number = 0
    for first in range(0, sequences, _AT_ONCE):
        lengths = np.frombuffer(file.read(4 * min(_AT_ONCE, sequences - first)), np.int32)
        if (lengths < 0).any():
            at = int(np.argmax(lengths < 0))
            raise DataError(
                f"{index} says that sequence {first + at} (from 0) has "
                f"{plural(lengths[at], 'token')}; expected 0 or more: write it again"
            )
        number += int(lengths.sum(dtype=np.int64))
    return np.dtype(_TYPES[code]), number
