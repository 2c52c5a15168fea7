"""Ranks are killed, and those that are left go on in the same job (ULFM).

Only Open MPI shows it, so `.ci/run` has it and the default run on MPICH skips it. Each case is a
job of its own, since each loses other ranks; what they are held beside is one run in this process,
which differs by the order of sums.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ..sweeps import first
from .mpirun import environment, is_open_mpi, launcher, mpirun, run
from .runs import LIMIT_S, lines, trained_alone, write_files

STEPS, EVERY = 90, 4
SETTINGS = (
    *("model.layers=4", "parallel.pipe=2", "parallel.data=2", "schedule.policy=1f1b"),
    *("schedule.microbatches=2", "data.held_out=0", "run.log_every=1", f"run.steps={STEPS}"),
)
TRAIN = ("-m", "axrt", "train", "tiny.toml", *SETTINGS)
MOST_LOST = 2  # steps, besides the one under way: those since the newest copy that is whole
TEAMS = ("parallel.pipe=1", "parallel.tensor=2", "parallel.tensor_shards=2", "model.heads=2")
GOING_ON = ("run.survive=true", f"checkpoint.every={EVERY}", "run.out=out")


def losses(run: Path) -> dict[int, float]:
    """The losses by step; of a step that ran again the last."""
    return {int(line["step"]): line["loss"] for line in lines(run) if "loss" in line}


def newest(run: Path) -> int:
    return max(losses(run), default=0)


def wait_for(step: int, job: "subprocess.Popen[bytes]", run: Path, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while newest(run) < step:
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def ranks_of(job: "subprocess.Popen[bytes]") -> list[int]:
    """The processes of the ranks, in the order of their ranks: numbers of processes begin again."""
    ranks = psutil.Process(job.pid).children()
    return [one.pid for one in sorted(ranks, key=lambda one: int(one.environ()["PMIX_RANK"]))]


@pytest.fixture(autouse=True)
def needs_open_mpi(tmp_path: Path) -> None:
    if not is_open_mpi():
        pytest.skip("MPICH's mpirun ends all ranks when one is lost")
    write_files(tmp_path)


def run_with_losses(folder: Path, victims: tuple[int, ...], *settings: str) -> str:
    """Train on two replicas of two stages and a spare, and kill ranks on the way. Returns what the
    job has printed."""
    log = folder / "log"
    command = [launcher(), "--with-ft", "ulfm", "-n", "5", sys.executable, *TRAIN, *settings]
    with log.open("wb") as file:
        job = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=file, stderr=subprocess.STDOUT
        )
        for number, victim in enumerate(victims):
            wait_for(15 * (number + 1), job, folder / "out", log)
            os.kill(ranks_of(job)[victim], signal.SIGKILL)
        assert job.wait(timeout=2 * LIMIT_S) == 0, log.read_text()
    return log.read_text()


# The same samples on one rank.
ALONE = ("parallel.pipe=1", "parallel.data=1", "schedule.microbatches=4")


def check_as_quiet(folder: Path, *settings: str, since: int = 0) -> None:
    """Every step has the loss of a quiet run."""
    trained_alone(folder, "quiet", *SETTINGS, *ALONE, *settings)
    found, expected = losses(folder / "out"), losses(folder / "quiet")
    assert sorted(found) == list(range(since + 1, max(expected) + 1))
    assert found == {step: pytest.approx(loss, rel=1e-6) for step, loss in expected.items()}


def test_ranks_that_are_left_go_on_with_the_batch_of_a_quiet_run(tmp_path: Path) -> None:
    """The spare takes the first lost place. After the second loss one replica computes the whole
    batch, and after the fourth one rank does."""
    said = run_with_losses(tmp_path, (1, 0, 1, 0), *GOING_ON)  # the first rank, too
    assert "Left: 4 of the ranks, which go on: ranks in the pipeline: 2, replicas: 2" in said
    assert (
        "Left: 3 of the ranks, which go on: ranks in the pipeline: 2, replicas: 1, spares: 1"
        in said
    )
    assert "Left: 1 of the ranks, which go on: ranks in the pipeline: 1, replicas: 1" in said
    assert "\x1b" not in said, "a log gets plain lines"
    check_as_quiet(tmp_path)


def test_teams_go_on_as_long_as_one_is_whole(tmp_path: Path) -> None:
    """Shares of a stage stay as they are, on one rank at last."""
    said = run_with_losses(tmp_path, (1, 0, 1, 0), *GOING_ON, *TEAMS)
    for left, ranks in ((4, "2, replicas: 2"), (3, "2, replicas: 1, spares: 1"), (1, "1, rep")):
        assert f"Left: {left} of the ranks, which go on: ranks in the pipeline: {ranks}" in said
    check_as_quiet(tmp_path, *TEAMS[2:])


@pytest.mark.parametrize(("zero", "team"), first([(1, ()), (0, TEAMS), (0, ()), (1, TEAMS)]))
def test_the_state_comes_from_memory_and_hardly_a_step_is_lost(
    tmp_path: Path, zero: int, team: tuple[str, ...]
) -> None:
    """Nothing is saved on a disk. A spare takes a lost place; then one replica is left, and that is
    on one host."""
    shm = tmp_path / "shm"
    shm.mkdir()
    kept = ("checkpoint.memory_every=1", f"checkpoint.memory_dir={shm}", "run.host_of=0,0,1,1,0")
    settings = ("run.survive=true", "checkpoint.every=0", "run.out=out", f"memory.zero={zero}")
    said = run_with_losses(tmp_path, (1, 1), *settings, *kept, *team)
    assert said.count("taken from memory: the copies of step") == 2, said
    assert "no copies are kept in memory from here on: " in said
    ran = [line["step"] for line in lines(tmp_path / "out") if "loss" in line]
    assert len(ran) - STEPS <= 2 * MOST_LOST, ran
    check_as_quiet(tmp_path, *team[2:])


def test_a_rank_that_leaves_before_mpi_is_up_is_named(tmp_path: Path) -> None:
    """The library alone would let the others wait. Of two ranks its launcher ends by itself."""
    ranks = [sys.executable, "-m", "tests.mpi.victims", "a_rank_leaves_before_it_begins"]
    command = [launcher(), "--with-ft", "ulfm", "-n", "3", *ranks]
    ended = run(command, LIMIT_S, extra={"AXRT_EXIT_FILE": str(tmp_path / "code")})
    assert ended.code == 69, ended.err
    assert "ends the job: rank 1 ended before MPI was up" in ended.err
    assert (tmp_path / "code").read_text().strip() == "69"


def test_a_rank_that_is_stopped_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    log, settings = tmp_path / "log", (*GOING_ON, "run.patience_s=5")
    command = [launcher(), "--with-ft", "ulfm", "-n", "4", sys.executable, *TRAIN, *settings]
    with log.open("wb") as file:
        job = subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=file, stderr=subprocess.STDOUT
        )
        wait_for(10, job, tmp_path / "out", log)
        os.kill(stopped := ranks_of(job)[2], signal.SIGSTOP)
        assert job.wait(timeout=2 * LIMIT_S) == 0, log.read_text()
    said = log.read_text()
    assert f"rank 2 (process {stopped} on " in said
    assert "has shown no sign of life for run.patience_s: it is killed" in said
    check_as_quiet(tmp_path)


def test_a_spare_that_is_lost_holds_nobody_up(tmp_path: Path) -> None:
    said = run_with_losses(tmp_path, (4,), *GOING_ON)
    assert "axrt: lost:" not in said
    check_as_quiet(tmp_path)


def test_a_job_that_is_asked_to_end_says_how_to_go_on_with_its_spare(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [launcher(), "--with-ft", "ulfm", "-n", "5", sys.executable, *TRAIN, *GOING_ON]
    with log.open("wb") as file:
        job = subprocess.Popen(
            [*command, "run.steps=100000"],
            cwd=tmp_path,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        wait_for(5, job, tmp_path / "out", log)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=2 * LIMIT_S) == 75, log.read_text()
    assert "go on with: mpirun --with-ft ulfm -n 5 axrt train out/config.toml" in log.read_text()


@pytest.mark.parametrize(
    ("setting", "code"),
    first(
        [
            ("run.host_of=0,0,1,1", 2),
            ("run.steps=2", 0),
            ("checkpoint.memory_every=1", 2),
            ("memory.device_gb=0.000001", 2),
        ],
        quick=2,
    ),
)
def test_a_job_with_spares_ends_as_one_without(tmp_path: Path, setting: str, code: int) -> None:
    """A refusal reaches the spares, too."""
    log = tmp_path / "log"
    command = [launcher(), "--with-ft", "ulfm", "-n", "6", sys.executable, *TRAIN, *GOING_ON]
    with log.open("wb") as file:
        job = subprocess.Popen(
            [*command, setting],
            cwd=tmp_path,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        assert job.wait(timeout=2 * LIMIT_S) == code, log.read_text()


def test_where_no_layout_is_left_the_job_ends_as_with_a_lost_rank(tmp_path: Path) -> None:
    rows = ["F0.0,F0.1,B0.0,B0.1", "F1.0,B1.0,F1.1,B1.1"]
    (tmp_path / "order.csv").write_text("\n".join(rows))
    log = tmp_path / "log"
    order = ("schedule.policy=fixed", "schedule.order=order.csv")
    train = [launcher(), "--with-ft", "ulfm", "-n", "2", sys.executable, *TRAIN, *GOING_ON, *order]
    with log.open("wb") as file:
        job = subprocess.Popen(
            [*train, "parallel.data=1"],
            cwd=tmp_path,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        wait_for(5, job, tmp_path / "out", log)
        os.kill(ranks_of(job)[1], signal.SIGKILL)
        assert job.wait(timeout=2 * LIMIT_S) == 69, log.read_text()
    assert "no layout with the same samples in a step fits them" in log.read_text()


COUNTED = """
import sys, weakref
from axrt.engine import Engine
from axrt.models.gpt import gpt

