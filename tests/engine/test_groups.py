"""Replicas in groups: sums in two levels, and shards within a group (hybrid sharding).

Nothing else has subtotals and totals: these cases prove the order of their additions to the bit,
against plain torch, that a total of one step is not taken for that of another, and how many
elements go within groups and between them. What a shard is, `test_zero.py` proves.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import axrt
from axrt.runtime.post import Post
from axrt.runtime.session import Session
from axrt.scheduler.message import Load, Meaning, Message
from axrt.transport.local import LocalWorld
from axrt.transport.payload import flatten

from ..sweeps import first, some, swept
from .models import motley
from .reference import (
    TWO_PIPES,
    Outcome,
    configured,
    made_once,
    momentum,
    random_batches,
    spoiling,
    together,
    train_on_a_rank,
    train_with_masters,
)
from .test_bits import MOTLEY_BATCHES
from .test_ties import MICROBATCHES as TIED_MICROBATCHES
from .test_ties import batches as tied_batches
from .test_ties import tied
from .test_zero import SMALL, WIDE_BATCHES, adafactor, check_equal, short, wide

MICROBATCHES, STEPS = 3, 2
KINDS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"weights": "bfloat16"},
    "in weights": {"weights": "bfloat16", "gradients": "weights"},
}


def batches_for(replicas: int) -> Any:
    return random_batches((6, 16), classes=5, microbatches=MICROBATCHES * replicas)


def trained(
    ranks: int,
    data: int,
    memory: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    seed: int = 1,
    steps: int = STEPS,
    **sections: Any,
) -> Outcome:
    config = configured(
        MICROBATCHES,
        memory={"bucket_mb": SMALL, **(memory or {})},
        parallel={"data": data, **(parallel or {})},
        **sections,
    )
    outcomes = LocalWorld(ranks * data, seed).run(
        lambda t: train_on_a_rank(t, short(), batches_for(data), steps, config)
    )
    return together(outcomes, data)


in_one_level = made_once(trained)


@made_once
def in_plain_torch(data: int, group: int, kind: str, clip: float) -> Outcome:
    return train_with_masters(
        short(),
        batches_for(data),
        STEPS,
        to=torch.float32 if kind == "float32" else torch.bfloat16,
        in_weights=kind == "in weights",
        clip=clip,
        holder_of=lambda k: k // MICROBATCHES,
        group_of=lambda holder: holder // group,
    )


@swept(
    ("data, group", [(4, 2), (6, 2), (6, 3), (4, 1), (4, 4)]),
    ("kind", KINDS),
    ("policy, clip", [("1f1b", 0.0), ("zb-h1", 0.4), ("adaptive", 0.0), ("1f1b", 0.4)]),
    ("seed", [1, 2]),
    quick=5,
)
def test_sums_are_those_of_plain_torch_group_by_group(
    data: int, group: int, kind: str, policy: str, clip: float, seed: int
) -> None:
    expected = in_plain_torch(data, group if 1 < group < data else data, kind, clip)
    found = trained(
        2,
        data,
        parallel={"group": group},
        precision=KINDS[kind],
        schedule={"policy": policy},
        optimizer={"clip": clip},
        seed=seed,
    )
    assert found.losses == expected.losses
    assert found.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        assert torch.equal(found.parameters[name], value), name


def test_another_order_of_the_same_sum_has_other_bits() -> None:
    """So the test above can fail."""
    one, other = (in_plain_torch(6, group, "float32", 0.0) for group in (2, 3))
    assert one.parameters.keys() == other.parameters.keys()
    assert any(
        not torch.equal(one.parameters[name], other.parameters[name]) for name in one.parameters
    )


@swept(
    ("kind", KINDS),
    ("policy", ["1f1b", "zb-h1", "breadth-first", "chimera", "interleaved-1f1b"]),
    ("data, shard, clip", [(4, 2, 0.0), (6, 3, 0.4), (6, 3, 0.0), (4, 2, 0.4)]),
    quick=2,  # more of them below, and without groups in test_zero.py
)
def test_shards_within_groups_change_no_bit_of_sums_in_groups(
    kind: str, policy: str, data: int, shard: int, clip: float
) -> None:
    pipes = 2 if policy in TWO_PIPES else 1
    check_equal(
        2,
        data,
        pipes=pipes,
        clip=clip,
        group=shard,
        microbatches=2,
        precision=KINDS[kind],
        schedule={"policy": policy},
    )


@pytest.mark.parametrize("seed", first(range(12), quick=2))
def test_a_total_that_is_late_in_another_group_is_that_of_its_step(seed: int) -> None:
    """A group may be a step ahead of another one, which has not had all of its totals."""
    found = trained(1, 4, {"zero": 1}, {"group": 2}, seed=seed, steps=6)
    plain = in_one_level(1, 4, parallel={"group": 2}, seed=0, steps=6)
    assert found.losses == plain.losses
    for name, value in plain.parameters.items():
        assert torch.equal(found.parameters[name], value), name


@swept(("kind", KINDS), ("model", ["tied", "motley", "wide", "adafactor"]))
def test_groups_know_tied_odd_and_large_weights(kind: str, model: str, landed: list[int]) -> None:
    of: dict[str, dict[str, Any]] = {
        "tied": {
            "model": tied,
            "batches": tied_batches(4 * TIED_MICROBATCHES),
            "microbatches": TIED_MICROBATCHES,
        },
        "motley": {"model": motley, "batches": MOTLEY_BATCHES, "microbatches": 1},
        "wide": {
            "model": wide,
            "batches": WIDE_BATCHES,
            "memory": {"bucket_mb": 0.1},
        },
        "adafactor": {"factory": adafactor, "microbatches": 2},
    }
    ranks = 1 if model == "wide" else 2
    zeros = some((1, 3), (3,))
    check_equal(ranks, 4, group=2, zeros=zeros, precision=KINDS[kind], **of[model])
    assert bool(landed) == (model == "wide")


@swept(
    ("kind", KINDS),
    ("clip", [0.0, 0.4]),
    ("recompute", ["full", "none"]),
    quick=2,
)
def test_shards_within_groups_may_be_offloaded_and_recomputed(
    kind: str, clip: float, recompute: str, tmp_path: Path
) -> None:
    check_equal(
        1,
        4,
        group=2,
        clip=clip,
        zeros=some((1, 3), (3,)),
        microbatches=2,
        precision=KINDS[kind],
        memory={"recompute": recompute},
        only={"offload": "stream", "scratch": f"disk:{tmp_path}"},
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("zero", "seed"), first([(2, 2), (1, 1), (0, 0)], quick=2))
def test_an_optimizer_may_write_to_gradients_while_totals_are_on_their_way(
    zero: int, seed: int
) -> None:
    def of(factory: Any, seed: int) -> dict[str, torch.Tensor]:
        memory = {"zero": zero, "bucket_mb": SMALL}
        config = configured(MICROBATCHES, memory=memory, parallel={"data": 4, "group": 2})
        ranks = LocalWorld(4, seed).run(
            lambda t: train_on_a_rank(t, short(), batches_for(4), STEPS, config, factory)
        )
        return together(ranks, 4).parameters

    expected, spoilt = of(momentum, 0), of(spoiling, seed)
    assert all(torch.equal(spoilt[name], value) for name, value in expected.items())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_sends_as_much_as_in_one_level_and_between_groups_a_shard_alone(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of P elements, R replicas in groups of N: 2P (R - 1)/R in all without shards, of which 2P/N
    (R/N - 1)/(R/N) go between groups. With shards the last gather is of weights."""
    sent: dict[Meaning, int] = {}
    post = Post.post

    def counting(of: Post, session: Session, message: Message, payload: Any = None) -> None:
        of_shards = message.meaning.load in (Load.SHARD, Load.PART_OF_SHARD)
        if of_shards and not session.state.is_here(message):
            size = sum(tensor.numel() for tensor in flatten(payload)[1])
            sent[message.meaning] = sent.get(message.meaning, 0) + size
        post(of, session, message, payload)

    monkeypatch.setattr(Post, "post", counting)
    data, group, steps, width = 8, 4, 2, 64
    layers = [axrt.LayerSpec(nn.Linear, width, width, bias=False) for _ in range(2)]
    model = axrt.PipelineModule(layers, loss_fn=nn.functional.mse_loss)
    config = configured(
        1,
        memory={"zero": zero, "reductions": 1 if zero > 1 else 0},
        parallel={"data": data, "group": group},
        schedule={"policy": "1f1b"},
    )
    items = [(torch.randn(2, width), torch.randn(2, width)) for _ in range(data)]
    LocalWorld(data).run(lambda t: train_on_a_rank(t, model, lambda step: items, steps, config))
    elements, groups = 2 * width * width, data // group
    within = data * steps * elements * (group - 1) // group
    across = data * steps * elements // group * (groups - 1) // groups
    last = Meaning.WEIGHTS if zero else Meaning.SUM
    assert sent == {
        Meaning.PART: within,
        Meaning.SUBTOTAL: across,
        Meaning.TOTAL: across,
        last: within,
    }


def refused(**sections: Any) -> str:
    with pytest.raises(axrt.ConfigError) as error:
        axrt.Config.read(sections)
    return str(error.value)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"parallel": {"data": 6, "group": 4}},
            "parallel.group = 4 of parallel.data = 6 replicas; expected 0 for all of them, or one "
            "of 1, 2, 3, 6",
        ),
        (
            {"parallel": {"data": 4}, "memory": {"shard": 2, "zero": 1}},
            "memory.shard is now parallel.group; expected the new name",
        ),
        (
            {"parallel": {"data": 4, "group": 2, "collectives": "library"}},
            "parallel.group = 2 with parallel.collectives = 'library'",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(sections: dict[str, Any], said: str) -> None:
    assert said in refused(**sections)
