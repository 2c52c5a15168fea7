"""A save that goes on beside training has the files of one that is waited for, to the byte."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.checkpoint import snapshot, writing
from axrt.checkpoint.folder import candidates_in
from axrt.store.bucket import Bucket
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..disks import small_disk
from ..engine.models import motley, perceptron
from ..engine.reference import adamw, configured, momentum, random_batches
from ..engine.test_ties import batches as token_batches
from ..engine.test_ties import tied
from ..sweeps import swept

MICROBATCHES = 4
BATCHES = random_batches((6, 16), classes=5, microbatches=2 * MICROBATCHES)
MOTLEY_BATCHES = random_batches((6, 12), classes=4, microbatches=MICROBATCHES)
SMALL = 0.004  # MiB: a bucket or two a layer
NARROW = {"weights": "bfloat16", "gradients": "weights"}
DISK = "disk"  # replaced by a directory of the test's own
MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"offload": "stream"},
    "on a disk": {"offload": "stream", "scratch": DISK},
    "on the host": {"offload": "cpu"},
    "weights in scratch": {"offload": "stream", "offload_parameters": True, "gathered": 1},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3, "gathered": 1},
    "zero 3 on a disk": {"zero": 3, "offload": "stream", "scratch": DISK},
}


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def slowed(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, seconds: float) -> None:
    """Let a function take longer, so that what comes meets it under way."""
    plain = getattr(module, name)

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return plain(*args)

    monkeypatch.setattr(module, name, slow)


def held_up(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> threading.Event:
    """Let a function wait, on any thread but this one, until it may go on."""
    plain, may, here = getattr(module, name), threading.Event(), threading.current_thread()

    def waiting(*args: Any) -> Any:
        assert threading.current_thread() is here or may.wait(600)
        return plain(*args)

    monkeypatch.setattr(module, name, waiting)
    return may


def shallow() -> axrt.PipelineModule:
    return perceptron(layers=4)


def both_ways(
    folder: Path, ranks: int, config: Any, model: Callable[[], Any], factory: Any, batches: Any
) -> None:
    """Save each step twice, waited for and beside the next one, and train on in between."""

    def rank_main(transport: Transport) -> None:
        with axrt.initialize(model(), factory, config=config, transport=transport) as engine:
            count = engine.config.schedule.microbatches
            mine = slice(engine.data_rank * count, (engine.data_rank + 1) * count)
            for step in range(2):
                engine.save_checkpoint(folder / f"waited-{step}", extra={"step": step})
                asked = folder / f"beside-{step}"
                assert engine.save_checkpoint(asked, extra={"step": step}, wait=False)
                engine.train_batch(iter(batches(step)[mine]))
                if step % 2:
                    engine.eval_batch(iter(batches(step)[mine]))
                engine.finish_saving()

    LocalWorld(ranks, seed=ranks).run(rank_main)


@swept(
    ("memory", MEMORY),
    ("precision", [{}, NARROW]),
    ("ranks, data", [(2, 2), (4, 2), (1, 1), (2, 1)]),
    ("optimizer", [{}, {"clip": 0.5}]),
    quick=10,
)
def test_files_are_those_of_the_step_to_the_byte(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory: str,
    precision: dict[str, str],
    ranks: int,
    data: int,
    optimizer: dict[str, float],
) -> None:
    settings = {"bucket_mb": SMALL, **MEMORY[memory]}
    if settings.get("scratch") == DISK:
        settings["scratch"] = f"disk:{tmp_path}"
    if memory.startswith("zero") and data == 1:
        pytest.skip("one copy has no shards")
    config = configured(
        2,
        memory=settings,
        parallel={"data": data},
        schedule={"policy": "breadth-first", "chunks": 2},
        precision=precision,
        optimizer=optimizer,
    )
    slowed(monkeypatch, snapshot, "_fill", 0.002)
    slowed(monkeypatch, writing, "write_file", 0.001)
    both_ways(tmp_path / "saved", ranks, config, shallow, adamw, BATCHES)
    check_equal(tmp_path / "saved")


def check_equal(folder: Path) -> None:
    for step in range(2):
        waited = files_in(folder / f"waited-{step}")
        assert len(waited) > 2
        assert files_in(folder / f"beside-{step}") == waited


class Running(nn.Module):
    """Running means, which every forward writes to, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, value: Tensor) -> Tensor:
        frozen: Tensor = self.frozen(self.norm(value))
        return value + frozen


