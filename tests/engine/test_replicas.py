"""Replicas: the gradient of all microbatches of all of them, in one order of summation."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.runtime import rank as rank_module
from axrt.runtime.compute import compute_on
from axrt.runtime.reader import _digest
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import fewer, first, swept
from .models import perceptron
from .reference import (
    ONE_PIPE,
    Outcome,
    configured,
    momentum,
    plain_torch,
    random_batches,
    spoiling,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)
from .test_engine import delayed

MICROBATCHES, STEPS = 6, fewer(10, quick=3)


def batches_for(replicas: int) -> Any:
    return random_batches((6, 16), classes=5, microbatches=MICROBATCHES * replicas)


def on_ranks(
    pipe: int,
    data: int,
    model: axrt.PipelineModule | None = None,
    seed: int = 0,
    steps: int = STEPS,
    **sections: Any,
) -> Outcome:
    config = configured(
        MICROBATCHES, parallel={"data": data, **sections.pop("parallel", {})}, **sections
    )
    whole, batches = model or perceptron(), batches_for(data)
    outcomes = LocalWorld(pipe * data, seed).run(
        lambda transport: train_on_a_rank(transport, whole, batches, steps, config)
    )
    return together(outcomes, data)


def in_plain_torch(replicas: int) -> Outcome:
    return plain_torch(perceptron, batches_for(replicas), STEPS)


def sgd_of_rate_one(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1.0)


def first_gradient(pipe: int, data: int, **sections: Any) -> dict[str, Tensor]:
    """The first step's gradient: what one step of SGD takes away."""
    model, batches = perceptron(), batches_for(data)
    config = configured(MICROBATCHES, parallel={"data": data}, **sections)
    ranks = LocalWorld(pipe * data).run(
        lambda t: train_on_a_rank(t, model, batches, 1, config, sgd_of_rate_one)
    )
    before = dict(model.sequential(7).named_parameters())
    return {
        name: before[name].detach().double() - after.double()
        for name, after in together(ranks, data).parameters.items()
    }


def relative_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    difference = torch.cat([(one[name] - other[name]).flatten() for name in one])
    return float(
        difference.norm() / torch.cat([tensor.flatten() for tensor in one.values()]).norm()
    )


@pytest.mark.parametrize("seed", first(range(4), quick=2))
def test_an_optimizer_may_write_to_gradients_while_their_sums_are_on_their_way(seed: int) -> None:
    def trained(optimizer: Any, seed: int) -> dict[str, Tensor]:
        config = configured(MICROBATCHES, parallel={"data": 3})
        ranks = LocalWorld(3, seed).run(
            lambda t: train_on_a_rank(
                t,
                perceptron(),
                batches_for(3),
                4,
                config,
                optimizer,
            )
        )
        return together(ranks, 3).parameters

    expected = trained(momentum, 0)
    spoilt = trained(spoiling, seed)
    assert all(torch.equal(spoilt[name], value) for name, value in expected.items())


@swept(
    ("pipe, data", [(1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (3, 3)]),
    ("policy", ONE_PIPE),
    quick=6,
)
def test_replicas_train_as_one_process_with_all_their_microbatches(
    pipe: int, data: int, policy: str
) -> None:
    reference = in_plain_torch(data)
    outcome = on_ranks(pipe, data, schedule={"policy": policy})
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-6)
    assert outcome.norms[0] == pytest.approx(reference.norms[0], rel=1e-6)


@pytest.mark.parametrize(("pipe", "data"), [(1, 2), (2, 2), (3, 3)])
def test_the_first_gradient_is_that_of_plain_torch(pipe: int, data: int) -> None:
    model = perceptron()
    reference = train_in_plain_torch(model, batches_for(data), 1, sgd_of_rate_one)
    before = dict(model.sequential(7).named_parameters())
    expected = {
        name: before[name].detach().double() - after.double()
        for name, after in reference.parameters.items()
    }
    # Subtracting from weights rounds to their last bits; the gradient itself is nearer than what is
    # left of it here.
    assert relative_difference(expected, first_gradient(pipe, data)) < 1e-6


@pytest.mark.parametrize("data", first([2, 3]))
def test_bits_depend_on_the_number_of_replicas_alone(data: int) -> None:
    expected = on_ranks(1, data, steps=3)
    assert on_ranks(3, data, seed=5, steps=3) == expected
    assert on_ranks(2, data, steps=3, parallel={"rank_order": "data"}) == expected
    assert on_ranks(2, data, steps=3, memory={"bucket_mb": 0}) == expected
    assert (
        on_ranks(2, data, steps=3, memory={"bucket_mb": 0.001}, schedule={"policy": "gpipe"})
        == expected
    )
    assert on_ranks(2, data, steps=3, parallel={"partition": [0, 0, 8]}) == expected, (
        "an empty stage"
    )


