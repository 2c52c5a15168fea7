"""What a directory of `transformers` says of text beside its tokenizer: the tokens that begin and
end one, and how the tokenizer is loaded. A run of an imported model keeps these files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from axrt.checkpoint.durable import write_durably
from axrt.config import Data
from axrt.data.tokenizer import Tokenizer
from axrt.errors import DataError
from axrt.observe.metrics import kept_in_run

from .files import CONFIG, TOKENIZER, read_json

GENERATION, OF_TOKENIZER = "generation_config.json", "tokenizer_config.json"
_BEGIN, _END = "bos_token_id", "eos_token_id"


class TextEnds(NamedTuple):
    """The tokens that begin and end a text.

    Args:
        begin: token in front of a text; None: nobody knows one.
        ends: tokens any of which ends a text; (): nobody knows one.
    """

    begin: int | None = None
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Those that a generation_config.json or config.json says.

        Raises:
            DataError: they are no tokens.
        """
        begin, end = said.get(_BEGIN), said.get(_END)
        ends = end if isinstance(end, list) else [] if end is None else [end]
        for key, value in ((_BEGIN, begin), *((_END, one) for one in ends)):
            if value is not None and (not isinstance(value, int) or value < 0):
                raise DataError(f"{key} = {value!r}; expected a token, or several")
        return cls(begin, tuple(ends))

    def as_dict(self) -> dict[str, Any]:
        """The keys of both files."""
        ends = self.ends[0] if len(self.ends) == 1 else list(self.ends) or None
        return {_BEGIN: self.begin, _END: ends}


def keep_text_files(theirs: Path, run: Path) -> None:
    """Have a run keep what a directory of `transformers` says of text.

    Raises:
        DataError: a file there cannot be read.
    """
    for name in (TOKENIZER, OF_TOKENIZER):
        if (theirs / name).is_file():
            write_durably(run / name, (theirs / name).read_bytes())
    said = theirs / GENERATION
    found = read_json(said if said.is_file() else theirs / CONFIG)
    _write(run / GENERATION, TextEnds.of(found).as_dict())


def carry_text_files(checkpoint: Path, run: Path) -> None:
    """Have a run keep what the one that it begins from keeps of an imported model. A run whose data
    have another tokenizer keeps its own.

    Args:
        checkpoint: the checkpoint that it begins from.
        run: directory of the run.
    """
    said = kept_in_run(checkpoint, GENERATION)
    if said is None or said.parent.samefile(run):
        return
    mine, its = run / TOKENIZER, said.parent / TOKENIZER
    if mine.is_file() and not (its.is_file() and mine.read_bytes() == its.read_bytes()):
        return
    for path in (its, said.parent / OF_TOKENIZER, said):
        if path.is_file():
            write_durably(run / path.name, path.read_bytes())


def write_text_files(checkpoint: Path, out: Path, tokenizer: Path | None, ends: TextEnds) -> None:
    """Write what `transformers` needs to know of text.

    Args:
        checkpoint: the checkpoint that is exported.
        out: directory of the model.
        tokenizer: file of the tokenizer; None: there is none.
        ends: the tokens that begin and end a text.
    """
    _write(out / GENERATION, ends.as_dict())
    if tokenizer is not None:
        write_durably(out / TOKENIZER, tokenizer.read_bytes())
        kept = kept_in_run(checkpoint, OF_TOKENIZER)
        _write(out / OF_TOKENIZER, read_json(kept) if kept else _of_tokenizer(tokenizer, ends))


def text_ends(run: Path, data: Data, tokenizer: Tokenizer | None) -> TextEnds:
    """The tokens that begin and end a text: those of the model that was imported; else the one that
    has kept documents apart in training; else the one that the tokenizer puts behind them.

    Args:
        run: directory of a run, or a checkpoint in it.
        data: section `[data]` of the run.
        tokenizer: its tokenizer; None: nobody knows it.
    """
    if (said := kept_in_run(run, GENERATION)) is not None:
        return TextEnds.of(read_json(said))
    if data.document_end >= 0:
        return TextEnds(data.document_end, (data.document_end,))
    end = None if tokenizer is None else tokenizer.end
    return TextEnds() if end is None else TextEnds(end, (end,))


def _of_tokenizer(tokenizer: Path, ends: TextEnds) -> dict[str, Any]:
    """How `transformers` loads a tokenizer that it did not write."""
    added = read_json(tokenizer).get("added_tokens") or ()
    named = {one["id"]: one["content"] for one in added}
    end = next((named[one] for one in ends.ends if one in named), None)
    known = {} if end is None else {"bos_token": end, "eos_token": end}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **known}


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(values, indent=1).encode())
