"""A row of tokens, read part by part. A file is mapped for its length and type; what is looked at
is read from it instead, since a page that was cut off would end the process with SIGBUS."""

import os
import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from axrt.errors import DataError
from axrt.scheduler.regular_file import open_regular

from .tokens import Mapped, Tokens, Unknown, unknown

_LOOKED_AT, _PIECES = 1 << 28, 256  # tokens: half a second


class Row:
    """A row of tokens. A copy in another process opens the file anew.

    Args:
        tokens: integers, shape (number,), in memory or mapped.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._mapped = Mapped.of(tokens)
        self._in_memory = tokens if self._mapped is None else tokens[:0].copy()  # no mapping stays
        self._length, self._dtype = len(tokens), tokens.dtype
        self._which = None if self._mapped is None else _which(os.stat(self._mapped.path))
        self._file: int | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def source(self) -> str:
        """The path of the file, or that there is none."""
        return self._mapped.path if self._mapped else "the data"

    def part(self, start: int, number: int) -> Tokens:
        """Consecutive tokens, shape (number,), fewer at the end of the row.

        Raises:
            DataError: the file has become shorter, or cannot be read.
        """
        number = min(number, len(self) - start)
        if self._mapped is None:
            return self._in_memory[start : start + number]
        part = np.empty(number, self._dtype)
        self._read(self._mapped, self._mapped.offset + start * part.itemsize, part)
        return part

    # Tokens are read, and not looked at where their file is mapped. A file that is cut off would
    # end the process with SIGBUS, which no handler of Python can tell. A `pread` a sample costs
    # less than the copy that follows.
    def _read(self, mapped: Mapped, place: int, into: Tokens) -> None:
        left = memoryview(into.view(np.uint8).data)
        try:
            file = self._opened(mapped)
            while left:
                num_bytes = os.preadv(file, [left], place)
                if not num_bytes:
                    raise DataError(
                        f"{mapped.path} has {os.fstat(file).st_size} bytes, and had more when this "
                        "job began: somebody has cut it off; expected the same file as long as a "
                        "job reads it"
                    )
                left, place = left[num_bytes:], place + num_bytes
        except OSError as error:
            raise DataError(f"{mapped.path}: {error.strerror}; expected a readable file") from None

    def fetch(self, start: int, number: int) -> None:
        """Have the system begin to read a part that is wanted soon; returns at once."""
        if self._mapped is None:
            return
        size = self._dtype.itemsize
        place = self._mapped.offset + start * size
        with suppress(OSError):  # it is told when the part is read
            file = self._opened(self._mapped)
            os.posix_fadvise(file, place, number * size, os.POSIX_FADV_WILLNEED)

    def where(self, place: int) -> str:
        """Where a token stands, as errors say it; "" for a row in memory."""
        return "" if self._mapped is None else self._mapped.where(place)

    def _opened(self, mapped: Mapped) -> int:
        if self._file is None:
            file = open_regular(mapped.path)
            if _which(os.fstat(file)) != self._which:
                os.close(file)
                raise DataError(
                    f"{mapped.path} is another file than when this job began; expected the same "
                    "one as long as a job reads it"
                )
            self._file = file
            weakref.finalize(self, os.close, file)
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


def _which(found: os.stat_result) -> tuple[int, int]:
    """What tells a file from another one of the same name."""
    return found.st_dev, found.st_ino


def unknown_in_row(row: Row, vocab: int, masked: bool = False) -> Unknown | None:
    """A token of a row that is not among 0 .. vocab - 1; None where none was found.

    It is looked at piece by piece, so that memory stays flat. A row of more than 2**28 tokens is
    checked in pieces that are spread over it evenly.
    """
    piece = _LOOKED_AT // _PIECES
    if len(row) <= _LOOKED_AT:
        starts = range(0, len(row), piece)
    else:
        starts = np.linspace(0, len(row) - piece, _PIECES).astype(np.int64).tolist()
    for start in starts:
        if found := unknown(row.part(start, piece), vocab, masked):
            return found._replace(place=found.place + start)
    return None
