"""Replicas that share microbatches: the same batch, whoever computes which part of it."""

from collections import Counter
from typing import Any

import pytest
import torch

import axrt
from axrt.observe.observer import Observer, Wait
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import first
from .models import motley, perceptron
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


def by_the_loss(of: list[Any]) -> axrt.PipelineModule:
    """The usual model, whose loss notes the targets that it gets."""
    model = perceptron()
    loss_fn = model.loss_fn

    def noting(outputs: Any, target: torch.Tensor) -> Any:
        of.append(tuple(target.tolist()))
        return loss_fn(outputs, target)

    return axrt.PipelineModule(model.layers, noting)


def test_each_microbatch_is_computed_once_and_some_by_another_replica() -> None:
    config = configured(MICROBATCHES, schedule={"policy": "1f1b"} | SHARED, parallel={"data": 2})
    moved = 0
    for seed in range(6):
        computed: dict[int, list[Any]] = {replica: [] for replica in range(2)}

        def rank_main(transport: Transport) -> None:
            replica = transport.rank // 2
            model = by_the_loss(computed[replica])  # noqa: B023
            train_on_a_rank(transport, model, batches_for(2), STEPS, config, momentum)

        LocalWorld(4, seed).run(rank_main)
        whole = [
            [tuple(target.tolist()) for _, target in batches_for(2)(step)] for step in range(STEPS)
        ]
        assert Counter(computed[0] + computed[1]) == Counter(one for step in whole for one in step)
        own = {one for step in whole for one in step[:MICROBATCHES]}
        moved += sum(one not in own for one in computed[0]) + sum(one in own for one in computed[1])
    assert moved > 0


def test_structured_activations_and_evaluations_between_steps() -> None:
    batches = random_batches((6, 12), classes=4, microbatches=2 * MICROBATCHES)
    expected = train_in_plain_torch(motley(), batches, STEPS, momentum)
    config = configured(MICROBATCHES, schedule={"policy": "1f1b"} | SHARED, parallel={"data": 2})

    def rank_main(transport: Transport) -> list[float]:
        losses = []
        with axrt.initialize(motley(), momentum, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            for step in range(STEPS):
                losses.append(engine.train_batch(iter(batches(step)[mine])).loss)
                engine.eval_batch(batches(9)[: 1 + engine.data_rank])
        return losses

    for seed in range(3):
        for losses in LocalWorld(4, seed).run(rank_main):
            assert losses == pytest.approx(expected.losses, rel=1e-6)


@pytest.mark.parametrize("short", [0, 1, 4])
def test_an_iterator_that_ends_drops_the_step_on_every_rank(short: int) -> None:
    expected = train_in_plain_torch(perceptron(), batches_for(2), 2, momentum)
    config = configured(MICROBATCHES, schedule={"policy": "1f1b"} | SHARED, parallel={"data": 2})

    def rank_main(transport: Transport) -> list[float]:
        losses = []
        with axrt.initialize(perceptron(), momentum, config=config, transport=transport) as engine:
            first = engine.data_rank * MICROBATCHES
            for step in range(2):
                items = batches_for(2)(step)[first : first + MICROBATCHES]
                ends = iter(items[:short] if engine.data_rank == 0 or short == 0 else items)
                with pytest.raises(StopIteration, match=f"ended after {short} of the 6"):
                    engine.train_batch(ends)
                losses.append(engine.train_batch(iter(items)).loss)
        return losses

    for seed in range(4):
        for losses in LocalWorld(4, seed).run(rank_main):
            assert losses == pytest.approx(expected.losses, rel=1e-6)


class Waits(Observer):
    def __init__(self) -> None:
        self.told: list[str] = []

    def waiting(self, wait: Wait) -> None:
        self.told.append(wait.what())


def test_a_rank_that_waits_for_a_microbatch_says_from_whom() -> None:
    config = configured(MICROBATCHES, schedule={"policy": "1f1b"} | SHARED, parallel={"data": 2})
    told: list[str] = []

    def rank_main(transport: Transport) -> None:
        watch = Waits()
        train_on_a_rank(
            transport, perceptron(), batches_for(2), STEPS, config, momentum, observers=[watch]
        )
        told.extend(watch.told)

    for seed in range(4):
        LocalWorld(4, seed).run(rank_main)
    assert any("lacks a microbatch to share from" in text for text in told)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"schedule": {"policy": "gpipe"}, "parallel": {"data": 2}}, "takes all that it can get"),
        ({"schedule": {"policy": "1f1b"}}, "schedule.share: there is one replica"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_runs(
    sections: dict[str, Any], why: str
) -> None:
    config = configured(MICROBATCHES, **sections)
    config["schedule"] |= SHARED

    def rank_main(transport: Transport) -> None:
        with pytest.raises(axrt.ConfigError, match=why):
            axrt.initialize(perceptron(), config=config, transport=transport)

    LocalWorld(2).run(rank_main)
