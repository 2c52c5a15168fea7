"""Tokens a second of the reader of token files, on a file that is made on the spot.

Samples are drawn in the order of a training, so each is at another place of the file. Memory is
what the process has besides mapped files (RssAnon): their pages belong to the page cache.
"""

import os
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np

from axrt.data.loader import microbatches
from axrt.data.order import Share
from axrt.data.windows import Windows

_VOCAB, _PIECE = 50_000, 1 << 25
_STATUS = Path("/proc/self/status")


def _make(path: Path, tokens: int) -> None:
    """Write random tokens, uint16."""
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        for begin in range(0, tokens, _PIECE):
            random.integers(0, _VOCAB, min(_PIECE, tokens - begin), np.uint16).tofile(file)
        os.fsync(file.fileno())


def _forget(path: Path) -> None:
    """Let the page cache forget a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@click.command()
@click.option("--gb", default=4.0, show_default=True, help="size of the file")
@click.option("--context", default=1024, show_default=True, help="tokens of a sample")
@click.option("--size", default=8, show_default=True, help="samples of a microbatch")
@click.option("--number", default=4000, show_default=True, help="microbatches to read")
@click.option("--workers", default=0, show_default=True, help="processes that read ahead")
@click.option("--disk", default="/tmp", show_default=True, help="directory of the file")
def main(gb: float, context: int, size: int, number: int, workers: int, disk: str) -> None:
    """Make a file of tokens, and read microbatches of it."""
    tokens = int(gb * 1e9 / 2)
    with TemporaryDirectory(dir=disk) as folder:
        path = Path(folder, "tokens.bin")
        _make(path, tokens)
        print("| page cache | tokens/s | first microbatch, ms | memory, MiB: before, most |")
        print("|---|---|---|---|")
        for cache in ("cold", "warm"):
            if cache == "cold":
                _forget(path)
            before = _own_mib()
            row = np.memmap(path, np.uint16, "r")
            windows = Windows(row, context, seed=1, vocab=_VOCAB)
            share = Share(replica=0, replicas=1, microbatches=8, size=size)
            stream = microbatches(windows, size, share.first_samples(0), workers)
            began, most = time.perf_counter(), before
            next(stream)
            first_s = time.perf_counter() - began
            began = time.perf_counter()
            for count, _ in enumerate(islice(stream, number)):
                most = max(most, _own_mib()) if count % 500 == 0 else most
            rate = number * size * context / (time.perf_counter() - began)
            print(f"| {cache} | {rate:,.0f} | {1e3 * first_s:.1f} | {before:.0f}, {most:.0f} |")


def _own_mib() -> float:
    (line,) = [one for one in _STATUS.read_text().splitlines() if one.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
