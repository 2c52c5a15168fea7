"""The witness of a rank's end."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from axrt.restarts.witness import FOLDER, first_lost

LIVES = """
import os, sys, time
from axrt.restarts.witness import witnessed

with witnessed(int(sys.argv[1])):
    if sys.argv[2] == "child" and os.fork() == 0:  # it holds all that its parent has open
        time.sleep(1000)
        os._exit(0)
    print("lives", flush=True)
    if sys.argv[2] != "ends":
        time.sleep(1000)
"""


def begun(folder: Path, rank: int, how: str) -> "subprocess.Popen[str]":
    made = subprocess.Popen(
        [sys.executable, "-c", LIVES, str(rank), how],
        env=os.environ | {FOLDER: str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    assert made.stdout.readline() == "lives\n"
    return made


def wait_for(folder: Path, rank: int) -> None:
    deadline = time.monotonic() + 120  # a hang: it takes some milliseconds
    while not (folder / f"rank-{rank}").exists():
        assert time.monotonic() < deadline, "the witness says nothing"
        time.sleep(0.01)


def processes_of(folder: Path) -> list[int]:
    """Processes that were told of a directory for witnesses."""
    mark, found = f"{FOLDER}={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


@pytest.mark.parametrize("how", ["alone", "child"])
def test_the_first_of_two_that_are_killed_is_told(tmp_path: Path, how: str) -> None:
    first, second = begun(tmp_path, 5, how), begun(tmp_path, 3, how)
    try:
        for rank, process in ((5, first), (3, second)):
            os.kill(process.pid, signal.SIGKILL)
            wait_for(tmp_path, rank)
            process.wait()
        assert first_lost(tmp_path) == (5, os.uname().nodename)
    finally:
        for child in processes_of(tmp_path):
            os.kill(child, signal.SIGKILL)
        for process in (first, second):
            process.communicate()


def test_a_rank_that_ends_by_itself_is_not_lost(tmp_path: Path) -> None:
    process = begun(tmp_path, 0, "ends")
    process.communicate(timeout=120)
    time.sleep(0.3)
    assert first_lost(tmp_path) is None


def test_nobody_is_left(tmp_path: Path) -> None:
    process = begun(tmp_path, 0, "alone")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=120)
    wait_for(tmp_path, 0)
    deadline = time.monotonic() + 120
    while processes_of(tmp_path):
        assert time.monotonic() < deadline, "a witness is left"
        time.sleep(0.01)
