"""Trainings of two hosts over TCP, on a link that is slow, loses packets, and is cut."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..cli.test_train import TINY
from ..mpi.mpirun import environment, is_open_mpi, mpirun
from ..mpi.runs import lines, told
from .hosts import TwoHosts, two_hosts

STEPS = 120
TRAIN = ("-m", "axrt", "train", "tiny.toml", "model.layers=4", "model.width=128")
SETTINGS = ("run.log_every=1", "run.eval_every=0", "checkpoint.every=0", f"run.steps={STEPS}")
BYTES_A_STEP = 2 * 2 * 8 * 128 * 4  # at the least: activations and gradients of two microbatches


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    if is_open_mpi():
        pytest.skip("the launcher of MPICH enters the hosts")
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 20)
    try:
        with two_hosts(tmp_path) as made:
            yield made
    except RuntimeError as error:
        pytest.skip(f"two hosts cannot be made here: {error}")


def begin(hosts: TwoHosts, folder: Path, *settings: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        hosts.command(*TRAIN, *SETTINGS, *settings),
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(folder: Path, step: int, job: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while max((line["step"] for line in lines(folder / "out")), default=0) < step:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, "the run does not get there"
        time.sleep(0.05)


def check_equal_to_quiet(folder: Path) -> None:
    ended = mpirun(2, [*TRAIN, *SETTINGS, "run.out=quiet"], cwd=folder)
    assert ended.code == 0, ended.err
    found: Any = told(folder / "out")
    assert len(found) == STEPS
    assert found == told(folder / "quiet")


def test_a_slow_link_that_loses_packets_and_is_cut_for_a_while_changes_no_bit(
    tmp_path: Path, hosts: TwoHosts
) -> None:
    job = begin(hosts, tmp_path)
    wait_for_step(tmp_path, 10, job)
    before = hosts.bytes_sent()
    hosts.cut()
    time.sleep(5.0)
    stood = max(line["step"] for line in lines(tmp_path / "out"))
    hosts.join()
    out, err = job.communicate(timeout=180)
    assert job.returncode == 0, out + err
    assert stood < STEPS, "the link was cut in time"
    assert hosts.bytes_sent() - before > BYTES_A_STEP * (STEPS - stood - 2), "it is the link's"
    check_equal_to_quiet(tmp_path)


def test_a_link_that_stays_cut_ends_the_job_by_patience_and_both_sides_are_named(
    tmp_path: Path, hosts: TwoHosts
) -> None:
    job = begin(hosts, tmp_path, "run.patience_s=6")
    wait_for_step(tmp_path, 10, job)
    hosts.cut()
    time.sleep(25.0)
    hosts.join()  # the launcher waits for the second host
    out, err = job.communicate(timeout=180)
    assert job.returncode != 0, out
    found = re.search(r"rank (\d) has waited \d+ s for rank (\d), which has shown no sign of", err)
    assert found, err
    assert {found[1], found[2]} == {"0", "1"}
    # Each waits for what the other owes. The one whose patience ends first may have ended before
    # the other asks, and its own words may be lost with the link.
    ended = re.search(r"rank (\d) waits in the end for rank (\d), which has given no answer", err)
    assert "a circle: 0 -> 1 -> 0" in err or ended, err
