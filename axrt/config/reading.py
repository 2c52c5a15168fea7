"""A configuration from a file, a dict and overrides: what no section has is found here."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from axrt.errors import ConfigError
from axrt.scheduler.regular_file import read_text, toml_of

from .former import what_became_of
from .section import Mistakes, name_of, type_name

_MOST_BYTES = 1 << 20  # of a file


def parse_file(path: Path) -> dict[str, Any]:
    try:
        # a name on a disk may be no UTF-8: its bytes stand in the file as they are
        return toml_of(read_text(path, _MOST_BYTES, errors="surrogateescape"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; expected a TOML file, such as examples/quickstart.toml"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def foreign_code(path: Path, tree: Mapping[str, Any], overrides: Iterable[str]) -> Iterator[str]:
    """What a file of another user's names of code that would be run, unless the command line names
    it, too."""
    model = tree.get("model")
    factory = model.get("factory") if isinstance(model, Mapping) else None
    if not isinstance(factory, str) or not factory:
        return
    is_named = any(text.replace(" ", "").startswith("model.factory=") for text in overrides)
    if not is_named and path.stat().st_uid not in (0, os.geteuid()):
        yield (
            f"{path} is another user's, and model.factory = {factory!r} there would run code from "
            f"{os.getcwd()}; expected model.factory={factory} on the command line, if you trust it"
        )


def apply(override: str, tree: dict[str, Any]) -> Iterator[str]:
    """Lay an override over the sections, and give the mistakes in it."""
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if (
        "\n" in override or "\r" in override
    ):  # TOML would take the first line and a second key with it
        yield f"{override!r} has more than one line; expected section.key=value, one at a time"
        return
    if not (equals and dot and key):
        yield f"{override!r} is no override; expected section.key=value, such as run.steps=100"
        return
    try:
        value = toml_of(f"value = {text}")["value"]
    except ValueError as error:
        if text[:1] in ('"', "'", "[", "{"):
            yield f"{override!r} begins as a value of TOML and is none: {error}"
            return
        value = text  # a bare word
    keys = tree.setdefault(section, {})
    if isinstance(keys, dict):  # else it is refused as a section
        keys[key] = value


def unknown(tree: Mapping[str, Any], sections: Mapping[str, type[Any]]) -> Iterator[str]:
    """The sections that do not exist, then the keys."""
    yield from _strangers("section", tree, sections, "")
    for name, kind in sections.items():
        if isinstance(tree.get(name), Mapping):
            yield from _strangers(
                "key", tree[name], {item.name: None for item in fields(kind)}, f"{name}."
            )


def _strangers(
    what: str, found: Mapping[str, Any], known: Mapping[str, Any], prefix: str
) -> Iterator[str]:
    for name in found:
        if name in known:
            continue
        said = what_became_of(prefix + name, found[name])
        if said:
            yield said
        elif said is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {prefix}{near[0]}?"
                if near
                else f"expected one of {', '.join(known)}"
            )
            yield f"there is no {what} {prefix}{name}; {hint}"


def built(kind: type[Any], keys: Any, mistakes: list[str]) -> Any:
    """The section, from the keys that fit; texts about the others are added to `mistakes`."""
    section = name_of(kind)
    if not isinstance(keys, Mapping):
        mistakes.append(f"[{section}] is {type_name(type(keys))}; expected a section of keys")
        return kind()
    choices = {item.name: item.metadata["choices"] for item in fields(kind)}
    fitting = {
        key: tuple(value) if isinstance(value, list) else _spelled(value, choices[key])
        for key, value in keys.items()
        if key in choices
    }
    while True:
        try:
            return kind(**fitting)
        except Mistakes as error:
            mistakes += error.texts
            wrong = [
                key
                for key in fitting
                if any(names_any(text, [f"{section}.{key}"]) for text in error.texts)
            ]
            fitting = {key: value for key, value in fitting.items() if wrong and key not in wrong}


def _spelled(value: Any, choices: Sequence[str]) -> Any:
    """A yes or no as the key's choices spell it: a boolean of TOML, on or off, true or false."""
    word = str(value).lower() if isinstance(value, bool) else value
    for same in (("true", "on"), ("false", "off")):
        if word in same:
            return next((choice for choice in same if choice in choices), value)
    return value


def names_any(text: str, keys: Iterable[str]) -> bool:
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) for key in keys)


def in_doubt(mistakes: Iterable[str], sections: Mapping[str, type[Any]]) -> set[str]:
    """The keys and sections that mistakes are about: no text about their values together with
    others is sure."""
    known = [f"{name}.{item.name}" for name, kind in sections.items() for item in fields(kind)]
    return {
        key
        for text in mistakes
        for key in known
        if names_any(text, [key]) or text.startswith(f"[{key.partition('.')[0]}]")
    }