def running() -> axrt.PipelineModule:
    layers = [axrt.LayerSpec(Running) for _ in range(3)]
    return axrt.PipelineModule(
        [*layers, axrt.LayerSpec(nn.Linear, 16, 5)], functional.cross_entropy
    )


@swept(
    ("model, batches", [(running, BATCHES), (tied, token_batches()), (motley, MOTLEY_BATCHES)]),
    ("policy", ["1f1b", "chimera"]),
    ("precision", [{}, NARROW]),
    quick=4,
)
def test_models_that_are_hard_to_copy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    batches: Any,
    precision: Any,
    policy: str,
) -> None:
    slowed(monkeypatch, snapshot, "_fill", 0.01)
    config = configured(MICROBATCHES, schedule={"policy": policy}, precision=precision)
    both_ways(tmp_path, 2, config, model, momentum, batches)
    check_equal(tmp_path)


def alone(folder: Path, **sections: Any) -> axrt.Engine:
    config = configured(MICROBATCHES, **sections)
    transport = LocalWorld(1).alone()
    return axrt.initialize(perceptron(), adamw, config=config, transport=transport)


def step(engine: axrt.Engine) -> None:
    engine.train_batch(iter(BATCHES(engine.step)[:MICROBATCHES]))


def test_training_goes_on_while_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = held_up(monkeypatch, writing, "write_file")
    told: list[str] = []
    with alone(tmp_path) as engine:
        step(engine)
        assert engine.save_checkpoint(tmp_path / "a", wait=False, then=told.append)
        for _ in range(3):
            step(engine)
            assert not engine.save_checkpoint(tmp_path / "b", wait=False), "one is under way"
        assert not (tmp_path / "a").exists()
        assert not (tmp_path / "b.partial").exists(), "nothing of it was begun"
        assert told == []
        may_write.set()
        engine.finish_saving()
        assert told == [""]
        assert engine.save_checkpoint(tmp_path / "b", wait=False)
    assert [one.step for one in candidates_in(tmp_path)] == [4, 1], "close waits for the end"


