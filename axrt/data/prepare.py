"""Text to a token file, by several processes, and on from where an earlier try has ended.

    NAME.bin, NAME.idx        tokens and lengths of documents, in Megatron's form
    NAME.json                 its tokenizer, and what it was made of
    NAME.tokenizer.json       the tokenizer, where it is a file
    NAME-held-out.bin ...     the same of the documents that are held out
    NAME.partial/             while it is made: tokens and lengths of each bundle of pieces

A bundle is a piece of a large file, or several small files. It is done when its JSON file is there,
which is written last. Which documents are held out, and the order of tokens, depend on the sources
alone, and not on the number of processes.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from axrt.checkpoint.durable import durable, write_durably
from axrt.errors import DataError

from .documents import Part, Piece, parts_of, pieces_of
from .learning import learn
from .preparation import TRAINING, Beginning, Order, beginning
from .prepared import Prepared
from .tokenizer import Ids, Tokenizer, check_installed, tokenizer_of
from .tokens import index_of

_AT_ONCE_CHARS = 1 << 20
_TELL_S = 20.0  # between lines about a tokenizer that is being made
_BUNDLE_BYTES, _BUNDLE_PIECES = 1 << 20, 256  # of small files, which are read as one
_NUMBER = re.compile("[0-9]+")

Bundle = tuple[Piece, ...]


class Row(NamedTuple):
    """What a bundle of pieces has come to in one part.

    Args:
        tokens: number of tokens.
        open: those of a document that goes on in the next bundle.
    """

    tokens: int
    open: int


class Done(NamedTuple):
    """What a bundle of pieces has come to.

    Args:
        rows: those of each part, in order.
        skipped: number of rows that were left out, since they have no text.
    """

    rows: tuple[Row, ...]
    skipped: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` has written."""
        rows, skipped = json.loads(path.read_text())
        return cls(tuple(Row(*row) for row in rows), skipped)

    def write(self, path: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_durably(path, json.dumps(self).encode())


class Progress(NamedTuple):
    """How far it is.

    Args:
        done_bytes, all_bytes: of the sources.
        tokens: tokens so far.
    """

    done_bytes: int
    all_bytes: int
    tokens: int


def _nothing(told: Any) -> None:
    """Tell nobody."""


def prepare(
    order: Order,
    processes: int,
    told: Callable[[Progress], None] = _nothing,
    say: Callable[[str], None] = _nothing,
    force: bool = False,
) -> dict[str, Prepared]:
    """Make token files, or find that they are made already.

    Args:
        order: what is to be prepared.
        processes: number of processes, at least 1.
        told: function that is called as pieces get done.
        say: function that tells a person what else is done.
        force: True to make them anew, whatever is there.
    Returns:
        What there is now, by part.
    Raises:
        DataError, ConfigError: a source or the tokenizer cannot be read, or what is there is of
            another order. A source that cannot be read on the way leaves what can be gone on with.
        OSError: something cannot be written.
    """
    if order.train_tokenizer:
        check_installed("tokenizers")
    else:
        tokenizer_of(order.tokenizer)
    made_of = order.made_of()
    begins = beginning(order, made_of, force)
    if begins is Beginning.MADE:
        say(f"{order.path(TRAINING, '.bin')} is already made; --force makes it anew")
        return {part: _found(order, part) for part in order.parts}
    pieces = list(pieces_of([Path(path) for path, *_ in made_of["sources"]], order.piece_bytes))
    if not pieces and order.train_tokenizer:
        raise DataError(f"{', '.join(order.sources)}: no text there to make a tokenizer from")
    _begin(order, made_of, begins)
    try:
        found = _made(_with_tokenizer(order, pieces, say), made_of, pieces, processes, told)
    except BaseException:
        _clear(order)
        raise
    shutil.rmtree(order.partial)
    return found


def _found(order: Order, part: str) -> Prepared:
    found = Prepared.beside(order.path(part, ".bin"))
    assert found is not None  # its file was there
    return found


def _begin(order: Order, made_of: dict[str, Any], begins: Beginning) -> None:
    """Make the directory of pieces, or leave of an earlier one what can be gone on with."""
    if order.partial.exists() and begins is Beginning.ANEW:
        shutil.rmtree(order.partial)
    elif order.partial.exists():
        _clear(order)
    order.partial.mkdir(parents=True, exist_ok=True)
    write_durably(order.plan, json.dumps(made_of).encode())


def _clear(order: Order) -> None:
    """Remove what cannot be gone on with: files of bundles that are not done, and the directory
    where nothing else is in it."""
    done = {path.stem for path in order.partial.glob("*.json")}
    for path in order.partial.iterdir():
        number = _NUMBER.match(path.name)
        if (number and number[0] not in done) or path.suffix == ".new":
            path.unlink()
    if done <= {order.plan.stem}:
        shutil.rmtree(order.partial)


def _with_tokenizer(order: Order, pieces: Sequence[Piece], say: Callable[[str], None]) -> Order:
    """The order with the tokenizer that is made from the sources, where one is wanted; an earlier
    try may have made it."""
    vocab, path = order.train_tokenizer, order.partial / "tokenizer.json"
    if not vocab:
        return order
    if not path.exists():
        say(
            f"a tokenizer of {vocab} tokens is made from {', '.join(order.sources)}; that takes up "
            "to a few minutes, and begins anew if it is interrupted"
        )
        with _workers(1) as pool:  # apart: the library hears no Ctrl-C until it is done
            began_s = time.monotonic()
            with _interrupts_blocked():
                learnt = pool.submit(learn, pieces, order.fields, vocab, path)
            while wait([learnt], _TELL_S).not_done:
                say(f"the tokenizer is being made, {time.monotonic() - began_s:.0f} s so far")
            learnt.result()
        found = tokenizer_of(str(path)).vocab
        if found < vocab:
            say(f"it came to {found} tokens, as the text has no more pairs to join")
    return replace(order, tokenizer=str(path))


def _made(
    order: Order,
    made_of: dict[str, Any],
    pieces: Sequence[Piece],
    processes: int,
    told: Callable[[Progress], None],
) -> dict[str, Prepared]:
    """Make the files from all that is done, and what is not yet."""
    bundles = list(bundles_of(pieces))
    all_bytes, done_bytes, tokens = sum(piece.num_bytes for piece in pieces), 0, 0
    told(Progress(0, all_bytes, 0))
    skipped = 0
    for bundle, done in _done(order, bundles, processes):
        done_bytes += sum(piece.num_bytes for piece in bundle)
        tokens += sum(row.tokens for row in done.rows)
        skipped += done.skipped
        told(Progress(done_bytes, all_bytes, tokens))
    if skipped and not tokens:
        raise DataError(
            f"{', '.join(order.sources)}: none of {skipped} rows has text in {order.field!r}; "
            "expected another --field"
        )
    return {part: _joined(order, part, len(bundles), made_of, skipped) for part in order.parts}


def bundles_of(pieces: Iterable[Piece]) -> Iterator[Bundle]:
    """Pieces in order, small ones together: each bundle costs files and time of its own. How many
    processes there are decides nothing: others may go on."""
    bundle: list[Piece] = []
    size = 0
    for piece in pieces:
        if bundle and (size + piece.num_bytes > _BUNDLE_BYTES or len(bundle) == _BUNDLE_PIECES):
            yield tuple(bundle)
            bundle, size = [], 0
        bundle.append(piece)
        size += piece.num_bytes
    if bundle:
        yield tuple(bundle)


def _done(order: Order, bundles: Sequence[Bundle], processes: int) -> Iterator[tuple[Bundle, Done]]:
    """Each bundle with what it has come to, as they get done."""
    with _workers(processes) as pool:
        with _interrupts_blocked():
            futures = {
                pool.submit(_prepared, order, number, bundle): bundle
                for number, bundle in enumerate(bundles)
            }
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextmanager
def _workers(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Context with worker processes. At an error, or Ctrl-C, they end at once: what they have begun
    is not waited for."""
    others = set(active_children())
    # Spawned: a process with threads must not be forked. A worker ends with its parent.
    with ProcessPoolExecutor(processes, get_context("spawn"), _end_with_parent) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(active_children()) - others:
                worker.terminate()
            raise


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Context in which work is submitted, so that workers begin. Ctrl-C goes to the whole group of
    processes, and this one decides what follows: workers inherit that it is blocked, and one that
    comes meanwhile is raised here afterwards. One in the midst of a start would leave a worker that
    nobody ends; and a thread of a library that does not block it may take it, too."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _prepared(order: Order, number: int, bundle: Bundle) -> Done:
    """Turn a bundle into tokens, if that was not done before."""
    path = order.partial / f"{number:06}.json"
    if path.exists():
        return Done.read(path)
    tokenizer = _tokenizer(order.tokenizer)
    writers = [_Writer(order, part, number, tokenizer) for part in order.parts]
    parts = _WithText(part for piece in bundle for part in parts_of(piece, order.fields))
    for several in _at_once(parts):
        for part, ids in zip(several, _encoded(several, order, tokenizer), strict=True):
            writers[order.held_out > 0 and _share(part) < order.held_out].add(ids, part.is_end)
    done = Done(tuple(writer.end() for writer in writers), parts.skipped)
    done.write(path)
    return done


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name; a worker reads a large one once, and not for every bundle."""
    return tokenizer_of(name)


class _WithText:
    """Parts of documents.

    Args:
        parts: them, and None for each row that was left out.
    Attributes:
        skipped: number of those so far.
    """

    def __init__(self, parts: Iterable[Part | None]) -> None:
        self._parts, self.skipped = parts, 0

    def __iter__(self) -> Iterator[Part]:
        for part in self._parts:
            if part is None:
                self.skipped += 1
            else:
                yield part


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
    """Writes what a bundle comes to in one part."""

    def __init__(self, order: Order, part: str, number: int, tokenizer: Tokenizer) -> None:
        self._path = _bundle_file(order, part, number)
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


def _bundle_file(order: Order, part: str, number: int) -> Path:
    return order.partial / f"{number:06}{part}.bin"


def _joined(
    order: Order, part: str, bundles: int, made_of: dict[str, Any], skipped: int
) -> Prepared:
    """Put the bundles of a part together to a token file."""
    tokenizer = tokenizer_of(order.tokenizer)
    tokens, path = 0, order.path(part, ".bin")
    lengths: list[NDArray[np.int64]] = []
    carried = 0
    dtype = order.dtype(tokenizer)
    with durable(path) as file:
        for number in range(bundles):
            done = Done.read(order.partial / f"{number:06}.json")
            row, source = done.rows[order.parts.index(part)], _bundle_file(order, part, number)
            if source.stat().st_size != row.tokens * dtype.itemsize:
                raise DataError(f"{source} is not whole; add --force to begin anew")
            with source.open("rb") as of_bundle:
                shutil.copyfileobj(of_bundle, file, 1 << 22)
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
    vocab, end = tokenizer.vocab, tokenizer.end
    prepared = Prepared(named, vocab, end, tokens, len(documents), made_of, skipped)
    prepared.write(path)
    return prepared


def _kept_tokenizer(order: Order, part: str) -> str:
    """The name that the tokenizer has beside the tokens, where a copy of its file is."""
    if not Path(order.tokenizer).is_file():
        return order.tokenizer
    path = order.path(part, ".tokenizer.json")
    write_durably(path, Path(order.tokenizer).read_bytes())
    return path.name
