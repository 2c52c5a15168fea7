"""Tokens a second of the reader of token files, on a file that is made on the spot.

Samples are drawn in the order of a training, so each is at another place of the file. Memory is
what the process has besides mapped files (RssAnon): their pages belong to the page cache. Then a
small GPT is trained on the file, from a cold page cache, and on one of a megabyte, in turn: where
the reader keeps ahead of the loop, the large file costs nothing.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np

from axrt.data.loader import microbatches
from axrt.data.order import Share
from axrt.data.windows import Windows

_VOCAB, _PIECE = 256, 1 << 25
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


def _train(source: Path, folder: Path) -> float:
    """Tokens a second of a training on a file, once it is under way."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "axrt", "train", "examples/quickstart.toml", f"run.out={out}"]
    command += [f"data.source={source}", "data.held_out=0", "run.eval_every=0"]
    command += ["run.steps=60", "run.log_every=20", "checkpoint.every=0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return float(median([line["tokens_per_s"] for line in lines if "loss" in line][1:]))


def _compare(large: Path, small: Path, rounds: int, folder: Path) -> None:
    print("\n| a GPT trained on | tokens/s | of those on the small one |\n|---|---|---|")
    found: dict[Path, list[float]] = {small: [], large: []}
    for _ in range(rounds):
        for source, rates in found.items():
            _forget(source)
            rates.append(_train(source, folder))
    for source, rates in found.items():
        ratios = [mine / its for mine, its in zip(rates, found[small], strict=True)]
        size = f"{source.stat().st_size / 1e9:g} GB"
        told = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"| {size} | {median(rates):,.0f} | {told} |")


@click.command()
@click.option("--gb", default=4.0, show_default=True, help="size of the file")
@click.option("--context", default=1024, show_default=True, help="tokens of a sample")
@click.option("--size", default=8, show_default=True, help="samples of a microbatch")
@click.option("--number", default=4000, show_default=True, help="microbatches to read")
@click.option("--workers", default=0, show_default=True, help="processes that read ahead")
@click.option("--rounds", default=3, show_default=True, help="trainings on each file")
@click.option("--disk", default="/tmp", show_default=True, help="directory of the file")
def main(
    gb: float, context: int, size: int, number: int, workers: int, rounds: int, disk: str
) -> None:
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
        small = Path(folder, "small.bin")
        _make(small, 500_000)
        _compare(path, small, rounds, Path(folder))


def _own_mib() -> float:
    (line,) = [one for one in _STATUS.read_text().splitlines() if one.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
