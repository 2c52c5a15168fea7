"""A training whose ranks are killed goes on from memory, also where a host has lost what it had.

Nothing else finds copies of ranks that have died: all else of copies in memory is tried in one
process (tests/checkpoint/test_in_memory.py). One run is killed, loses a host's memory, goes on
under `axrt launch`, and is killed once more; nothing is ever saved on the disk.
"""

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

import pytest

from axrt.checkpoint.folder import candidates_in
from axrt.checkpoint.memory_run import NAME, MemoryRun

from ..sweeps import first
from .mpirun import environment, launcher
from .runs import LIMIT_S, last_told, ranks_of, trained_alone, write_files
from .test_launch import SLOW, SLOWLY, Launch, starts

STEPS = 60
TRAIN = (
    "-m",
    "axrt",
    "train",
    "tiny.toml",
    f"run.steps={STEPS}",
    "model.layers=4",
    "model.heads=2",
)
# By host, and by ranks.
TWO, FOUR = "run.host_of=0,1", "run.host_of=0,0,1,1"


@pytest.fixture(autouse=True)
def a_model(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in memory, where the system has one."""
    where = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=where if where.is_dir() else None) as folder:
        yield Path(folder)


def kept(shm: Path, hosts: str) -> tuple[str, ...]:
    return (
        *(hosts, "checkpoint.memory_every=3", f"checkpoint.memory_dir={shm}"),
        "checkpoint.resume=auto",
    )


def wait_until_kept(folder: Path, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + LIMIT_S
    while (said := MemoryRun.read(folder / "out" / "checkpoints")) is None or said.step < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing is kept"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("hosts", "lost", "of_ranks", "members"),
    first(
        [
            (TWO, "node-0", "0", 2),
            (TWO, "node-1", "1", 1),
            (FOUR, "node-0", "0, 1", 1),
            (FOUR, "node-1", "2, 3", 2),
        ]
    ),
)
def test_a_killed_job_goes_on_from_memory_where_a_host_has_lost_its_own(
    tmp_path: Path, shm: Path, hosts: str, lost: str, of_ranks: str, members: int
) -> None:
    """Members of a team have parts of all layers; other ranks here are stages."""
    ranks = str(hosts.count(",") + 1)
    shards = "parallel.tensor_shards=2" if members > 1 else "parallel.tensor_shards=0"
    train = [
        sys.executable,
        *TRAIN,
        *SLOWLY,
        f"parallel.tensor={members}",
        shards,
        *kept(shm, hosts),
    ]
    command = [launcher(), "-n", ranks, *train]
    job = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until_kept(tmp_path, 6, job)
    os.kill(ranks_of(job.pid)[1], signal.SIGKILL)
    job.communicate(timeout=LIMIT_S)
    assert not candidates_in(tmp_path / "out" / "checkpoints"), "nothing is on the disk"
    (run,) = shm.iterdir()
    shutil.rmtree(run / lost)

    again = Launch(tmp_path, "--", *command)
    wait_until_kept(tmp_path, 21, again.process)
    again.lose(1)
    code, err = again.end()
    assert code == 0, err
    found = re.search(
        r"taken from memory: the copies of step (\d+), those of ranks? (.*) from their", err
    )
    assert found, err
    assert int(found[1]) >= 6
    assert found[2] == of_ranks
    first_start, second_start = starts(tmp_path)
    assert first_start["gained"] > 0, "memory counts as gained"
    assert second_start["step"] >= 21
    assert not list(shm.iterdir()), "what is done is removed"
    assert not (tmp_path / "out" / "checkpoints" / NAME).exists()
    settings = (
        "model.layers=4",
        "model.heads=2",
        shards,
        "run.log_every=1",
        "run.eval_every=0",
        f"run.steps={STEPS}",
    )
    quiet, all_told = trained_alone(tmp_path, "quiet", *settings), last_told(tmp_path / "out")
    assert len(quiet) == STEPS
    assert [all_told[line["step"]] for line in quiet] == quiet
