"""Copies in memory: a job that is started again goes on without a disk, whichever host is lost."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import axrt
from axrt.checkpoint.host_memory import HostMemory, Part
from axrt.checkpoint.memory_run import NAME, MemoryRun
from axrt.checkpoint.partners import host_name, partners_of
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..disks import small_disk
from ..engine.models import perceptron
from ..engine.reference import (
    adamw,
    configured,
    copies,
    plain_torch,
    random_batches,
)
from ..sweeps import first, swept
from .damage import ON_BYTES

MICROBATCHES, STEPS, KEPT = 4, 5, 2
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
HOSTS = "0,0,1,1"
Trained = tuple[int, list[float], dict[str, Tensor]]


def short() -> axrt.PipelineModule:
    """A layer for each of four stages, and one more."""
    return perceptron(5)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The folder of checkpoints, and the directory in memory."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "checkpoints", tmp_path / "shm"


def config_of(shm: Path, data: int, hosts: str = HOSTS, **sections: Any) -> dict[str, Any]:
    return configured(
        MICROBATCHES // data,
        parallel={"data": data},
        checkpoint={"memory_dir": str(shm)},
        run={"host_of": hosts},
        **{**sections, "memory": {"bucket_mb": 0.004, **sections.get("memory", {})}},
    )


def run(
    places: tuple[Path, Path],
    until: int,
    keeps: tuple[int, ...] = (),
    data: int = 1,
    disk: tuple[int, ...] = (),
    hosts: str = HOSTS,
    end: Path | None = None,
    ranks: int = 4,
    model: Callable[[], axrt.PipelineModule] = short,
    **sections: Any,
) -> list[Trained]:
    """Go on, train, keep; and end without a word, as a job that is killed."""
    folder, shm = places

    def rank_main(transport: Transport) -> Trained:
        config = config_of(shm, data, hosts, **sections)
        engine = axrt.initialize(model(), adamw, config=config, transport=transport)
        engine.load_checkpoint(folder, missing_ok=True)
        # `axrt train` begins from another run only where nothing of its own was loaded
        assert (engine.loaded_from is None) == (engine.step == 0)
        began, losses = engine.step, []
        count = MICROBATCHES // data
        mine = slice(engine.data_rank * count, (engine.data_rank + 1) * count)
        while engine.step < until:
            losses.append(engine.train_batch(iter(BATCHES(engine.step)[mine])).loss)
            if engine.step in keeps:
                engine.keep_in_memory(folder, extra={"kept": engine.step})
                if engine.step < max(keeps):
                    engine.finish_saving()
            if engine.step in disk:
                engine.save_checkpoint(folder / f"step-{engine.step}")
        trained = {name: one.detach().clone() for name, one in copies(engine)}
        if end is not None:
            engine.save_checkpoint(end)
        engine.close()
        return began, losses, trained

    return LocalWorld(ranks, seed=until).run(rank_main)


def memory_of(places: tuple[Path, Path]) -> Path:
    said = MemoryRun.read(places[0])
    assert said is not None
    return places[1] / f"axrt-{said.run}"


def step_of(places: tuple[Path, Path], host: int, step: int) -> Path:
    """The directory of a step's copies on a host."""
    said = MemoryRun.read(places[0])
    assert said is not None
    return memory_of(places) / f"node-{host}" / said.mark / f"step-{step:08}"


def check_went_on(found: list[Trained], data: int = 1, began: int = KEPT) -> None:
    assert {one[0] for one in found} == {began}
    if data == 1:
        whole = plain_torch(short, BATCHES, STEPS)
        assert found[0][1] == whole.losses[began:]
        for _, _, parameters in found:
            assert all(torch.equal(value, whole.parameters[n]) for n, value in parameters.items())


SHARDED: list[tuple[dict[str, Any], int]] = [  # [memory], and replicas
    ({}, 2),
    ({"zero": 1}, 2),
    ({"offload": "stream", "offload_parameters": True}, 1),
    ({"zero": 3, "gathered": 1}, 2),
    ({"zero": 3, "offload": "stream"}, 2),
    ({"offload": "stream"}, 1),
    ({}, 1),
    ({"zero": 2}, 2),
    ({"offload": "stream"}, 2),
    ({"offload": "stream", "offload_parameters": True}, 2),
]


