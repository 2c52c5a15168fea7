"""Text to a token file, by several processes, and on from where an earlier try has ended.

    NAME.bin, NAME.idx        tokens and lengths of documents, in Megatron's form
    NAME.json                 its tokenizer, and what it was made of
    NAME.tokenizer.json       the tokenizer, where it is a file
    NAME-held-out.bin ...     the same of the documents that are held out
    NAME.partial/             while it is made: tokens and lengths of each piece of the files

A piece is done when its JSON file is there, which is written last. Which documents are held out,
and the order of tokens, depend on the sources alone, and not on the number of processes.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from axrt.checkpoint.durable import durable, write_durably
from axrt.errors import ConfigError, DataError

from .documents import Part, Piece, files_of, parts_of, pieces_of
from .prepared import Prepared
from .tokenizer import Ids, Tokenizer, tokenizer_of
from .tokens import index_of

_PIECE_BYTES, _AT_ONCE_CHARS = 64 << 20, 1 << 20
TRAINING, HELD_OUT = "", "-held-out"


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be prepared.

    Args:
        out: path of the token file, without its ending.
        sources: files, and directories of them.
        tokenizer: name of the tokenizer.
        field: name of the field, or column, that has the text.
        held_out: share of the documents that are held out, 0 to 0.5.
        piece_bytes: size of what a process takes at a time, in bytes.
        prompt_field: name of the field that has a prompt before the text, whose tokens are masked;
            "": there is none.
    """

    out: Path
    sources: tuple[str, ...]
    tokenizer: str
    field: str = "text"
    held_out: float = 0.0
    piece_bytes: int = _PIECE_BYTES
    prompt_field: str = ""

    def path(self, part: str, ending: str) -> Path:
        """The path of one of the files that are made.

        Args:
            part: TRAINING or HELD_OUT.
            ending: ending of its name, such as ".bin".
        """
        return self.out.with_name(self.out.name + part + ending)

    @property
    def partial(self) -> Path:
        """The directory of what is not whole yet."""
        return self.path(TRAINING, ".partial")

    def dtype(self, tokenizer: Tokenizer) -> np.dtype[Any]:
        """The type of the tokens in the file: the smallest of Megatron's, or one with a sign where
        some are masked."""
        return np.dtype(np.int32) if self.prompt_field else dtype_of(tokenizer.vocab)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that documents go into."""
        return (TRAINING, HELD_OUT) if self.held_out else (TRAINING,)

    def made_of(self) -> dict[str, Any]:
        """What decides every token."""
        of_tokenizer = Path(self.tokenizer)
        digest = hashlib.blake2b(of_tokenizer.read_bytes()) if of_tokenizer.is_file() else None
        stats = [(str(path), path.stat()) for path in files_of(self.sources)]
        return {
            "sources": [[path, of.st_size, of.st_mtime_ns] for path, of in stats],
            "tokenizer": digest.hexdigest() if digest else self.tokenizer,
            "field": self.field,
            "held_out": self.held_out,
            "piece_bytes": self.piece_bytes,
            "prompt_field": self.prompt_field,
        }


class Row(NamedTuple):
    """What a piece has come to in one part.

    Args:
        tokens: number of tokens.
        open: those of a document that goes on in the next piece.
    """

    tokens: int
    open: int


class Progress(NamedTuple):
    """How far it is.

    Args:
        done_bytes, all_bytes: of the sources.
        tokens: tokens so far.
    """

    done_bytes: int
    all_bytes: int
    tokens: int


def prepare(
    order: Order, processes: int, told: Callable[[Progress], None] = lambda progress: None
) -> dict[str, Prepared]:
    """Make token files.

    Args:
        order: what is to be prepared.
        processes: number of processes, at least 1.
        told: function that is called as pieces get done.
    Returns:
        What there is now, by part.
    Raises:
        DataError, ConfigError: a source or the tokenizer cannot be read, or what an earlier try has
            left is of another order.
        OSError: something cannot be written.
    """
    tokenizer, made_of = tokenizer_of(order.tokenizer), order.made_of()
    pieces = list(pieces_of([Path(path) for path, *_ in made_of["sources"]], order.piece_bytes))
    _begin(order, made_of)
    all_bytes, done_bytes, tokens = sum(piece.num_bytes for piece in pieces), 0, 0
    told(Progress(0, all_bytes, 0))
    for piece, rows in _rows_of(order, pieces, processes):
        done_bytes, tokens = done_bytes + piece.num_bytes, tokens + sum(r.tokens for r in rows)
        told(Progress(done_bytes, all_bytes, tokens))
    found = {part: _joined(order, part, len(pieces), tokenizer, made_of) for part in order.parts}
    shutil.rmtree(order.partial)
    return found


def _begin(order: Order, made_of: dict[str, Any]) -> None:
    """Make the directory of pieces, or find one of the same order."""
    plan = order.partial / "order.json"
    if plan.exists() and json.loads(plan.read_text()) != made_of:
        raise ConfigError(
            f"{order.partial} was begun with other sources or settings, or sources have changed; "
            "expected the same, to go on. Remove it to begin anew"
        )
    order.partial.mkdir(parents=True, exist_ok=True)
    write_durably(plan, json.dumps(made_of).encode())


def _rows_of(
    order: Order, pieces: Sequence[Piece], processes: int
) -> Iterator[tuple[Piece, list[Row]]]:
    """Each piece with what it has come to, as they get done."""
    # Spawned: a process with threads must not be forked. A worker ends with its parent.
    with ProcessPoolExecutor(processes, get_context("spawn"), _end_with_parent) as pool:
        futures: dict[Future[list[Row]], Piece] = {
            pool.submit(_prepared, order, number, piece): piece
            for number, piece in enumerate(pieces)
        }
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _prepared(order: Order, number: int, piece: Piece) -> list[Row]:
    """Turn a piece into tokens, if that was not done before."""
    done = order.partial / f"{number:06}.json"
    if done.exists():
        return [Row(*row) for row in json.loads(done.read_text())]
    tokenizer = tokenizer_of(order.tokenizer)
    writers = [_Writer(order, part, number, tokenizer) for part in order.parts]
    for several in _at_once(parts_of(piece, order.field, order.prompt_field)):
        for part, ids in zip(several, _encoded(several, order, tokenizer), strict=True):
            writers[order.held_out > 0 and _share(part) < order.held_out].add(ids, part.is_end)
    rows = [writer.end() for writer in writers]
    write_durably(done, json.dumps(rows).encode())
    return rows


def _encoded(parts: Sequence[Part], order: Order, tokenizer: Tokenizer) -> Sequence[Ids]:
    """The tokens of each part, those of prompts masked (see `counted`)."""
    texts = tokenizer.encode([part.text for part in parts])
    if not order.prompt_field:
        return texts
    prompts = tokenizer.encode([part.prompt for part in parts])
    return [
        np.concatenate([~prompt.astype(np.int64), text])
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def _share(part: Part) -> float:
    """A number in [0, 1) that the name of a document alone decides."""
    digest = hashlib.blake2b(part.document.encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48


def _at_once(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts of documents, as many as are encoded at a time."""
    several: list[Part] = []
    size = 0
    for part in parts:
        several.append(part)
        size += len(part.text)
        if size >= _AT_ONCE_CHARS:
            yield several
            several, size = [], 0
    if several:
        yield several


