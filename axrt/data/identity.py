"""What identifies data: its size, and a digest of bytes from evenly spaced places. It is cheap for
files of any size, and tells data made anew, which differ all over."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from axrt.scheduler.regular_file import opened

_PLACES, _PLACE_BYTES = 256, 4096  # of a file; a smaller one is read as a whole


# Data are told by bytes from places all over them, kept in each checkpoint. A digest of the whole
# was thought of: it would read a file of many GB at each start. What `axrt prepare` says of its
# files was thought of, too: other tools say nothing, and what is said may be of a file before.
def identity_of(root: Path, paths: Sequence[Path]) -> str:
    """The size and digest of files, as a text.

    Args:
        root: directory that they are in; names below it count.
    Raises:
        OSError: one cannot be read.
    """
    digest, size = hashlib.blake2b(digest_size=8), 0
    for path in paths:
        num_bytes = path.stat().st_size
        digest.update(os.fsencode(f"{path.relative_to(root).as_posix()}\0{num_bytes}\0"))
        for data in _looked_at(path, num_bytes):
            digest.update(data)
        size += num_bytes
    return f"{size:,} bytes (digest {digest.hexdigest()})"


def _looked_at(path: Path, num_bytes: int) -> Iterator[bytes]:
    with opened(path) as file:
        if num_bytes <= _PLACES * _PLACE_BYTES:
            yield file.read()
            return
        for place in range(_PLACES):
            file.seek(place * (num_bytes - _PLACE_BYTES) // (_PLACES - 1))
            yield file.read(_PLACE_BYTES)
