"""A short form of `python -m tests.attacks.saves`, which kills 200 times. Nothing else kills a save
between two system calls."""

import subprocess
import sys

import pytest

from ..mpi.mpirun import ROOT
from ..sweeps import fewer
from .saves import can_trace


@pytest.mark.skipif(not can_trace(), reason="wants strace, and the right to trace")
@pytest.mark.parametrize("beside", [False, True], ids=["waited for", "beside training"])
def test_a_kill_at_any_system_call_of_a_save_loses_nothing_that_was_saved(beside: bool) -> None:
    """In a process of its own: it forks, and a child of a process that has started MPI may find a
    lock of the library's taken for ever."""
    kills = str(fewer(25, 8))
    command = [sys.executable, "-m", "tests.attacks.saves", "--kills", kills, "--seed", "3"]
    done = subprocess.run(
        [*command, *["--beside"] * beside],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,  # a hang; it takes ten seconds
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{kills} kills at system calls of a save, " in done.stdout
