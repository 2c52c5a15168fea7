"""A section of keys: each with its meaning, unit, range and "off" value, which are checked when it
is built."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from axrt.errors import ConfigError

from .former import VALUES

_STRANGE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # the rest stand for bytes of a name
_MOST_OF_NAME, _MOST_OF_PATH = 255, 4095  # bytes that Linux takes


def key(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    takes_own: bool = False,
    is_path: bool = False,
) -> Any:
    """A key with its range or its choices; `takes_own`: or what a user has written, by its name
    'package.module:Name'; `is_path`: it may be the path of a file or directory."""
    limits = {"least": least, "most": most, "choices": choices, "takes_own": takes_own}
    limits["is_path"] = is_path
    return field(default=default, metadata={"meaning": meaning, **limits})


class Mistakes(ConfigError):
    """All mistakes of a configuration, one text each."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        super().__init__(told(texts))


def told(texts: Sequence[str]) -> str:
    return (
        texts[0]
        if len(texts) == 1
        else "\n  ".join([f"{len(texts)} mistakes in the configuration:", *texts])
    )


def refuse(mistakes: Iterable[str]) -> None:
    texts = list(mistakes)
    if texts:
        raise Mistakes(texts)


def name_of(section: type[Any]) -> str:
    """The name of a section in a file: that of its class, or its `SECTION` where sections are
    within another, such as "links.node"."""
    return getattr(section, "SECTION", section.__name__.lower())


class Section:
    """Checks type, range and choices of every key when built, and then keys that must go
    together."""

    def __post_init__(self) -> None:
        refuse(self._of_values())
        refuse(self._of_all())

    def _of_values(self) -> Iterator[str]:
        kind: Any = type(self)
        hints = _hints_of(kind)
        for item in fields(self):  # type: ignore[arg-type]
            key = f"{name_of(type(self))}.{item.name}"
            value = getattr(self, item.name)
            if not _fits(value, hints[item.name]):
                choices = ", ".join(choice or "''" for choice in item.metadata["choices"])
                yield (
                    f"{key} = {value!r} is {type_name(type(value))}; expected "
                    f"{f'one of {choices}' if choices else type_name(hints[item.name])}"
                )
            else:
                yield from _out_of_range(key, value, item.metadata)
                yield from _impossible_text(key, value, item.metadata["is_path"])

    def _of_all(self) -> Iterator[str]:
        return iter(())


@cache
def _hints_of(section: type[Any]) -> dict[str, Any]:
    return get_type_hints(section)


def _fits(value: Any, kind: Any) -> bool:
    if type(value) is kind:
        return True
    if get_origin(kind) is UnionType:
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(one, get_args(kind)[0]) for one in value)
    return kind is float and type(value) is int


def type_name(kind: Any) -> str:
    names = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "a boolean (true or false)",
        tuple: "a list",
        list: "a list",
        dict: "a section",
    }
    if get_origin(kind) is UnionType:
        return " or ".join(type_name(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {type_name(get_args(kind)[0])}"
    return names.get(kind, str(kind))


def _out_of_range(key: str, value: Any, limits: Mapping[str, Any]) -> Iterator[str]:
    is_own = limits["takes_own"] and ":" in str(value)
    if (key, value) in VALUES:
        yield f"{key} = {value!r} is gone: {VALUES[key, value].why}"
    elif limits["choices"] and value not in limits["choices"] and not is_own:
        near = difflib.get_close_matches(str(value).lower(), limits["choices"], n=1, cutoff=0.75)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(choice or "''" for choice in limits["choices"])
        yield f"{key} = {value!r}; expected one of {known} ({limits['meaning']}){hint}"
    for one in value if isinstance(value, tuple) else (value,):
        too_small = limits["least"] is not None and not one >= limits["least"]
        too_large = (limits["most"] is not None and not one <= limits["most"]) or one == float(
            "inf"
        )
        if too_small or too_large:
            bounds = [f"at least {limits['least']}"] * (limits["least"] is not None)
            bounds += (
                [f"at most {limits['most']}"]
                if limits["most"] is not None
                else ["finite"] * too_large
            )
            yield f"{key} = {value!r}; expected {' and '.join(bounds)} ({limits['meaning']})"
            return


def _impossible_text(key: str, value: Any, is_path: bool) -> Iterator[str]:
    """What no path, and no other text, can have."""
    for one in value if isinstance(value, tuple) else (value,):
        if not isinstance(one, str):
            continue
        if strange := _STRANGE.search(one):
            yield f"{key} = {one[:60]!r} has {strange[0]!r}, which is no character; expected text"
        elif is_path and "\n" not in one and _is_overlong(one):
            yield (
                f"{key} = {one[:40] + '...'!r} has a name of {max(_lengths(one))} bytes in a path "
                f"of {len(os.fsencode(one))}; expected names of at most {_MOST_OF_NAME} bytes, and "
                f"{_MOST_OF_PATH} in all"
            )


def _is_overlong(path: str) -> bool:
    return max(_lengths(path)) > _MOST_OF_NAME or len(os.fsencode(path)) > _MOST_OF_PATH


def _lengths(path: str) -> list[int]:
    """The number of bytes of each name in a path."""
    return [len(os.fsencode(name)) for name in path.split("/")]
