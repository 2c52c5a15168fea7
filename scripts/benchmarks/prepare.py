"""Rate and memory of `axrt prepare` on files of text of two sizes, which are made on the spot.

Memory is the most that processes have besides mapped files (RssAnon), looked at ten times a second.
It is flat where the larger file takes no more.
"""

import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import click
import psutil

_PIECE = 1 << 24
_EVERY_S = 0.1


def _make(path: Path, num_bytes: int) -> None:
    """Write lines of words; the words are made up, and some are frequent."""
    random = Random(0)
    words = ["".join(random.choices("etaoinshrdlu", k=random.randint(2, 9))) for _ in range(20_000)]
    often = list(accumulate(random.paretovariate(0.8) for _ in words))
    lines = (" ".join(random.choices(words, cum_weights=often, k=13)) for _ in range(_PIECE // 80))
    data = "\n".join(lines).encode() + b"\n"
    with path.open("wb") as file:
        while file.tell() < num_bytes:
            file.write(data[: num_bytes - file.tell()])


def _mib(process: psutil.Process) -> float:
    try:
        text = Path(f"/proc/{process.pid}/status").read_text()
        (line,) = [one for one in text.splitlines() if one.startswith("RssAnon")]
        return int(line.split()[1]) / 1024
    except (OSError, ValueError):  # it has just ended
        return 0.0


def _prepared(source: Path, out: Path, more: list[str]) -> tuple[float, float, float]:
    """Seconds, and the most MiB of one process and of all."""
    command = [sys.executable, "-m", "axrt", "prepare", str(source), "--out", str(out), *more]
    began = time.perf_counter()
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    of_one = of_all = 0.0
    while job.poll() is None:
        sizes = list(map(_mib, [psutil.Process(job.pid), *psutil.Process().children(True)]))
        of_one, of_all = max(of_one, *sizes), max(of_all, sum(sizes[1:]))
        time.sleep(_EVERY_S)
    if job.returncode:
        sys.exit(f"{' '.join(command)} ended with {job.returncode}")
    return time.perf_counter() - began, of_one, of_all


@click.command()
@click.option("--gb", default=4.0, show_default=True, help="size of the larger file")
@click.option("--processes", default=2, show_default=True, help="of axrt prepare")
@click.option("--tokenizer", default="", help="tokenizer.json; without one it is made")
@click.option("--disk", default="/tmp", show_default=True, help="directory of the files")
def main(gb: float, processes: int, tokenizer: str, disk: str) -> None:
    """Prepare an eighth of the file and the whole as bytes, and a tenth of both by a tokenizer of
    4,096 tokens, which is slower."""
    with TemporaryDirectory(dir=disk) as name:
        folder = Path(name)
        if not tokenizer:
            _make(folder / "small.txt", 1 << 21)
            _prepared(folder / "small.txt", folder / "small", ["--train-tokenizer", "4096"])
            tokenizer = str(folder / "small.tokenizer.json")
        print("| tokenizer | GB | MB/s | memory, MiB: one process, all |\n|---|---|---|---|")
        cases = {"bytes": (gb, []), "4,096 tokens": (gb / 10, ["--tokenizer", tokenizer])}
        for label, (most, more) in cases.items():
            for size in (most / 8, most):
                source = folder / f"{size:g}.txt"
                if not source.exists():
                    _make(source, int(size * 1e9))
                out = folder / "made" / f"{size:g}-{len(more)}"
                out.parent.mkdir(exist_ok=True)
                took, one, both = _prepared(source, out, [*more, "--processes", str(processes)])
                rate = 1e3 * size / took
                print(f"| {label} | {size:g} | {rate:,.0f} | {one:.0f}, {both:.0f} |", flush=True)


if __name__ == "__main__":
    main()
