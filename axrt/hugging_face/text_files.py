"""What a directory of `transformers` says of text beside its tokenizer: the tokens that begin and
end one, how the tokenizer is loaded, how tokens are drawn, the form of a conversation. A run of an
imported model keeps these files, and an export has them again, to the byte.

    RUN/tokenizer.json ...    those that axrt reads
    RUN/imported/             all others of text, of 64 MB at most
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from axrt.checkpoint.durable import write_durably
from axrt.config import Data
from axrt.data.prepared import KEPT, Prepared
from axrt.data.tokenizer import BYTES, MOST_BYTES
from axrt.errors import ConfigError, DataError
from axrt.observe.metrics import kept_in_run
from axrt.scheduler.regular_file import read_bytes

from .files import CONFIG, TOKENIZER, read_json

GENERATION, OF_TOKENIZER = "generation_config.json", "tokenizer_config.json"
_IMPORTED = "imported"
_BEGIN, _END = "bos_token_id", "eos_token_id"
_OF_TEXT = {".json", ".jinja", ".txt", ".md", ".model", ".tiktoken"}
_MOST_BYTES = 64 << 20  # of a file that is kept


# What ends a text is kept as the file of transformers that says it, generation_config.json in the
# directory of the run, and no key: a run of its own knows it by `data.document_end` or by its
# tokenizer, and two places would have to agree. Exported models said nothing, so texts went on.
class TextEnds(NamedTuple):
    """The tokens that begin and end a text."""

    begin: int | None = None  # token in front of a text; None: nobody knows one
    ends: tuple[int, ...] = ()  # tokens any of which ends a text; (): nobody knows one

    @classmethod
    def of(cls, *said: Mapping[str, Any]) -> Self:
        """Those that the files of a model say, of the first that says each. A number below 0 stands
        for none.

        Raises:
            DataError: they are no tokens.
        """
        begin, ends = (
            next((of[key] for of in said if of.get(key) is not None), -1) for key in (_BEGIN, _END)
        )
        listed = ends if isinstance(ends, list) else [ends]
        for key, value in ((_BEGIN, begin), *((_END, one) for one in listed)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise DataError(f"{key} = {value!r}; expected a token")
        return cls(begin if begin >= 0 else None, tuple(one for one in listed if one >= 0))

    def as_dict(self) -> dict[str, Any]:
        """The keys of both files."""
        ends = self.ends[0] if len(self.ends) == 1 else list(self.ends) or None
        return {_BEGIN: self.begin, _END: ends}


def keep_text_files(theirs: Path, run: Path) -> None:
    """Have a run keep what a directory of `transformers` says of text.

    Raises:
        DataError: a file there cannot be read.
        OSError: one cannot be written.
    """
    for name in (TOKENIZER, OF_TOKENIZER):
        if (theirs / name).is_file():
            write_durably(run / name, read_bytes(theirs / name, MOST_BYTES))
    said = [theirs / GENERATION, theirs / CONFIG]
    of_each = [read_json(path) for path in said if path.is_file()]
    ends = TextEnds.of(*of_each)
    if said[0].is_file() and TextEnds.of(of_each[0]) == ends:
        write_durably(run / GENERATION, read_bytes(said[0], MOST_BYTES))
    else:  # the configuration of the model has the rest
        _write(run / GENERATION, {**(of_each[0] if said[0].is_file() else {}), **ends.as_dict()})
    others = [path.relative_to(theirs) for path in theirs.rglob("*") if _is_text(path)]
    own = {Path(name) for name in (CONFIG, TOKENIZER, OF_TOKENIZER, GENERATION)}
    _copy(theirs, sorted({*others} - own), run / _IMPORTED)


def _is_text(path: Path) -> bool:
    """A file of text, or of a tokenizer, and none of weights or data."""
    is_named = path.suffix in _OF_TEXT or path.name in ("LICENSE", "NOTICE")
    is_index = path.name.endswith(".index.json")
    return is_named and not is_index and path.is_file() and path.stat().st_size <= _MOST_BYTES


def carry_text_files(checkpoint: Path, run: Path, tokenizer: str) -> None:
    """Have a run keep what the one that it begins from keeps of an imported model. A run whose data
    have another tokenizer keeps its own.

    Args:
        tokenizer: name of the tokenizer of its data, see `tokenizer_of`; "": nobody says one.
    Raises:
        OSError: a file cannot be read or written.
    """
    said = kept_in_run(checkpoint, GENERATION)
    if said is None or said.parent.samefile(run):
        return
    mine, its = run / TOKENIZER, said.parent / TOKENIZER
    is_its = (
        mine.is_file()
        and its.is_file()
        and read_bytes(mine, MOST_BYTES) == read_bytes(its, MOST_BYTES)
    )
    if tokenizer and not is_its:
        return
    for path in (its, said.parent / OF_TOKENIZER, said):
        if path.is_file():
            write_durably(run / path.name, read_bytes(path, MOST_BYTES))
    _copy_imported(said.parent, run / _IMPORTED)


def check_tokens_stay(checkpoint: Path, data: Data) -> None:
    """Check that text is not read as bytes where tokens stand for something else.

    Raises:
        ConfigError: the run of the checkpoint keeps a tokenizer or was imported, and the data is
            text, which is read as bytes.
    """
    if data.is_of_tokens or data.tokenizer == BYTES:
        return
    tokenizer = kept_in_run(checkpoint, TOKENIZER)
    if tokenizer is None and kept_in_run(checkpoint, GENERATION) is None:
        return
    if "stdlib" in data.sources:
        raise ConfigError(
            f"{checkpoint} has tokens of its own tokenizer, and data.source = 'stdlib' is text, "
            "which would be read as bytes; expected a token file in data.source. If bytes are "
            "meant: data.tokenizer=bytes"
        )
    sources = " ".join(map(shlex.quote, data.sources))
    whose = f"of {tokenizer}" if tokenizer else "of a tokenizer that was not imported"
    how = shlex.quote(str(tokenizer)) if tokenizer else "ITS_TOKENIZER.json"
    raise ConfigError(
        f"{checkpoint} has tokens {whose}, and data.source = {sources!r} is text, which would be "
        f"read as bytes; expected a token file: axrt prepare {sources} --tokenizer {how} --out "
        "mine, then data.source=mine.bin. If bytes are meant: data.tokenizer=bytes"
    )


def _copy_imported(run: Path, to: Path) -> None:
    """Copy what a run keeps beside the files that axrt reads."""
    kept = run / _IMPORTED
    _copy(kept, sorted(one.relative_to(kept) for one in kept.rglob("*") if one.is_file()), to)


def _copy(folder: Path, files: Sequence[Path], to: Path) -> None:
    """Copy files of a folder, by their paths in it."""
    for file in files:
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        write_durably(to / file, read_bytes(folder / file, MOST_BYTES))


def write_text_files(run: Path, out: Path, tokenizer: Path | None, ends: TextEnds) -> None:
    """Write what `transformers` needs to know of text.

    Args:
        tokenizer: file of the tokenizer; None: there is none.
    """
    if said := kept_in_run(run, GENERATION):
        write_durably(out / GENERATION, read_bytes(said, MOST_BYTES))
    else:
        _write(out / GENERATION, ends.as_dict())
    if tokenizer is not None:
        write_durably(out / TOKENIZER, read_bytes(tokenizer, MOST_BYTES))
        if kept := kept_in_run(run, OF_TOKENIZER):
            write_durably(out / OF_TOKENIZER, read_bytes(kept, MOST_BYTES))
        else:
            _write(out / OF_TOKENIZER, _of_tokenizer(tokenizer, ends))
    its = kept_in_run(run, TOKENIZER)
    is_its = tokenizer is None or (
        its is not None and read_bytes(its, MOST_BYTES) == read_bytes(tokenizer, MOST_BYTES)
    )
    if said and is_its:
        _copy_imported(said.parent, out)


def text_ends(run: Path, data: Data, end: Callable[[], int | None]) -> TextEnds:
    """The tokens that begin and end a text: those of the model that was imported; else the one that
    has kept documents apart in training; else the one behind the documents of the data; else the
    one that the tokenizer puts there.

    Args:
        end: function that asks its tokenizer for the last of these.
    Raises:
        DataError: the file of the imported model cannot be read.
    """
    if (said := kept_in_run(run, GENERATION)) is not None:
        return TextEnds.of(read_json(said))
    token = data.document_end if data.document_end >= 0 else _prepared_end(run, data)
    token = end() if token is None else token
    return TextEnds() if token is None else TextEnds(token, (token,))


def _prepared_end(run: Path, data: Data) -> int | None:
    """The token behind each document of prepared data; None where nobody says one. A run keeps what
    is told of its data."""
    if kept := kept_in_run(run, KEPT):
        return Prepared.read(kept).end
    prepared = Prepared.beside(Path(data.sources[0])) if data.is_of_tokens else None
    return prepared.end if prepared else None


def _of_tokenizer(tokenizer: Path, ends: TextEnds) -> dict[str, Any]:
    """How `transformers` loads a tokenizer that it did not write."""
    added = read_json(tokenizer).get("added_tokens") or ()
    named = {one["id"]: one["content"] for one in added}
    begin = named.get(ends.begin)
    end = next((named[one] for one in ends.ends if one in named), None)
    told = {"bos_token": begin, "eos_token": end}
    known = {key: token for key, token in told.items() if token is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **known}


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(values, indent=1).encode())