@swept(
    ("memory, data", SHARDED),
    ("lost", ["node-0", "node-1", ""]),
    ("weights", ["float32", "bfloat16"]),
    quick=6,
)
def test_any_one_host_may_be_lost_and_nothing_is_read_from_a_disk(
    places: tuple[Path, Path],
    memory: dict[str, Any],
    data: int,
    lost: str,
    weights: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sections: dict[str, Any] = {
        "precision": {"weights": weights},
        "memory": memory,
        "optimizer": {"clip": 0.5},
        "schedule": {"policy": "breadth-first", "chunks": 2},
        "model": perceptron if data == 1 else short,
    }
    ends = places[0].with_name("quiet"), places[0].with_name("gone-on")
    quiet = run((places[0] / "no", places[1]), STEPS, data=data, end=ends[0] / "a", **sections)
    run(places, KEPT + 1, keeps=(1, KEPT), data=data, **sections)
    if lost:
        shutil.rmtree(memory_of(places) / lost)
    assert [path.name for path in places[0].iterdir()] == [NAME]
    found = run(places, STEPS, data=data, end=ends[1] / "a", **sections)
    assert {one[0] for one in found} == {KEPT}
    for whole, rest in zip(quiet, found, strict=True):
        assert rest[1] == whole[1][KEPT:]
    expected, there = (
        {file.name: file.read_bytes() for file in (end / "a").glob("*.safetensors")} for end in ends
    )
    assert len(expected) > 2
    assert there == expected
    told = capfd.readouterr().err
    assert f"taken from memory: the copies of step {KEPT}" in told
    assert ("from their partners" in told) == bool(lost)


def test_the_newest_of_disk_and_memory_is_taken(places: tuple[Path, Path]) -> None:
    run(places, 2, keeps=(2,), disk=(1,))
    assert run(places, 3, keeps=(3,))[0][0] == 2
    assert run(places, 4, disk=(4,))[0][0] == 3
    check_went_on(run(places, STEPS), began=4)


def test_where_both_copies_are_lost_the_disk_is_taken_and_a_line_says_so(
    places: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run(places, 3, keeps=(3,), disk=(KEPT,))
    for host in range(2):
        shutil.rmtree(step_of(places, host, 3) / "rank-1-of-4")
    check_went_on(run(places, STEPS))
    told = capfd.readouterr().err
    assert "of step 3 both copies of rank 1 are gone or damaged" in told


def test_where_all_copies_are_lost_a_line_says_so(
    places: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run(places, 3, keeps=(3,), disk=(KEPT,))
    shutil.rmtree(memory_of(places))
    check_went_on(run(places, STEPS))
    assert "all copies of step 3 are gone" in capfd.readouterr().err


@pytest.mark.parametrize("damage", ON_BYTES, ids=lambda damage: damage.__name__)
def test_what_is_damaged_is_not_taken(
    places: tuple[Path, Path], damage: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run(places, KEPT, keeps=(KEPT,))
    random = Random(3)
    for rank in range(4):  # one of the two copies of each
        part = step_of(places, rank % 2, KEPT) / f"rank-{rank}-of-4"
        damage(random.choice(sorted(part.iterdir())), random)
    check_went_on(run(places, STEPS))
    assert "ranks 0, 3 from their partners" in capfd.readouterr().err


def test_a_damaged_checkpoint_that_is_newer_does_not_hide_what_memory_has(
    places: tuple[Path, Path],
) -> None:
    run(places, 4, keeps=(3,), disk=(1, 4))
    (places[0] / "step-4" / "optimizer-0003.safetensors").write_bytes(b"torn")
    check_went_on(run(places, STEPS), began=3)


def test_a_copy_and_a_save_of_one_step_go_on_side_by_side(places: tuple[Path, Path]) -> None:
    folder, shm = places

    def both(transport: Transport) -> None:
        with axrt.initialize(
            short(), adamw, config=config_of(shm, 1), transport=transport
        ) as engine:
            for step in range(KEPT):
                engine.train_batch(iter(BATCHES(step)))
            assert engine.save_checkpoint(folder / "a", wait=False)
            engine.keep_in_memory(folder)
            engine.train_batch(iter(BATCHES(KEPT)))

    LocalWorld(4, seed=4).run(both)
    shutil.rmtree(memory_of(places) / "node-1")
    shutil.copytree(folder, folder.with_name("disk"), ignore=shutil.ignore_patterns(NAME))
    check_went_on(run((folder.with_name("disk"), shm), STEPS))
    shutil.rmtree(folder / "a")
    check_went_on(run(places, STEPS))


def test_whoever_reads_a_checkpoint_of_a_run_leaves_its_copies_as_they_are(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    run(places, 4, keeps=(4,), disk=(KEPT,))

    def reads(transport: Transport) -> None:
        with axrt.initialize(
            short(), adamw, config=config_of(places[1], 1), transport=transport
        ) as engine:
            engine.load_checkpoint(places[0] / f"step-{KEPT}")
            engine.own_checkpoints(tmp_path / "other")

    LocalWorld(4).run(reads)
    check_went_on(run(places, STEPS), began=4)


def test_memory_that_is_full_or_gone_costs_no_training(
    places: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, _ = places
    with small_disk(tmp_path / "small", "64k") as small:

        def too_little(transport: Transport) -> int:
            with axrt.initialize(
                short(), adamw, config=config_of(small, 1), transport=transport
            ) as engine:
                for step in range(KEPT):
                    engine.train_batch(iter(BATCHES(step)))
                    engine.keep_in_memory(folder)
                    engine.finish_saving()
                return engine.step

        assert LocalWorld(4).run(too_little) == [KEPT] * 4
    assert "no copy in memory: " in (told := capfd.readouterr().err)
    assert "No space left on device" in told
    assert MemoryRun.read(folder) is None, "nothing was ever whole"

    def gone(transport: Transport) -> int:
        where = places[1] / "gone"
        where.mkdir(exist_ok=True)
        with axrt.initialize(
            short(), adamw, config=config_of(where, 1), transport=transport
        ) as engine:
            for step in range(KEPT):
                engine.train_batch(iter(BATCHES(step)))
                if step == 1:
                    shutil.rmtree(where, ignore_errors=True)
                    where.write_text("a file is in its place") if engine.is_main else None
                engine.keep_in_memory(folder)
                engine.finish_saving()
            return engine.step

    assert LocalWorld(4).run(gone) == [KEPT] * 4
    assert "step 2: no copy in memory: " in capfd.readouterr().err


def test_a_directory_that_is_none_is_refused_at_the_start(places: tuple[Path, Path]) -> None:
    def rank_main(transport: Transport) -> None:
        config = config_of(places[1] / "nowhere", 1)
        config["checkpoint"]["memory_every"] = 2
        axrt.initialize(short(), adamw, config=config, transport=transport)

    with pytest.raises(axrt.ConfigError, match="nowhere' is no directory that can be"):
        LocalWorld(4).run(rank_main)


def test_a_copy_that_was_cut_off_is_no_copy(places: tuple[Path, Path]) -> None:
    """A job that ends while it keeps leaves what it had kept before."""
    run(places, KEPT, keeps=(KEPT,))
    mark = step_of(places, 0, KEPT).parent.name
    host = HostMemory(places[1], memory_of(places).name[5:], "node-0", mark)
    (host.begin(Part(5, 0, 4)) / "layer-0000.safetensors").write_bytes(b"half of it")
    check_went_on(run(places, STEPS))


def test_a_run_that_goes_back_takes_nothing_of_what_it_has_left(places: tuple[Path, Path]) -> None:
    folder, shm = places
    run(places, 4, keeps=(4,), disk=(KEPT,))

    def back(transport: Transport) -> int:
        with axrt.initialize(
            short(), adamw, config=config_of(shm, 1), transport=transport
        ) as engine:
            engine.load_checkpoint(folder / f"step-{KEPT}")
            engine.own_checkpoints(folder)
            return engine.step

    assert LocalWorld(4).run(back) == [KEPT] * 4
    check_went_on(run(places, STEPS))


def test_a_run_that_begins_with_another_ones_state_leaves_its_copies_alone(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    run(places, KEPT, keeps=(KEPT,))
    other = tmp_path / "other"

    def begins_there(transport: Transport) -> int:
        with axrt.initialize(
            short(), adamw, config=config_of(places[1], 1), transport=transport
        ) as engine:
            engine.load_checkpoint(places[0])
            engine.own_checkpoints(other)
            began = engine.step
            for step in range(2):
                engine.train_batch(iter(BATCHES(step)))  # other samples than the run itself
                engine.keep_in_memory(other)
                engine.finish_saving()
            return began

    assert LocalWorld(4).run(begins_there) == [KEPT] * 4
    assert run((other, places[1]), KEPT + 2)[0][0] == KEPT + 2
    check_went_on(run(places, STEPS))


def test_what_another_run_has_kept_is_not_taken(places: tuple[Path, Path], tmp_path: Path) -> None:
    run(places, 4, keeps=(4,))
    other = tmp_path / "other"
    assert run((other, places[1]), 2)[0][0] == 0
    other.mkdir(exist_ok=True)
    wrong = {"run": "../x", "mark": "0" * 8, "step": 5, "is_void": False}
    (other / NAME).write_text(json.dumps(wrong))
    assert run((other, places[1]), 2)[0][0] == 0


AS_KEPT: list[dict[str, Any]] = [
    {},
    {"zero": 1},
    {"zero": 3, "gathered": 1},
    {"zero": 3, "offload": "stream"},
]
LAYOUTS = [(4, 1), (2, 2), (1, 4), (3, 1), (2, 1), (1, 2), (1, 1)]  # ranks of a pipe, replicas


@swept(
    ("before", [(4, 1), (2, 2), (1, 4)]),
    ("after", LAYOUTS),
    ("memory", AS_KEPT),
    ("then", AS_KEPT),
    ("weights", ["float32", "bfloat16"]),
    ("lost", ["node-0", "node-1", ""]),
    quick=5,
)
def test_any_layout_takes_what_another_one_has_kept(
    places: tuple[Path, Path],
    before: tuple[int, int],
    after: tuple[int, int],
    memory: dict[str, Any],
    then: dict[str, Any],
    weights: str,
    lost: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What goes on is, to the byte, what was kept, as checkpoints of both say."""
    sections: dict[str, Any] = {"precision": {"weights": weights}, "optimizer": {"clip": 0.5}}
    ends = places[0].with_name("kept") / "a", places[0].with_name("taken") / "a"

    def of(layout: tuple[int, int], memory: dict[str, Any]) -> dict[str, Any]:
        ranks, data = layout
        memory = memory if data > 1 else {k: v for k, v in memory.items() if k != "zero"}
        size = ranks * data
        hosts = ",".join(str(rank * 2 // size) for rank in range(size))
        if size == 1 and lost == "node-0":  # what is there is on the other one
            hosts = "1"
        return {"ranks": size, "data": data, "hosts": hosts, "memory": memory, **sections}

    run(places, KEPT, keeps=(KEPT,), end=ends[0], **of(before, memory))
    if lost:
        shutil.rmtree(memory_of(places) / lost)
    found = run(places, KEPT, end=ends[1], **of(after, then))
    assert {began for began, *_ in found} == {KEPT}
    assert f"taken from memory: the copies of step {KEPT}" in capfd.readouterr().err
    expected, there = (
        {file.name: file.read_bytes() for file in end.glob("*.safetensors")} for end in ends
    )
    assert len(expected) > 2
    assert there == expected
    assert not list(memory_of(places).glob("*/*/*/joined-*"))


class Partly(nn.Module):
    """A layer that counts in a buffer of its own, and has a parameter that may not be trained."""

    def __init__(self, width: int, is_frozen: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.factor = nn.Parameter(torch.rand(width) + 0.5, requires_grad=not is_frozen)

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = self.norm(self.linear(value)) * self.factor
        return found


def with_buffers(is_frozen: bool) -> axrt.PipelineModule:
    body = [axrt.LayerSpec(Partly, 16, is_frozen) for _ in range(3)]
    return axrt.PipelineModule([*body, axrt.LayerSpec(nn.Linear, 16, 5)], cross_entropy)


@swept(
    ("zero, then, layout", [(1, 1, (2, 2)), (1, 0, (2, 2)), (0, 3, (2, 2)), (3, 0, (1, 2))]),
    ("is_frozen", [True, False]),
    ("weights", ["float32", "bfloat16"]),
    quick=4,
)
def test_buffers_and_frozen_parameters_come_with_their_full_values(
    places: tuple[Path, Path],
    zero: int,
    then: int,
    layout: tuple[int, int],
    is_frozen: bool,
    weights: str,
) -> None:
    ends = places[0].with_name("kept") / "a", places[0].with_name("taken") / "a"
    sections: dict[str, Any] = {"precision": {"weights": weights}, "data": 2}
    memory: dict[str, Any] = {"zero": zero}
    run(
        places,
        KEPT,
        keeps=(KEPT,),
        end=ends[0],
        memory=memory,
        model=lambda: with_buffers(is_frozen),
        **sections,
    )
    found = run(
        places,
        KEPT,
        end=ends[1],
        memory={"zero": then},
        ranks=layout[0] * layout[1],
        model=lambda: with_buffers(is_frozen),
        **sections,
    )
    assert {one[0] for one in found} == {KEPT}
    one, other = (
        {file.name: file.read_bytes() for file in end.glob("*.safetensors")} for end in ends
    )
    assert one == other


def test_what_was_trained_and_is_frozen_now_comes_from_shards(places: tuple[Path, Path]) -> None:
    memory = {"zero": 3}
    run(places, KEPT, keeps=(KEPT,), data=2, memory=memory, model=lambda: with_buffers(False))
    found = run(places, STEPS, data=2, model=lambda: with_buffers(True))
    assert {one[0] for one in found} == {KEPT}


def test_shards_of_another_cut_are_put_together(places: tuple[Path, Path]) -> None:
    memory = {"zero": 1}
    run(places, 3, keeps=(3,), disk=(KEPT,), data=2, memory=memory)
    found = run(places, STEPS, data=2, memory={**memory, "bucket_mb": 25.0})
    assert {one[0] for one in found} == {3}


def test_where_some_shards_are_lost_the_disk_is_taken(
    places: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run(places, 3, keeps=(3,), disk=(KEPT,), data=2, memory={"zero": 1})
    for part in memory_of(places).glob("*/*/step-00000003/rank-3-of-4-*"):
        shutil.rmtree(part)
    assert {one[0] for one in run(places, STEPS)} == {KEPT}
    assert "both copies of rank 3 are gone" in capfd.readouterr().err


@pytest.mark.parametrize("zero", first([3, 0, 1], quick=2))
def test_copies_of_another_optimizer_or_model_are_refused_and_stay(
    places: tuple[Path, Path], zero: int
) -> None:
    """Beginning anew instead would lose them, where nothing is on a disk."""
    sections: dict[str, Any] = {"data": 2 if zero else 1, "memory": {"zero": zero}}
    run(places, 3, keeps=(3,), **sections)

    def begun(transport: Transport, model: axrt.PipelineModule, factory: Any) -> None:
        config = config_of(places[1], **sections)
        with axrt.initialize(model, factory, config=config, transport=transport) as engine:
            engine.load_checkpoint(places[0], missing_ok=True)

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1)

    with pytest.raises(axrt.ConfigError, match=r"the optimizer of .* was AdamW, and is SGD here"):
        LocalWorld(4).run(lambda t: begun(t, short(), sgd))
    shorter = axrt.PipelineModule(short().layers[:-1], short().loss_fn)
    with pytest.raises(axrt.ConfigError, match="expected a checkpoint of the same model"):
        LocalWorld(4).run(lambda t: begun(t, shorter, adamw))
    assert {one[0] for one in run(places, STEPS, **sections)} == {3}


def test_where_all_on_the_disk_is_damaged_memory_is_taken_though_it_is_older(
    places: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run(places, 4, keeps=(3,), disk=(4,))
    (places[0] / "step-4" / "optimizer-0003.safetensors").write_bytes(b"torn")
    check_went_on(run(places, STEPS), began=3)
    assert "damaged, and not taken: " in capfd.readouterr().err


def test_the_directory_of_a_run_means_its_copies_too(places: tuple[Path, Path]) -> None:
    run(places, 3, keeps=(3,))
    (places[0].parent / "config.toml").write_text('[checkpoint]\ndir = "checkpoints"\n')

    def begun(transport: Transport) -> int:
        config = config_of(places[1], 1)
        with axrt.initialize(short(), adamw, config=config, transport=transport) as engine:
            engine.load_checkpoint(places[0].parent)
            return engine.step

    assert LocalWorld(4).run(begun) == [3] * 4


def test_shards_of_another_width_are_refused(places: tuple[Path, Path]) -> None:
    """As long as names are those of the model, sizes alone tell."""
    run(places, 3, keeps=(3,), data=2, memory={"zero": 1})

    def wider(transport: Transport) -> None:
        config = config_of(places[1], 1)
        with axrt.initialize(
            perceptron(5, width=20), adamw, config=config, transport=transport
        ) as engine:
            engine.load_checkpoint(places[0], missing_ok=True)

    with pytest.raises(axrt.ConfigError, match=r"do not have all of 0\..*, shape \(.*20"):
        LocalWorld(4).run(wider)


@pytest.mark.parametrize("memory", first([{"zero": 1}, {}]))
def test_parts_of_two_jobs_never_go_together(
    places: tuple[Path, Path], memory: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Two jobs are killed while they keep the same step, one after the other."""
    run(places, KEPT, keeps=(1, KEPT), data=2, memory=memory)
    first = places[1].with_name("first")
    shutil.copytree(places[1], first)
    shutil.rmtree(places[1])
    places[1].mkdir()
    (places[0] / NAME).unlink()
    run(places, KEPT, keeps=(1, KEPT), data=2, memory=memory)
    for rank in (0, 1):
        for host in (0, 1):
            (mine,) = step_of(places, host, KEPT).glob(f"rank-{rank}-of-4*")
            shutil.rmtree(mine)
            (other,) = first.glob(f"*/node-{host}/*/step-{KEPT:08}/{mine.name}")
            beside = mine.parents[1].with_name(other.parents[1].name) / mine.parent.name
            beside.mkdir(parents=True, exist_ok=True)
            shutil.copytree(other, beside / mine.name)
    found = run(places, KEPT, data=2, memory=memory)
    both = memory == {}  # a replica that is whole has all layers
    assert {began for began, *_ in found} == {KEPT if both else 0}
    assert ("gone or damaged" in capfd.readouterr().err) != both


def test_a_copy_that_failed_leaves_the_one_before_it_and_nothing_of_itself(
    places: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it had taken is free for the next one."""
    on_main: dict[int, set[str]] = {}
    with small_disk(tmp_path / "small", "800k") as small:

        def on_a_rank(transport: Transport) -> None:
            config = config_of(small, 1)
            with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
                for step in range(1, STEPS):
                    if step == 2 and engine.is_main:
                        (small / "large").write_bytes(b"x" * (300 << 10))
                    if step == 3 and engine.is_main:
                        (small / "large").unlink()
                    engine.broadcast(None)
                    engine.train_batch(iter(BATCHES(step)))
                    engine.keep_in_memory(places[0])
                    engine.finish_saving()
                    if engine.is_main:
                        on_main[step] = {one.name for one in small.glob("axrt-*/node-0/*/step-*")}

        LocalWorld(4).run(on_a_rank)
    told = capfd.readouterr().err
    assert [on_main[step] for step in (1, 2, 3)] == [
        {"step-00000001"},
        {"step-00000001"},
        {"step-00000003"},
    ]
    assert "step 2: no copy in memory" in told
    assert told.count("no copy in memory") == 1, told


@pytest.mark.parametrize("hosts", ["", "0,,1", "a/b,c", ",".join(["x" * 70, "y"])])
def test_made_up_hosts_have_names(hosts: str) -> None:
    run = axrt.config.Run(host_of=hosts)
    if not hosts:
        assert host_name(run, 0) == socket.gethostname()
        return
    with pytest.raises(axrt.ConfigError, match="expected a name for each rank"):
        host_name(run, 0)


def test_what_is_done_is_removed(places: tuple[Path, Path]) -> None:
    folder, shm = places
    run(places, KEPT, keeps=(KEPT,))

    def dropped(transport: Transport) -> None:
        with axrt.initialize(
            short(), adamw, config=config_of(shm, 1), transport=transport
        ) as engine:
            engine.drop_memory(folder)

    LocalWorld(4).run(dropped)
    assert not list(shm.iterdir())
    assert not (folder / NAME).exists()


def test_copies_are_kept_on_the_next_host() -> None:
    assert partners_of(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert partners_of(["a", "b", "a", "c"]) == [1, 3, 1, 0]
    assert partners_of(["a", "a", "a", "b"]) == [3, 3, 3, 0]
    for hosts in (["a", "b", "c"], ["a", "b", "a", "b", "b"]):
        assert all(hosts[k] != hosts[r] for r, k in enumerate(partners_of(hosts)))


def test_one_host_is_refused(places: tuple[Path, Path]) -> None:
    with pytest.raises(axrt.ConfigError, match="all 4 ranks are on node-0, .*memory_every = 0"):
        run(places, 1, keeps=(1,), hosts="0,0,0,0")
    with pytest.raises(axrt.ConfigError, match="run.host_of = '0,1' has 2 hosts"):
        run(places, 1, hosts="0,1")
