"""Files that exist as a whole or not at all, whatever ends the process or the machine."""

# The order is the promise: bytes on disk, then the name, then the directory. Whoever is killed in
# between leaves the old file, or the new one. A disk that is full leaves the old one, too, and what
# was begun is removed, for its room is what the next try needs.

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import BufferedWriter
from pathlib import Path

from axrt.scheduler.regular_file import open_regular

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_POLYNOMIAL = 0xEDB88320  # of CRC-32; the highest bit is the coefficient of x^0


@contextmanager
def durable(path: Path, mode: int = 0o666) -> Iterator[BufferedWriter]:
    """Context with a file that is beside its place, and is put there at the end, each on disk
    before the next.

    Raises:
        OSError: the file cannot be written; an older file of that name stands.
    """
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)  # whatever somebody has left there
    try:
        with open(open_regular(beside, _NEW, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except Exception:
        beside.unlink(missing_ok=True)  # on a full disk its room is what a next try needs
        raise
    sync(path.parent)


def write_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file beside its place, then put it there, each on disk before the next.

    Raises:
        OSError: the file cannot be written; an older file of that name stands.
    """
    with durable(path, mode) as file:
        file.write(data)


def sync(directory: Path) -> None:
    """Make the names in a directory durable.

    Raises:
        OSError: the directory cannot be opened or synchronised.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# CRC-32 replaced SHA-256 (2.0 and 0.26 GB/s): digests find accidents.
def digest_of(data: bytes) -> str:
    """CRC-32 in hexadecimal, 8 digits: any flipped bit changes it. It finds accidents, and is no
    defence against forgery."""
    return digits_of(zlib.crc32(data))


def digits_of(crc: int) -> str:
    """A CRC-32 as a digest is written."""
    return f"{crc:08x}"


def crc_of_both(first: int, second: int, num_bytes: int) -> int:
    """The CRC-32 of two stretches of bytes, one behind the other, from the CRC-32 of each.

    Args:
        first: CRC-32 of the first stretch.
        second: CRC-32 of the second stretch.
        num_bytes: size of the second stretch.
    Source: a CRC is a remainder of polynomials over GF(2), so the bytes behind the first stretch
        multiply its remainder by x^(8 num_bytes), as zlib's `crc32_combine` does.
    """
    return _product(first, _power_of(num_bytes)) ^ second


@lru_cache(maxsize=4096)  # stretches are often as long as each other
def _power_of(num_bytes: int) -> int:
    """The remainder of x^(8 num_bytes)."""
    found, power = 1 << 31, 1 << 23  # 1, and x^8, which is one byte
    while num_bytes:
        if num_bytes & 1:
            found = _product(found, power)
        power = _product(power, power)
        num_bytes >>= 1
    return found


def _product(one: int, other: int) -> int:
    """The product of two remainders."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product
