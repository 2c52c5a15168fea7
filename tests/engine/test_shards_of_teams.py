"""Teams whose replicas share out the optimizer's state (ZeRO): against plain torch, and files that
any other layout goes on from."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import axrt
from axrt.transport.local import LocalWorld

from ..sweeps import first as first_of
from ..sweeps import swept
from .reference import Item, adamw, configured, plain_torch
from .test_tensor import (
    MICROBATCHES,
    assert_close,
    built_in,
    few_sentences,
    language,
    saved,
    sentences,
    trained,
    trained_once,
)

T = TypeVar("T")


@swept(
    (
        "policy, pipe, tensor, zero",
        [
            ("1f1b", 1, 2, 1),
            ("zb-h1", 2, 2, 1),
            ("breadth-first", 2, 2, 2),
            ("1f1b", 1, 2, 3),
            ("zb-v", 2, 2, 3),
            ("breadth-first", 1, 2, 3),
        ],
    ),
    ("clip, bucket_mb", [(0.0, 25.0), (0.5, 0.0)]),
)
def test_replicas_of_teams_share_out(
    policy: str, pipe: int, tensor: int, zero: int, clip: float, bucket_mb: float
) -> None:
    found = trained(
        *(language, sentences, pipe, tensor, 2),
        schedule={"policy": policy},
        memory={"zero": zero, "bucket_mb": bucket_mb},
        optimizer={"clip": clip},
    )
    assert_close(found, plain_torch(language, sentences, 2, clip=clip))


def test_four_members_and_two_replicas_of_two_pipes_share_out() -> None:
    found = trained(
        *(language, sentences, 1, 4, 2), schedule={"policy": "1f1b"}, memory={"zero": 1}
    )
    assert_close(found, plain_torch(language, sentences, 2))
    found = trained(
        *(language, sentences, 2, 2, 2), schedule={"policy": "chimera"}, memory={"zero": 1}
    )
    assert_close(found, plain_torch(language, sentences, 2))


def test_each_copy_steps_its_part() -> None:
    """Of what members have cut each replica steps a half, and of what is whole each rank a
    quarter."""

    def main(transport: Any) -> int:
        config = configured(MICROBATCHES, parallel={"tensor": 2, "data": 2}, memory={"zero": 1})
        model = built_in("gpt-2")
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            engine.train_batch(_own(engine, sentences(0)))
            optimizers = [of.optimizer for of in engine._model.all_buckets]
            groups = [group for of in optimizers if of for group in of.param_groups]
            return sum(one.numel() for group in groups for one in group["params"])

    stepped = LocalWorld(4, 3).run(main)
    model = built_in("gpt-2").sequential(0)  # whose first and last layer both step what is tied
    whole = sum(one.numel() for _, one in model.named_parameters(remove_duplicate=False))
    assert sum(stepped) == whole
    assert max(stepped) < 0.4 * whole


# Checkpoints: (pipe, tensor, data) and memory.zero of the run that saves, and of that which goes
# on; the save is waited for, and weights are narrow then.
LAYOUTS = [
    ((1, 1, 1), 0, (2, 2, 2), 2, True),
    ((1, 1, 2), 1, (1, 2, 2), 1, False),
    ((1, 2, 2), 3, (2, 1, 1), 0, True),
    ((2, 2, 1), 0, (1, 2, 2), 3, False),
    ((1, 2, 2), 1, (1, 1, 1), 0, True),
    ((2, 2, 2), 1, (1, 4, 1), 0, False),
]


@pytest.mark.parametrize(("first", "zero", "then", "zero_then", "wait"), first_of(LAYOUTS, quick=4))
def test_any_layout_goes_on_from_any_other(
    first: tuple[int, int, int],
    zero: int,
    then: tuple[int, int, int],
    zero_then: int,
    wait: bool,
    tmp_path: Path,
) -> None:
    """Files know neither of teams nor of shards: what is loaded and saved again is the same to the
    byte."""

    def run(layout: tuple[int, int, int], zero: int, act: Callable[[axrt.Engine], T]) -> list[T]:
        pipe, tensor, data = layout
        config = configured(
            MICROBATCHES // data,
            parallel={"pipe": pipe, "tensor": tensor, "data": data},
            optimizer={"clip": 0.5},
            precision={"weights": "bfloat16"} if wait else {},
            memory={"zero": zero},
            schedule={"policy": "1f1b"},
        )

        def main(transport: Any) -> T:
            with axrt.initialize(language(), adamw, config=config, transport=transport) as engine:
                return act(engine)

        return LocalWorld(pipe * tensor * data, 5).run(main)

    def train(engine: axrt.Engine, step: int) -> float:
        return engine.train_batch(_own(engine, few_sentences(step))).loss

    def begin(engine: axrt.Engine) -> None:
        train(engine, 0)
        engine.save_checkpoint(tmp_path / "one", {"of": "one"}, wait=wait)
        train(engine, 1)  # beside the save
        engine.finish_saving()

    def go_on(engine: axrt.Engine) -> float:
        assert engine.load_checkpoint(tmp_path / "one") == {"of": "one"}
        engine.save_checkpoint(tmp_path / "two")
        return train(engine, 1)

    run(first, zero, begin)
    losses = run(then, zero_then, go_on)
    assert saved(tmp_path / "one") == saved(tmp_path / "two")
    again = run(
        first, zero, lambda engine: (engine.load_checkpoint(tmp_path / "two"), train(engine, 1))[1]
    )
    assert losses == pytest.approx([again[0]] * len(losses), rel=1e-2 if wait else 1e-5)


def _own(engine: axrt.Engine, items: list[Item]) -> Any:
    """The microbatches that this rank's replica reads."""
    mine = len(items) // engine.data_size
    first = engine.data_rank * mine
    return iter(items[first : first + mine]) if engine.reads else None


