"""A training whose ranks are killed goes on from memory, also where a host has lost what it had."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from axrt.checkpoint.folder import candidates_in
from axrt.checkpoint.memory_run import NAME, MemoryRun

from ..cli.test_train import TINY
from ..sweeps import first
from .mpirun import environment, launcher, mpirun
from .runs import told
from .test_launch import Launch, starts

STEPS = 600  # more than pass while this process is given no core
TRAIN = ("-m", "axrt", "train", "tiny.toml", f"run.steps={STEPS}", "model.layers=4")
SETTINGS = ("run.log_every=1", "run.eval_every=0")


@pytest.fixture(autouse=True)
def a_model(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 20)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in memory, where the system has one."""
    where = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=where if where.is_dir() else None) as folder:
        yield Path(folder)


def kept(shm: Path) -> tuple[str, ...]:
    return (
        "run.host_of=0,0,1,1",
        "checkpoint.memory_every=3",
        f"checkpoint.memory_dir={shm}",
        "checkpoint.resume=auto",
    )


def wait_until_kept(folder: Path, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while (said := MemoryRun.read(folder / "out" / "checkpoints")) is None or said.step < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing is kept"
        time.sleep(0.01)


def check_equal_to_quiet(folder: Path) -> None:
    ended = mpirun(4, [*TRAIN, *SETTINGS, "run.out=quiet"], cwd=folder)
    assert ended.code == 0, ended.err
    by_step: dict[Any, Any] = {line["step"]: line for line in told(folder / "out")}
    expected = told(folder / "quiet")
    assert len(expected) == STEPS
    assert [by_step[line["step"]] for line in expected] == expected


@pytest.mark.parametrize("lost", first(["node-0", "node-1"]))
def test_a_killed_job_goes_on_from_memory_where_a_host_has_lost_its_own(
    tmp_path: Path, shm: Path, lost: str
) -> None:
    command = [launcher(), "-n", "4", sys.executable, *TRAIN, *SETTINGS, *kept(shm)]
    job = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until_kept(tmp_path, 30, job)
    ranks = Launch.ranks_in(tmp_path)
    os.kill(ranks[2], signal.SIGKILL)
    job.communicate(timeout=120)
    assert not candidates_in(tmp_path / "out" / "checkpoints"), "nothing is on the disk"
    (run,) = shm.iterdir()
    shutil.rmtree(run / lost)
    ended = mpirun(4, [*TRAIN, *SETTINGS, *kept(shm)], cwd=tmp_path)
    assert ended.code == 0, ended.err
    found = re.search(
        r"taken from memory: the copies of step (\d+), those of ranks (.*) from their", ended.err
    )
    assert found, ended.err
    assert int(found[1]) >= 30
    assert found[2] == {"node-0": "0, 1", "node-1": "2, 3"}[lost]
    check_equal_to_quiet(tmp_path)
    assert not list(shm.iterdir()), "what is done is removed"
    assert not (tmp_path / "out" / "checkpoints" / NAME).exists()


def test_a_launch_gains_the_steps_that_memory_has(tmp_path: Path, shm: Path) -> None:
    """Four starts that save nothing on the disk: three without a step would be the last."""
    job = Launch(
        tmp_path, "--", launcher(), "-n", "4", sys.executable, *TRAIN, *SETTINGS, *kept(shm)
    )
    for step in (20, 60, 100, 140):
        wait_until_kept(tmp_path, step, job.process)
        job.lose(1)
    code, err = job.end()
    assert code == 0, err
    found = starts(tmp_path)
    assert len(found) == 5
    assert all(one["gained"] > 0 for one in found)
    check_equal_to_quiet(tmp_path)
