"""Files that are there as a whole or not at all, whatever ends the process or the machine."""

import os
import zlib
from pathlib import Path

_READ_BYTES = 1 << 22


def write_durably(path: Path, data: bytes) -> None:
    """Write a file beside its place, then put it there, each on disk before the next; `OSError`
    where that cannot be."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)  # on a full disk its room is what a next try needs
        raise
    sync(path.parent)


def sync(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(data: bytes) -> str:
    """CRC-32 in hexadecimal, 8 digits: any flipped bit changes it. It finds accidents, and is no
    defence against forgery."""
    return f"{zlib.crc32(data):08x}"


def digest_of_file(path: Path) -> str:
    """The same of a file, read piece by piece; `OSError` where it cannot be read."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"
