"""Losses of (sum, weight): microbatches may count differently."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import axrt
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import fewer, swept
from .models import perceptron
from .reference import Outcome, configured, together, train_in_plain_torch, train_on_a_rank

MICROBATCHES, STEPS = 3, fewer(10, quick=4)
IGNORED = -100


def summed(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(outputs, target, reduction="sum", ignore_index=IGNORED), (
        target != IGNORED
    ).sum()


def model(loss_fn: Any = summed) -> axrt.PipelineModule:
    return axrt.PipelineModule(perceptron().layers, loss_fn)


def batches(replicas: int = 1) -> Any:
    """Targets of which ever more are ignored; of the last microbatch all."""

    def of_step(step: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(step)
        items = []
        for k in range(MICROBATCHES * replicas):
            target = torch.randint(5, (6,), generator=generator)
            target[: 6 * (k + 1) // (MICROBATCHES * replicas)] = IGNORED
            items.append((torch.randn(6, 16, generator=generator), target))
        return items

    return of_step


def on_ranks(pipe: int, data: int, **sections: Any) -> Outcome:
    config = configured(MICROBATCHES, parallel={"data": data}, **sections)
    return together(
        LocalWorld(pipe * data).run(
            lambda t: train_on_a_rank(t, model(), batches(data), STEPS, config)
        ),
        data,
    )


@swept(("pipe, data", [(1, 1), (3, 1), (1, 2), (2, 3)]), ("clip", [0.0, 0.5]))
def test_the_loss_is_the_sum_of_sums_over_the_sum_of_weights(
    pipe: int, data: int, clip: float
) -> None:
    reference = train_in_plain_torch(model(), batches(data), STEPS, clip=clip)
    outcome = on_ranks(pipe, data, optimizer={"clip": clip})
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-6)
    assert outcome.norms == pytest.approx(reference.norms, rel=1e-5)


def test_one_replica_has_the_bits_of_plain_torch() -> None:
    assert on_ranks(3, 1) == train_in_plain_torch(model(), batches(), STEPS)


def test_the_weight_may_be_a_number_and_an_evaluation_counts_alike() -> None:
    def by_number(outputs: Tensor, target: Tensor) -> tuple[Tensor, float]:
        total, weight = summed(outputs, target)
        return total, float(weight)

    def rank_main(transport: Transport) -> tuple[float, float]:
        with axrt.initialize(
            model(by_number), config=configured(MICROBATCHES), transport=transport
        ) as engine:
            return engine.eval_batch(iter(batches()(0))).loss, engine.train_batch(
                iter(batches()(0))
            ).loss

    whole = model().sequential(7).eval()
    with torch.no_grad():
        pairs = [summed(whole(inputs), target) for inputs, target in batches()(0)]
    expected = sum(float(total) for total, _ in pairs) / sum(float(weight) for _, weight in pairs)
    for evaluated, trained in LocalWorld(2).run(rank_main):
        assert evaluated == expected
        assert trained != expected  # with dropout


def test_a_replica_without_microbatches_has_no_say_in_an_evaluation() -> None:
    def rank_main(transport: Transport) -> tuple[float, int]:
        with axrt.initialize(
            model(), config=configured(MICROBATCHES, parallel={"data": 2}), transport=transport
        ) as engine:
            result = engine.eval_batch(iter(batches()(0) if engine.data_rank else []))
            return result.loss, result.microbatches

    one, two = LocalWorld(2).run(rank_main)
    assert one == two
    assert one[1] == MICROBATCHES


def test_means_and_pairs_do_not_mix() -> None:
    def sometimes(outputs: Tensor, target: Tensor) -> Any:
        pair = summed(outputs, target)
        return pair if int(pair[1]) else pair[0] * 0

    with (
        axrt.initialize(
            model(sometimes), config=configured(MICROBATCHES), transport=LocalWorld(1).alone()
        ) as engine,
        pytest.raises(
            axrt.DataError,
            match=r"gave \(sum, weight\) for some microbatches and a mean for others",
        ),
    ):
        engine.train_batch(iter(batches()(0)))


def test_weights_that_sum_to_nothing_are_refused() -> None:
    items = [(inputs, torch.full_like(target, IGNORED)) for inputs, target in batches()(0)]
    with (
        axrt.initialize(
            model(), config=configured(MICROBATCHES), transport=LocalWorld(1).alone()
        ) as engine,
        pytest.raises(
            axrt.DataError, match="the weights of all losses sum to 0.0; expected a positive number"
        ),
    ):
        engine.train_batch(iter(items))


def test_a_pair_that_is_no_sum_and_weight_is_refused() -> None:
    wrong = model(lambda outputs, target: (outputs, 3))
    with (
        axrt.initialize(
            wrong, config=configured(MICROBATCHES), transport=LocalWorld(1).alone()
        ) as engine,
        pytest.raises(
            TypeError,
            match=(
                r"loss_fn returned \(a tensor of shape \(6, 5\), 3\); expected a tensor with one "
                r"element"
            ),
        ),
    ):
        engine.train_batch(iter(batches()(0)))
