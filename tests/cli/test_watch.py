"""`axrt watch`: how far a run is, from its files."""

import json
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
    assert "step 4 of 9, ended early" in watch("out", "--once").output


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
        assert run.wait(120) == 0
    assert "step 2: validation loss" in followed
    assert "step 40/40" in followed
    assert "step 40 of 40, done" in followed.splitlines()[-1]


def test_half_a_line_is_no_line_and_what_is_no_run_is_refused() -> None:
    axrt("tiny.toml")
    with Path("out/metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    assert "step 4 of 4" in watch("out", "--once").output
    assert watch(".").exit_code == 2


def test_the_time_left_comes_from_the_times_that_the_run_has_written() -> None:
    """Steps that were done before it watched are no progress of the moment in which it reads them,
    and the time between two starts is none of a step."""
    axrt("tiny.toml")
    config = Path("out/config.toml")
    config.write_text(config.read_text().replace("steps = 4", "steps = 150"))
    written: list[dict[str, object]] = [{"step": 0, "val_loss": 2.0, "time_s": 1.0}]
    written += [{"step": step, "loss": 2.0, "time_s": 1 + 0.2 * step} for step in (30, 60, 90)]
    written += [{"step": 80, "resumed_from": "out/checkpoints/step-00000080", "time_s": 100.0}]
    written += [{"step": step, "loss": 2.0, "time_s": 60.0 + step / 2} for step in (80, 90)]
    Path("out/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    said = [line.split() for line in watch("out").output.splitlines() if "left" in line]
    assert [(line[1], line[-2]) for line in said] == [
        *(("30/150", "0:00:24"), ("60/150", "0:00:18"), ("90/150", "0:00:12")),
        *(("80/150", "-:--:--"), ("90/150", "0:00:30")),
    ]
