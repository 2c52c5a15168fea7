"""`axrt prepare`: text to a token file."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from axrt.data.preparation import HELD_OUT, TRAINING, Order
from axrt.data.prepare import Progress, prepare
from axrt.data.prepared import Prepared
from axrt.data.tokenizer import BYTES
from axrt.exit_codes import Exit
from axrt.scheduler.plural import plural

from .refusal import errors_as_lines

_LINE_EVERY_S = 10.0


@click.command(short_help="Turn text into a token file to train on.")
@click.argument("sources", nargs=-1, required=True)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="NAME.bin is made, or continued"
)
@click.option(
    "--tokenizer",
    help="'bytes', which is the default, the path of a tokenizer.json, or 'tiktoken:NAME'",
)
@click.option(
    "--train-tokenizer",
    type=click.IntRange(257),
    help="make a tokenizer of so many tokens from the sources first (byte-pair encoding)",
)
@click.option(
    "--end",
    default="",
    help="token behind each document, by its text; by default the tokenizer's own",
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
    "--skip-empty", is_flag=True, help="leave out rows without text (null, missing, or empty)"
)
@click.option("--force", is_flag=True, help="make it anew, whatever NAME.bin was made of")
@click.option(
    "--processes", default=os.cpu_count() or 1, show_default="cores", type=click.IntRange(1)
)
def prepare_command(
    sources: tuple[str, ...],
    out: Path,
    tokenizer: str | None,
    train_tokenizer: int | None,
    end: str,
    field: str,
    prompt_field: str,
    held_out: float,
    skip_empty: bool,
    force: bool,
    processes: int,
) -> None:
    """Turn SOURCES into a token file: text, JSON lines, Parquet, Hugging Face datasets on a disk,
    or directories of them. Started again after a kill, it goes on where it was; what is made
    already stays as it is.

    \b
    axrt prepare corpus/*.jsonl --out data/corpus --train-tokenizer 32000 --held-out 0.01
    axrt train my.toml data.source=data/corpus.bin model.vocab=32000
    """
    if tokenizer and train_tokenizer:
        raise click.UsageError(
            f"--tokenizer {tokenizer} and --train-tokenizer, which makes another one; expected one "
            "of them"
        )
    if end and train_tokenizer:
        raise click.UsageError(
            f"--end {end} and --train-tokenizer, whose end is <|endoftext|>; expected one of them"
        )
    out = out.with_suffix("") if out.suffix == ".bin" else out
    order = Order(
        out,
        sources,
        tokenizer or BYTES,
        field,
        held_out,
        prompt_field=prompt_field,
        skip_empty=skip_empty,
        train_tokenizer=train_tokenizer or 0,
        end=end,
    )
    try:
        with errors_as_lines():
            with _shown() as told:
                found = prepare(order, processes, told, partial(click.echo, err=True), force)
            for line in _lines(order, found):
                click.echo(line)
    except KeyboardInterrupt:
        click.echo("axrt: interrupted; the same command goes on", err=True)
        sys.exit(Exit.INTERRUPTED)


def _lines(order: Order, found: dict[str, Prepared]) -> Iterator[str]:
    for part, of in found.items():
        tokens, documents = plural(of.tokens, "token"), plural(of.documents, "document")
        yield f"{order.path(part, '.bin')}: {tokens} of {documents}"
    if skipped := found[TRAINING].skipped:
        yield f"rows without text that were left out: {skipped:,}"
    is_held_out = HELD_OUT in found and found[HELD_OUT].tokens
    validation = f" data.validation={order.path(HELD_OUT, '.bin')}" if is_held_out else ""
    if HELD_OUT in found and not is_held_out:
        yield f"{order.held_out:.2g} of so few tokens is none: nothing is held out"
    whole = found[TRAINING]
    masked = " data.masked=true" if order.prompt_field else ""
    yield (
        f"train with data.source={order.path(TRAINING, '.bin')}{validation} "
        f"model.vocab={whole.vocab}{masked}"
    )
    if whole.end is not None:
        yield f"data.document_end={whole.end} keeps documents apart"
    else:
        yield (
            f"warning: {order.tokenizer} has no token for the end of a document, so nothing stands "
            "behind one; --end names one"
        )


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """Context with what shows progress: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.fields[n]}"))
    with Bar(*columns, console=Console(stderr=True)) as bar:
        yield _OnBar(bar)


class _OnBar:
    """A bar, with the number of tokens beside it."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._task = bar, bar.add_task("", n="")

    def __call__(self, progress: Progress) -> None:
        done, of = progress.done_bytes, progress.all_bytes
        text = plural(progress.tokens, "token")
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
            click.echo(f"{share:.0%}, {plural(progress.tokens, 'token')}", err=True)
