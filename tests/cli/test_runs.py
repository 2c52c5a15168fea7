"""`axrt runs`: which runs there are, how far they are, and who is at work."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axrt.checkpoint.lock import DirectoryLock
from axrt.cli import main

from .test_train import axrt, in_a_directory

__all__ = ["in_a_directory"]  # a fixture


def runs(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["runs", *arguments])


def rows(*arguments: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in runs(*arguments, "--json").output.splitlines()]


def test_each_run_has_its_step_loss_and_state() -> None:
    assert axrt("tiny.toml", "run.steps=2", "run.out=all/one").exit_code == 0
    assert axrt("tiny.toml", "run.steps=3", "run.out=all/deep/two").exit_code == 0
    (Path("all") / "no run").mkdir()
    cut = Path("all/one/metrics.jsonl")
    cut.write_bytes(cut.read_bytes() + b'{"step": 9')  # as a killed process leaves it
    os.utime(cut, (1, 1))
    two, one = rows("all")
    assert (two["path"], two["step"], two["of"], two["state"]) == ("all/deep/two", 3, 3, "done")
    assert (one["path"], one["step"], one["state"]) == ("all/one", 2, "done")
    last = [
        json.loads(line) for line in Path("all/deep/two/metrics.jsonl").read_text().splitlines()
    ]
    assert two["loss"] == [line["loss"] for line in last if "loss" in line][-1]
    assert isinstance(two["validation"], float)
    shown = runs("all").output.splitlines()
    assert len(shown) == 3
    assert "all/deep/two" in shown[1]
    config = Path("all/one/config.toml")
    config.write_text(config.read_text().replace("steps = 2", "steps = 20"))
    assert rows("all")[1]["state"] == "ended early"


def test_a_run_that_is_under_way_names_its_process() -> None:
    assert axrt("tiny.toml", "run.steps=1", "run.out=out").exit_code == 0
    lock = DirectoryLock(Path("out"))
    assert str(rows("out")[0]["state"]).endswith(f"process {os.getpid()}")
    lock.release()
    assert rows("out")[0]["state"] == "done"
    gone = multiprocessing.get_context("spawn").Process(target=print)
    gone.start()
    gone.join()
    said = {"host": os.uname().nodename, "pid": gone.pid, "started": 1.0}
    Path("out/.lock").write_text(json.dumps(said))
    assert rows("out")[0]["state"] == "done"


def test_a_run_takes_one_row_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    longest = "node-17, process 4194303"  # the greatest that Linux gives a process
    monkeypatch.setattr("axrt.cli.runs.holder_of", lambda _: longest)
    assert axrt("tiny.toml", "run.steps=1", "run.out=runs/quickstart").exit_code == 0
    heading, row = runs("runs").output.splitlines()
    assert "runs on node-17:4194303" in row
    assert row.endswith("runs/quickstart")
    assert heading.split() == ["step", "loss", "validated", "state", "written", "(UTC)", "run"]


def test_nothing_there_is_said(tmp_path: Path) -> None:
    assert runs(str(tmp_path)).output == f"no run in {tmp_path}\n"
    none = runs(str(tmp_path / "none"))
    assert none.exit_code == 2
    assert "is no directory; expected one with runs" in none.output
