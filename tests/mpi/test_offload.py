"""`axrt train` with its optimizer's state on a disk, on a job of ranks: killed, gone on with, and
beside the same run without offload."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ..cli.test_train import TINY
from ..sweeps import first
from .mpirun import mpirun
from .test_runs import begin, lines

LAYOUT = (
    "model.layers=3",
    "memory.bucket_mb=0.05",
    "optimizer.clip=0.5",
    "run.log_every=1",
    "checkpoint.every=5",
)


def trained(folder: Path, ranks: int, *overrides: str) -> list[dict[str, Any]]:
    """The lines of metrics of a run of 14 steps."""
    folder.mkdir()
    (folder / "tiny.toml").write_text(TINY)
    (folder / "text.txt").write_text("all work and no play " * 20)
    command = ["-m", "axrt", "train", "tiny.toml", "run.steps=14", *LAYOUT, *overrides]
    ended = mpirun(ranks, command, cwd=folder)
    assert ended.code == 0, ended.err
    return told(folder / "out")


def told(run: Path) -> list[dict[str, Any]]:
    return [
        {key: line[key] for key in ("step", "loss", "grad_norm") if key in line}
        for line in lines(run)
        if "loss" in line
    ]


ALL = (
    *("memory.offload_parameters=true", "memory.gathered=1"),
    *("schedule.policy=breadth-first", "schedule.chunks=2"),
)
TWICE = ("parallel.data=2", "schedule.microbatches=2")


@pytest.mark.parametrize(
    ("weights", "layout", "what"),
    first(
        [
            ("bfloat16", (), ALL),
            ("float32", (), ()),
            ("bfloat16", TWICE, (*ALL, "memory.zero=3", "schedule.chunks=4")),
        ]
    ),
)
def test_a_rank_that_is_killed_leaves_nothing_on_the_disk_and_the_run_goes_on_with_the_same_bits(
    tmp_path: Path, weights: str, layout: tuple[str, ...], what: tuple[str, ...]
) -> None:
    """State is on the disk, or all that a rank has."""
    precision = (f"precision.weights={weights}", "precision.gradients=weights", *layout)
    plain = trained(tmp_path / "plain", 2, *precision)
    scratch, killed = tmp_path / "scratch", tmp_path / "killed"
    scratch.mkdir()
    killed.mkdir()
    offload = (*precision, "memory.offload=stream", f"memory.scratch=disk:{scratch}", *what)
    quiet = trained(tmp_path / "quiet", 2, *offload)
    assert quiet == plain
    job = begin(killed, 2, *LAYOUT, *offload)
    open_files = [file for rank in ranks_of(job.pid) for file in files_in(scratch, rank)]
    assert len(open_files) == 2, "each rank has one file, which has no name"
    os.kill(ranks_of(job.pid)[0], signal.SIGKILL)
    job.communicate(timeout=60)
    assert not list(scratch.iterdir())
    more = ("checkpoint.resume=auto", "run.steps=14")
    ended = mpirun(2, ["-m", "axrt", "train", "out/config.toml", *more], cwd=killed)
    assert ended.code == 0, ended.err
    by_step = {line["step"]: line for line in told(killed / "out")}
    assert [by_step[line["step"]] for line in plain] == plain


@pytest.mark.parametrize(
    ("policy", "rooms"),
    first([("gpipe", 3), ("adaptive schedule.max_held=6", 4)]),
)
def test_activations_on_a_disk_have_the_same_bits_also_when_a_rank_was_killed(
    tmp_path: Path, policy: str, rooms: int
) -> None:
    schedule = f"schedule.policy={policy}".split()
    layout = (*LAYOUT, "model.layers=4", "schedule.microbatches=8", *schedule)
    plain = trained(tmp_path / "plain", 2, *layout)
    scratch, killed = tmp_path / "scratch", tmp_path / "killed"
    scratch.mkdir()
    killed.mkdir()
    disk = f"memory.scratch=disk:{scratch}"
    offload = (*layout, disk, f"memory.offload_activations={rooms}")
    assert trained(tmp_path / "quiet", 2, *offload) == plain
    job = begin(killed, 2, *offload)
    open_files = [file for rank in ranks_of(job.pid) for file in files_in(scratch, rank)]
    assert len(open_files) == 2, "each rank has one file, which has no name"
    os.kill(ranks_of(job.pid)[0], signal.SIGKILL)
    job.communicate(timeout=60)
    assert not list(scratch.iterdir())
    more = ("checkpoint.resume=auto", "run.steps=14")
    ended = mpirun(2, ["-m", "axrt", "train", "out/config.toml", *more], cwd=killed)
    assert ended.code == 0, ended.err
    by_step = {line["step"]: line for line in told(killed / "out")}
    assert [by_step[line["step"]] for line in plain] == plain


def ranks_of(launcher: int) -> list[int]:
    """The processes of Python under a launcher."""
    found = []
    for child in children_of(launcher):
        command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        is_rank = b"axrt" in command and b"python" in Path(command[0].decode()).name.encode()
        found += [child] if is_rank else []
        found += ranks_of(child)
    return found


def children_of(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task")
    return [
        int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()
    ]


def files_in(directory: Path, process: int) -> list[str]:
    """Open files of a process that are in a directory and have no name."""
    links = Path(f"/proc/{process}/fd")
    targets = [os.readlink(link) for link in links.iterdir() if link.is_symlink()]
    return [target for target in targets if str(directory) in target and "(deleted)" in target]
