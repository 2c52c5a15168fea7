"""CPU seconds of commands that do little: what a start takes.

User and system time of a command and of all that it starts. Imports end with the process, as all
the others do: what Python does at its end counts. States of the code run in turn.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click

_HERE = Path(__file__).resolve().parents[2]
_BRIEF = ("run.steps=3", "run.eval_every=0", "optimizer.warmup_steps=1", "run.device=cpu")


def _commands(mpirun: str, folder: Path) -> dict[str, list[str]]:
    """What is timed, by its name in the table."""
    python = [sys.executable]
    axrt, run = [*python, "-m", "axrt"], str(folder / "run")
    train = [*axrt, "train", str(_HERE / "examples/quickstart.toml"), *_BRIEF]
    into = f"run.out={folder / 'another'}"
    subprocess.run([*train, f"run.out={run}"], check=True, stdout=subprocess.DEVNULL)
    imports = "from axrt.cli import main; main.get_command(None, '{}')"
    simulate = ["simulate", "--policy", "1f1b", "--ranks", "4", "--microbatches", "8"]
    return {
        "`import torch`": [*python, "-c", "import torch"],
        "`axrt --help`": [*axrt, "--help"],
        "`axrt simulate`, a small schedule": [*axrt, *simulate],
        "imports of `axrt train`": [*python, "-c", imports.format("train")],
        "imports of `axrt generate`": [*python, "-c", imports.format("generate")],
        "`axrt generate`, two tokens": [*axrt, "generate", run, "--tokens", "2"],
        "`axrt train`, three steps": [*train, into],
        "`axrt train`, three steps on 4 ranks, all together": [mpirun, "-n", "4", *train, into],
    }


def _cpu_s(command: list[str], checkout: Path, folder: Path) -> float:
    """User and system time of a command, in seconds."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed axrt is compiled once
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@click.command()
@click.option("--mpirun", default="mpirun", show_default=True, help="starts ranks")
@click.option("--rounds", default=5, show_default=True, help="runs of each command")
@click.option("--beside", type=click.Path(path_type=Path, exists=True), help="another checkout")
def main(mpirun: str, rounds: int, beside: Path | None) -> None:
    """Print a table for docs/performance.md."""
    states = {"CPU s": _HERE}
    if beside:
        states["CPU s of the other state"] = beside.resolve()
    print(f"| | {' | '.join(states)} |\n|---|{'---|' * len(states)}")
    with TemporaryDirectory() as made:
        folder = Path(made)
        for name, command in _commands(mpirun, folder).items():
            took: dict[Path, list[float]] = {state: [] for state in states.values()}
            for checkout in [*states.values()] * rounds:
                took[checkout].append(_cpu_s(command, checkout, folder))
            cells = (f"{median(of):.2f} ({min(of):.2f} to {max(of):.2f})" for of in took.values())
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
