"""`axrt train` with steps on the host, on a job of ranks: killed, gone on with on another route,
and beside the same run without offload."""

import os
import signal
from pathlib import Path

import pytest

from ..sweeps import first
from .mpirun import mpirun
from .test_offload import LAYOUT, ranks_of, told, trained
from .test_runs import begin


@pytest.mark.parametrize(
    ("weights", "saved", "route"),
    first(
        [("bfloat16", "cpu", "stream"), ("float32", "hybrid", "cpu"), ("float32", "auto", "none")],
        full=2,
    ),
)
def test_a_run_that_is_killed_goes_on_with_the_same_bits_on_any_route(
    tmp_path: Path, weights: str, saved: str, route: str
) -> None:
    precision = (f"precision.weights={weights}", "precision.gradients=weights")
    plain = trained(tmp_path / "plain", 2, *precision)
    on_host = (*precision, f"memory.offload={saved}")
    assert trained(tmp_path / "quiet", 2, *on_host) == plain
    killed = tmp_path / "killed"
    killed.mkdir()
    job = begin(killed, 2, *LAYOUT, *on_host)
    os.kill(ranks_of(job.pid)[0], signal.SIGKILL)
    job.communicate(timeout=60)
    more = ("checkpoint.resume=auto", "run.steps=14", f"memory.offload={route}")
    ended = mpirun(2, ["-m", "axrt", "train", "out/config.toml", *more], cwd=killed)
    assert ended.code == 0, ended.err
    by_step = {line["step"]: line for line in told(killed / "out")}
    assert [by_step[line["step"]] for line in plain] == plain
