"""bfloat16 by autocast: float32 weights, messages in the type that is computed in, and the same
bits wherever the model is cut."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import axrt
from axrt.device.queues import NOW, Moment
from axrt.transport import Parcel, Transport
from axrt.transport.local import LocalTransport, LocalWorld

from .models import perceptron
from .reference import (
    Outcome,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

MICROBATCHES, STEPS = 4, 3
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)


def on_ranks(ranks: int, **sections: Any) -> Outcome:
    config = configured(MICROBATCHES, precision={"compute": "bfloat16"}, **sections)
    return together(
        LocalWorld(ranks).run(lambda t: train_on_a_rank(t, perceptron(), BATCHES, STEPS, config))
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bfloat16_has_the_bits_of_plain_torch_under_autocast(ranks: int) -> None:
    reference = train_in_plain_torch(perceptron(), BATCHES, STEPS, compute=torch.bfloat16)
    assert reference == train_in_plain_torch(perceptron(), BATCHES, STEPS, compute=torch.bfloat16)
    assert on_ranks(ranks) == reference
    assert on_ranks(ranks, schedule={"policy": "gpipe"}, memory={"bucket_mb": 0}) == reference
    assert all(tensor.dtype == torch.float32 for tensor in reference.parameters.values())


class Pair(NamedTuple):
    """What may not travel."""

    value: Tensor
    factor: float


def test_what_does_not_travel_may_be_of_any_type() -> None:
    model = axrt.PipelineModule(
        [
            lambda value: Pair(value, 2.0),
            lambda pair: pair.value * pair.factor,
            axrt.LayerSpec(torch.nn.Linear, 16, 5),
        ],
        torch.nn.functional.cross_entropy,
    )
    config = configured(MICROBATCHES, precision={"compute": "bfloat16"})
    with axrt.initialize(model, config=config, transport=LocalWorld(1).alone()) as engine:
        assert engine.train_batch(iter(BATCHES(0))).loss > 0


def test_what_travels_is_in_the_type_that_is_computed_in() -> None:
    sent: list[tuple[str, torch.dtype]] = []

    class Watching(LocalTransport):
        def send(self, rank: int, parcel: Parcel, after: Moment = NOW) -> None:
            payload = (
                parcel.payload[0]
                if isinstance(parcel.payload, tuple) and parcel.payload
                else parcel.payload
            )
            if isinstance(payload, torch.Tensor) and payload.dim() == 2:
                sent.append((parcel.message[0].value, payload.dtype))
            super().send(rank, parcel, after)

    def rank_main(transport: LocalTransport) -> None:
        transport.__class__ = Watching
        config = configured(MICROBATCHES, precision={"compute": "bfloat16"})
        with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
            engine.train_batch(iter(BATCHES(0)))

    LocalWorld(2).run(rank_main)
    assert set(sent) == {("activation", torch.bfloat16), ("gradient", torch.bfloat16)}


def test_an_evaluation_computes_in_the_same_type() -> None:
    def rank_main(transport: Transport, compute: str) -> float:
        with axrt.initialize(
            perceptron(),
            config=configured(MICROBATCHES, precision={"compute": compute}),
            transport=transport,
        ) as engine:
            return engine.eval_batch(iter(BATCHES(0))).loss

    halves = LocalWorld(2).run(lambda transport: rank_main(transport, "bfloat16"))
    wholes = LocalWorld(2).run(lambda transport: rank_main(transport, "float32"))
    assert halves[0] == pytest.approx(wholes[0], rel=1e-2)
    assert halves[0] != wholes[0]