def test_buckets_of_any_size_have_the_bits_of_plain_torch_on_one_replica() -> None:
    for bucket_mb in (
        0,
        0.001,
        0.01,
    ):  # from one parameter a bucket to a few; the largest here has 2 KiB
        assert on_ranks(2, 1, memory={"bucket_mb": bucket_mb}) == in_plain_torch(1)


def test_a_replica_whose_device_is_slow_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = on_ranks(2, 2, steps=4)
    made: list[object] = []

    def third_and_fourth_are_slow(device: torch.device) -> Any:
        made.append(device)
        return delayed(device) if len(made) > 2 else compute_on(device)

    monkeypatch.setattr(rank_module, "compute_on", third_and_fourth_are_slow)
    assert on_ranks(2, 2, steps=4, seed=3) == expected


@swept(("seed", [2, 5, 3, 0, 1, 4]), ("optimizer", [momentum, spoiling]), quick=2)
def test_sums_leave_unchanged_where_devices_tell_ends_late(
    seed: int, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who clips and steps starts behind a sum that has not left."""

    def trained(data: int) -> Outcome:
        config = configured(MICROBATCHES, parallel={"data": data}, optimizer={"clip": 0.05})
        ranks = LocalWorld(data, seed).run(
            lambda t: train_on_a_rank(t, perceptron(), batches_for(data), 3, config, optimizer)
        )
        return together(ranks, data)

    data = 2 + seed % 2
    expected = trained(data)
    monkeypatch.setattr(rank_module, "compute_on", delayed)
    assert trained(data) == expected


class Unused(nn.Module):
    """A weight that no forward uses, beside one that all do, and one that only some microbatches
    use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.never = nn.Linear(width, width), nn.Linear(width, width)
        self.sometimes = nn.Parameter(torch.ones(width))

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.linear(value)
        return out * self.sometimes if float(value.sum()) > 0 else out


@pytest.mark.parametrize(("pipe", "data"), [(1, 1), (2, 2), (1, 3)])
def test_a_parameter_without_a_gradient_stays_as_plain_torch_leaves_it(
    pipe: int, data: int
) -> None:
    model = axrt.PipelineModule(
        [axrt.LayerSpec(Unused, 16), axrt.LayerSpec(nn.Linear, 16, 5)], functional.cross_entropy
    )
    reference = train_in_plain_torch(model, batches_for(data), 3)
    outcome = on_ranks(pipe, data, model, steps=3)
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-6)
    # weight decay would change it
    assert torch.equal(
        outcome.parameters["0.never.weight"], model.sequential(7).get_parameter("0.never.weight")
    )


def test_a_gradient_that_only_one_replica_has_reaches_both() -> None:
    model = axrt.PipelineModule(
        [axrt.LayerSpec(Unused, 16), axrt.LayerSpec(nn.Linear, 16, 5)], functional.cross_entropy
    )
    items = [
        (torch.full((6, 16), sign), torch.zeros(6, dtype=torch.int64))
        for sign in (1.0, -1.0)
        for _ in range(MICROBATCHES)
    ]
    config = configured(MICROBATCHES, parallel={"data": 2})
    outcome = together(
        LocalWorld(2).run(lambda t: train_on_a_rank(t, model, lambda step: items, 2, config)), 2
    )
    reference = train_in_plain_torch(model, lambda step: items, 2)
    assert outcome.parameters["0.sometimes"].tolist() == pytest.approx(
        reference.parameters["0.sometimes"].tolist(), rel=1e-5
    )
    assert not torch.equal(outcome.parameters["0.sometimes"], torch.ones(16))


def test_one_huge_parameter_is_a_bucket_of_its_own(landed: list[int]) -> None:
    model = axrt.PipelineModule(
        [axrt.LayerSpec(nn.Linear, 16, 3000), axrt.LayerSpec(nn.Linear, 3000, 5)],
        functional.cross_entropy,
    )
    reference = train_in_plain_torch(model, batches_for(2), 3)
    outcome = on_ranks(2, 2, model, steps=3, memory={"bucket_mb": 0.01})
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-6)
    assert landed


