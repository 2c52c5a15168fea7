"""`axrt train` with its optimizer's state in shards over replicas: killed, gone on with in other
layouts, and beside the same run without shards."""

import os
import signal
from pathlib import Path

from .mpirun import mpirun
from .test_offload import LAYOUT, ranks_of, told, trained
from .test_runs import begin

REPLICAS = ("parallel.data=2", "precision.weights=bfloat16", "precision.gradients=weights")


def test_a_run_with_shards_has_the_lines_of_one_without_also_when_a_rank_was_killed(
    tmp_path: Path,
) -> None:
    plain = trained(tmp_path / "plain", 4, *REPLICAS)
    killed = tmp_path / "killed"
    killed.mkdir()
    job = begin(killed, 4, *LAYOUT, *REPLICAS, "memory.zero=1")
    os.kill(ranks_of(job.pid)[2], signal.SIGKILL)
    job.communicate(timeout=60)
    for overrides in (("run.steps=12",), ("run.steps=14", "memory.zero=0")):
        command = ["-m", "axrt", "train", "out/config.toml", "checkpoint.resume=auto", *overrides]
        ended = mpirun(4, command, cwd=killed)
        assert ended.code == 0, ended.err
    by_step = {line["step"]: line for line in told(killed / "out")}
    assert [by_step[line["step"]] for line in plain] == plain
