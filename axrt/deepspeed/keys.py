"""The keys of DeepSpeed's JSON configuration, read one by one; mistakes are collected."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_AUTO = "auto"  # a trainer fills it in
_OFF: tuple[Any, ...] = (False, None, 0, "none", {})


class Keys:
    """The keys of a JSON object, and which of them have been read.

    Reading a key whose value cannot be used adds to `mistakes`, and gives the default.

    Args:
        values: the object.
    Attributes:
        mistakes: what was found, a text each.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self._read = values, set[str]()
        self.mistakes: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a key, such as "fp16.loss_scale"; it counts as read."""
        *sections, key = name.split(".")
        within: Any = self._values
        for at, section in enumerate(sections):
            within = {} if within.get(section) is None else within[section]
            if not isinstance(within, Mapping):
                self._refuse(".".join(sections[: at + 1]), within, "an object")
                return default
        self._read.add(name)
        found = within.get(key)
        return default if found in (None, _AUTO) else found

    def flag(self, name: str, default: bool = False) -> bool:
        """A key that is true or false."""
        return bool(self._of(name, default, bool, "true or false"))

    def number(self, name: str, default: float) -> float:
        """A key that is a finite number, 0 or more."""
        found = self._of(name, default, int | float, "a number")
        if math.isfinite(found) and found >= 0:
            return float(found)
        self._refuse(name, found, "a number, 0 or more")
        return default

    def whole(self, name: str, default: int | None, most: int | None = None) -> Any:
        """A key that is a whole number from 0, an int or `default`."""
        found = self._of(name, default, int, "a whole number")
        if found == default or (found >= 0 and (most is None or found <= most)):
            return found
        upto = "" if most is None else f" to {most}"
        self._refuse(name, found, f"a whole number from 0{upto}")
        return default

    def text(self, name: str, default: str | None, choices: Sequence[str] = ()) -> Any:
        """A key that is a text, one of the choices where there are any; a str or `default`."""
        found = self._of(name, default, str, "text")
        if not choices or found in choices:
            return found
        self._refuse(name, found, " or ".join(map(repr, choices)))
        return default

    def section(self, name: str) -> Mapping[str, Any] | None:
        """A key that is an object; None: it is not there."""
        found: Mapping[str, Any] | None = self._of(name, None, Mapping, "an object")
        return found

    def rest(self) -> list[tuple[str, Any]]:
        """Keys that nobody has read, and their values; those of what is off are left away."""
        return [
            (name, value)
            for name, value in _flat(self._values, "")
            if value not in _OFF and not self._is_read(name)
        ]

    def check(self) -> None:
        """Check what is so in every section: nothing that is read is left to somebody else, and
        what turns a section on or off is true or false."""
        for name, value in _flat(self._values, ""):
            is_switch = name.rpartition(".")[2] == "enabled" and name not in self._read
            if value == _AUTO and self._is_read(name):
                self._add(f"{name} = 'auto' is for a trainer that fills it in; expected a value")
            elif is_switch and value not in (True, False, None):
                self._refuse(name, value, "true or false")

    def known(self) -> list[str]:
        """All names that have been asked for."""
        return [*self._read]

    def _of(self, name: str, default: Any, kind: Any, expected: str) -> Any:
        found = self.take(name, default)
        is_bool = isinstance(found, bool) and kind is not bool  # which Python takes for a number
        if found is default or (isinstance(found, kind) and not is_bool):
            return found
        self._refuse(name, found, expected)
        return default

    def _refuse(self, name: str, found: Any, expected: str) -> None:
        self._read.add(name)
        self._add(f"{name} = {found!r}; expected {expected}")

    def _add(self, text: str) -> None:
        if text not in self.mistakes:  # a section that is none is met with each of its keys
            self.mistakes.append(text)

    def _is_read(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:n]) in self._read for n in range(1, len(parts) + 1))


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found = []
    for key, value in values.items():
        if not isinstance(value, Mapping):
            found.append((prefix + key, value))
        elif value.get("enabled", True) not in _OFF:
            found += _flat(value, f"{prefix}{key}.")
    return found
