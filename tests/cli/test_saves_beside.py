"""`axrt train` goes on while checkpoints are written."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from axrt.checkpoint import writing
from axrt.checkpoint.folder import candidates_in

from ..disks import small_disk
from .test_full_disk import acting, empty, fill
from .test_train import axrt, in_a_directory, losses  # noqa: F401 - a fixture

BESIDE = ("checkpoint.background=on", "run.log_every=1", "checkpoint.keep=0")


def steps_saved(folder: Path) -> list[int]:
    return sorted(one.step for one in candidates_in(folder))


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    write = getattr(writing, "write_file")  # noqa: B009

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return write(*args)

    monkeypatch.setattr(writing, "write_file", slow)


def test_a_save_that_is_due_while_another_is_written_is_told_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_disk(monkeypatch, 0.2)
    result = axrt("tiny.toml", *BESIDE, "run.steps=8", "checkpoint.every=1")
    assert result.exit_code == 0, result.output
    saved = steps_saved(Path("out/checkpoints"))
    assert 8 in saved, "the last one is waited for"
    assert len(saved) < 8
    for step in {1, 2, 3, 4, 5, 6, 7} - set(saved):
        assert f"step {step}: no checkpoint (training goes on, and the next" in result.output
    assert "step-00000001 is still being written" in result.output
    assert len(losses("out")) == 8


@pytest.mark.parametrize("asked", [["checkpoint.background=on"], []], ids=["asked for", "auto"])
def test_whoever_goes_on_from_it_has_the_losses_of_a_run_that_waits(
    monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    slow_disk(monkeypatch, 0.02)
    common = ("tiny.toml", "run.log_every=1", "run.steps=9", "checkpoint.keep=0")
    assert axrt(*common, "checkpoint.background=off", "run.out=whole").exit_code == 0
    assert axrt(*common, *asked, "checkpoint.every=4", "run.out=beside").exit_code == 0
    saved = steps_saved(Path("beside/checkpoints"))
    assert saved[0] == 4
    resumed = "checkpoint.resume=beside/checkpoints/step-00000004"
    assert axrt(*common, resumed, "run.out=rest").exit_code == 0
    whole, rest = losses("whole"), losses("rest")
    assert rest == {step: whole[step] for step in range(5, 10)}
    assert losses("beside") == whole


def test_a_disk_that_is_full_for_a_while_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        # A save takes steps, of which the one before the disk is full must have enough, and so must
        # the last one that fails.
        slow: dict[int, Any] = {step: partial(time.sleep, 0.1) for step in range(11, 50)}
        acting(monkeypatch, slow | {19: partial(fill, disk), 49: partial(empty, disk)})
        keys = ("run.steps=60", "checkpoint.every=10", "data.held_out=0", f"run.out={disk / 'out'}")
        result = axrt("tiny.toml", *BESIDE, *keys)
        assert result.exit_code == 0, result.output
        assert "step 20: no checkpoint (training goes on, and the next one will be" in result.output
        assert "No space left on device" in result.output
        assert steps_saved(disk / "out" / "checkpoints") == [10, 50, 60]
        assert len(losses(str(disk / "out"))) == 60
        assert not list((disk / "out" / "checkpoints").glob("*.partial"))
