"""Replicas that share microbatches: the same batch, whoever computes which part of it."""

from typing import Any

import pytest
import torch

from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import first
from .models import perceptron
from .reference import (
    Outcome,
    configured,
    momentum,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

MICROBATCHES, STEPS = 6, 3
SHARED = {"share": True}


def batches_for(replicas: int) -> Any:
    return random_batches((6, 16), classes=5, microbatches=MICROBATCHES * replicas)


def trained(pipe: int, data: int, seed: int = 1, **sections: Any) -> Outcome:
    config = configured(MICROBATCHES, **sections)
    config["schedule"] |= SHARED
    config["parallel"] = {"data": data, **config.get("parallel", {})}

    def rank_main(transport: Transport) -> Outcome:
        return train_on_a_rank(transport, perceptron(), batches_for(data), STEPS, config, momentum)

    return together(LocalWorld(pipe * data, seed).run(rank_main), data)


def check_close(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], parameter, rtol=1e-5, atol=1e-6)


SECTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "clipped": {"optimizer": {"clip": 0.5}},
    "zb-h1": {"schedule": {"policy": "zb-h1"}},
    "axonn": {"schedule": {"policy": "axonn"}},
    "interleaved": {"schedule": {"policy": "interleaved-1f1b", "chunks": 2}},
    "zb-v": {"schedule": {"policy": "zb-v"}},
    "recomputing": {"memory": {"recompute": 1}},
    "zero 1": {"memory": {"zero": 1}},
    "zero 2": {"memory": {"zero": 2, "reductions": 2}},
    "zero 3": {"memory": {"zero": 3}},
    "offloaded": {"memory": {"offload": "stream", "bucket_mb": 0.004}},
    "stashes away": {
        "schedule": {"policy": "zb-v"},
        "memory": {"offload_activations": 4},
    },
}


@pytest.mark.parametrize("name", first(list(SECTIONS), quick=4))
@pytest.mark.parametrize(("pipe", "data"), [(1, 3), (2, 2)])
def test_the_batch_is_that_of_plain_torch(name: str, pipe: int, data: int) -> None:
    sections = {key: dict(of) for key, of in SECTIONS[name].items()}
    if pipe == 1 and name in ("zb-h1", "interleaved", "zb-v", "stashes away"):
        pytest.skip("a schedule of several ranks")
    sections.setdefault("schedule", {"policy": "1f1b"})
    clip = sections.get("optimizer", {}).get("clip", 0.0)
    expected = train_in_plain_torch(perceptron(), batches_for(data), STEPS, momentum, clip=clip)
    for seed in range(3):
        check_close(trained(pipe, data, seed, **sections), expected)