@swept(("seed", range(10)), quick=3)
def test_the_first_reader_that_ends_ends_the_step_on_every_rank(seed: int) -> None:
    batches = batches_for(2)

    def rank_main(transport: Transport) -> list[float]:
        with axrt.initialize(
            perceptron(), config=configured(MICROBATCHES, parallel={"data": 2}), transport=transport
        ) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            items = [item for step in range(3) for item in batches(step)[mine]]
            stream = iter(
                items[: 2 * MICROBATCHES + seed % MICROBATCHES]
                if engine.data_rank == seed % 2
                else items
            )
            losses = [engine.train_batch(stream).loss for _ in range(2)]
            with pytest.raises(StopIteration):
                engine.train_batch(stream)
            assert engine.step == 2
            return [*losses, engine.train_batch(iter(batches(2)[mine])).loss]

    ranks = LocalWorld(4, seed).run(rank_main)
    assert ranks == [ranks[0]] * 4
    assert ranks[0] == on_ranks_with_the_default_optimizer()


@cache
def on_ranks_with_the_default_optimizer() -> list[float]:
    def rank_main(transport: Transport) -> list[float]:
        with axrt.initialize(
            perceptron(), config=configured(MICROBATCHES, parallel={"data": 2}), transport=transport
        ) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            return [engine.train_batch(iter(batches_for(2)(step)[mine])).loss for step in range(3)]

    return LocalWorld(2).run(rank_main)[0]


def test_an_evaluation_counts_the_microbatches_of_all_replicas_and_keeps_their_order() -> None:
    items = batches_for(2)(99)
    whole = perceptron().sequential(7).eval()
    with torch.no_grad():
        expected = [whole(inputs) for inputs, _ in items]
    losses = [
        float(functional.cross_entropy(outputs, target))
        for outputs, (_, target) in zip(expected, items, strict=True)
    ]

    def rank_main(transport: Transport) -> int:
        with axrt.initialize(
            perceptron(), config=configured(MICROBATCHES, parallel={"data": 2}), transport=transport
        ) as engine:
            mine = items[:4] if engine.data_rank == 0 else items[4:]
            result = engine.eval_batch(iter(mine), outputs=True)
            assert (result.loss, result.microbatches) == (
                sum(losses) / len(losses),
                2 * MICROBATCHES,
            )
            if engine.is_main:
                assert all(
                    torch.equal(mine, its)
                    for mine, its in zip(result.outputs, expected, strict=True)
                )
            return len(result.outputs)

    assert LocalWorld(4, seed=1).run(rank_main) == [2 * MICROBATCHES, 0, 0, 0]


def test_replicas_that_read_the_same_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by `pytest.warns`: another thread's context may hide warnings meanwhile.
    warned: list[tuple[str, object]] = []
    monkeypatch.setattr(
        "warnings.warn", lambda text, category=None, **_: warned.append((text, category))
    )

    def rank_main(transport: Transport) -> None:
        with axrt.initialize(
            perceptron(), config=configured(MICROBATCHES, parallel={"data": 2}), transport=transport
        ) as engine:
            for step in range(2):
                engine.train_batch(iter(batches_for(1)(step)))

    LocalWorld(2).run(rank_main)
    ((text, category),) = warned
    assert text.startswith("replicas 0 and 1 have read the same first microbatch")
    assert category in (None, UserWarning)


def test_replicas_may_read_tensors_of_any_strides() -> None:
    """Their first microbatch is compared by its bytes."""
    odd = [
        torch.tensor(1.0).expand(1),
        torch.randn(6).unfold(0, 3, 1),
        torch.randn(2, dtype=torch.complex64).conj(),
    ]
    assert len({_digest((tensor, torch.ones(1))) for tensor in odd}) == 3


@swept(("seed", range(8)), quick=2)
def test_modules_given_as_they_are_take_the_values_of_the_first_replica_as_they_were_at_the_start(
    seed: int,
) -> None:
    batches = batches_for(2)

    def rank_main(transport: Transport) -> list[float]:
        torch.manual_seed(transport.rank)
        means = torch.full((16,), float(transport.rank))
        normed = nn.BatchNorm1d(16)
        normed.running_mean = means
        model = axrt.PipelineModule(
            [nn.Linear(16, 16), normed, nn.Linear(16, 5)], functional.cross_entropy
        )
        with axrt.initialize(
            model, config=configured(MICROBATCHES, parallel={"data": 2}), transport=transport
        ) as engine:
            weights = [float(p.detach().sum()) for _, p in engine.named_parameters()]
            # forwards will change the first replica's while the network may still be reading
            mean = float(means.sum())
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            return [*weights, mean, engine.train_batch(iter(batches(0)[mine])).loss]

    one, two = LocalWorld(2, seed).run(rank_main)
    assert one == two
