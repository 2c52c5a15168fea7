"""The full run in pieces, and what it says at its end."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from . import by_folder
from .shards import read, seconds_of, shards

ROOT = Path(__file__).resolve().parents[1]
NAMES = [
    f"{file}::test_{number}"
    for file, cases in {
        "tests/engine/test_a.py": 900,
        "tests/engine/test_b.py": 60,
        "tests/mpi/test_c.py": 5,
        "tests/scheduler/test_d.py": 700,
        "tests/test_e.py": 3,
        "tests/slurm/test_pretrain.py": 7,
    }.items()
    for number in range(cases)
]


@pytest.mark.parametrize("pieces", [1, 2, 3, 6, 11])
def test_every_case_is_in_exactly_one_piece(pieces: int) -> None:
    found = shards(NAMES, pieces)
    assert len(found) == pieces
    assert sorted(name for piece in found for name in piece) == sorted(NAMES)
    assert found == shards(NAMES, pieces)


def test_pieces_take_about_as_long_and_a_file_that_fits_stays_whole() -> None:
    found = shards(NAMES, 6)
    took_s = [sum(map(seconds_of, piece)) for piece in found]
    whole_s = sum(map(seconds_of, NAMES))
    assert max(took_s) < 1.25 * whole_s / 6
    for file in ("tests/engine/test_b.py", "tests/mpi/test_c.py", "tests/test_e.py"):
        assert sum(any(name.startswith(file) for name in piece) for piece in found) == 1


@pytest.mark.parametrize("text", ["", "3", "0/6", "7/6", "a/b", "1/0"])
def test_what_is_no_piece_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a piece of several, such as 2/6"):
        read(text)


def test_pytest_takes_a_piece() -> None:
    collected = []
    for piece in ("1/2", "2/2"):
        asked = ["--collect-only", "-q", "--shard", piece, __file__]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *asked],
            cwd=ROOT,
            env={**os.environ, "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
        )
        collected.append(set(re.findall(r"^tests/\S+::\S+", ran.stdout, re.MULTILINE)))
    one, other = collected
    assert one
    assert other
    assert not one & other
    assert sum("test_every_case_is_in_exactly_one_piece" in name for name in one | other) == 5


def test_a_run_says_what_it_has_found_in_each_folder() -> None:
    def report(nodeid: str, why: object = "") -> SimpleNamespace:
        return SimpleNamespace(nodeid=nodeid, longrepr=why)

    no_slurm = ("file", 1, "Skipped: no slurmd here")
    stats = {
        "passed": [report("tests/mpi/test_a.py::test_b[x/y]"), report("tests/test_c.py::test_d")],
        "failed": [report("tests/mpi/test_a.py::test_e")],
        "error": [report("tests/mpi/test_a.py::test_f")],
        "skipped": [report("tests/slurm/test_g.py::test_h", no_slurm)] * 2,
    }
    assert by_folder.told(stats) == [
        "tests: 1 passed, 0 failed",
        "tests/mpi: 1 passed, 2 failed",
        "tests/slurm: 0 passed, 0 failed, 2 skipped: 2 since no slurmd here",
    ]
