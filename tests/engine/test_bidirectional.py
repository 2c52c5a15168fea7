"""Two pipes over the same ranks: every stage held twice, every microbatch through one pipe, one
gradient."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.observe.observer import Observer
from axrt.scheduler.task import Task
from axrt.transport import Transport
from axrt.transport.control import News
from axrt.transport.local import LocalWorld

from ..sweeps import fewer, swept
from .models import perceptron
from .reference import (
    TWO_PIPES,
    Outcome,
    adamw,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)
from .test_replicas import relative_difference, sgd_of_rate_one
from .test_ties import MICROBATCHES as TIED_MICROBATCHES
from .test_ties import batches as tied_batches
from .test_ties import tied
from .test_weighted_losses import batches as weighted_batches
from .test_weighted_losses import model as weighted_model

MICROBATCHES, STEPS = 6, fewer(10, quick=3)


def batches_for(data: int) -> Any:
    return random_batches((6, 16), classes=5, microbatches=MICROBATCHES * data)


def on_ranks(ranks: int, data: int = 1, seed: int = 0, steps: int = STEPS, **of: Any) -> Outcome:
    sections = {
        "schedule": {"policy": "dualpipe"},
        **of,
        "parallel": {"data": data, **of.get("parallel", {})},
    }
    config, whole, batches = configured(MICROBATCHES, **sections), perceptron(), batches_for(data)
    outcomes = LocalWorld(ranks * data, seed).run(
        lambda transport: train_on_a_rank(transport, whole, batches, steps, config)
    )
    return together(
        [Outcome(one.losses, outcomes[0].norms, one.parameters) for one in outcomes], pipes=2 * data
    )


@cache
def in_plain_torch(data: int) -> Outcome:
    return train_in_plain_torch(perceptron(), batches_for(data), STEPS)


@swept(("ranks, data", [(2, 1), (4, 1), (2, 2), (4, 3)]), ("policy", TWO_PIPES))
def test_two_pipes_train_as_one_process(ranks: int, data: int, policy: str) -> None:
    reference = in_plain_torch(data)
    outcome = on_ranks(ranks, data, schedule={"policy": policy})
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-6)
    assert outcome.norms[0] == pytest.approx(reference.norms[0], rel=1e-6)


@swept(("data", [1, 2]), ("policy", TWO_PIPES))
def test_the_first_gradient_is_that_of_plain_torch(data: int, policy: str) -> None:
    before = dict(perceptron().sequential(7).named_parameters())

    def gradient(outcome: Outcome) -> dict[str, Tensor]:
        return {
            name: before[name].detach().double() - after.double()
            for name, after in outcome.parameters.items()
        }

    config = configured(MICROBATCHES, schedule={"policy": policy}, parallel={"data": data})
    ranks = LocalWorld(4 * data).run(
        lambda t: train_on_a_rank(t, perceptron(), batches_for(data), 1, config, sgd_of_rate_one)
    )
    expected = train_in_plain_torch(perceptron(), batches_for(data), 1, sgd_of_rate_one)
    assert relative_difference(gradient(expected), gradient(together(ranks, pipes=2 * data))) < 1e-6


def test_bits_depend_on_the_number_of_pipes_alone() -> None:
    expected = on_ranks(2, steps=3)
    assert on_ranks(2, steps=3, seed=5, schedule={"policy": "chimera"}) == expected
    assert on_ranks(4, steps=3, seed=6, memory={"bucket_mb": 0.001}) == expected
    assert on_ranks(4, steps=3, schedule={"policy": "fixed", "order": "chimera"}) == expected
    assert on_ranks(4, steps=3, memory={"recompute": "full"}) == expected
    two_replicas = on_ranks(4, 2, steps=3)
    assert on_ranks(2, 2, steps=3, seed=3, parallel={"rank_order": "data"}) == two_replicas


@pytest.mark.parametrize("policy", TWO_PIPES)
def test_clipping_votes_once_for_both_pipes(policy: str) -> None:
    reference = train_in_plain_torch(perceptron(), batches_for(1), STEPS, clip=0.5)
    outcome = on_ranks(4, schedule={"policy": policy}, optimizer={"clip": 0.5})
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-6)
    assert outcome.norms == pytest.approx(reference.norms, rel=1e-5)


@pytest.mark.parametrize("data", [1, 2])
def test_tied_weights_are_summed_over_both_pipes(data: int) -> None:
    """Four copies a replica: two layers in two pipes."""
    reference = train_in_plain_torch(tied(), tied_batches(data), STEPS)
    config = configured(TIED_MICROBATCHES, parallel={"data": data}, schedule={"policy": "chimera"})
    outcomes = LocalWorld(4 * data, 3).run(
        lambda t: train_on_a_rank(t, tied(), tied_batches(data), STEPS, config)
    )
    assert outcomes[0].losses == pytest.approx(reference.losses, rel=1e-6)
    copies: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, tensor in outcome.parameters.items():
            assert torch.equal(copies.setdefault(name, tensor), tensor), name


def test_weighted_losses_are_divided_by_the_weights_of_both_pipes() -> None:
    reference = train_in_plain_torch(weighted_model(), weighted_batches(2), 3)
    config = configured(6, schedule={"policy": "chimera"})
    outcomes = LocalWorld(2).run(
        lambda t: train_on_a_rank(t, weighted_model(), weighted_batches(2), 3, config)
    )
    assert outcomes[0].losses == pytest.approx(reference.losses, rel=1e-6)


def test_an_evaluation_goes_down_one_pipe_and_changes_nothing() -> None:
    items = batches_for(1)(99)[:5]
    whole = perceptron().sequential(7).eval()
    with torch.no_grad():
        losses = [
            float(functional.cross_entropy(whole(inputs), target)) for inputs, target in items
        ]

    def rank_main(transport: Transport) -> list[float]:
        config = configured(MICROBATCHES, schedule={"policy": "chimera"})
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            found = engine.eval_batch(iter(items))
            assert (found.loss, found.microbatches) == (sum(losses) / len(losses), len(items))
            return [
                engine.train_batch(iter(batches_for(1)(step)) if engine.reads else None).loss
                for step in range(2)
            ]

    reference = train_in_plain_torch(perceptron(), batches_for(1), 2)
    for of_rank in LocalWorld(4, seed=5).run(rank_main):
        assert of_rank == pytest.approx(reference.losses, rel=1e-6)


def test_a_checkpoint_of_two_pipes_is_that_of_one(tmp_path: Path) -> None:
    """Saved by two pipes on four ranks, gone on with by one rank, which has its numbers to
    rounding."""

    def train(transport: Transport, policy: str, resume: bool) -> list[float]:
        config = configured(MICROBATCHES, schedule={"policy": policy})
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            if resume:
                engine.load_checkpoint(tmp_path / "saved")
            losses = [
                engine.train_batch(iter(batches_for(1)(engine.step)) if engine.reads else None).loss
                for _ in range(2)
            ]
            if not resume:
                engine.save_checkpoint(tmp_path / "saved")
            return losses

    LocalWorld(4, seed=2).run(lambda transport: train(transport, "dualpipe", False))
    reference = train_in_plain_torch(perceptron(), batches_for(1), 4)
    assert train(LocalWorld(1).alone(), "1f1b", True) == pytest.approx(
        reference.losses[2:], rel=1e-6
    )
    for of_rank in LocalWorld(4, seed=3).run(lambda transport: train(transport, "chimera", True)):
        assert of_rank == pytest.approx(reference.losses[2:], rel=1e-6)


def test_modules_given_as_they_are_take_the_values_of_the_first_pipe() -> None:
    def rank_main(transport: Transport) -> dict[str, Tensor]:
        torch.manual_seed(transport.rank)  # every process made its own
        layers = [nn.Linear(16, 16), nn.Linear(16, 5)]
        model, config = (
            axrt.PipelineModule(layers, functional.cross_entropy),
            configured(2, schedule={"policy": "chimera"}),
        )
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            return {
                name: parameter.detach().clone() for name, parameter in engine.named_parameters()
            }

    one, two = LocalWorld(2, seed=4).run(rank_main)
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


class Events(Observer):
    """What was sent and started, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def sent(self, rank: int, message: News, payload: object) -> None:
        self.told.append(str(message))

    def started(self, task: Task) -> None:
        self.told.append(str(task))


