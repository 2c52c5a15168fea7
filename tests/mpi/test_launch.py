"""`axrt launch`: a job that is killed goes on by itself, and one that cannot work does not.

Nothing else starts a launcher again after a real death, passes a signal on to it, or leaves a host
out. One run is killed twice, asked to end, and goes on; the other starts have one rank where ranks
do not matter.
"""

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

from ..engine.models import perceptron
from ..engine.reference import adamw, random_batches, train_in_plain_torch
from ..sweeps import is_full
from .mpirun import ROOT, environment, is_open_mpi, launcher
from .runs import LIMIT_S, last_told, newest, trained_alone, write_files

STEPS, EVERY = 60, 5
TRAIN = ("-m", "axrt", "train", "tiny.toml", f"run.steps={STEPS}", f"checkpoint.every={EVERY}")
SETTINGS = ("run.log_every=1", "run.eval_every=0")
# Steps of a tenth of a second, so that a test sees one and kills long before the last.
SLOW = """
import time
from axrt import PipelineModule
from axrt.model import cross_entropy
from axrt.models.gpt import gpt

def slowly(outputs, targets):
    time.sleep(0.05)
    return cross_entropy(outputs, targets)

def model(config):
    whole = gpt(config)
    return PipelineModule(whole.layers, slowly, tensor=whole.tensor)
"""
SLOWLY = (*SETTINGS, "model.factory=slow:model")
MPIRUN_ONE, MPIRUN_TWO = ((launcher(), "-n", ranks, sys.executable) for ranks in "12")
# Where a job of MPICH's has lost one rank of two is shown below, and in test_memory.py.
MPIRUN_FEW = MPIRUN_TWO if is_full() or is_open_mpi() else MPIRUN_ONE


@pytest.fixture(autouse=True)
def a_model(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)


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
        deadline = time.monotonic() + LIMIT_S
        while newest(self._folder / "out") < step:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "the run does not get there"
            time.sleep(0.02)

    def ranks(self) -> dict[int, int]:
        """The processes of ranks, by their number."""
        return self.ranks_in(self._folder)

    @staticmethod
    def ranks_in(where: Path) -> dict[int, int]:
        """The processes of ranks in a directory, by their number. A rank's witness is a copy of it
        that starts later; its number may be lower, since numbers of processes begin again."""
        found: list[tuple[int, int, int]] = []  # of each the start, the rank, the process
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = folder.joinpath("environ").read_bytes().split(b"\0")
                command = folder.joinpath("cmdline").read_bytes()
                here = os.readlink(folder / "cwd")
                _, _, rest = folder.joinpath("stat").read_text().rpartition(")")
            except OSError:
                continue
            of = dict(one.split(b"=", 1) for one in variables if b"=" in one)
            number = of.get(b"PMI_RANK", of.get(b"PMIX_RANK"))
            if number is not None and b"tiny.toml" in command and here == str(where):
                found.append((int(rest.split()[19]), int(number), int(folder.name)))
        return {rank: process for _, rank, process in sorted(found, reverse=True)}

    def lose(self, rank: int) -> None:
        """Kill a rank, and wait until the start that it was in is told as ended."""
        before = len(starts(self._folder))
        os.kill(self.ranks()[rank], signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while len(starts(self._folder)) == before:
            assert time.monotonic() < deadline, "a job that has lost a rank goes on"
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=2 * LIMIT_S)
        return self.process.returncode, err


def starts(folder: Path) -> list[dict[str, Any]]:
    """What is told of the starts that have ended."""
    file = folder / "out" / "launches.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def same_as_in_peace(folder: Path, *settings: str) -> None:
    """Every step is that of the same run in peace, on one rank; of one that ran again the last."""
    expected = trained_alone(folder, "quiet", *settings)
    found = last_told(folder / "out")
    assert [found[line["step"]] for line in expected] == expected


def test_a_run_that_is_killed_and_asked_to_end_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """A rank is killed, then the launcher itself; then a signal saves and ends the job, and the
    same command goes on."""
    command = ("--", *MPIRUN_FEW, *TRAIN, *SLOWLY)
    job = Launch(tmp_path, *command)
    job.wait_for_step(EVERY + 2)
    job.lose(0)
    job.wait_for_step(3 * EVERY + 2)
    (mpirun_itself,) = psutil.Process(job.process.pid).children()
    mpirun_itself.kill()
    job.wait_for_step(5 * EVERY + 2)
    job.process.send_signal(signal.SIGINT)
    code, err = job.end()
    assert code == 75, err
    assert "it was asked to end. All starts:" in err
    code, err = Launch(tmp_path, *command).end()
    assert code == 0, err
    found = starts(tmp_path)
    assert len(found) == 4, err
    assert found[1]["lost"] == [], "no host is to blame for a launcher that was killed"
    assert all(start["gained"] >= EVERY for start in found)
    assert found[3]["step"] >= 5 * EVERY + 2, "a signal saves"
    assert [start["step"] + start["gained"] for start in found[:3]] == [
        start["step"] for start in found[1:]
    ]
    assert sorted(last_told(tmp_path / "out")) == list(range(1, STEPS + 1))
    same_as_in_peace(tmp_path, *SETTINGS, f"run.steps={STEPS}")


