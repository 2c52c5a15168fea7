"""The number of layers that run again, where activations leave the device: chosen by costs."""

from pathlib import Path
from typing import Any

import pytest
import torch

import axrt
from axrt import recompute_choice
from axrt.config import Config
from axrt.copy_rates import Copies, copied_a_second
from axrt.device import CPU
from axrt.model_job import of_one_replica
from axrt.offload.tier import HostTier, PacedTier
from axrt.recompute_choice import fastest
from axrt.scheduler.cost_table import LayerCosts
from axrt.scheduler.job import Job
from axrt.scheduler.model_costs import ModelCosts
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

MICROBATCHES, STEPS = 8, 2
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
    found = fastest(
        config.schedule, job, ModelCosts(layers, Edge()), Copies(bytes_per_s, bytes_per_s)
    )
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


@pytest.mark.parametrize(("gb_s", "expected"), [(0.0, None), (0.0002, 4)])
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


@pytest.mark.parametrize("memory", [{"zero": 3}, {"offload": "stream", "offload_parameters": True}])
def test_stays_are_planned_for_layers_that_run_again(
    memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the schedule is stuck: releases wait for other tasks than there are."""
    monkeypatch.setattr(
        recompute_choice, "fastest", lambda *_: recompute_choice.Choice(2, {0: 2.0, 2: 1.0})
    )
    schedule = {"policy": "interleaved-1f1b", "chunks": 2}

    def trained(transport: Transport, recompute: int | str) -> tuple[Job, list[float]]:
        config = configured(
            MICROBATCHES,
            schedule=schedule,
            parallel={"data": 2, "pipe": 2},
            memory={**memory, "gathered": 1, "offload_activations": 4, "recompute": recompute},
        )
        sample = BATCHES(0)[0]
        with axrt.initialize(
            perceptron(), adamw, config=config, transport=transport, sample=sample
        ) as engine:
            assert engine.config.memory.recompute == 2
            mine = slice(engine.data_rank * MICROBATCHES, None)
            assert set(engine._job.recomputed.values()) == {2}
            return engine._job, [
                engine.train_batch(iter(twice(step)[mine]) if engine.reads else None).loss
                for step in range(STEPS)
            ]

    twice = random_batches((6, 16), classes=5, microbatches=2 * MICROBATCHES)
    chosen, given = (
        LocalWorld(4).run(lambda transport: trained(transport, recompute))  # noqa: B023
        for recompute in ("auto", 2)
    )
    assert chosen == given, "the same schedule, and the same losses"


def test_a_bound_of_activations_is_kept_to() -> None:
    """Without it no layer runs again, since copies take no time."""
    config = Config.read(configured_with())
    job = of_one_replica(config.schedule, config, perceptron(), 2)
    layers = [LayerCosts(1.0, 1.0, 1.0, 0, 1 << 20, 0.0)] * 8
    assert fastest(config.schedule, job, ModelCosts(layers, Edge()), Copies()).layers == 0
    bounded = fastest(
        config.schedule, job, ModelCosts(layers, Edge()), Copies(), activations_mb=12.0
    )
    assert bounded.layers > 0
    assert 0 not in bounded.step_s


def test_a_layer_that_cannot_run_by_itself_is_refused() -> None:
    class Hands(torch.nn.Module):
        def forward(self, value: Any) -> Any:
            return value if isinstance(value, torch.Tensor) else value.kept

    class Wraps(torch.nn.Linear):
        def forward(self, value: Any) -> Any:
            return Wrapped(super().forward(value))

    model = axrt.PipelineModule(
        [axrt.LayerSpec(Wraps, 16, 16), axrt.LayerSpec(Hands), axrt.LayerSpec(Wraps, 16, 5)],
        lambda outputs, target: outputs.kept.mean(),
    )
    with pytest.raises(axrt.ConfigError, match="runs each layer by itself"):
        LocalWorld(1).run(
            lambda t: axrt.initialize(
                model, adamw, config=configured_with(), transport=t, sample=BATCHES(0)[0]
            ).close()
        )


class Wrapped:
    def __init__(self, kept: Any) -> None:
        self.kept = kept


def test_scratch_without_room_is_refused_by_name_and_a_measurement_needs_none(
    tmp_path: Path,
) -> None:
    def run(**memory: Any) -> None:
        LocalWorld(2).run(
            lambda t: axrt.initialize(
                perceptron(),
                adamw,
                config=configured_with(**memory),
                transport=t,
                sample=BATCHES(0)[0],
            ).close()
        )

    run(scratch_gb=0.001)
    with pytest.raises(axrt.ConfigError, match="memory.scratch: "):
        run(scratch=f"disk:{tmp_path / 'none'}")


@pytest.mark.parametrize("apart", [True, False])
def test_a_copy_is_no_faster_than_its_tier(apart: bool) -> None:
    tier = PacedTier(HostTier(CPU), 0.2e9)
    assert max(copied_a_second(tier, CPU, apart)) <= 0.2e9 * 1.1  # a copy may make up for a moment


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
