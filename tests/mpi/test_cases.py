"""Every case under mpirun, one job a world size."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from . import cases
from .mpirun import mpirun

SIZES = (1, 2, 3, 4)


@cache
def results_of(size: int) -> dict[str, str]:
    """What each case said on a job of so many ranks: nothing where it holds."""
    out = Path(mkdtemp()) / "results.json"
    ended = mpirun(size, ["-m", "tests.mpi.runner", str(out)], timeout_s=180)
    results: dict[str, str] = json.loads(out.read_text()) if out.exists() else {}
    for failed in out.parent.glob("*.failed"):
        results[failed.suffixes[-2].lstrip(".")] = failed.read_text()
    return results if ended.code == 0 or any(results.values()) else {**results, "job": f"code {ended.code}\n{ended.err}"}


@pytest.mark.parametrize(("size", "case"), [(size, name) for size in SIZES for name in cases.names(size)])
def test_holds_under_mpirun(size: int, case: str) -> None:
    results = results_of(size)
    assert results.get(case, results.get("job", "did not run: an earlier case ended the job")) == ""
