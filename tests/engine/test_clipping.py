"""Clipping by the norm of all gradients, wherever they are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.scheduler.task import AnyKind, Kind
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import swept
from .models import motley, perceptron
from .reference import (
    ONE_PIPE,
    Outcome,
    adamw,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)
from .test_engine import Watch

MICROBATCHES, STEPS, CLIP = 4, 3, 0.5
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)


def on_ranks(ranks: int, seed: int = 0, clip: float = CLIP, **sections: Any) -> Outcome:
    config = configured(MICROBATCHES, optimizer={"clip": clip}, **sections)
    outcomes = LocalWorld(ranks, seed).run(
        lambda t: train_on_a_rank(t, perceptron(), BATCHES, STEPS, config)
    )
    return together([Outcome(outcome.losses, [], outcome.parameters) for outcome in outcomes])


@pytest.fixture(scope="module")
def reference() -> Outcome:
    clipped = train_in_plain_torch(perceptron(), BATCHES, STEPS, clip=CLIP)
    assert all(norm > CLIP for norm in clipped.norms)
    assert clipped != train_in_plain_torch(perceptron(), BATCHES, STEPS)
    return clipped


@swept(("ranks", [1, 2, 4]), ("policy", ONE_PIPE), quick=4)
def test_clipping_has_the_bits_of_plain_torch(reference: Outcome, ranks: int, policy: str) -> None:
    outcome = on_ranks(ranks, schedule={"policy": policy}, memory={"bucket_mb": 0.002})
    assert outcome == Outcome(reference.losses, [], reference.parameters)


def test_a_limit_that_no_norm_reaches_changes_no_bit() -> None:
    reference = train_in_plain_torch(perceptron(), BATCHES, STEPS, clip=1e6)
    assert on_ranks(2, clip=1e6) == Outcome(reference.losses, [], reference.parameters)
    assert reference == train_in_plain_torch(perceptron(), BATCHES, STEPS)


def test_every_rank_knows_the_norm_before_clipping(reference: Outcome) -> None:
    def rank_main(transport: Transport) -> list[float | None]:
        with axrt.initialize(
            perceptron(),
            adamw,
            config=configured(MICROBATCHES, optimizer={"clip": CLIP}),
            transport=transport,
        ) as engine:
            return [engine.train_batch(iter(BATCHES(step))).grad_norm for step in range(STEPS)]

    assert LocalWorld(3, seed=2).run(rank_main) == [reference.norms] * 3


def test_replicas_clip_by_the_norm_of_what_they_have_in_common() -> None:
    batches = random_batches((6, 16), classes=5, microbatches=2 * MICROBATCHES)
    reference = train_in_plain_torch(perceptron(), batches, STEPS, clip=CLIP)
    config = configured(MICROBATCHES, optimizer={"clip": CLIP}, parallel={"data": 2})
    ranks = LocalWorld(4).run(lambda t: train_on_a_rank(t, perceptron(), batches, STEPS, config))
    for rank in ranks:
        assert rank.losses == pytest.approx(reference.losses, rel=1e-6)
        assert rank.norms == pytest.approx(reference.norms, rel=1e-5)


def test_without_a_limit_nothing_waits_for_a_norm() -> None:
    watch = Watch()
    with axrt.initialize(
        perceptron(),
        config=configured(MICROBATCHES),
        transport=LocalWorld(1).alone(),
        observers=[watch],
    ) as engine:
        engine.train_batch(iter(BATCHES(0)))
    assert {task.kind for task in watch.tasks} == {Kind.FORWARD, Kind.BACKWARD, Kind.STEP}


def test_one_replica_votes_for_all() -> None:
    def rank_main(transport: Transport) -> set[AnyKind]:
        watch, config = (
            Watch(),
            configured(MICROBATCHES, optimizer={"clip": CLIP}, parallel={"data": 2}),
        )
        with axrt.initialize(
            perceptron(), config=config, transport=transport, observers=[watch]
        ) as engine:
            engine.train_batch(iter(BATCHES(0)) if engine.reads else None)
        return {task.kind for task in watch.tasks} & {Kind.NORM, Kind.VOTE}

    with pytest.warns(UserWarning, match="the same first microbatch"):
        voted = LocalWorld(4).run(rank_main)
    assert voted == [{Kind.NORM, Kind.VOTE}, {Kind.NORM}, set(), set()]


class Explodes(nn.Module):
    """The gradient of its weight is infinite where the input says so; the loss is a number all the
    same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        return value + (
            (self.weight * 0).sqrt() if float(value.detach().abs().max()) > 1e6 else self.weight
        )


@pytest.mark.parametrize("data", [1, 2])
def test_a_norm_that_is_no_number_skips_the_step_on_every_rank(data: int) -> None:
    model = axrt.PipelineModule(
        [
            axrt.LayerSpec(nn.Linear, 16, 16),
            axrt.LayerSpec(Explodes),
            torch.tanh,
            axrt.LayerSpec(nn.Linear, 16, 5),
        ],
        nn.functional.cross_entropy,
    )
    bad = BATCHES(1)
    bad[2] = (bad[2][0] * 0 + 1e9, bad[2][1])
    steps = [BATCHES(0), bad, BATCHES(2)]

    def rank_main(transport: Transport) -> list[tuple[bool, bool]]:
        config = configured(MICROBATCHES, optimizer={"clip": CLIP}, parallel={"data": data})
        seen = []
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            for items in steps:
                before = [p.detach().clone() for _, p in engine.named_parameters()]
                mine = [(inputs + engine.data_rank, target) for inputs, target in items]
                result = engine.train_batch(iter(mine))
                same = all(
                    torch.equal(b, p)
                    for b, (_, p) in zip(before, engine.named_parameters(), strict=True)
                )
                seen.append((result.skipped, same))
        return seen

    for seen in LocalWorld(3 * data).run(rank_main):
        assert [skipped for skipped, _ in seen] == [False, True, False]
        assert seen[1] == (True, True)


def test_structured_activations_and_frozen_weights_are_clipped_alike() -> None:
    batches = random_batches((6, 12), classes=4, microbatches=MICROBATCHES)
    reference = train_in_plain_torch(motley(), batches, STEPS, clip=0.1)
    config = configured(MICROBATCHES, optimizer={"clip": 0.1})
    outcomes = LocalWorld(4).run(lambda t: train_on_a_rank(t, motley(), batches, STEPS, config))
    assert together(outcomes) == reference