alive, plain = weakref.WeakSet(), Engine.__init__

def noted(self, *given, **named):
    alive.add(self)
    plain(self, *given, **named)

Engine.__init__ = noted

def model(config):
    print(f"engines from before: {len(alive)}", file=sys.stderr)
    return gpt(config)
"""


def test_what_the_job_of_before_has_held_is_let_go_of(tmp_path: Path) -> None:
    """Else a device that is more than half full is too small for the next attempt."""
    (tmp_path / "counted.py").write_text(COUNTED)
    said = run_with_losses(tmp_path, (1, 0), *GOING_ON, "model.factory=counted:model")
    assert said.count("engines from before: 0") > 8, said
    assert "engines from before: 1" not in said


def test_what_the_run_began_from_is_begun_from_again(tmp_path: Path) -> None:
    """There is no checkpoint of its own yet."""
    trained_alone(tmp_path, "base", *SETTINGS, *ALONE, "run.steps=20")
    begins = ("checkpoint.resume=base", "run.steps=60")
    run_with_losses(tmp_path, (1,), *GOING_ON, "checkpoint.every=1000", *begins)
    check_as_quiet(tmp_path, *begins, since=20)


def test_replicas_that_share_go_on_as_long_as_there_are_several(tmp_path: Path) -> None:
    batch = ("schedule.microbatches=4", "schedule.global_batch=8")
    said = run_with_losses(tmp_path, (1, 0), *GOING_ON, *batch, "schedule.share=true")
    assert "replicas: 1" in said
    check_as_quiet(tmp_path, "schedule.microbatches=8")


def test_under_a_launcher_that_ends_all_ranks_it_is_said(tmp_path: Path) -> None:
    ended = mpirun(4, [*TRAIN, *GOING_ON, "run.steps=2"], cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "run.survive: here the job ends when a rank is lost" in ended.err
