"""Token files without an index beside them: what type their tokens have, and where they begin.

nanoGPT's are a row of uint16 and nothing else. llm.c's begin with 256 numbers of int32: a magic
number, a version, and the number of tokens. Of other rows nothing says the type but their numbers:
the upper halves of 32-bit tokens are nearly all 0.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from axrt.errors import DataError
from axrt.scheduler.plural import plural
from axrt.scheduler.regular_file import opened

AUTO = "auto"
_UINT16 = np.dtype(np.uint16)
_HEADER, _HEADER_BYTES = np.dtype("<i4"), 1024
_OF_LLM_C: dict[int, tuple[int, np.dtype[Any]]] = {  # by magic number: version and type
    20240520: (1, _UINT16),
    20240801: (7, np.dtype(np.uint32)),
}
_OF_OTHERS = {
    b"\x93NUMPY": "an array of NumPy's, which tokens.tofile writes without its header",
    b"PK\x03\x04": "a zip file, or an archive of NumPy's or torch's",
    b"\x1f\x8b\x08": "a file of gzip's",
    b"\x28\xb5\x2f\xfd": "a file of zstd's",
    b"PAR1": "a Parquet file, which axrt prepare reads",
    b"ARROW1": "an Arrow file, which axrt prepare reads",
    b"MMIDIDX\x00\x00": "an index of Megatron's, which is to be named .idx",
}
_LOOKED_AT = 1 << 17  # bytes
_NARROW, _WIDE = 16, 255  # upper halves are at most this; of lower halves some are more than that
_NEGATIVE = 0xFFFF  # the upper half of a masked token


class Form(NamedTuple):
    """How tokens stand in a file."""

    dtype: np.dtype[Any]  # their type
    offset: int  # bytes before the first one
    number: int  # how many there are


def form_of(path: Path, size: int, dtype: str, vocab: int) -> Form:
    """How tokens stand in a file without an index.

    Args:
        size: its size in bytes.
        dtype: `data.dtype`; "auto" has the file and the vocabulary say it.
    Raises:
        DataError: it is something else, not whole, or seems to be of another type.
        OSError: it cannot be read.
    """
    with opened(path) as file:
        begins = file.read(_LOOKED_AT)
    if found := _of_llm_c(path, size, begins):
        if dtype not in (AUTO, found.dtype.name):
            raise DataError(
                f"{path} has llm.c's header, which says tokens of {found.dtype}, and data.dtype is "
                f"{dtype!r}; expected 'auto' or {found.dtype.name!r}"
            )
        return found
    if dtype != AUTO:
        return _row(path, size, np.dtype(dtype))
    for magic, what in _OF_OTHERS.items():
        if begins.startswith(magic):
            raise DataError(
                f"{path} begins as {what}; expected tokens and nothing else. If they are, say "
                "their type: data.dtype"
            )
    looks = _seems(begins)
    if looks != _UINT16 and vocab <= 1 << 16:
        raise DataError(
            f"{path} has a 0 in every second number of 16 bits, or nearly: it seems to have tokens "
            f"of {looks}; expected data.dtype = {looks.name!r}, or 'uint16' if it has none"
        )
    return _row(path, size, looks)


def _of_llm_c(path: Path, size: int, begins: bytes) -> Form | None:
    if len(begins) < _HEADER_BYTES:
        return None
    magic, version, number, *rest = np.frombuffer(begins, _HEADER, _HEADER_BYTES // 4).tolist()
    known = _OF_LLM_C.get(magic)
    if known is None:
        return None
    if version != known[0] or number < 0 or any(rest):
        raise DataError(
            f"{path} begins with llm.c's magic number {magic}, in a header of version {version} "
            f"that is not known; expected version {known[0]}, the number of tokens, and zeros"
        )
    form = Form(known[1], _HEADER_BYTES, number)
    whole = _HEADER_BYTES + number * form.dtype.itemsize
    if size != whole:
        raise DataError(
            f"{path} has {size} bytes, and its header says {plural(number, 'token')} of "
            f"{form.dtype}; expected {whole}: the whole file"
        )
    return form


def bytes_before(path: Path) -> int:
    """The number of bytes before the first token of a file without an index."""
    with opened(path) as file:
        magic = np.frombuffer(file.read(4), _HEADER)
    return _HEADER_BYTES if magic.size and int(magic[0]) in _OF_LLM_C else 0


def _row(path: Path, size: int, dtype: np.dtype[Any]) -> Form:
    number, more = divmod(size, dtype.itemsize)
    if more:
        raise DataError(
            f"{path} has {size} bytes, but a row of {dtype} has a multiple of {dtype.itemsize}; "
            "expected the whole file, or another data.dtype (is it cut off, or its .idx missing?)"
        )
    return Form(dtype, 0, number)


# The type of bare tokens is told by halves of numbers. The size of a file tells little, and the
# vocabulary nothing where it is small: then what looks wider is refused with the key.
def _seems(begins: bytes) -> np.dtype[Any]:
    """The type that the first tokens of a row seem to have; uint16 where nothing speaks against
    it."""
    if len(begins) < 4:
        return _UINT16
    halves: NDArray[np.uint16] = np.frombuffer(begins, "<u2", len(begins) // 4 * 2)
    low, high = halves[::2], halves[1::2]
    is_negative = high == _NEGATIVE
    if not ((high <= _NARROW) | is_negative).all():
        return _UINT16
    if int(low.max()) <= _WIDE and (high.any() or not low.any()):
        return _UINT16  # numbers are small everywhere
    pairs = len(high) // 2
    behind, below = high[1::2][:pairs], low[1::2][:pairs]
    extends = (below == behind) & ((behind == 0) | (behind == _NEGATIVE))
    if pairs and extends.all():  # 0 or all ones behind each: the sign
        return np.dtype(np.int64)
    return np.dtype(np.int32 if is_negative.any() else np.uint32)
