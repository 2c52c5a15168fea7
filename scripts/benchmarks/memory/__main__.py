"""The command; see scripts/bench_memory."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
from peers.__main__ import machine

from . import report
from .model import LARGE, QUICK, REGULAR, Sizes, num_parameters
from .settings import REFERENCE, SETTINGS, Setting, from_text

HERE = Path(__file__).resolve().parents[1]
_COMPILES_S = 900


class Bench(NamedTuple):
    """What all jobs have in common.

    Args:
        mpirun: the launcher.
        sizes: of the model and of a step.
        disk: directory for what is offloaded to a disk.
        compiled: directory for what DeepSpeed compiles.
        limit_s: most seconds that a job may take.
    """

    mpirun: str
    sizes: Sizes
    disk: Path
    compiled: Path
    limit_s: float

    def prepare(self, setting: Setting) -> None:
        """Let a setting compile what it needs, once for all runs, in a job of one rank. That it
        cannot run is no matter here."""
        mark = self.compiled / f"{setting.name} is prepared"
        if mark.exists():
            return
        click.echo(f"preparing {setting.label}", err=True)
        for lock in self.compiled.glob("**/lock"):
            lock.unlink()  # of a job that was ended, for which the next one would wait
        self._row(setting, 1, _COMPILES_S, rehearses=True)
        mark.touch()

    def row(self, setting: Setting, ranks: int) -> dict[str, Any]:
        """The row of a setting, or the reason why there is none."""
        return self._row(setting, ranks, self.limit_s, rehearses=False)

    def _row(self, setting: Setting, ranks: int, limit_s: float, rehearses: bool) -> dict[str, Any]:
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory(dir=self.disk) as scratch,
        ):
            asked = {
                "setting": setting,
                "sizes": self.sizes,
                "scratch": scratch,
                "rehearses": rehearses,
            }
            said = self._run(ranks, [json.dumps(asked), f"{folder}/store", folder], limit_s)
            found, reason = Path(folder, "row"), Path(folder, "reason")
            if found.exists() and not said:
                row: dict[str, Any] = json.loads(found.read_text())
                return row
            return {"reason": reason.read_text() if reason.exists() else said}

    def _run(self, ranks: int, arguments: Sequence[str], limit_s: float) -> str:
        """Run a job; text that says how it failed, or nothing."""
        command = [self.mpirun, "-n", str(ranks), sys.executable, "-m", "memory.job", *arguments]
        variables = {
            "TORCH_EXTENSIONS_DIR": str(self.compiled),
            "PYTHONWARNINGS": "ignore",  # of torch to DeepSpeed, in every call
        }
        job = subprocess.Popen(
            command,
            cwd=HERE,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            told, _ = job.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"had not ended after {limit_s:g} s"
        finally:
            _end(job)
        last = (told.strip().splitlines() or ["nothing was printed"])[-1]
        return f"ended with {job.returncode}: {last}" if job.returncode else ""


def _end(job: "subprocess.Popen[str]") -> None:
    """End a job that has not ended; mpirun ends its ranks."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(timeout=10)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def in_turn(
    settings: Sequence[Setting], rounds: int, ranks: Sequence[int]
) -> Iterator[tuple[int, int, Setting]]:
    """Round, ranks and setting; every round has another order. Plain torch, on one rank, is among
    them whatever ranks are asked for."""
    for number in range(rounds):
        random = Random(number)
        for size in sorted({REFERENCE.least, *ranks}):
            fitting = [setting for setting in settings if setting.fits(size)]
            order = fitting if size in ranks else [REFERENCE]
            yield from ((number, size, one) for one in random.sample(order, len(order)))


def _chosen(only: Sequence[str], more: Sequence[str]) -> list[Setting]:
    """The settings whose names have one of the texts, those that were typed, and plain torch."""
    found = [one for one in SETTINGS if not only or any(text in one.label for text in only)]
    typed = [from_text(text) for text in more]
    return list({one.label: one for one in [REFERENCE, *found, *typed]}.values())


