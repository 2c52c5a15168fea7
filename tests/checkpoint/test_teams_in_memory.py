"""Copies in memory of members of teams: their own ranks take them back as they are, and any other
layout takes them to the byte, also where a host is lost. The same of replicas, shards and stages is
in test_in_memory.py."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn.functional import cross_entropy

import axrt
from axrt.checkpoint import joined
from axrt.checkpoint.memory_run import NAME
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..engine.reference import adamw, configured
from ..engine.test_tensor import MICROBATCHES, built_in, language, saved, sentences
from ..sweeps import swept
from .test_in_memory import memory_of, places

__all__ = ["places"]
KEPT, STEPS = 2, 4
Layout = tuple[int, int, int]  # ranks of a pipe, members of a team, replicas


def run(
    places: tuple[Path, Path],
    layout: Layout,
    until: int,
    keeps: bool = False,
    end: Path | None = None,
    hosts: str = "",
    model: Callable[[], axrt.PipelineModule] = language,
    shards: int = 0,
    **sections: Any,
) -> list[tuple[int, list[float]]]:
    """Go on, train, keep after `KEPT` steps; and end without a word, as a job that is killed.

    Returns:
        The step at which each rank has begun, and its losses.
    """
    (pipe, tensor, data), (folder, shm) = layout, places
    size = pipe * tensor * data
    hosts = hosts or ",".join(str(rank * 2 // size) for rank in range(size))
    config = configured(
        MICROBATCHES * 2 // data,
        parallel={"pipe": pipe, "tensor": tensor, "data": data, "tensor_shards": shards},
        checkpoint={"memory_dir": str(shm)},
        run={"host_of": hosts},
        optimizer={"clip": 0.5},
        schedule={"policy": "1f1b", "fill": "never"},  # else each rank simulates which is faster
        **{**sections, "memory": {"bucket_mb": 0.004, **sections.get("memory", {})}},
    )

    def rank_main(transport: Transport) -> tuple[int, list[float]]:
        engine = axrt.initialize(model(), adamw, config=config, transport=transport)
        engine.load_checkpoint(folder, missing_ok=True)
        began, losses = engine.step, []
        count = MICROBATCHES * 2 // data
        mine = slice(engine.data_rank * count, (engine.data_rank + 1) * count)
        while engine.step < until:
            batch = sentences(engine.step)[mine]
            losses.append(engine.train_batch(iter(batch) if engine.reads else None).loss)
            if keeps and engine.step == KEPT:
                engine.keep_in_memory(folder)
        if end is not None:
            engine.save_checkpoint(end)
        engine.close()
        return began, losses

    return LocalWorld(size, seed=until).run(rank_main)


@swept(
    (
        "layout, memory",
        [
            ((1, 2, 1), {}),
            ((2, 2, 1), {"offload": "stream", "offload_parameters": True}),
            ((1, 2, 2), {"zero": 3}),
            ((1, 2, 2), {"zero": 1}),
            ((2, 2, 2), {}),
            ((1, 4, 1), {"offload": "stream"}),
            ((1, 2, 2), {"zero": 2, "offload": "stream"}),
        ],
    ),
    ("lost", ["node-1", "node-0", ""]),
    ("weights", ["float32", "bfloat16"]),
    quick=3,
)
def test_members_go_on_from_their_own_copies(
    places: tuple[Path, Path],
    layout: Layout,
    memory: dict[str, Any],
    lost: str,
    weights: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sections: dict[str, Any] = {"precision": {"weights": weights}, "memory": memory}
    ends = places[0].with_name("quiet") / "a", places[0].with_name("gone-on") / "a"
    quiet = run((places[0] / "no", places[1]), layout, STEPS, end=ends[0], **sections)
    run(places, layout, KEPT + 1, keeps=True, **sections)
    if lost:
        shutil.rmtree(memory_of(places) / lost)
    assert [path.name for path in places[0].iterdir()] == [NAME], "nothing is on a disk"
    found = run(places, layout, STEPS, end=ends[1], **sections)
    assert found == [(KEPT, losses[KEPT:]) for _, losses in quiet]
    assert saved(ends[0]) == saved(ends[1])
    assert ("from their partners" in capfd.readouterr().err) == bool(lost)


def test_virtual_members_have_the_same_bits_on_any_degree(places: tuple[Path, Path]) -> None:
    quiet = run((places[0] / "no", places[1]), (1, 4, 1), STEPS, shards=4)
    run(places, (1, 4, 1), KEPT, keeps=True, shards=4)
    found = run(places, (1, 2, 1), STEPS, shards=4)
    assert found == [(KEPT, quiet[0][1][KEPT:])] * 2


AS_KEPT: list[dict[str, Any]] = [{}, {"zero": 1}, {"zero": 3}, {"offload": "stream"}]
LAYOUTS: list[tuple[Layout, Layout]] = [  # before and after
    ((3, 2, 1), (1, 1, 1)),  # the last stage of `language` has nothing that is cut
    ((1, 2, 2), (1, 2, 1)),
    ((2, 1, 1), (1, 2, 1)),
    ((1, 4, 1), (2, 2, 1)),
    ((1, 2, 2), (2, 1, 2)),
    ((2, 2, 1), (1, 4, 1)),
    ((2, 2, 2), (3, 1, 1)),
    ((3, 2, 1), (2, 2, 1)),
    ((1, 2, 1), (1, 1, 1)),
]


@swept(
    ("before, after", LAYOUTS),
    ("memory", AS_KEPT),
    ("then", AS_KEPT),
    ("weights", ["float32", "bfloat16"]),
    ("lost", ["node-0", "node-1", ""]),
    ("model", [language, lambda: built_in("gpt-2")]),
    quick=6,
)
def test_any_layout_takes_what_teams_have_kept(
    places: tuple[Path, Path],
    before: Layout,
    after: Layout,
    memory: dict[str, Any],
    then: dict[str, Any],
    weights: str,
    lost: str,
    model: Callable[[], axrt.PipelineModule],
) -> None:
    """And teams take what any layout has kept: the checkpoints of both say the same."""
    ends = places[0].with_name("kept") / "a", places[0].with_name("taken") / "a"

    def of(layout: Layout, memory: dict[str, Any]) -> dict[str, Any]:
        is_alone = layout[2] == 1
        memory = {key: value for key, value in memory.items() if not (is_alone and key == "zero")}
        hosts = "1" if layout == (1, 1, 1) and lost == "node-0" else ""  # where there is something
        return {"memory": memory, "hosts": hosts, "precision": {"weights": weights}, "model": model}

    run(places, before, KEPT, keeps=True, end=ends[0], **of(before, memory))
    if lost:
        shutil.rmtree(memory_of(places) / lost)
    found = run(places, after, KEPT, end=ends[1], **of(after, then))
    assert {began for began, _ in found} == {KEPT}
    assert saved(ends[0]) == saved(ends[1])
    assert not list(memory_of(places).glob("*/*/*/joined-*"))


def test_replicas_that_have_the_same_are_asked_once(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of members, a rank needs one of each."""
    joins: list[int] = []
    join = joined.join

    def counted(directory: Path, parts: Any, model: Any) -> Any:
        joins.append(len(parts))
        return join(directory, parts, model)

    monkeypatch.setattr("axrt.checkpoint.loading.join", counted)
    run(places, (1, 2, 2), KEPT, keeps=True)
    run(places, (1, 1, 1), KEPT)
    assert joins == [2]


def test_copies_that_lack_a_member_are_not_taken(places: tuple[Path, Path]) -> None:
    run(places, (1, 2, 1), KEPT, keeps=True)
    for part in memory_of(places).glob("*/*/*/rank-1-of-2*"):
        shutil.rmtree(part)
    assert run(places, (1, 1, 1), 1)[0][0] == 0


class Perceptron(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 23))


def test_copies_of_another_width_are_refused(places: tuple[Path, Path]) -> None:
    def model(hidden: int) -> axrt.PipelineModule:
        return axrt.PipelineModule(
            [axrt.LayerSpec(nn.Embedding, 23, 16), axrt.LayerSpec(Perceptron, hidden)],
            lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
            tensor={"1.0": "column", "1.2": "row"},
        )

    run(places, (1, 2, 1), KEPT, keeps=True, model=lambda: model(16))
    for layout in ((1, 2, 1), (1, 1, 1)):
        with pytest.raises(
            axrt.ConfigError, match="copies in memory do not have all of 1.0.weight"
        ):
            run(places, layout, STEPS, model=lambda: model(32))
