"""What `axrt launch` refuses before it starts anything, and what it goes on with."""

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from axrt.cli import main
from axrt.observe.json_lines import objects_in
from axrt.restarts import process
from axrt.restarts.history import LAUNCH, History
from axrt.restarts.hosts import read_hosts
from axrt.restarts.launcher import Command
from axrt.restarts.supervisor import Supervisor

from ..cli.test_train import TINY
from ..mpi.mpirun import launcher
from .test_decision import start

TRAIN = ("-n", "2", "axrt", "train", "tiny.toml")


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    Path("hosts").write_text("first:1\nsecond:1\n")


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["launch", *arguments])
    assert result.exit_code == 2, result.output
    assert "start 1" not in result.output
    return result.output


def test_settings_that_do_not_go_together_are_refused() -> None:
    mpirun = launcher()
    assert "--spares 1 without --hosts" in refused("--spares", "1", "--", mpirun, *TRAIN)
    said = refused("--hosts", "hosts", "--", mpirun, "-host", "a", *TRAIN)
    assert "-host of the launcher; expected one of them" in said
    assert "expected one, or --run DIR" in refused("--", mpirun, "-n", "2", "python", "my.py")
    assert "without a number of ranks" in refused("--hosts", "hosts", "--", mpirun, *TRAIN[2:])
    assert "how that takes hosts is not known" in refused("--hosts", "hosts", "--", *TRAIN[2:])
    assert "did you mean" in refused("--", mpirun, *TRAIN, "run.stepz=3")


def test_going_back_at_every_start_is_refused() -> None:
    Path("out/checkpoints/step-00000003").mkdir(parents=True)
    resume = "checkpoint.resume=out/checkpoints/step-00000003"
    assert "axrt launch would do that at every start" in refused("--", launcher(), *TRAIN, resume)


def test_a_place_that_is_no_directory_is_refused() -> None:
    Path("file").touch()
    assert "file is no directory" in refused("--", launcher(), *TRAIN, "run.out=file")
    said = refused("--", launcher(), *TRAIN, "run.out=file/below")
    assert "expected a place for the run that can be written to" in said


def test_a_second_launch_of_a_run_is_refused() -> None:
    with Path(".out.launch").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = refused("--", launcher(), *TRAIN)
    assert "another axrt launch starts out" in said


def test_a_signal_before_there_is_a_job_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Supervisor._placed

    def placed(of: Supervisor) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(of)

    monkeypatch.setattr(Supervisor, "_placed", placed)
    monkeypatch.setattr(process, "_LEAVES_S", 1.0)
    began = time.monotonic()
    supervisor = Supervisor(Command.of(["sleep", "30"]), 5, None, 0, Path("out"))
    supervisor.until_done()
    assert time.monotonic() - began < 10


def test_a_host_file_that_is_no_text_is_refused() -> None:
    Path("hosts").write_bytes(b"\xff\xfe bad")
    assert "hosts: no text" in refused("--hosts", "hosts", "--", launcher(), *TRAIN)


def test_starts_are_kept_until_the_run_has_a_directory() -> None:
    history = History(Path("out"))
    history.add(start(137))
    Path("out").mkdir()
    history.add(start(0, 0, gained=3))
    with Path("out/launches.jsonl").open("a") as file:
        file.write('{"torn')
    found = list(objects_in(Path("out/launches.jsonl"), LAUNCH, pytest.fail))
    assert [(one["code"], one["gained"]) for one in found] == [(137, 0), (0, 3)]
    assert len(read_hosts(Path("hosts"))) == 2