def test_a_step_waits_for_the_copy_of_its_own_bucket_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the last bucket is held up: all others step, and it does when it is copied."""
    stepped: list[Bucket] = []
    may_copy = threading.Event()
    copy, run = snapshot._fill, Bucket.step

    def copying(taken: Any, values: Any) -> None:
        if getattr(values, "__self__", None) is last:
            assert may_copy.wait(600)
        copy(taken, values)

    def stepping(bucket: Bucket, number: int) -> None:
        if bucket is last:
            assert len(stepped) == len(engine._model.all_buckets) - 1
            may_copy.set()
        run(bucket, number)
        stepped.append(bucket)

    with alone(tmp_path, memory={"bucket_mb": SMALL}, schedule={"policy": "1f1b"}) as engine:
        step(engine)
        # buckets step in the order of their backwards, and are copied in that of the model
        last = engine._model.all_buckets[-1]
        monkeypatch.setattr(snapshot, "_fill", copying)
        monkeypatch.setattr(Bucket, "step", stepping)
        order = [bucket for bucket in engine._model.all_buckets if bucket is not last]
        assert len(order) > 2
        engine.save_checkpoint(tmp_path / "waited")
        engine.save_checkpoint(tmp_path / "beside", wait=False)
        may_copy.set()
        step(engine)
    assert files_in(tmp_path / "beside") == files_in(tmp_path / "waited")


@pytest.mark.parametrize("by", ["a layer", "the user"])
def test_weights_that_somebody_writes_to_while_they_are_copied_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    may_copy = held_up(monkeypatch, snapshot, "_fill")
    told: list[str] = []
    with alone(tmp_path) as engine:
        step(engine)
        weight = engine.named_parameters()[0][1]
        assert engine.save_checkpoint(tmp_path / "a", wait=False, then=told.append)
        with torch.no_grad():
            weight.mul_(2)
        may_copy.set()
        if by == "a layer":
            step(engine)
        with pytest.raises(axrt.SaveError, match="was written to before it was copied"):
            engine.finish_saving()
        assert engine.save_checkpoint(tmp_path / "b", wait=False)
        engine.finish_saving()
    assert "checkpoint.background = 'off'" in told[0]
    assert [one.path.name for one in candidates_in(tmp_path)] == ["b"]


def test_who_asks_for_parameters_may_write_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, snapshot, "_fill", 0.05)
    with alone(tmp_path) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path / "waited")
        engine.save_checkpoint(tmp_path / "beside", wait=False)
        with torch.no_grad():
            for _, parameter in engine.named_parameters():
                parameter.mul_(2)
    assert files_in(tmp_path / "beside") == files_in(tmp_path / "waited")


def test_a_save_that_is_refused_leaves_the_one_before_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for parameters still waits for the copies of the first one."""
    may_copy = held_up(monkeypatch, snapshot, "_fill")
    with alone(tmp_path) as engine:
        step(engine)
        assert engine.save_checkpoint(tmp_path / "a", wait=False)
        assert not engine.save_checkpoint(tmp_path / "b", wait=False)
        may_copy.set()
        with torch.no_grad():
            for _, parameter in engine.named_parameters():
                parameter.mul_(2)
        engine.finish_saving()


def test_what_is_being_written_is_written_before_others_may(tmp_path: Path) -> None:
    """A job that goes on without lost ranks leaves the save of before half way."""
    written = []

    def write() -> None:
        time.sleep(0.3)
        written.append(True)

    with alone(tmp_path) as engine:
        engine._saves._checkpoints._queue.put(write)
        engine._saves._checkpoints.close()
        assert written == [True]


def test_a_step_that_is_dropped_changes_nothing_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, snapshot, "_fill", 0.02)
    with alone(tmp_path) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path / "waited")
        engine.save_checkpoint(tmp_path / "beside", wait=False)
        with pytest.raises(StopIteration):
            engine.train_batch(iter(BATCHES(1)[:1]))
        step(engine)
        engine.finish_saving()
        engine.load_checkpoint(tmp_path / "beside")
        assert engine.step == 1
    assert files_in(tmp_path / "beside") == files_in(tmp_path / "waited")


def test_a_full_disk_is_told_and_training_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    with small_disk(tmp_path / "disk", "64k") as disk, alone(tmp_path) as engine:
        step(engine)
        assert engine.save_checkpoint(disk / "a", wait=False, then=told.append)
        step(engine)
        with pytest.raises(axrt.SaveError, match="No space left"):
            engine.finish_saving()
        assert "No space left" in told[0]
        assert engine.save_checkpoint(tmp_path / "b", wait=False)
        step(engine)
    assert [one.step for one in candidates_in(tmp_path)] == [2]


def test_one_that_nobody_may_save_is_refused_at_once(tmp_path: Path) -> None:
    with alone(tmp_path) as engine:
        step(engine)
        with pytest.raises(axrt.ConfigError, match="cannot be called"):
            engine.save_checkpoint(tmp_path / "latest", wait=False)
        with pytest.raises(axrt.ConfigError, match="JSON"):
            engine.save_checkpoint(tmp_path / "a", extra={"what": object()}, wait=False)
        assert engine.save_checkpoint(tmp_path / "a", wait=False)
    assert [one.path.name for one in candidates_in(tmp_path)] == ["a"]
