"""Files read slice by slice, several slices at a time: one thread alone leaves a disk idle while it
computes a digest."""

# Each slice has two digests. CRC-32 is the manifest's: that of a file follows from those of its
# slices (`durable.crc_of_both`). XXH3 is this process's own, for the second reading, when the slice
# is taken: it takes a twentieth of the time, and no other process has to agree on it.
#
# Files are read, not mapped. A page of a map that the disk cannot give ends the process with a
# signal, where a read raises an error that all ranks can be told of; and a map would show a file
# that is changed after it was checked.

import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

_SLICE_BYTES = 4 * 1024 * 1024  # a multiple of every type's size
_THREADS = 4  # a disk wants several requests at a time


class Slice(NamedTuple):
    """Some bytes of a file."""

    start: int  # offset of the first one
    num_bytes: int  # how many there are
    crc: int  # their CRC-32, which the manifest knows
    # their XXH3 (64 bits). A second reading is compared by this one, which takes a twentieth of
    # the time.
    seen: int


class SliceReader:
    """Threads that read, each with memory for one slice; they end when nobody holds the reader."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "axrt reads")
        self._memory = threading.local()

    def check(self, file: int, start: int, end: int, look: Callable[[Tensor], None]) -> list[Slice]:
        """Read a stretch of a file, and keep none of it.

        Args:
            look: function that sees each slice, uint8, on any thread.
        Returns:
            The slices, in order.
        Raises:
            OSError: it cannot be read, or ends too early.
        """
        return list(self._pool.map(partial(self._checked, file, look), *_cut(start, end)))

    def read(self, file: int, slices: list[Slice], into: Tensor) -> bool:
        """Read a stretch again.

        Args:
            into: memory on the CPU, uint8, shape (bytes,).
        Returns:
            Its bytes are what they were.
        Raises:
            OSError: it cannot be read, or ends too early.
        """
        places = [one.start - slices[0].start for one in slices]
        memories = [into[at : at + one.num_bytes] for at, one in zip(places, slices, strict=True)]
        if len(slices) == 1:  # small, as most are: no thread is asked
            return _is_same(file, slices[0], memories[0])
        return all(self._pool.map(partial(_is_same, file), slices, memories))

    def _checked(
        self, file: int, look: Callable[[Tensor], None], start: int, num_bytes: int
    ) -> Slice:
        if not hasattr(self._memory, "bytes"):
            self._memory.bytes = torch.empty(_SLICE_BYTES, dtype=torch.uint8)
        memory = self._memory.bytes[:num_bytes]
        _fill(file, start, memory)
        look(memory)
        data = memory.numpy().data
        return Slice(start, num_bytes, zlib.crc32(data), xxhash.xxh3_64_intdigest(data))


def _cut(start: int, end: int) -> tuple[list[int], list[int]]:
    starts = list(range(start, end, _SLICE_BYTES))
    return starts, [min(_SLICE_BYTES, end - at) for at in starts]


def _is_same(file: int, one: Slice, memory: Tensor) -> bool:
    _fill(file, one.start, memory)
    return xxhash.xxh3_64_intdigest(memory.numpy().data) == one.seen


def _fill(file: int, start: int, memory: Tensor) -> None:
    rest, at = memory.numpy().data, start
    while rest:
        moved = os.preadv(file, [rest], at)
        if not moved:
            raise OSError("it ends too early")
        rest, at = rest[moved:], at + moved
