"""Metrics in TensorBoard and in Weights & Biases, read back by their own readers."""

import importlib
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .test_train import axrt, environment, in_a_directory, lines

_BLOCK, _HEAD, _FULL, _LAST = 1 << 15, struct.Struct("<IHB"), 1, 4

__all__ = ["in_a_directory"]  # a fixture


@pytest.mark.filterwarnings("ignore")  # theirs
def test_tensorboard_has_the_metrics_of_the_run() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = axrt("tiny.toml", "run.tensorboard=true", "run.log_every=1")
    assert result.exit_code == 0, result.output
    found = EventAccumulator("out/tensorboard")
    found.Reload()
    losses = {event.step: event.value for event in found.Scalars("loss_metrics/global_avg_loss")}
    expected = {line["step"]: line["loss"] for line in lines("out") if "loss" in line}
    assert losses == pytest.approx(expected)
    tags = set(found.Tags()["scalars"])
    assert {"grad_norm", "lr", "throughput(tps)", "mfu(%)", "validation_metrics/loss"} <= tags


def records_of(file: Path) -> Iterator[Any]:
    """The records of a file of theirs: a head of 7 bytes, and the log format of LevelDB."""
    internal = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, whole = file.read_bytes(), 7, b""
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:
            at += left
            continue
        _, size, kind = _HEAD.unpack_from(data, at)
        whole += data[at + _HEAD.size : at + _HEAD.size + size]
        at += _HEAD.size + size
        if kind in (_FULL, _LAST):
            yield internal.Record.FromString(whole)
            whole = b""


def test_weights_and_biases_has_them_without_a_network_and_a_run_that_goes_on_is_the_same_run() -> (
    None
):
    pytest.importorskip("wandb.proto.wandb_internal_pb2")
    # In processes of their own: it takes the place of sys.exit, and keeps it.
    offline = {**environment(), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    again = ("checkpoint.resume=auto", "run.steps=6")
    for more in (["tiny.toml", "run.log_every=1"], ["out/config.toml", *again]):
        train = [sys.executable, "-m", "axrt", "train", *more, "run.wandb=trials"]
        ended = subprocess.run(train, env=offline, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
    files = Path("out").glob("wandb/offline-run-*/*.wandb")
    records = [list(records_of(file)) for file in sorted(files)]
    assert len(records) == 2, "one for each start"
    losses = [
        float(item.value_json)
        for of_start in records
        for record in of_start
        for item in record.history.item
        if "/".join(item.nested_key or [item.key]) == "loss_metrics/global_avg_loss"
    ]
    assert losses == pytest.approx([line["loss"] for line in lines("out") if "loss" in line])
    (name,) = {record.run.run_id for of_start in records for record in of_start} - {""}
    assert Path("out/wandb-id").read_text().strip() == name


def test_one_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axrt.observe.trackers.find_spec", lambda name: None)
    result = axrt("tiny.toml", "run.wandb=trials")
    assert result.exit_code == 2
    assert "run.wandb: wandb is not installed; expected it: pip install" in result.output
    assert not Path("out").exists()
