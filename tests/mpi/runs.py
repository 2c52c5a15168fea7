"""Runs of `axrt train` with a tiny model, on a job of ranks or in this process alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from axrt.cli import main

from ..cli.test_train import TINY
from .mpirun import environment, launcher

TRAIN = ("-m", "axrt", "train", "tiny.toml")
ENDLESS = "run.steps=100000"
# A hang. What is waited for takes some seconds on a quiet machine, most of them to start ranks.
LIMIT_S = 150.0


def write_files(folder: Path) -> None:
    """Write the settings of a tiny model, and text to train it on."""
    (folder / "tiny.toml").write_text(TINY)
    (folder / "text.txt").write_text("all work and no play " * 20)


def lines(run: Path) -> list[dict[str, Any]]:
    """What metrics say, but for half a line at the end."""
    try:
        whole = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return []
    return [json.loads(line) for line in whole]


def told(run: Path) -> list[dict[str, Any]]:
    """The step, loss and norm of each line that has a loss."""
    return [
        {key: line[key] for key in ("step", "loss", "grad_norm") if key in line}
        for line in lines(run)
        if "loss" in line
    ]


def newest(run: Path) -> int:
    """The last step that metrics tell."""
    return max((int(line["step"]) for line in lines(run)), default=0)


def last_told(run: Path) -> dict[int, dict[str, Any]]:
    """What is told of each step; of one that ran again the last."""
    return {line["step"]: line for line in told(run)}


def alone(folder: Path, *words: str) -> str:
    """What a command line of axrt prints in this process, where nothing fails."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(main, list(words))
    finally:
        os.chdir(before)
    assert result.exit_code == 0, result.output
    return result.output


def trained_alone(folder: Path, out: str, *overrides: str) -> list[dict[str, Any]]:
    """What is told of a training in this process. With one copy of each weight it has the bits of
    any number of ranks."""
    alone(folder, "train", "tiny.toml", f"run.out={out}", *overrides)
    return told(folder / out)


def begin(folder: Path, ranks: int, *overrides: str, steps: int = 10) -> subprocess.Popen[str]:
    """Start a run that goes on until it is told to end, and wait for its first steps."""
    write_files(folder)
    job = subprocess.Popen(
        [launcher(), "-n", str(ranks), sys.executable, *TRAIN, ENDLESS, *overrides],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + LIMIT_S
    while newest(folder / "out") < steps:
        if job.poll() is not None or time.monotonic() > deadline:
            job.terminate()
            raise AssertionError(f"the run does not run: {job.communicate(timeout=LIMIT_S)}")
        time.sleep(0.05)
    return job


def ranks_of(launched: int) -> list[int]:
    """The processes of Python under a launcher."""
    found = []
    for child in children_of(launched):
        command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        is_rank = b"axrt" in command and b"python" in Path(command[0].decode()).name.encode()
        found += [child] if is_rank else []
        found += ranks_of(child)
    return found


def children_of(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task")
    return [
        int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()
    ]


def files_in(directory: Path, process: int) -> list[str]:
    """Open files of a process that are in a directory and have no name."""
    links = Path(f"/proc/{process}/fd")
    targets = [os.readlink(link) for link in links.iterdir() if link.is_symlink()]
    return [target for target in targets if str(directory) in target and "(deleted)" in target]
