"""What `axrt prepare` tells of a token file, beside it."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from axrt.checkpoint.durable import write_durably
from axrt.config import Data
from axrt.errors import DataError
from axrt.scheduler.regular_file import MALFORMED, json_of, read_bytes, read_text

from .tokenizer import BYTES, MOST_BYTES

KEPT = "tokens.json"  # what a run keeps of this


@dataclass(frozen=True, slots=True)
class Prepared:
    """A token file and its tokenizer."""

    # name of the tokenizer, see `tokenizer_of`; the path of a file is relative to that of the
    # tokens
    tokenizer: str
    vocab: int  # number of different tokens
    end: int | None  # token behind each document; None: there is none
    # tokens, documents: number of each
    tokens: int
    documents: int
    made_of: dict[str, Any]  # what decided the tokens: sources, and how they were read
    skipped: int = 0  # number of rows of the sources that were left out, since they have no text

    def write(self, tokens: Path) -> None:
        """Write it beside a token file.

        Raises:
            OSError: it cannot be written.
        """
        write_durably(_beside(tokens), json.dumps(asdict(self), indent=1).encode() + b"\n")

    @classmethod
    def beside(cls, tokens: Path) -> Self | None:
        """What is told of a token file, with the whole path of its tokenizer; None: nothing is.

        Raises:
            DataError: the file beside it says something else.
        """
        path = _beside(tokens)
        return cls.read(path) if path.exists() else None

    @classmethod
    def read(cls, path: Path) -> Self:
        """What a file tells, with the whole path of its tokenizer.

        Raises:
            DataError: the file says something else.
        """
        try:
            found = cls(**json_of(read_text(path)))
            vocab, end = int(found.vocab), found.end
            if vocab < 1 or not (end is None or 0 <= end < vocab):
                raise ValueError(f"token {end} of {vocab}")
            is_file = found.tokenizer.endswith(".json")
        except (OSError, *MALFORMED) as error:
            raise DataError(
                f"{path}: {error}; expected what `axrt prepare` writes, or no such file"
            ) from None
        if is_file:
            return replace(found, tokenizer=str(path.with_name(found.tokenizer)))
        return found

    def same_tokenizer(self, other: "Prepared") -> bool:
        """Both have the same tokenizer: the same name, or files of the same bytes. A file that is
        gone says nothing, and is taken for the same."""
        contents = {_content(self.tokenizer), _content(other.tokenizer)} - {None}
        return len(contents) < 2


def _content(tokenizer: str) -> str | bytes | None:
    """What a tokenizer is told by: the bytes of its file, or its name where it is none."""
    if not tokenizer.endswith(".json"):
        return tokenizer
    path = Path(tokenizer)
    return read_bytes(path, MOST_BYTES) if path.is_file() else None


def _beside(tokens: Path) -> Path:
    return tokens.with_suffix(".json")


def lost_tokenizer(data: Data) -> str:
    """A line about a tokenizer whose file is named and is gone; "" where there is none."""
    name = tokenizer_name(data)
    if not name.endswith(".json") or Path(name).is_file():
        return ""
    return (
        f"the tokenizer of the data, {name}, is not there: the run keeps no copy, so that neither "
        "axrt generate nor axrt export will know text. Put it back, and go on from a checkpoint"
    )


def tokenizer_name(data: Data) -> str:
    """The name of the tokenizer that the data of a run was made with, see `tokenizer_of`; "" where
    nobody says."""
    if not data.is_of_tokens:
        return BYTES
    if data.tokenizer != "auto":
        return "" if data.tokenizer == BYTES else data.tokenizer
    prepared = Prepared.beside(Path(data.sources[0]))
    return prepared.tokenizer if prepared else ""
