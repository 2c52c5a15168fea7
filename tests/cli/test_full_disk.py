"""A disk that is full for a while costs no training; one that stays full is told, and so by the
code."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from axrt.checkpoint.folder import candidates_in
from axrt.cli.train.interrupt import Interrupt

from ..disks import small_disk
from .test_train import axrt, in_a_directory  # noqa: F401 - a fixture

MICROBATCHES = 2  # a step, as `TINY` says


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "4m") as where:
        yield where


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with contextlib.suppress(OSError), (disk / "rest").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


def empty(disk: Path) -> None:
    for name in ("filler", "rest"):
        (disk / name).unlink()


def acting(monkeypatch: pytest.MonkeyPatch, acts: dict[int, Any]) -> None:
    """Before a step's first microbatch is drawn, do something."""
    until = Interrupt.until

    def watched(self: Interrupt, batches: Iterator[Any], microbatches: int) -> Iterator[Any]:
        for number, item in enumerate(until(self, batches, microbatches)):
            step, first = divmod(number, microbatches)
            if first == 0 and step in acts:
                acts[step]()
            yield item

    monkeypatch.setattr(Interrupt, "until", watched)


def steps_in(disk: Path) -> list[int]:
    return [
        json.loads(line)["step"]
        for line in (disk / "out" / "metrics.jsonl").read_text().splitlines()
        if "loss" in json.loads(line)
    ]


RUN = (
    "run.steps=60",
    "run.log_every=1",
    "checkpoint.every=10",
    "checkpoint.keep=0",
    "data.held_out=0",
)


def test_a_disk_that_is_full_for_a_while_costs_no_step_and_no_line(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting(monkeypatch, {12: lambda: fill(disk), 55: lambda: empty(disk)})
    result = axrt("tiny.toml", *RUN, f"run.out={disk / 'out'}")
    assert result.exit_code == 0, result.output
    assert (
        result.output.count(
            "step 20: no checkpoint (training goes on, and the next one will be tried)"
        )
        == 1
    )
    assert "No space left on device" in result.output
    assert (
        result.output.count(
            "metrics.jsonl: No space left on device; 1 line wait to be written; training goes on"
        )
        == 1
    )
    assert [one.step for one in candidates_in(disk / "out" / "checkpoints")] == [60, 10]
    assert steps_in(disk) == list(range(1, 61))
    assert not list((disk / "out" / "checkpoints").glob("*.partial"))


def test_a_disk_that_stays_full_ends_with_a_code_and_what_was_saved_stands(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting(monkeypatch, {25: lambda: fill(disk)})
    result = axrt("tiny.toml", *RUN, f"run.out={disk / 'out'}")
    assert result.exit_code == 70, result.output
    assert "step 60: no checkpoint (the last one)" in result.output
    assert "done, but not saved; configuration" in result.output
    assert "the newest checkpoint in" in result.output
    assert [one.step for one in candidates_in(disk / "out" / "checkpoints")] == [20, 10]
    empty(disk)
    monkeypatch.undo()
    os.chdir(disk.parent)
    again = axrt(str(disk / "out" / "config.toml"), "checkpoint.resume=auto")
    assert again.exit_code == 0, again.output
    assert "at step 20" in again.output
    assert candidates_in(disk / "out" / "checkpoints")[0].step == 60


def test_a_disk_that_becomes_read_only_is_told(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)

    acting(monkeypatch, {12: lambda: remount("ro"), 55: lambda: remount("rw")})
    result = axrt("tiny.toml", *RUN, f"run.out={disk / 'out'}")
    assert result.exit_code == 0, result.output
    assert "Read-only file system" in result.output
    assert steps_in(disk) == list(range(1, 61))
    assert candidates_in(disk / "out" / "checkpoints")[0].step == 60


def test_half_a_line_that_a_kill_has_left_is_cut_off(tmp_path: Path) -> None:
    axrt("tiny.toml", "run.log_every=1")
    metrics = Path("out/metrics.jsonl")
    whole = metrics.read_text()
    metrics.write_text(whole + '{"step": 5, "lo')
    axrt("out/config.toml", "checkpoint.resume=auto", "run.steps=5")
    assert metrics.read_text().startswith(whole + '{"step": 4, "resumed_from"')
    assert all(json.loads(line) for line in metrics.read_text().splitlines())


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    axrt("tiny.toml")
    Path("out/.lock").write_text('{"host": "another", "pid": 3}')
    config = Path("out/config.toml").read_bytes()
    result = axrt("out/config.toml", "checkpoint.resume=auto", "run.steps=9")
    assert result.exit_code == 2
    assert (
        "out is written to by process 3 on another; expected one run in a directory"
        in result.output
    )
    assert Path("out/config.toml").read_bytes() == config