def test_a_run_that_begins_from_another_does_so_at_every_start_until_it_has_saved(
    tmp_path: Path,
) -> None:
    short, long = "run.steps=10", "run.steps=40"
    trained_alone(tmp_path, "base", *SETTINGS, short)
    begins = ("checkpoint.resume=base", "checkpoint.every=1000", long)
    job = Launch(tmp_path, "--", *MPIRUN_ONE, *TRAIN, *SLOWLY, *begins)
    job.wait_for_step(12)
    os.kill(job.ranks()[0], signal.SIGKILL)
    code, err = job.end()
    assert code == 0, err
    assert len(starts(tmp_path)) == 2
    same_as_in_peace(tmp_path, *SETTINGS, *begins)
    assert sorted(last_told(tmp_path / "out")) == list(range(11, 41))


def test_a_run_that_was_moved_goes_on_where_it_is(tmp_path: Path) -> None:
    trained_alone(tmp_path, "out", *SETTINGS, "run.steps=10")
    (tmp_path / "out").rename(tmp_path / "moved")
    train = ("-m", "axrt", "train", "moved/config.toml", "run.steps=15")
    code, err = Launch(tmp_path, "--", *MPIRUN_ONE, *train).end()
    assert code == 0, err
    (start,) = (tmp_path / "moved/launches.jsonl").read_text().splitlines()
    assert (json.loads(start)["step"], json.loads(start)["gained"]) == (10, 5)
    assert not (tmp_path / "out").exists()


def test_what_cannot_work_is_started_once(tmp_path: Path) -> None:
    command = (*MPIRUN_FEW, *TRAIN, "model.heads=3", "model.width=8")
    code, err = Launch(tmp_path, "--", *command).end()
    assert code == 2, err
    assert err.count("axrt launch: start") <= 1
    assert "axrt launch: start 2" not in err


def test_a_job_that_gains_nothing_is_given_up_with_a_report(tmp_path: Path) -> None:
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    began = time.monotonic()
    code, err = Launch(tmp_path, "--run", "out", "--", sys.executable, "-c", dies).end()
    assert code == 69, err
    assert time.monotonic() - began > 3, "pauses grow: 1 and 2 s, on any machine"
    assert "3 starts in a row have gained no step. All starts:" in err
    assert err.count("from step 0: 0 steps in") == 3


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
        time.sleep(0.2)
        if engine.is_main:
            with open("losses", "a") as file:
                print(number, loss, file=file)
        engine.save_checkpoint(f"out/step-{engine.step}")
""".replace("STEPS", "20")


def test_a_script_of_ones_own_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    command = (*MPIRUN_ONE, "own.py", "tiny.toml")
    job = Launch(tmp_path, "--run", "out", "--", *command, PYTHONPATH=str(ROOT))
    log = tmp_path / "losses"
    deadline = time.monotonic() + LIMIT_S
    while not log.exists() or len(log.read_text().splitlines()) < 10:
        assert time.monotonic() < deadline, job.process.poll()
        time.sleep(0.02)
    os.kill(job.ranks()[0], signal.SIGKILL)
    code, err = job.end()
    assert code == 0, err
    assert len(starts(tmp_path)) == 2, err
    losses = dict(line.split() for line in log.read_text().splitlines())
    whole = train_in_plain_torch(perceptron(), random_batches((6, 16), 5, 4), 20, adamw)
    assert [float(losses[str(step)]) for step in range(20)] == whole.losses


@pytest.mark.skipif(is_open_mpi(), reason="Hydra alone starts ranks of any host here (fork)")
def test_a_host_that_fails_twice_is_left_out_and_the_batch_stays(tmp_path: Path) -> None:
    """Two replicas on hosts of one slot. The second host fails twice, and no other is left; the
    host file is torn by then."""
    (tmp_path / "hosts").write_text("first:1\nsecond:1\n")
    job = Launch(
        tmp_path,
        *("--hosts", "hosts", "--", *MPIRUN_TWO, *TRAIN, *SLOWLY),
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
