"""`axrt launch`: a job that is killed goes on by itself, and one that cannot work does not."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..cli.test_train import TINY
from ..engine.models import perceptron
from ..engine.reference import adamw, random_batches, train_in_plain_torch
from .mpirun import ROOT, environment, is_open_mpi, launcher, mpirun
from .runs import lines, told

STEPS, EVERY = 40, 5
TRAIN = ("-m", "axrt", "train", "tiny.toml", f"run.steps={STEPS}", f"checkpoint.every={EVERY}")
# So wide that a step takes long beside the time in which a test sees it and kills.
SETTINGS = ("run.log_every=1", "run.eval_every=0", "model.width=256")


@pytest.fixture(autouse=True)
def a_model(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 20)


class Launch:
    """`axrt launch` with some arguments, in a directory."""

    def __init__(self, folder: Path, *arguments: str, **extra: str) -> None:
        self._folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "axrt", "launch", *arguments],
            cwd=folder,
            env=environment(extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while max((line["step"] for line in lines(self._folder / "out")), default=0) < step:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the run does not get there"
            time.sleep(0.02)

    def ranks(self) -> dict[int, int]:
        """The processes of ranks, by their number."""
        return self.ranks_in(self._folder)

    @staticmethod
    def ranks_in(where: Path) -> dict[int, int]:
        """The processes of ranks in a directory, by their number; their witnesses come after
        them."""
        found: dict[int, int] = {}
        for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda one: int(one.name)):
            try:
                variables = folder.joinpath("environ").read_bytes().split(b"\0")
                command = folder.joinpath("cmdline").read_bytes()
                here = os.readlink(folder / "cwd")
            except OSError:
                continue
            of = dict(one.split(b"=", 1) for one in variables if b"=" in one)
            number = of.get(b"PMI_RANK", of.get(b"PMIX_RANK"))
            if number is not None and b"tiny.toml" in command and here == str(where):
                found.setdefault(int(number), int(folder.name))
        return found

    def lose(self, rank: int) -> None:
        """Kill a rank, and wait until the start that it was in is told as ended."""
        before = len(starts(self._folder))
        os.kill(self.ranks()[rank], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while len(starts(self._folder)) == before:
            assert time.monotonic() < deadline, "a job that has lost a rank goes on"
            time.sleep(0.02)

    def end(self, timeout_s: float = 300) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, err


def starts(folder: Path) -> list[dict[str, Any]]:
    """What is told of the starts that have ended."""
    file = folder / "out" / "launches.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def same_as_in_peace(folder: Path, steps: int = STEPS, *more: str) -> None:
    """Every step is that of the same run in peace; a step that was run again counts once."""
    settings = (*SETTINGS, f"run.steps={steps}", "run.out=quiet", *more)
    ended = mpirun(2, [*TRAIN, *settings], cwd=folder)
    assert ended.code == 0, ended.err
    by_step = {line["step"]: line for line in told(folder / "out")}
    expected = told(folder / "quiet")
    assert len(expected) == steps
    assert [by_step[line["step"]] for line in expected] == expected


def test_ranks_that_are_killed_change_no_bit_of_the_run(tmp_path: Path) -> None:
    job = Launch(tmp_path, "--", launcher(), "-n", "2", sys.executable, *TRAIN, *SETTINGS)
    for step, rank in ((EVERY + 2, 0), (3 * EVERY + 2, 1)):
        job.wait_for_step(step)
        job.lose(rank)
    job.wait_for_step(5 * EVERY + 2)
    (mpirun_itself,) = psutil.Process(job.process.pid).children()
    mpirun_itself.kill()
    code, err = job.end()
    assert code == 0, err
    found = starts(tmp_path)
    assert len(found) == 4, err
    assert found[2]["lost"] == [], "no host is to blame for a launcher that was killed"
    assert all(start["gained"] >= EVERY for start in found)
    assert [start["step"] + start["gained"] for start in found[:3]] == [
        start["step"] for start in found[1:]
    ]
    same_as_in_peace(tmp_path)


def test_a_run_that_begins_from_another_does_so_at_every_start_until_it_has_saved(
    tmp_path: Path,
) -> None:
    never, more = "checkpoint.every=1000", "run.steps=60"
    begins = (*SETTINGS, never, more, "checkpoint.resume=base")
    assert mpirun(2, [*TRAIN, *SETTINGS, "run.out=base"], cwd=tmp_path).code == 0
    assert mpirun(2, [*TRAIN, *begins, "run.out=quiet"], cwd=tmp_path).code == 0
    job = Launch(tmp_path, "--", launcher(), "-n", "2", sys.executable, *TRAIN, *begins)
    job.wait_for_step(STEPS + 2)
    os.kill(job.ranks()[1], signal.SIGKILL)
    code, err = job.end()
    assert code == 0, err
    assert len(starts(tmp_path)) == 2
    by_step = {line["step"]: line for line in told(tmp_path / "out")}
    expected = told(tmp_path / "quiet")
    assert [line["step"] for line in expected] == list(range(STEPS + 1, 61))
    assert [by_step[line["step"]] for line in expected] == expected


def test_a_run_that_was_moved_goes_on_where_it_is(tmp_path: Path) -> None:
    assert mpirun(2, [*TRAIN, *SETTINGS], cwd=tmp_path).code == 0
    (tmp_path / "out").rename(tmp_path / "moved")
    train = ("-m", "axrt", "train", "moved/config.toml", "run.steps=45")
    code, err = Launch(tmp_path, "--", launcher(), "-n", "2", sys.executable, *train).end()
    assert code == 0, err
    (start,) = (tmp_path / "moved/launches.jsonl").read_text().splitlines()
    assert (json.loads(start)["step"], json.loads(start)["gained"]) == (STEPS, 5)
    assert not (tmp_path / "out").exists()


def test_what_cannot_work_is_started_once(tmp_path: Path) -> None:
    command = (launcher(), "-n", "2", sys.executable, *TRAIN, "model.heads=3", "model.width=8")
    code, err = Launch(tmp_path, "--", *command).end()
    assert code == 2, err
    assert err.count("axrt launch: start") <= 1
    assert "axrt launch: start 2" not in err


def test_a_job_that_gains_nothing_is_given_up_with_a_report(tmp_path: Path) -> None:
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    began = time.monotonic()
    code, err = Launch(tmp_path, "--run", "out", "--", sys.executable, "-c", dies).end()
    assert code == 69, err
    assert time.monotonic() - began > 3, "pauses grow: 1 and 2 s"
    assert "3 starts in a row have gained no step. All starts:" in err
    assert err.count("from step 0: 0 steps in") == 3


def test_a_signal_saves_and_ends_the_job_and_the_same_command_goes_on(tmp_path: Path) -> None:
    steps = 5 * STEPS  # so many that it comes before the end
    rarely = "checkpoint.every=50"
    train = (sys.executable, *TRAIN, *SETTINGS, f"run.steps={steps}", rarely)
    command = ("--", launcher(), "-n", "2", *train)
    job = Launch(tmp_path, *command)
    job.wait_for_step(EVERY + 2)
    job.process.send_signal(signal.SIGINT)
    code, err = job.end()
    assert code == 75, err
    assert "it was asked to end. All starts:" in err
    code, err = Launch(tmp_path, *command).end()
    assert code == 0, err
    assert starts(tmp_path)[1]["step"] >= EVERY + 2
    same_as_in_peace(tmp_path, steps, rarely)


# `tiny.toml` is in its command, by which ranks are found here.
OWN = """
import time
import axrt
from tests.engine.models import perceptron
from tests.engine.reference import adamw, configured, random_batches

