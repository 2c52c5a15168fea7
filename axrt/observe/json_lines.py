"""Files of one JSON object a line, which a run appends to while others read it.

A process that is killed leaves half a line at the end, and a disk or a person may change any other.
A line that is no such object is named and passed over: it ends no command, and no training.
"""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BufferedReader
from math import isfinite
from pathlib import Path
from typing import Any

from axrt.scheduler.regular_file import MALFORMED, json_of, open_regular, opened

Fits = Mapping[str, Callable[[Any], bool]]
Says = Callable[[str], None]

_LONGEST, _MOST_BYTES = 1 << 24, 1 << 32  # of a line, and of a file
_TAIL_BYTES = 1 << 16
_MOST_NAMED = 3  # lines of a file that are named one by one


def is_count(value: Any) -> bool:
    """A whole number that is not negative."""
    return type(value) is int and value >= 0


def is_number(value: Any) -> bool:
    """A finite number."""
    return type(value) in (int, float) and isfinite(value)


def is_seconds(value: Any) -> bool:
    """A time that a run may have taken: under some three thousand years."""
    return is_number(value) and 0 <= value < 1e11


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def are_numbers(value: Any) -> bool:
    """Numbers by name."""
    return isinstance(value, dict) and all(map(is_number, value.values()))


def are_named_texts(value: Any) -> bool:
    """Texts by name."""
    return isinstance(value, dict) and all(map(is_text, value.values()))


def or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """What fits, or nothing."""
    return lambda value: value is None or fits(value)


def object_of(line: bytes, fits: Fits) -> dict[str, Any]:
    """The object of a line.

    Args:
        fits: for each key that is looked at whether a value may be there; None stands for none.
    Raises:
        ValueError: it is none, or a value cannot be.
    """
    try:
        found = json_of(line)
        if not isinstance(found, dict):
            raise ValueError(f"it is {type(found).__name__}, and no object")
        for key, is_fit in fits.items():
            if not is_fit(found.get(key)):
                raise ValueError(f"{key} = {str(found.get(key))[:40]!r}")
    except MALFORMED as error:
        raise ValueError(str(error)[:100]) from None
    return found


def objects_in(path: Path, fits: Fits, says: Says) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order; none where there is no file.

    Args:
        says: function that is told of lines that are passed over, and of a file that cannot be
            read. A last line that is not whole yet is passed over in silence.
    """
    damaged: list[tuple[int, str]] = []
    try:
        with opened(path) as file:
            for number, (line, _) in enumerate(whole_lines(file), start=1):
                try:
                    yield object_of(line, fits)
                except ValueError as error:
                    damaged.append((number, str(error)))
    except FileNotFoundError:
        return
    except OSError as error:
        says(f"{path}: {error.strerror}; left out")
    for number, what in damaged[:_MOST_NAMED]:
        says(f"{path}, line {number}: {what}; left out")
    if len(damaged) > _MOST_NAMED:
        says(f"{path}: {len(damaged) - _MOST_NAMED} more lines like that; left out")


def whole_lines(file: BufferedReader) -> Iterator[tuple[bytes, int]]:
    """The lines of a file from where it stands, each with the place behind it. A last one that is
    not whole yet is not among them; of one that is too long its beginning is.

    Raises:
        OSError: the file is too large, or cannot be read.
    """
    if os.fstat(file.fileno()).st_size > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has over {_MOST_BYTES:,} bytes")
    while line := file.readline(_LONGEST):
        rest = line
        while len(rest) == _LONGEST and not rest.endswith(b"\n"):
            rest = file.readline(_LONGEST)
        if not rest.endswith(b"\n"):
            return
        yield line, file.tell()


def last_objects(path: Path, fits: Fits) -> Iterator[dict[str, Any]]:
    """The objects at the end of a file, the last one first; what is none is passed over, and so is
    a file that cannot be read. Arguments are those of `objects_in`."""
    try:
        lines = end_of(path)[1].splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with suppress(ValueError):
            yield object_of(line, fits)


def end_of(path: Path) -> tuple[int, bytes]:
    """The last bytes of a file, 64 KiB at most, and the place where they begin.

    Raises:
        OSError: it cannot be read.
    """
    with opened(path) as file:
        place = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(place)
        return place, file.read()


def append(path: Path, data: bytes) -> None:
    """Append all of the data, or nothing where the disk is full.

    Raises:
        OSError: it cannot be written.
    """
    file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        length = os.fstat(file).st_size
        try:
            if os.write(file, data) < len(data):  # the disk was full in the middle
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(file, length)
            raise
    finally:
        os.close(file)


def cut_off_half_a_line(path: Path) -> None:
    """Remove a last line that a process had not finished when it was killed.

    Raises:
        OSError: the file cannot be read or written.
    """
    if path.is_symlink():  # to somebody's file, perhaps
        raise OSError(errno.ELOOP, "it is a link", str(path))
    if not path.exists():
        return
    place, data = end_of(path)
    if data.endswith(b"\n"):
        return
    if place and b"\n" not in data:  # no line of ours is that long
        append(path, b"\n")
    else:
        os.truncate(path, place + data.rfind(b"\n") + 1)
