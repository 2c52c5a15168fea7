"""The number of layers that run again, where activations leave the device: chosen by costs."""

from typing import Any

import pytest

import axrt
from axrt.autoschedule import Copies, of_one_replica
from axrt.config import Config
from axrt.model.costs import LayerCosts
from axrt.recompute_choice import fastest
from axrt.scheduler.simulator import Edge
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from .models import perceptron
from .reference import (
    adamw,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

MICROBATCHES, STEPS = 8, 3
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
AUTO: dict[str, Any] = {"recompute": "auto", "offload_activations": 3}
GPIPE = {"policy": "gpipe"}


def configured_with(**memory: Any) -> dict[str, Any]:
    return configured(MICROBATCHES, schedule=GPIPE, memory={**AUTO, **memory})


def taken(bytes_per_s: float) -> tuple[int, dict[int, float]]:
    """The choice for four layers a rank that take a second forward, and keep a byte each."""
    config = Config.read(configured_with())
    job = of_one_replica(config.schedule, config, perceptron(), 2)
    layers = [LayerCosts(1.0, 1.0, 1.0, 0, 1, 0.0)] * 8
    found = fastest(config.schedule, job, layers, Edge(), Copies(bytes_per_s, bytes_per_s))
    return found.layers, found.step_s


def test_copies_that_take_no_time_let_no_layer_run_again() -> None:
    layers, step_s = taken(float("inf"))
    assert layers == 0
    assert list(step_s) == [0, 1, 2, 3, 4]
    assert sorted(step_s.values()) == list(step_s.values()), "each layer takes time to run again"


def test_slow_copies_let_all_layers_run_again() -> None:
    layers, step_s = taken(0.01)
    assert layers == 4
    assert sorted(step_s.values(), reverse=True) == list(step_s.values())


def test_in_between_a_mixture_is_faster_than_both() -> None:
    layers, step_s = taken(2.0)
    assert 0 < layers < 4
    assert step_s[layers] < 0.96 * min(step_s[0], step_s[4])


@pytest.mark.parametrize(("gb_s", "expected"), [(0.0, None), (0.002, 4)])
def test_bits_stay_and_all_ranks_take_one_number(
    gb_s: float, expected: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured_with(scratch_gb_s=gb_s)
    sample = BATCHES(0)[0]

    def number(transport: Transport) -> int | str:
        with axrt.initialize(
            perceptron(), adamw, config=config, transport=transport, sample=sample
        ) as engine:
            return engine.config.memory.recompute

    numbers = LocalWorld(2).run(number)
    assert len(set(numbers)) == 1
    assert expected in (None, numbers[0])
    said = capsys.readouterr().err
    assert said.count("memory.recompute = 'auto' takes") == 1
    assert f"takes {numbers[0]}: so many layers" in said
    found = LocalWorld(2).run(
        lambda t: train_on_a_rank(t, perceptron(), BATCHES, STEPS, config, sample=sample)
    )
    assert together(found) == train_in_plain_torch(perceptron(), BATCHES, STEPS)


def test_nothing_to_weigh_is_refused() -> None:
    with pytest.raises(axrt.ConfigError, match="expected memory.offload_activations, too"):
        Config.read({"memory": {"recompute": "auto"}})


def test_a_run_without_a_sample_is_refused() -> None:
    with pytest.raises(axrt.ConfigError, match="memory.recompute = 'auto' measures the layers"):
        LocalWorld(1).run(
            lambda t: axrt.initialize(
                perceptron(), adamw, config=configured_with(), transport=t
            ).close()
        )
