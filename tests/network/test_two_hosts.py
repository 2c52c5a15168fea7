"""A training of two hosts over TCP, on a link that is slow, loses packets, is cut for a while, and
is then cut for good.

Nothing else sends over a network that fails, nor lets two ranks wait for each other of whom each
could still work. One job goes through all of it, which takes half a minute of waiting.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ..mpi.mpirun import environment, is_open_mpi
from ..mpi.runs import LIMIT_S, newest, told, trained_alone, write_files
from .hosts import TwoHosts, two_hosts

STEPS = 1000  # more than there is time for
SETTINGS = (
    *("model.layers=4", "model.width=128", "run.log_every=1", "run.eval_every=0"),
    *("checkpoint.every=0", "data.held_out=0", "optimizer.schedule=constant"),
)
BYTES_A_STEP = 2 * 2 * 8 * 128 * 4  # at the least: activations and gradients of two microbatches
CUT_S, PATIENCE = 3.0, "run.patience_s=8"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    if is_open_mpi():
        pytest.skip("the launcher of MPICH enters the hosts")
    write_files(tmp_path)
    try:
        with two_hosts(tmp_path) as made:
            yield made
    except RuntimeError as error:
        pytest.skip(f"two hosts cannot be made here: {error}")


def begin(hosts: TwoHosts, folder: Path) -> "subprocess.Popen[str]":
    train = ("-m", "axrt", "train", "tiny.toml", f"run.steps={STEPS}", PATIENCE, *SETTINGS)
    return subprocess.Popen(
        hosts.command(*train),
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(fact: Callable[[], bool], words: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not fact():
        assert time.monotonic() < deadline, words
        time.sleep(0.05)


def ranks_in(folder: Path) -> list[psutil.Process]:
    """The ranks of a run that are there, in a directory."""
    found = psutil.process_iter(["cmdline", "cwd"])
    of_ranks = [sys.executable, "-m", "axrt"]
    return [
        process
        for process in found
        if process.info["cwd"] == str(folder) and (process.info["cmdline"] or [])[:3] == of_ranks
    ]


@pytest.mark.long
def test_a_link_that_loses_packets_and_is_cut_changes_no_bit_and_ends_the_job_by_patience(
    tmp_path: Path, hosts: TwoHosts
) -> None:
    run = tmp_path / "out"
    job = begin(hosts, tmp_path)

    def gets_to(step: int) -> None:
        until(lambda: newest(run) >= step or job.poll() is not None, "the run does not get there")
        assert job.poll() is None, job.communicate()

    gets_to(10)
    before = hosts.bytes_sent()
    hosts.cut()
    time.sleep(CUT_S)
    stood = newest(run)
    hosts.join()
    gets_to(stood + 20)
    assert hosts.bytes_sent() - before > BYTES_A_STEP * 18, "it is the link's"

    hosts.cut()
    # Each side ends by its patience. The launcher waits for the second host.
    until(lambda: not ranks_in(tmp_path), "the ranks do not end")
    hosts.join()
    out, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0, out
    found = re.search(r"rank (\d) has waited \d+ s for rank (\d), which has shown no sign of", err)
    assert found, err
    assert {found[1], found[2]} == {"0", "1"}
    # Each waits for what the other owes. The one whose patience ends first may have ended before
    # the other asks, and its own words may be lost with the link.
    ended = re.search(r"rank (\d) waits in the end for rank (\d), which has given no answer", err)
    assert "a circle: 0 -> 1 -> 0" in err or ended, err

    found_lines = told(run)
    steps = f"run.steps={len(found_lines)}"
    assert found_lines == trained_alone(tmp_path, "quiet", steps, *SETTINGS)
