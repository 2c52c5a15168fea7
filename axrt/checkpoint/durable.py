"""Files that exist as a whole or not at all, whatever ends the process or the machine."""

import os
import zlib
from pathlib import Path

_READ_BYTES = 1 << 22


def write_durably(path: Path, data: bytes) -> None:
    """Write a file beside its place, then put it there, each on disk before the next.

    Raises:
        OSError: the file cannot be written; an older file of that name stands.
    """
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
    """Make the names in a directory durable.

    Raises:
        OSError: the directory cannot be opened or synchronised.
    """
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
    """The digest of a file as `digest_of` gives it, read piece by piece.

    Raises:
        OSError: the file cannot be read.
    """
    value = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"