def test_modules_get_the_weights_of_their_member_back() -> None:
    """Of masters that copies share out, also where layers have narrow weights."""

    def main(transport: Any) -> dict[str, Tensor]:
        config = configured(
            MICROBATCHES,
            parallel={"tensor": 2, "data": 2},
            memory={"zero": 1},
            precision={"weights": "bfloat16"},
        )
        with axrt.initialize(language(), adamw, config=config, transport=transport) as engine:
            engine.train_batch(_own(engine, sentences(0)))
            given = dict(engine.named_parameters())
        return {name: one.detach().clone() for name, one in given.items()}

    of_ranks = LocalWorld(4, 1).run(main)
    for one, other in ((0, 2), (1, 3)):  # the same member of two replicas
        assert of_ranks[one].keys() == of_ranks[other].keys()
        for name, value in of_ranks[one].items():
            assert value.dtype == torch.float32
            assert torch.equal(value, of_ranks[other][name]), name


# Residencies.

LETS_GO: dict[str, tuple[int, dict[str, Any]]] = {
    "shards": (2, {"memory": {"zero": 3, "gathered": 1}}),
    "shards and what is gathered": (
        *(2, {"memory": {"zero": 3, "gathered": 1}, "parallel": {"gather_again": True}}),
    ),
    "run again": (2, {"memory": {"zero": 3, "gathered": 1, "recompute": "full"}}),
    "scratch": (1, {"memory": {"offload_parameters": True, "offload": "stream", "gathered": 1}}),
    "both": (2, {"memory": {"offload_parameters": True, "offload": "stream", "zero": 3}}),
}


@swept(
    ("policy", ["1f1b", "breadth-first"]),
    ("case", LETS_GO),
)
def test_weights_that_come_and_go_have_the_same_bits(case: str, policy: str) -> None:
    data, sections = LETS_GO[case]
    batches = sentences if data == 2 else few_sentences
    same: dict[str, Any] = {"schedule": {"policy": policy}, "optimizer": {"clip": 0.5}}
    memory = {**sections["memory"], "scratch": "host"}
    found = trained(language, batches, 2, 2, data, **{**sections, **same, "memory": memory})
    # Shards are cut elsewhere, and norms of pieces are added up in another order.
    plain: dict[str, Any] = {"memory": {"zero": 1}} if "zero" in memory else {}
    assert found == trained_once(language, batches, 2, 2, data, **same, **plain)


def test_an_evaluation_has_whole_weights() -> None:
    """Also of what members have cut, of which the same one of each replica has a shard."""

    def main(memory: dict[str, Any], transport: Any) -> float:
        config = configured(
            MICROBATCHES, parallel={"tensor": 2, "data": 2, "pipe": 1}, memory=memory
        )
        with axrt.initialize(language(), adamw, config=config, transport=transport) as engine:
            engine.train_batch(_own(engine, sentences(0)))
            return engine.eval_batch(_own(engine, sentences(1))).loss

    found, expected = (
        LocalWorld(4, 1).run(partial(main, memory)) for memory in ({"zero": 3}, {"zero": 1})
    )
    assert found == expected


def test_groups_of_replicas_add_up_first() -> None:
    def batches(step: int) -> list[Item]:
        return [*sentences(step), *sentences(step + 7)]

    found = trained(language, batches, 1, 2, 4, parallel={"group": 2})
    assert_close(found, plain_torch(language, batches, 2))
