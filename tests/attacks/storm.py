"""A training in a storm: ranks and launcher are killed, files are damaged, again and again; then it
must be as if nothing had been.

python -m tests.attacks.storm [--kills 100] [--ranks 2] [--seed 0]

It takes the mpirun of this environment.

Each life of the job goes on with `checkpoint.resume=auto` and meets one fault at a moment that the
seed draws:

    rank        SIGKILL of a rank
    launcher    SIGKILL of mpirun
    save        SIGKILL of a rank while a save is under way
    damage      SIGKILL of a rank, and a file of the newest checkpoint flipped, cut off, removed
                or exchanged
    asked       SIGUSR1 of mpirun: saves, code 75

After them it runs to its end in peace. Weights and optimizer state of the last checkpoint, and the
loss of every step, must be those of a quiet run, to the bit; nothing but what was asked for may
have ended with code 0; no process may be left.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import click
import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor

from axrt.checkpoint.folder import candidates_in
from tests.checkpoint.damage import cut_off, exchange, flip_a_bit, remove
from tests.mpi.mpirun import environment, launcher

FAULTS = ("rank", "launcher", "save", "damage", "asked")
CONFIG = """
[model]
layers = 2
width = 16
heads = 2
context = 16
dropout = 0.1
[schedule]
microbatches = 4
[optimizer]
clip = 1.0
[data]
source = "text.txt"
held_out = 0
[checkpoint]
every = 3
keep = 3
[run]
steps = 1000000
log_every = 1
device = "cpu"
progress = "off"
"""
_END_S = 300  # a hang: a job ends in some seconds


@dataclass
class Storm:
    """What has happened.

    Args:
        lives: of the job, by fault.
        codes: with which mpirun has ended, by fault.
        strays: processes of the job that outlived its launcher.
    """

    lives: Counter[str] = field(default_factory=Counter)
    codes: dict[str, Counter[int]] = field(default_factory=dict)
    strays: int = 0

    def __str__(self) -> str:
        said = [
            f"{fault} {count} (codes {dict(self.codes[fault])})"
            for fault, count in self.lives.items()
        ]
        return f"{self.lives.total()} faults: {', '.join(said)}; processes left over: {self.strays}"


def begin(folder: Path, ranks: int, run: str, *overrides: str) -> subprocess.Popen[bytes]:
    """Start the job, or go on with it."""
    config = folder / run / "config.toml"
    file, more = (config, []) if config.exists() else (folder / "storm.toml", [f"run.out={run}"])
    command = [
        launcher(),
        "-n",
        str(ranks),
        sys.executable,
        "-m",
        "axrt",
        "train",
        str(file),
        "checkpoint.resume=auto",
        *more,
        *overrides,
    ]
    with (folder / f"{run}.log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def lines(folder: Path, run: str) -> Iterator[dict[str, float]]:
    """Of the metrics, but for half a line at the end."""
    try:
        whole = (folder / run / "metrics.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return
    yield from map(json.loads, whole)


def steps(folder: Path, run: str) -> int:
    return sum("loss" in line for line in lines(folder, run))


def ranks_of(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The ranks of a job, below its launcher."""
    found = []
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            if "axrt" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def wait_for(
    condition: "Iterator[bool]", job: subprocess.Popen[bytes], limit_s: float = _END_S
) -> bool:
    """Whether it came to hold while the job ran."""
    until = time.monotonic() + limit_s
    for holds in condition:
        if holds or job.poll() is not None or time.monotonic() > until:
            return holds
        time.sleep(0.002)
    return False


def strike(folder: Path, run: str, ranks: int, fault: str, random: Random, storm: Storm) -> None:
    """One life of the job, and its end."""
    before = steps(folder, run)
    job = begin(folder, ranks, run)
    if not wait_for((steps(folder, run) > before for _ in iter(int, 1)), job):
        raise AssertionError(
            f"the job did not go on:\n{(folder / f'{run}.log').read_text()[-3000:]}"
        )
    time.sleep(random.uniform(0, 0.8))
    victims = ranks_of(job)
    if fault == "save":
        wait_for(
            (any((folder / run / "checkpoints").glob("*.partial")) for _ in iter(int, 1)), job, 5
        )
        time.sleep(random.uniform(0, 0.01))
    if fault == "asked":
        job.send_signal(signal.SIGUSR1)
    elif fault == "launcher":
        job.kill()
    else:
        with_luck = random.choice(victims)
        with_luck.kill()
    code = job.wait(_END_S)
    _, alive = psutil.wait_procs(victims, timeout=120)
    storm.strays += len(alive)
    storm.lives[fault] += 1
    storm.codes.setdefault(fault, Counter())[code] += 1
    if fault == "damage":
        damage_newest(folder / run / "checkpoints", random)


