"""Token files: mapped into memory, read where they are looked at.

Two forms. nanoGPT's: `NAME.bin` is a row of uint16 and nothing else. Megatron's: `NAME.bin` is a
row of tokens, and `NAME.idx` beside it says their type and how long each sequence is; samples are
cut from the row as it is, across the ends of sequences, as Megatron's own are.
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from axrt.errors import DataError

Tokens = NDArray[np.integer[Any]]
_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, documents
_LOOKED_AT, _PIECES = 1 << 28, 256  # tokens: half a second
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class Mapped(NamedTuple):
    """Where mapped tokens are, to be mapped again in another process.

    Args:
        path: of the file.
        dtype: of the tokens.
        offset: of the first, in bytes.
        number: how many.
    """

    path: str
    dtype: str
    offset: int
    number: int

    @classmethod
    def of(cls, tokens: Tokens) -> Self | None:
        """Of a row of tokens that is mapped as it is, or a contiguous part of one; None for one in
        memory."""
        if not isinstance(tokens, np.memmap) or tokens.filename is None:
            return None
        start = np.frombuffer(tokens._mmap, np.uint8).ctypes.data  # type: ignore[attr-defined]
        return cls(str(tokens.filename), tokens.dtype.str, tokens.ctypes.data - start, len(tokens))

    def tokens(self) -> Tokens:
        return (
            np.memmap(self.path, self.dtype, "r", self.offset, (self.number,))
            if self.number
            else np.empty(0, self.dtype)
        )


def is_token_file(path: Path) -> bool:
    """By its name."""
    return path.suffix == ".bin"


def unknown(tokens: Tokens, vocab: int) -> int | None:
    """A token of an array that is not among 0 .. vocab - 1, None where there is none."""
    most = int(tokens.max())
    if most >= vocab:
        return most
    least = int(tokens.min()) if tokens.dtype.kind == "i" else 0
    return least if least < 0 else None


def unknown_in_row(tokens: Tokens, vocab: int) -> int | None:
    """The same of a row; of a very long one, of pieces spread over it evenly."""
    piece = _LOOKED_AT // _PIECES
    if len(tokens) <= _LOOKED_AT:
        return unknown(tokens, vocab)
    starts = np.linspace(0, len(tokens) - piece, _PIECES).astype(np.int64)
    found = (unknown(tokens[start : start + piece], vocab) for start in starts)
    return next((token for token in found if token is not None), None)


def map_tokens(path: Path, key: str = "data.source") -> Tokens:
    """The tokens of a file, shape (number,), of the type that they are stored in.

    Args:
        path: of the .bin.
        key: of the configuration that names it, for errors.
    Raises:
        DataError: no such file, or one whose length does not fit its type or its index.
    """
    index = path.with_suffix(".idx")
    try:
        size = path.stat().st_size
        dtype, expected = _read_index(index) if index.exists() else (np.dtype(np.uint16), None)
    except OSError as error:
        raise DataError(
            f"{path.absolute()}: {error.strerror}; expected a readable token file ({key})"
        ) from None
    if size % dtype.itemsize or (expected is not None and size != expected * dtype.itemsize):
        says = (
            f"{index} says {expected} tokens of {dtype}"
            if expected is not None
            else "a row of uint16 has an even number"
        )
        raise DataError(
            f"{path} has {size} bytes, but {says}; expected the whole file (is one of the two cut "
            "off, or of another data set?)"
        )
    return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)


def _read_index(index: Path) -> tuple[np.dtype[Any], int]:
    """The type of the tokens and how many there are."""
    data = index.read_bytes()
    if len(data) < _HEAD.size or data[:9] != _MAGIC:
        raise DataError(
            f"{index} does not begin as Megatron's index does; expected that of the .bin beside "
            "it, or none for a row of uint16"
        )
    _, version, code, sequences, _ = _HEAD.unpack_from(data)
    if version != 1 or code not in _TYPES:
        raise DataError(
            f"{index} is of version {version} with tokens of type {code}; expected version 1 and "
            "integers"
        )
    if len(data) < _HEAD.size + 4 * sequences:
        raise DataError(f"{index} is cut off; expected the lengths of {sequences} sequences")
    lengths = np.frombuffer(data, np.int32, sequences, _HEAD.size)
    if (lengths < 0).any():
        first = int(np.argmax(lengths < 0))
        raise DataError(
            f"{index} says that sequence {first} (from 0) has {lengths[first]} tokens; expected 0 "
            "or more: write it again"
        )
    return np.dtype(_TYPES[code]), int(lengths.sum(dtype=np.int64))
