"""`axrt watch`: how far a run is, from its files."""

import subprocess
import sys
import time
from pathlib import Path

from click.testing import CliRunner, Result

from axrt.cli import main

from .test_train import axrt, environment, in_a_directory, lines

__all__ = ["in_a_directory"]  # a fixture


def watch(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["watch", *arguments])


def test_a_run_that_has_ended_is_told_in_a_line() -> None:
    assert axrt("tiny.toml").exit_code == 0
    last = lines("out")[-2]
    said = watch("out", "--once").output
    assert said.startswith(f"out: step 4 of 4, done. loss {last['loss']:.3f}  lr 0.0003")
    assert said.count("\n") == 1
    Path("out/config.toml").write_text(Path("out/config.toml").read_text().replace("= 4", "= 9"))
    assert "step 4 of 9, ended before" in watch("out", "--once").output


def test_a_run_that_is_under_way_is_followed_to_its_end() -> None:
    command = [
        sys.executable,
        "-m",
        "axrt",
        "train",
        "tiny.toml",
        "run.steps=40",
        "run.log_every=1",
    ]
    run = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    with run:
        while not Path("out/metrics.jsonl").exists():
            assert run.poll() is None
            time.sleep(0.01)
        followed = watch("out").output
        assert run.wait(60) == 0
    assert "step 2: validation loss" in followed
    assert "step 40/40" in followed
    assert "step 40 of 40, done" in followed.splitlines()[-1]


def test_half_a_line_is_no_line_and_what_is_no_run_is_refused() -> None:
    axrt("tiny.toml")
    with Path("out/metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    assert "step 4 of 4" in watch("out", "--once").output
    assert watch(".").exit_code == 2