def damage_newest(checkpoints: Path, random: Random) -> None:
    found = candidates_in(checkpoints)
    if len(found) > 1:
        file = random.choice(sorted(found[0].path.iterdir()))
        random.choice((flip_a_bit, cut_off, remove, exchange))(file, random)


def finish(folder: Path, run: str, ranks: int, until: int) -> None:
    """Run to the end in peace."""
    job = begin(folder, ranks, run, f"run.steps={until}")
    if job.wait(1200) != 0:
        raise AssertionError(
            f"the last life of {run} ended with "
            f"{job.returncode}:\n{(folder / f'{run}.log').read_text()[-3000:]}"
        )


def last_checkpoint(folder: Path, run: str) -> dict[str, Tensor]:
    path = candidates_in(folder / run / "checkpoints")[0].path
    return {
        f"{file.name}/{name}": value
        for file in path.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def compare(folder: Path, quiet: str, stormy: str) -> int:
    """How many steps were compared; `AssertionError` where a tensor or a loss is another."""
    mine, its = last_checkpoint(folder, quiet), last_checkpoint(folder, stormy)
    differing = [
        name
        for name in mine.keys() | its.keys()
        if name not in mine or name not in its or not torch.equal(mine[name], its[name])
    ]
    assert not differing, f"{len(differing)} of {len(mine)} tensors differ, {differing[0]} for one"
    losses = {line["step"]: line["loss"] for line in lines(folder, quiet) if "loss" in line}
    seen = [(line["step"], line["loss"]) for line in lines(folder, stormy) if "loss" in line]
    others = [step for step, loss in seen if losses[step] != loss]
    assert not others, f"the losses of {len(others)} steps differ, of {others[0]} for one"
    missing = losses.keys() - {step for step, _ in seen}
    assert not missing, f"{len(missing)} steps have no line, {min(missing)} for one"
    return len(losses)


def attack(folder: Path, kills: int, ranks: int, seed: int, say: bool) -> tuple[Storm, int]:
    """What has happened, and how many steps a quiet run has had alike; `AssertionError` where
    something is lost."""
    (folder / "storm.toml").write_text(CONFIG)
    (folder / "text.txt").write_text("all work and no play makes a dull day of it; " * 40)
    random, storm = Random(seed), Storm()
    for number in range(kills):
        strike(folder, "stormy", ranks, FAULTS[number % len(FAULTS)], random, storm)
        if say and (number + 1) % 10 == 0:
            click.echo(str(storm))
    until = max(int(line["step"]) for line in lines(folder, "stormy")) + 5
    finish(folder, "stormy", ranks, until)
    finish(folder, "quiet", ranks, until)
    compared = compare(folder, "quiet", "stormy")
    for fault, codes in storm.codes.items():
        assert set(codes) == {75} if fault == "asked" else 0 not in codes, (
            f"{fault} ended with {dict(codes)}"
        )
    assert storm.strays == 0
    return storm, compared


@click.command()
@click.option("--kills", default=100, show_default=True, help="faults; four in five of them kill")
@click.option("--ranks", default=2, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--keep", is_flag=True, help="leave the folder where something was lost")
def main(kills: int, ranks: int, seed: int, keep: bool) -> None:
    """Train in a storm and compare with a quiet run."""
    folder = Path(tempfile.mkdtemp(prefix="axrt-storm-"))
    began = time.monotonic()
    try:
        storm, compared = attack(folder, kills, ranks, seed, say=True)
        click.echo(
            f"{storm}; weights, optimizer state and the losses of {compared} steps are those of a "
            "quiet run"
        )
        click.echo(
            f"{time.monotonic() - began:.0f} s on {ranks} ranks with {launcher()}, seed {seed}, "
            f"{os.cpu_count()} cores"
        )
    finally:
        if keep:
            click.echo(str(folder))
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