def test_the_other_pipe_has_its_first_microbatch_before_the_reader_begins_with_its_own() -> None:
    """Its first rank has nothing else to do while this one computes."""

    def rank_main(transport: Transport) -> list[str]:
        events = Events()
        config = configured(MICROBATCHES, schedule={"policy": "chimera"})
        train_on_a_rank(transport, perceptron(), batches_for(1), 2, config, observers=[events])
        return events.told

    told = LocalWorld(2, seed=1).run(rank_main)[0]
    for step in range(2):
        number = step * MICROBATCHES
        assert told.index(f"activation {number + 1} for stage 0 of pipe 1") < told.index(
            f"F0.{number}"
        )


def test_what_does_not_fit_two_pipes_is_refused() -> None:
    def start(ranks: int, microbatches: int) -> None:
        config = configured(microbatches, schedule={"policy": "chimera"})
        LocalWorld(ranks).run(lambda t: train_on_a_rank(t, perceptron(), batches_for(1), 1, config))

    with pytest.raises(
        axrt.ConfigError, match="takes an even number of ranks; start 4 ranks a pipeline, not 3"
    ):
        start(3, 6)
    with pytest.raises(
        axrt.ConfigError,
        match="has 2 pipes, and each takes as many microbatches; set microbatches = 6, not 5",
    ):
        start(2, 5)


def test_the_reader_that_ends_drops_the_step_on_both_pipes() -> None:
    def rank_main(transport: Transport) -> list[float]:
        config = configured(MICROBATCHES, schedule={"policy": "dualpipe"})
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            losses = [engine.train_batch(iter(batches_for(1)(0))).loss]
            with pytest.raises(StopIteration, match="ended after 3 of the 6"):
                engine.train_batch(iter(batches_for(1)(1)[:3]))
            return [*losses, engine.train_batch(iter(batches_for(1)(1))).loss]

    reference = train_in_plain_torch(perceptron(), batches_for(1), 2)
    for of_rank in LocalWorld(4, seed=8).run(rank_main):
        assert of_rank == pytest.approx(reference.losses, rel=1e-6)
