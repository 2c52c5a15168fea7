"""`axrt train` with its optimizer's state in shards over replicas: killed, gone on with in other
layouts, and beside the same run without shards."""

import os
import signal
from pathlib import Path

import pytest

from .mpirun import mpirun
from .test_offload import LAYOUT, ranks_of, told, trained
from .test_runs import begin

REPLICAS = ("parallel.data=2", "precision.weights=bfloat16", "precision.gradients=weights")


# Stages come and go, and their weights are so large that they land where layers read them.
BY_STAGE = ("model.width=128", "schedule.policy=breadth-first", "schedule.chunks=2")
NOT_SHARED = ("memory.zero=0", "memory.reductions=0")
# Four replicas in groups of two, whose shards land where gradients are.
IN_GROUPS = ("model.width=128", "parallel.data=4", "parallel.group=2")


@pytest.mark.parametrize(
    ("shared", "both", "whole"),
    [
        (("memory.zero=1",), (), NOT_SHARED),
        (("memory.zero=3", "memory.reductions=1", "memory.gathered=1"), BY_STAGE, NOT_SHARED),
        (("memory.zero=2", "memory.shard=2"), IN_GROUPS, (*NOT_SHARED, "memory.shard=0")),
    ],
)
def test_a_run_with_shards_has_the_lines_of_one_without_also_when_a_rank_was_killed(
    shared: tuple[str, ...],
    both: tuple[str, ...],
    whole: tuple[str, ...],
    tmp_path: Path,
) -> None:
    plain = trained(tmp_path / "plain", 4, *REPLICAS, *both)
    killed = tmp_path / "killed"
    killed.mkdir()
    job = begin(killed, 4, *LAYOUT, *REPLICAS, *both, *shared)
    os.kill(ranks_of(job.pid)[2], signal.SIGKILL)
    job.communicate(timeout=60)
    for overrides in (("run.steps=12",), ("run.steps=14", *whole)):
        command = ["-m", "axrt", "train", "out/config.toml", "checkpoint.resume=auto", *overrides]
        ended = mpirun(4, command, cwd=killed)
        assert ended.code == 0, ended.err
    by_step = {line["step"]: line for line in told(killed / "out")}
    assert [by_step[line["step"]] for line in plain] == plain