@click.command()
@click.option("--mpirun", default="mpirun", help="the launcher")
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1), help="interleaved repetitions"
)
@click.option(
    "--ranks",
    multiple=True,
    default=(1, 2, 4),
    show_default=True,
    type=click.IntRange(1),
    help="may be given again",
)
@click.option("--large", is_flag=True, help="a model of 101 million parameters, few steps")
@click.option("--quick", is_flag=True, help="all of it with a tiny model, to see that it runs")
@click.option(
    "--only", multiple=True, help="rows whose names have this text, such as FSDP2; may be repeated"
)
@click.option(
    "--also",
    multiple=True,
    metavar="'SECTION.KEY=VALUE ...'",
    help="one more row of axrt; may be repeated",
)
@click.option("--resume", is_flag=True, help="measure what rows.json lacks")
@click.option(
    "--disk",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(tempfile.gettempdir()),
    help="directory for offloaded state",
)
@click.option("--limit-s", default=300.0, show_default=True, help="seconds that a job may take")
@click.option(
    "--out",
    default="runs/memory",
    show_default=True,
    type=click.Path(path_type=Path),
    help="folder for rows.json",
)
def main(
    mpirun: str,
    rounds: int,
    ranks: Sequence[int],
    large: bool,
    quick: bool,
    only: Sequence[str],
    also: Sequence[str],
    resume: bool,
    disk: Path,
    limit_s: float,
    out: Path,
) -> None:
    """Measure the memory, traffic and speed of axrt beside torch and DeepSpeed."""
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes = QUICK if quick else LARGE if large else REGULAR
    bench = Bench(mpirun, sizes, disk, (out / "compiled").resolve(), limit_s)
    bench.compiled.mkdir(exist_ok=True)
    settings = _chosen(only, also)
    for setting in settings:
        if setting.runtime == "DeepSpeed":
            bench.prepare(setting)
    rows = _rows_of(out / "rows.json", sizes) if resume else []
    for number, size, setting in in_turn(settings, 1 if quick else rounds, ranks):
        if not _is_done(rows, setting, size, number):
            click.echo(f"round {number + 1}, ranks {size}: {setting.label}", err=True)
            rows.append(_about(setting, sizes, size, number) | bench.row(setting, size))
            text = json.dumps({"machine": machine(False), "rows": rows}, indent=1)
            (out / "rows.json").write_text(text)
    click.echo(report.tables(_in_order(rows, settings)))
    sys.exit(bool(report.disagreeing(rows)))


def _rows_of(file: Path, sizes: Sizes) -> list[dict[str, Any]]:
    """The rows of this model that were measured before."""
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return [row for row in rows if row["model"] == sizes.label and "reason" not in row]


def _in_order(rows: Sequence[dict[str, Any]], settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Rows by ranks, and as the table of settings has them; others last."""
    labels = [setting.label for setting in (*SETTINGS, *settings)]
    order = {label: place for place, label in reversed(list(enumerate(labels)))}
    return sorted(rows, key=lambda row: (row["ranks"], order.get(row["name"], len(order))))


def _about(setting: Setting, sizes: Sizes, ranks: int, number: int) -> dict[str, Any]:
    return {
        "name": setting.label,
        "model": sizes.label,
        "parameters": num_parameters(sizes),
        "ranks": ranks,
        "round": number,
    }


def _is_done(rows: Sequence[dict[str, Any]], setting: Setting, ranks: int, number: int) -> bool:
    """There is a row of the round, or one that could not run, which is not tried again."""
    key = (setting.label, ranks)
    mine = [row for row in rows if (row["name"], row["ranks"]) == key]
    return any("reason" in row or row["round"] == number for row in mine)


if __name__ == "__main__":
    main(prog_name="scripts/bench_memory")
