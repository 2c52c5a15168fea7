"""`axrt prepare`: text to a token file."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from axrt.data.documents import Piece, files_of, parts_of, pieces_of
from axrt.data.prepare import HELD_OUT, TRAINING, Order, Progress, prepare
from axrt.data.prepared import Prepared
from axrt.data.tokenizer import BYTES, train_tokenizer
from axrt.errors import DataError
from axrt.exit_codes import Exit

from .refusal import errors_as_lines

_LINE_EVERY_S = 10.0
_LEARNT_FROM_CHARS = 1 << 28  # what a tokenizer learns from: more takes long, and says little new


@click.command(short_help="Turn text into a token file to train on.")
@click.argument("sources", nargs=-1, required=True)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="NAME.bin is made, or continued"
)
@click.option(
    "--tokenizer",
    default=BYTES,
    show_default=True,
    help="'bytes', the path of a tokenizer.json, or 'tiktoken:NAME'",
)
@click.option(
    "--train-tokenizer",
    type=click.IntRange(257),
    help="make a tokenizer of so many tokens from the sources first (byte-pair encoding)",
)
@click.option("--field", default="text", show_default=True, help="field or column with the text")
@click.option(
    "--prompt-field",
    default="",
    help="field or column with a prompt before the text, which is read and not predicted",
)
@click.option(
    "--held-out",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 0.5),
    help="share of the documents for validation, in NAME-held-out.bin",
)
@click.option(
    "--processes", default=os.cpu_count() or 1, show_default="cores", type=click.IntRange(1)
)
def prepare_command(
    sources: tuple[str, ...],
    out: Path,
    tokenizer: str,
    train_tokenizer: int | None,
    field: str,
    prompt_field: str,
    held_out: float,
    processes: int,
) -> None:
    """Turn SOURCES into a token file: text, JSON lines, Parquet, Hugging Face datasets on a disk,
    or directories of them. Started again after a kill, it goes on where it was.

    \b
    axrt prepare corpus/*.jsonl --out data/corpus --train-tokenizer 32000 --held-out 0.01
    axrt train my.toml data.source=data/corpus.bin model.vocab=32000
    """
    out = out.with_suffix("") if out.suffix == ".bin" else out
    order = Order(out, sources, tokenizer, field, held_out, prompt_field=prompt_field)
    try:
        with errors_as_lines():
            out.absolute().parent.mkdir(parents=True, exist_ok=True)
            if train_tokenizer:
                order = replace(order, tokenizer=_trained(order, train_tokenizer))
            with _shown() as told:
                found = prepare(order, processes, told)
            for line in _lines(order, found):
                click.echo(line)
    except KeyboardInterrupt:
        click.echo(f"axrt: interrupted; the same command goes on from {order.partial}", err=True)
        sys.exit(Exit.INTERRUPTED)


def _trained(order: Order, vocab: int) -> str:
    """The tokenizer that is made from the sources, in its file; an earlier try may have made it."""
    path = order.path(TRAINING, ".tokenizer.json")
    if order.partial.exists() and path.exists():
        return str(path)
    click.echo(f"a tokenizer of {vocab} tokens is made from {', '.join(order.sources)}", err=True)
    train_tokenizer(_learnt_from(order), vocab, path)
    return str(path)


def _learnt_from(order: Order) -> Iterator[str]:
    """Text from all over the sources."""
    pieces = list(pieces_of(files_of(order.sources), order.piece_bytes))
    if not pieces:
        raise DataError(f"{', '.join(order.sources)}: no text there")
    most = _LEARNT_FROM_CHARS // len(pieces)
    for piece in pieces:
        yield from _first_of(piece, order, most)


def _first_of(piece: Piece, order: Order, most: int) -> Iterator[str]:
    taken = 0
    for part in parts_of(piece, order.field, order.prompt_field):
        yield part.prompt + part.text
        taken += len(part.prompt) + len(part.text)
        if taken >= most:
            return


def _lines(order: Order, found: dict[str, Prepared]) -> Iterator[str]:
    for part, of in found.items():
        yield f"{order.path(part, '.bin')}: {of.tokens:,} tokens of {of.documents:,} documents"
    validation = f" data.validation={order.path(HELD_OUT, '.bin')}" if HELD_OUT in found else ""
    whole = found[TRAINING]
    masked = " data.masked=true" if order.prompt_field else ""
    yield (
        f"train with data.source={order.path(TRAINING, '.bin')}{validation} "
        f"model.vocab={whole.vocab}{masked}"
    )
    if whole.end is not None:
        yield f"data.document_end={whole.end} keeps documents apart"


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """Context with what shows progress: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.fields[n]}"))
    with Bar(*columns) as bar:
        yield _OnBar(bar)


class _OnBar:
    """A bar, with the number of tokens beside it."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._task = bar, bar.add_task("", n="")

    def __call__(self, progress: Progress) -> None:
        done, of = progress.done_bytes, progress.all_bytes
        text = f"{progress.tokens:,} tokens"
        self._bar.update(self._task, completed=done, total=of, n=text)


class _Lines:
    """A line now and then."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= _LINE_EVERY_S:
            self._last_s = now_s
            share = progress.done_bytes / max(1, progress.all_bytes)
            click.echo(f"{share:.0%}, {progress.tokens:,} tokens", err=True)
