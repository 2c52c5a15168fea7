"""Replicas that share microbatches: the same batch, whoever computes which part of it."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.observe.observer import Observer, Wait
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import fewer, swept
from .models import motley, perceptron
from .reference import (
    SEED,
    Outcome,
    configured,
    momentum,
    plain_torch,
    random_batches,
    run_in_plain_torch,
    together,
    train_on_a_rank,
)
from .test_ties import MICROBATCHES as TIED_MICROBATCHES
from .test_ties import batches as tied_batches
from .test_ties import tied

MICROBATCHES, STEPS = 8, 2
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
    "recomputing": {"memory": {"recompute": 1}},
    "zb-v": {"schedule": {"policy": "zb-v"}},
    "zero 1": {"memory": {"zero": 1}},
    "stashes away": {
        "schedule": {"policy": "zb-v"},
        "memory": {"offload_activations": 4},
    },
    "zero 2": {"memory": {"zero": 2, "reductions": 2}},
    "zero 3": {"memory": {"zero": 3}},
    "offloaded": {"memory": {"offload": "stream", "bucket_mb": 0.004}},
}
OF_SEVERAL_RANKS = ("zb-h1", "interleaved", "zb-v", "stashes away")


@swept(("name", SECTIONS), ("pipe, data", [(2, 2), (1, 3)]))
def test_the_batch_is_that_of_plain_torch(name: str, pipe: int, data: int) -> None:
    sections = {key: dict(of) for key, of in SECTIONS[name].items()}
    if pipe == 1 and name in OF_SEVERAL_RANKS:
        pytest.skip("a schedule of several ranks")
    sections.setdefault("schedule", {"policy": "1f1b"})
    clip = sections.get("optimizer", {}).get("clip", 0.0)
    expected = plain_torch(perceptron, batches_for(data), STEPS, momentum, clip=clip)
    for seed in range(2):
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
    expected = plain_torch(motley, batches, STEPS, momentum)
    config = configured(MICROBATCHES, schedule={"policy": "1f1b"} | SHARED, parallel={"data": 2})

    def rank_main(transport: Transport) -> list[float]:
        losses = []
        with axrt.initialize(motley(), momentum, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            for step in range(STEPS):
                losses.append(engine.train_batch(iter(batches(step)[mine])).loss)
                engine.eval_batch(batches(9)[: 1 + engine.data_rank])
        return losses

    for seed in range(2):
        for losses in LocalWorld(4, seed).run(rank_main):
            assert losses == pytest.approx(expected.losses, rel=1e-6)


@pytest.mark.parametrize("short", [0, 1, 4])
def test_an_iterator_that_ends_drops_the_step_on_every_rank(short: int) -> None:
    expected = plain_torch(perceptron, batches_for(2), 2, momentum)
    config = configured(MICROBATCHES, schedule={"policy": "1f1b"} | SHARED, parallel={"data": 2})

    def rank_main(transport: Transport) -> list[float]:
        losses = []
        with axrt.initialize(perceptron(), momentum, config=config, transport=transport) as engine:
            first = engine.data_rank * MICROBATCHES
            for step in range(2):
                items = batches_for(2)(step)[first : first + MICROBATCHES]
                ends = iter(items[:short] if engine.data_rank == 0 or short == 0 else items)
                with pytest.raises(StopIteration, match=f"ended after {short} of the 8"):
                    engine.train_batch(ends)
                losses.append(engine.train_batch(iter(items)).loss)
        return losses

    for seed in range(2):
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
        (
            {"schedule": {"policy": "gpipe"}, "parallel": {"data": 2}},
            "may take all that it can get",
        ),
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


def tree_sum(leaves: list[Tensor | None]) -> Tensor | None:
    """Of neighbours, then of pairs of neighbours, and so on."""
    while len(leaves) > 1:
        pairs = [leaves[place : place + 2] for place in range(0, len(leaves), 2)]
        sums = [[one for one in pair if one is not None] for pair in pairs]
        leaves = [sum(of[1:], of[0]) if of else None for of in sums]
    return leaves[0]


def train_in_a_tree(model: axrt.PipelineModule, batches: Any, clip: float) -> Outcome:
    """Plain PyTorch; gradients of microbatches are added up as neighbours."""
    whole = model.sequential(SEED)
    named = list(whole.named_parameters())
    optimizer = momentum(named)
    losses, norms = [], []
    for step in range(STEPS):
        items, found = batches(step), []
        of_step = []
        for k, (inputs, target) in enumerate(items):
            outputs = run_in_plain_torch(whole, inputs, step, k, None)
            loss = functional.cross_entropy(outputs, target)
            torch.autograd.backward(loss / len(items))
            of_step.append(loss.item())
            found.append([parameter.grad for _, parameter in named])
            optimizer.zero_grad()
        for (_, parameter), leaves in zip(named, zip(*found, strict=True), strict=True):
            parameter.grad = tree_sum(list(leaves))
        gradients = [p.grad for _, p in named if p.grad is not None]
        norms.append(nn.utils.get_total_norm(gradients).item())
        if clip:
            nn.utils.clip_grad_norm_([p for _, p in named], clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(of_step) / len(of_step))
    return Outcome(losses, norms, {name: p.detach().clone() for name, p in named})


@swept(
    ("pipe, data", [(1, 3), (2, 2), (2, 3)]),
    ("memory", [{}, {"bucket_mb": 0.002}, {"offload": "stream", "bucket_mb": 0.004}]),
    quick=2,
)
def test_bits_are_those_of_a_tree_whoever_computes_what(
    pipe: int, data: int, memory: dict[str, Any]
) -> None:
    expected = train_in_a_tree(perceptron(), batches_for(data), clip=0.5)
    for seed in range(fewer(4, 2)):
        found = trained(
            pipe,
            data,
            seed,
            schedule={"policy": "1f1b"},
            run={"deterministic": True},
            optimizer={"clip": 0.5},
            memory=memory,
        )
        assert found.losses == expected.losses
        for name, parameter in expected.parameters.items():
            assert torch.equal(found.parameters[name], parameter), name


@pytest.mark.parametrize("pipe", [1, 2])
def test_tied_weights_have_one_sum_whoever_computes_what(pipe: int) -> None:
    config = configured(
        TIED_MICROBATCHES,
        schedule={"policy": "1f1b"} | SHARED,
        parallel={"data": 2},
        run={"deterministic": True},
    )
    batches = tied_batches(2)
    outcomes = []
    for seed in range(3):

        def rank_main(transport: Transport) -> Outcome:
            return train_on_a_rank(transport, tied(), batches, STEPS, config, momentum)

        found = LocalWorld(2 * pipe, seed).run(rank_main)
        outcomes.append(found)
    expected = plain_torch(tied, batches, STEPS, momentum)
    assert outcomes[0][0].losses == pytest.approx(expected.losses, rel=1e-6)
    for found in outcomes[1:]:
        for one, other in zip(found, outcomes[0], strict=True):
            assert one.losses == other.losses
            for name, parameter in other.parameters.items():
                assert torch.equal(one.parameters[name], parameter), name


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"schedule": {"policy": "zb-h1"}}, "splits backwards"),
        ({"memory": {"zero": 1}}, "memory.zero = 0, or run.deterministic = false"),
        ({"parallel": {"data": 2, "collectives": "library"}}, "parallel.collectives = 'parts'"),
        ({"parallel": {"data": 2, "group": 2}}, "parallel.group = 0"),
    ],
)
def test_where_no_tree_adds_up_it_is_said(sections: dict[str, Any], why: str) -> None:
    usual = {"parallel": {"data": 2}, "run": {"deterministic": True}}
    config = configured(MICROBATCHES, **{**usual, **sections})
    config["schedule"] = {"policy": "1f1b", **config["schedule"], **SHARED}

    def rank_main(transport: Transport) -> None:
        with pytest.raises(axrt.ConfigError, match=why):
            axrt.initialize(perceptron(), config=config, transport=transport)

    LocalWorld(4).run(rank_main)
