"""Text to a token file, by several processes, and on from where an earlier try has ended.

    NAME.bin, NAME.idx        tokens and lengths of documents, in Megatron's form
    NAME.json                 its tokenizer, and what it was made of
    NAME.tokenizer.json       the tokenizer, where it is a file
    NAME-held-out.bin ...     the same of the documents that are held out
    NAME.partial/             while it is made: tokens and lengths of each bundle of pieces

Which documents are held out, and the order of tokens, depend on the sources alone, and not on the
number of processes.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from axrt.checkpoint.durable import durable, write_durably
from axrt.errors import DataError
from axrt.scheduler.plural import plural
from axrt.scheduler.regular_file import opened, read_bytes

from .bundles import Bundle, Done, Row, WholeRow, bundle_file, bundles_of, rows_of
from .documents import Part, Piece, parts_of, pieces_of
from .learning import learn
from .preparation import TRAINING, Beginning, Order, beginning, plan_of
from .prepared import Prepared
from .tokenizer import Ids, Tokenizer, check_installed, tokenizer_of
from .tokens import index_of, unknown

_AT_ONCE_CHARS = 1 << 20
_TELL_S = 20.0  # between lines about a tokenizer that is being made
_NUMBER = re.compile("[0-9]+")


class Progress(NamedTuple):
    """How far it is."""

    # done_bytes, all_bytes: of the sources
    done_bytes: int
    all_bytes: int
    tokens: int  # tokens so far


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
    tokens = _tokens_now(order)
    made_of = order.made_of()
    begins = beginning(order, made_of, force, tokens)
    if begins is Beginning.MADE:
        made = {part: _found(order, part) for part in order.parts}
        _check_files(order)
        _check_same(order, made[TRAINING], tokens)
        say(f"{order.path(TRAINING, '.bin')} is already made; --force makes it anew")
        return made
    pieces = list(pieces_of([Path(path) for path, *_ in made_of["sources"]], order.piece_bytes))
    if not pieces and order.train_tokenizer:
        raise DataError(f"{', '.join(order.sources)}: no text there to make a tokenizer from")
    _begin(order, plan_of(made_of, tokens), begins)
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


def _check_files(order: Order) -> None:
    """Check that what is made already are files, and no pipe in place of one."""
    for part in order.parts:
        for end in (".bin", ".idx"):
            path = order.path(part, end)
            try:
                opened(path).close()
            except OSError as error:
                raise DataError(
                    f"{path}: {error.strerror}; expected the file that was made, or --force to "
                    "make it anew"
                ) from None


def _tokens_now(order: Order) -> dict[str, Any] | None:
    """What decides tokens besides the order: files beside a tokenizer name its end. None for a
    tokenizer that is to be made."""
    if order.train_tokenizer:
        return None
    now = tokenizer_of(order.tokenizer, order.end)
    return {"vocab": now.vocab, "end": now.end}


def _check_same(order: Order, made: Prepared, tokens: dict[str, Any] | None) -> None:
    """Check that what is made already has the tokens that the tokenizer would give now."""
    before = {"vocab": made.vocab, "end": made.end}
    if tokens and before != tokens:
        raise DataError(
            f"{order.path(TRAINING, '.bin')} was made with {plural(made.vocab, 'token')}, and "
            f"{made.end} behind each document; {order.tokenizer} has {tokens['vocab']}, and "
            f"{tokens['end']}. Expected the same, or --force to make it anew"
        )


def _begin(order: Order, plan: dict[str, Any], begins: Beginning) -> None:
    """Make the directory of pieces, or leave of an earlier one what can be gone on with."""
    if order.partial.exists() and begins is Beginning.ANEW:
        shutil.rmtree(order.partial)
    elif order.partial.exists():
        _clear(order)
    order.partial.mkdir(parents=True, exist_ok=True)
    write_durably(order.plan, json.dumps(plan).encode())


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
            f"a tokenizer of {plural(vocab, 'token')} is made from {', '.join(order.sources)}; "
            "that takes up to a few minutes, and begins anew if it is interrupted"
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
            say(f"it came to {plural(found, 'token')}, as the text has no more pairs to join")
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
            f"{', '.join(order.sources)}: none of {plural(skipped, 'row')} has text in "
            f"{order.field!r}; expected another --field"
        )
    if not tokens:
        raise DataError(f"{', '.join(order.sources)} holds no text; expected some")
    size = order.dtype(tokenizer_of(order.tokenizer, order.end)).itemsize
    rows = rows_of(order, len(bundles), size)
    return {part: _joined(order, part, *rows[part], made_of, skipped) for part in order.parts}


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
    tokenizer = _tokenizer(order.tokenizer, order.end)
    writers = [_Writer(order, part, number, tokenizer) for part in order.parts]
    parts = _WithText(part for piece in bundle for part in parts_of(piece, order.fields))
    for several in _at_once(parts):
        for part, ids in zip(several, _encoded(several, order, tokenizer), strict=True):
            writers[order.held_out > 0 and _share(part) < order.held_out].add(ids, part.is_end)
    done = Done(tuple(writer.end() for writer in writers), parts.skipped)
    done.write(path)
    return done


@lru_cache(maxsize=1)
def _tokenizer(name: str, end: str) -> Tokenizer:
    """The tokenizer of that name; a worker reads a large one once, and not for every bundle."""
    return tokenizer_of(name, end)


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
    digest = hashlib.blake2b(os.fsencode(part.document), digest_size=6).digest()
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
        self._path = bundle_file(order, part, number)
        self._file = self._path.open("wb")
        self._dtype, self._end = order.dtype(tokenizer), tokenizer.end
        self._vocab, self._tokenizer = tokenizer.vocab, order.tokenizer
        self._lengths: list[int] = []
        self._tokens = self._open = 0

    def add(self, ids: Ids, is_end: bool) -> None:
        """Add a part of a document."""
        if is_end and self._end is not None:
            ids = np.append(ids, self._end)
        if found := unknown(ids, self._vocab, masked=True) if len(ids) else None:
            raise DataError(
                f"the tokenizer {self._tokenizer} has made token {found.token}; expected 0 or more "
                f"and less than {self._vocab}, which it says it has"
            )
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


def _joined(
    order: Order, part: str, row: WholeRow, places: range, made_of: dict[str, Any], skipped: int
) -> Prepared:
    """Make the token file of a part."""
    tokenizer, path = tokenizer_of(order.tokenizer, order.end), order.path(part, ".bin")
    dtype = order.dtype(tokenizer)
    with durable(path) as file:
        row.copy(places, file, dtype.itemsize)
    documents = row.documents_in(places)
    write_durably(path.with_suffix(".idx"), index_of(dtype, documents))
    named = _kept_tokenizer(order, part)
    vocab, end = tokenizer.vocab, tokenizer.end
    prepared = Prepared(named, vocab, end, len(places), len(documents), made_of, skipped)
    prepared.write(path)
    return prepared


def _kept_tokenizer(order: Order, part: str) -> str:
    """The name that the tokenizer has beside the tokens, where a copy of its file is."""
    if not Path(order.tokenizer).is_file():
        return order.tokenizer
    path = order.path(part, ".tokenizer.json")
    write_durably(path, read_bytes(order.tokenizer, sys.maxsize))
    return path.name
