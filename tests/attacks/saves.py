"""Kills a training at each system call of a save, over and over, and looks at what is left each
time.

python -m tests.attacks.saves [--kills 200] [--seed 0] [--beside]

The training is the README's own recipe: load the newest checkpoint if there is one, train, save
under a new name. Each time a child goes on in the same folder; strace, attached when its save
begins, kills it with SIGKILL as it enters its n-th system call of any kind. What it had saved must
be there, to the bit, whatever n is, and the next one must go on. With --beside training goes on
while it is written, and n counts the system calls of one thread.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import click
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.checkpoint.folder import candidates_in
from axrt.transport.local import LocalWorld
from tests.engine.reference import adamw, configured, random_batches

BATCHES = random_batches((4, 8), classes=3, microbatches=2)
_SAVES = 2  # a life
_MOST = 400  # system calls: more than two saves have
_LATE = 65_000  # behind the last system call of a life; strace counts so far


def engine() -> axrt.Engine:
    model = axrt.PipelineModule([axrt.LayerSpec(nn.Linear, 8, 3)], functional.cross_entropy)
    return axrt.initialize(model, adamw, config=configured(2), transport=LocalWorld(1).alone())


def recipe(folder: Path, tell: int, until: int, beside: bool) -> None:
    """What the README says; it tells when it is about to save, and what it has saved."""
    with engine() as e:
        e.load_checkpoint(folder, missing_ok=True)
        end = e.step + until
        while e.step < end:
            e.train_batch(iter(BATCHES(e.step)))
            if e.step == end - until + 1:
                os.write(tell, b"saving\n")
                os.kill(os.getpid(), signal.SIGSTOP)  # until strace is there
            saved = e.step
            e.save_checkpoint(folder / f"step-{saved}", wait=not beside)
            if beside:
                e.eval_batch(iter(BATCHES(0)))
                e.finish_saving()
            os.write(tell, f"{saved}\n".encode())


@dataclass
class Life:
    """One child: how far it had saved by its own word, and whether it was killed before its end."""

    saved: int
    was_killed: bool
    text: str


def live(folder: Path, at_call: int, beside: bool) -> Life:
    """Run the recipe in a child that is killed at a system call after the first save has begun."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        code = 1
        with suppress(BaseException):
            recipe(folder, tell, _SAVES, beside)
            code = 0
        os._exit(code)
    os.close(tell)
    os.waitpid(child, os.WUNTRACED)
    tracer = subprocess.Popen(
        [
            "strace",
            "-qq",
            "-f",
            "-o",
            os.devnull,
            "-p",
            str(child),
            "-e",
            f"inject=all:signal=SIGKILL:when={at_call}",
        ],
        stderr=subprocess.DEVNULL,
    )
    status = Path(f"/proc/{child}/status")
    while "TracerPid:\t0" in status.read_text():
        time.sleep(0.002)
    os.kill(child, signal.SIGCONT)
    _, ended = os.waitpid(child, 0)
    tracer.wait(120)
    with os.fdopen(told) as file:
        lines = file.read().split()
    numbers = [int(line) for line in lines if line.isdigit()]
    return Life(max(numbers, default=0), os.WIFSIGNALED(ended), f"ended with {ended}, said {lines}")


def quiet(steps: int) -> Iterator[dict[str, Tensor]]:
    """Weights after 0, 1, 2, ... steps of a run that nobody disturbs."""
    with engine() as e:
        for step in range(steps + 1):
            yield {name: value.detach().clone() for name, value in e.named_parameters()}
            e.train_batch(iter(BATCHES(step)))


def attack(folder: Path, kills: int, seed: int, say: bool, beside: bool = False) -> tuple[int, int]:
    """(kills, steps that were saved); `AssertionError` where something is lost."""
    random, done, known = Random(seed), 0, 0
    calls = list(range(1, _MOST))
    random.shuffle(calls)
    while done < kills:
        at_call = calls[done % len(calls)]
        life = live(folder, at_call, beside)
        known = max(known, life.saved)
        assert life.was_killed or life.saved, f"at call {at_call}: {life.text}"
        done += life.was_killed
        if not life.was_killed:
            calls = [call for call in calls if call < at_call]  # the save was over by then
        found = candidates_in(folder)
        newest = found[0].step if found else 0
        assert newest in (known, known + 1), (
            f"at call {at_call}: {known} was saved, and {newest} is the newest"
        )
        with engine() as e:
            e.load_checkpoint(folder, missing_ok=True)
            assert e.step == newest
            known = newest
        if say and done % 20 == 0:
            click.echo(f"{done} kills, {newest} steps saved")
    if not known:  # every kill came before a save was whole
        known = live(folder, _LATE, beside).saved
        assert known, "nothing is saved, although nobody is killed"
    with engine() as e:
        e.load_checkpoint(folder)
        expected = list(quiet(e.step))[e.step]
        assert all(torch.equal(value, expected[name]) for name, value in e.named_parameters())
    return done, known


def can_trace() -> bool:
    """strace is here, and may be used."""
    return (
        shutil.which("strace") is not None
        and subprocess.run(["strace", "-qq", "true"], capture_output=True, check=False).returncode
        == 0
    )


@click.command()
@click.option("--kills", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--beside", is_flag=True, help="Training goes on while files are written.")
def main(kills: int, seed: int, beside: bool) -> None:
    """Kill a training at each system call of a save."""
    torch.set_num_threads(1)
    if not can_trace():
        sys.exit("axrt: this wants strace, and the right to trace")
    with tempfile.TemporaryDirectory() as folder:
        done, steps = attack(Path(folder) / "checkpoints", kills, seed, True, beside)
    click.echo(
        f"{done} kills at system calls of a save, {steps} steps saved, none lost, weights those of "
        "a quiet run"
    )


if __name__ == "__main__":
    main()