class _Writer:
    """Writes what a piece comes to in one part."""

    def __init__(self, order: Order, part: str, number: int, tokenizer: Tokenizer) -> None:
        self._path = _piece_file(order, part, number)
        self._file = self._path.open("wb")
        self._dtype, self._end = order.dtype(tokenizer), tokenizer.end
        self._lengths: list[int] = []
        self._tokens = self._open = 0

    def add(self, ids: Ids, is_end: bool) -> None:
        """Add a part of a document."""
        if is_end and self._end is not None:
            ids = np.append(ids, self._end)
        self._file.write(ids.astype(self._dtype).tobytes())
        self._tokens, self._open = self._tokens + len(ids), self._open + len(ids)
        if is_end:
            self._lengths.append(self._open)
            self._open = 0

    def end(self) -> Row:
        """Have everything in the files."""
        self._file.close()
        np.save(self._path.with_suffix(".npy"), np.array(self._lengths, np.int64))
        return Row(self._tokens, self._open)


def _piece_file(order: Order, part: str, number: int) -> Path:
    return order.partial / f"{number:06}{part}.bin"


def dtype_of(vocab: int) -> np.dtype[Any]:
    """The smallest type of Megatron's that has the tokens of a vocabulary: uint8, uint16, int32."""
    fits: type[Any] = np.uint16 if vocab <= 1 << 16 else np.int32
    return np.dtype(np.uint8 if vocab <= 1 << 8 else fits)


def _joined(
    order: Order, part: str, pieces: int, tokenizer: Tokenizer, made_of: dict[str, Any]
) -> Prepared:
    """Put the pieces of a part together to a token file."""
    tokens, path = 0, order.path(part, ".bin")
    lengths: list[NDArray[np.int64]] = []
    carried = 0
    dtype = order.dtype(tokenizer)
    with durable(path) as file:
        for number in range(pieces):
            rows = json.loads((order.partial / f"{number:06}.json").read_text())
            row, source = Row(*rows[order.parts.index(part)]), _piece_file(order, part, number)
            if source.stat().st_size != row.tokens * dtype.itemsize:
                raise DataError(f"{source} is not whole; remove {order.partial} and begin anew")
            with source.open("rb") as of_piece:
                shutil.copyfileobj(of_piece, file, 1 << 22)
            of_documents = np.load(source.with_suffix(".npy"))
            if len(of_documents):
                of_documents[0] += carried
                carried = 0
            carried += row.open
            lengths.append(of_documents)
            tokens += row.tokens
    documents = np.concatenate([*lengths, [carried] if carried else []]).astype(np.int64)
    write_durably(path.with_suffix(".idx"), index_of(dtype, documents))
    named = _kept_tokenizer(order, part)
    prepared = Prepared(named, tokenizer.vocab, tokenizer.end, tokens, len(documents), made_of)
    prepared.write(path)
    return prepared


def _kept_tokenizer(order: Order, part: str) -> str:
    """The name that the tokenizer has beside the tokens, where a copy of its file is."""
    if not Path(order.tokenizer).is_file():
        return order.tokenizer
    path = order.path(part, ".tokenizer.json")
    write_durably(path, Path(order.tokenizer).read_bytes())
    return path.name
