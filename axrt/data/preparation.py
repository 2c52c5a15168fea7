"""What is to be prepared, and how that begins.

what is there                       what follows
nothing                             it is made
one begun, of the same order        it goes on: also with --force, as that command does again
one made, of the same order         nothing: it is there; with --force it is made anew
one begun or made of another order  refused, with what differs; with --force it is made anew
a token file of other tools         refused; with --force it is made in its place
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from axrt.errors import ConfigError
from axrt.scheduler.plural import plural
from axrt.scheduler.regular_file import json_of, read_bytes, read_text

from .documents import Fields, files_of
from .prepared import Prepared
from .tokenizer import Tokenizer

TRAINING, HELD_OUT = "", "-held-out"
_PIECE_BYTES = 64 << 20
_MOST_NAMED = 3  # of the files that differ


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be prepared."""

    out: Path  # path of the token file, without its ending
    sources: tuple[str, ...]  # files, and directories of them
    tokenizer: str  # name of the tokenizer
    field: str = "text"  # name of the field, or column, that has the text
    held_out: float = 0.0  # share of the documents that are held out, 0 to 0.5
    piece_bytes: int = _PIECE_BYTES  # size of what a process takes at a time, in bytes
    # name of the field that has a prompt before the text, whose tokens are masked; "": there is
    # none
    prompt_field: str = ""
    skip_empty: bool = False  # True to leave out rows without text
    # number of tokens of a tokenizer that is made from the sources, and taken instead of
    # `tokenizer`; 0: none is made
    train_tokenizer: int = 0
    end: str = ""  # token behind each document, by its text; "": the tokenizer's own

    def path(self, part: str, ending: str) -> Path:
        """The path of one of the files that are made.

        Args:
            ending: ending of its name, such as ".bin".
        """
        return self.out.with_name(self.out.name + part + ending)

    @property
    def partial(self) -> Path:
        """The directory of what is not whole yet."""
        return self.path(TRAINING, ".partial")

    @property
    def plan(self) -> Path:
        """The file in it that says what it was begun with."""
        return self.partial / "order.json"

    @property
    def fields(self) -> Fields:
        """Where rows have their text."""
        return Fields(self.field, self.prompt_field, self.skip_empty)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that documents go into."""
        return (TRAINING, HELD_OUT) if self.held_out else (TRAINING,)

    def dtype(self, tokenizer: Tokenizer) -> np.dtype[Any]:
        """The type of the tokens in the file: the smallest of Megatron's, or one with a sign where
        some are masked."""
        return np.dtype(np.int32) if self.prompt_field else dtype_of(tokenizer.vocab)

    def made_of(self) -> dict[str, Any]:
        """What decides every token."""
        stats = [(str(path), path.stat()) for path in files_of(self.sources)]
        return {
            "sources": [[path, of.st_size, of.st_mtime_ns] for path, of in stats],
            "tokenizer": self._made_with(),
            "field": self.field,
            "held_out": self.held_out,
            "piece_bytes": self.piece_bytes,
            "prompt_field": self.prompt_field,
            "skip_empty": self.skip_empty,
            **({"end": self.end} if self.end else {}),
        }

    def _made_with(self) -> str:
        if self.train_tokenizer:
            return f"one of {plural(self.train_tokenizer, 'token')}, made from the sources"
        path = Path(self.tokenizer)
        if not path.is_file():
            return self.tokenizer
        return f"file {hashlib.blake2b(read_bytes(path, sys.maxsize), digest_size=16).hexdigest()}"


def dtype_of(vocab: int) -> np.dtype[Any]:
    """The smallest type of Megatron's that has the tokens of a vocabulary: uint8, uint16, int32."""
    fits: type[Any] = np.uint16 if vocab <= 1 << 16 else np.int32
    return np.dtype(np.uint8 if vocab <= 1 << 8 else fits)


class Beginning(Enum):
    """How a preparation begins."""

    ANEW = "anew"
    GOING_ON = "going on"
    MADE = "made"


def plan_of(made_of: Mapping[str, Any], tokens: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the file says that a preparation is begun with; arguments are those of `beginning`."""
    return {**made_of, **({} if tokens is None else {"tokens": dict(tokens)})}


def beginning(
    order: Order,
    made_of: Mapping[str, Any],
    force: bool,
    tokens: Mapping[str, Any] | None = None,
) -> Beginning:
    """How a preparation begins, by what is there; nothing is changed.

    Args:
        tokens: what its tokenizer gives by now; None: it is to be made.
        force: True to make it anew whatever is there.
    Raises:
        ConfigError, DataError: something else is there.
    """
    try:
        begun = _begun(order)
    except (OSError, ValueError) as error:
        if force:
            return Beginning.ANEW
        raise ConfigError(
            f"{order.plan}: {error}; expected what axrt prepare has written there. Add --force to "
            "begin anew"
        ) from None
    wanted = plan_of(made_of, tokens)
    if begun == wanted:
        return Beginning.GOING_ON
    if force:
        return Beginning.ANEW
    if begun is not None:
        raise ConfigError(
            f"{order.partial} was begun otherwise: {_told(begun, wanted)}; expected the same "
            "sources and settings, to go on. Add --force to begin anew"
        )
    return _beside_made(order, made_of)


def _beside_made(order: Order, made_of: Mapping[str, Any]) -> Beginning:
    tokens = order.path(TRAINING, ".bin")
    made = Prepared.beside(tokens)
    if not tokens.exists() and made is None:
        return Beginning.ANEW
    if made is None:
        raise ConfigError(
            f"{tokens} is there, and axrt prepare has not made it; expected another --out, or "
            "--force to write in its place"
        )
    if made.made_of != made_of:
        raise ConfigError(
            f"{tokens} was made otherwise: {_told(made.made_of, made_of)}; expected the same "
            "sources and settings, another --out, or --force to make it anew"
        )
    return Beginning.MADE if _is_whole(order) else Beginning.ANEW


def _is_whole(order: Order) -> bool:
    """All files are there."""
    endings = (".bin", ".idx", ".json")
    return all(order.path(part, end).exists() for part in order.parts for end in endings)


def _begun(order: Order) -> dict[str, Any] | None:
    """What a preparation was begun with; None where none was."""
    if not order.plan.exists():
        return None
    found = json_of(read_text(order.plan))
    if not isinstance(found, dict):
        raise ValueError(f"it is {type(found).__name__}, and no object")
    return found


def _told(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return ", ".join(differences(before, now))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two values of `made_of`, one text each."""
    settings = [
        f"{key} {before.get(key)!r} -> {now.get(key)!r}"
        for key in dict.fromkeys((*now, *before))
        if key != "sources" and before.get(key) != now.get(key)
    ]
    sources = list(_of_sources(before.get("sources", ()), now["sources"]))
    more = len(sources) - _MOST_NAMED
    return settings + sources[:_MOST_NAMED] + ([f"{more} more files differ"] if more > 0 else [])


def _of_sources(before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> Iterator[str]:
    """What differs between files, each a path with what tells its content."""
    was, is_now = ({path: tuple(rest) for path, *rest in files} for files in (before, now))
    yield from (
        f"{path} has changed" for path in is_now if was.get(path, is_now[path]) != is_now[path]
    )
    yield from (f"{path} is new" for path in is_now if path not in was)
    yield from (f"{path} is gone" for path in was if path not in is_now)
    if was == is_now and list(was) != list(is_now):
        yield "the order of the sources"
