"""Regular files, opened without waiting and read within bounds, whatever a name leads to."""

# A name may lead to a pipe, a socket or a device, which keeps its reader for ever. A file may have
# any size, and a text may nest deeper, or have longer numbers, than what reads it can take. All of
# that is refused here with a sentence, before memory is taken.

import errno
import json
import os
import stat
import tomllib
from collections.abc import Callable
from io import BufferedReader
from os import PathLike
from typing import Any

MOST_BYTES = 1 << 26  # of a text that people or axrt write: 64 MiB

# What reading values of unknown types and sizes may end in.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

_DEEPEST = 100  # levels; what axrt and its peers write has at most ten
_MOST_DIGITS = 100  # of a whole number: the state of a generator may have forty
_MOST_DOTS = 10_000  # of a TOML key: it takes time with the square of them
_TOO_DEEP = f"it nests deeper than {_DEEPEST} levels"

_KINDS: dict[str, Callable[[int], bool]] = {
    "a pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a link": stat.S_ISLNK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


# One module opens and reads files (`regular_file.py`), and a test finds whoever does it otherwise.
# Pipes, devices, sizes and depths were faults of one kind in thirty places.
def open_regular(path: str | PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of a regular file.

    Raises:
        OSError: it cannot be opened, or is a pipe, a socket, a device or a directory; `strerror`
            says which.
    """
    try:
        found = os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    except ValueError:
        raise OSError(errno.EINVAL, "a name with a NUL byte", os.fspath(path)) from None
    else:  # before it is opened, since with a device that can do something by itself
        _check_regular(found.st_mode, path)
    file = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    try:
        _check_regular(os.fstat(file).st_mode, path)
        os.set_blocking(file, True)
    except BaseException:
        os.close(file)
        raise
    return file


def opened(path: str | PathLike[str]) -> BufferedReader:
    """A regular file, open for reading; arguments and errors are those of `open_regular`."""
    return open(open_regular(path), "rb")


def _check_regular(mode: int, path: str | PathLike[str]) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    kind = next((name for name, fits in _KINDS.items() if fits(mode)), "no regular file")
    raise OSError(errno.EINVAL, f"it is {kind}", os.fspath(path))


def read_bytes(path: str | PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The content of a regular file.

    Args:
        most: largest size that is read, in bytes.
    Raises:
        OSError: as for `opened`, or it is larger.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            what = f"it has {size:,} bytes, and at most {most:,} are read"
            raise OSError(errno.EFBIG, what, os.fspath(path))
        return file.read()


def read_text(
    path: str | PathLike[str],
    most: int = MOST_BYTES,
    encoding: str = "utf-8",
    errors: str = "strict",
) -> str:
    """The text of a regular file, whose lines may end as on any system.

    Args:
        path, most: as for `read_bytes`.
        encoding, errors: as for `bytes.decode`.
    Raises:
        OSError: as for `read_bytes`.
        UnicodeDecodeError: it is not in that encoding.
    """
    text = read_bytes(path, most).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def json_of(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The values of a JSON text.

    Args:
        text: the text; as bytes in UTF-8.
        pairs: function that makes an object of its pairs; None: a dictionary.
    Raises:
        ValueError: it is no JSON, nests deeper than 100 levels, or has a number of over 100 digits.
    """
    if isinstance(text, bytes):  # which the library would also take for UTF-16 or UTF-32
        text = text.decode()
    try:
        found = json.loads(text, parse_int=_whole_number, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(found)
    return found


def toml_of(text: str) -> dict[str, Any]:
    """The values of a TOML text.

    Raises:
        ValueError: it is no TOML, nests deeper than 100 levels, or has a key of over 10,000 parts.
    """
    if any(line.partition("=")[0].count(".") > _MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a key has over {_MOST_DOTS:,} parts")
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(found)
    return found


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits; expected at most {_MOST_DIGITS}")
    return int(digits)


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(_DEEPEST + 1):
        level = [inside for one in level for inside in _inside(one)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _inside(value: Any) -> list[Any]:
    """The lists and objects in a value."""
    inside = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return []
    return [one for one in inside if isinstance(one, dict | list)]