with axrt.initialize(perceptron(), adamw, config=configured(4)) as engine:
    engine.load_checkpoint("out", missing_ok=True)
    while engine.step < STEPS:
        number = engine.step
        batches = random_batches((6, 16), classes=5, microbatches=4)(number)
        loss = engine.train_batch(iter(batches)).loss
        time.sleep(0.02)
        if engine.is_main:
            with open("losses", "a") as file:
                print(number, loss, file=file)
        engine.save_checkpoint(f"out/step-{engine.step}")
""".replace("STEPS", str(STEPS))


def test_a_script_of_ones_own_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    command = (launcher(), "-n", "2", sys.executable, "own.py", "tiny.toml")
    job = Launch(tmp_path, "--run", "out", "--", *command, PYTHONPATH=str(ROOT))
    log = tmp_path / "losses"
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < STEPS // 2:
        assert time.monotonic() < deadline, job.process.poll()
        time.sleep(0.02)
    os.kill(job.ranks()[1], signal.SIGKILL)
    code, err = job.end()
    assert code == 0, err
    assert len(starts(tmp_path)) == 2, err
    losses = dict(line.split() for line in log.read_text().splitlines())
    whole = train_in_plain_torch(perceptron(), random_batches((6, 16), 5, 4), STEPS, adamw)
    assert [float(losses[str(step)]) for step in range(STEPS)] == whole.losses


@pytest.mark.skipif(is_open_mpi(), reason="Hydra alone starts ranks of any host here (fork)")
def test_a_host_that_fails_twice_is_left_out_and_the_batch_stays(tmp_path: Path) -> None:
    """Two replicas on hosts of one slot. The second host fails twice, and no other is left; the
    host file is torn by then."""
    (tmp_path / "hosts").write_text("first:1\nsecond:1\n")
    job = Launch(
        tmp_path,
        *("--hosts", "hosts", "--", launcher(), "-n", "2", sys.executable, *TRAIN, *SETTINGS),
        *("parallel.data=2", "schedule.microbatches=2"),
        HYDRA_LAUNCHER="fork",
    )
    for step in (EVERY + 2, 3 * EVERY + 2):
        job.wait_for_step(step)
        if step > 2 * EVERY:
            (tmp_path / "hosts").write_bytes(b"\xff")
        ranks = job.ranks()
        # Rank 0 ends at once when rank 1 has gone, and on a busy machine its witness may be the
        # first to run.
        witnesses = psutil.Process(ranks[0]).children()
        for witness in witnesses:
            witness.suspend()
        os.kill(ranks[1], signal.SIGKILL)
        time.sleep(2)
        for witness in witnesses:
            with suppress(psutil.Error):
                witness.kill()
    code, err = job.end()
    assert code == 0, err
    assert "hosts: no text" in err
    found = starts(tmp_path)
    assert [(start["ranks"], start["hosts"]) for start in found] == [
        (2, ["first", "second"]),
        (2, ["first", "second"]),
        (1, ["first"]),
    ], err
    assert found[-1]["settings"][1:] == [
        "parallel.pipe=1",
        "parallel.data=1",
        "schedule.microbatches=4",
    ]
    assert "A step has the same samples, at 0.50 of the speed" in err
