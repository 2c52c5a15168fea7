"""Modelled costs: counts are those of a run, and times those of a roofline."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import axrt
from axrt.cli.sample import sample_of
from axrt.config import Config
from axrt.device.device import CPU
from axrt.errors import ConfigError
from axrt.layouts.counted_layers import counted_layers
from axrt.layouts.modelled_table import ModelledTable
from axrt.layouts.roofline import RooflineCounter, seconds_on
from axrt.ledger.sketch import fake_tensors
from axrt.model.costs import measure
from axrt.model.module import PipelineModule
from axrt.model.precision import types_of
from axrt.model.seeds import BorrowedGenerator
from axrt.models.registry import model_of
from axrt.scheduler.cluster.cluster import Cluster, Device, Link
from axrt.scheduler.simulation.cost_table import LayerCosts

# A product of 64 x 64 x 64 takes 2 * 64^3 / 1e6 s, and moves 3 * 64^2 * 4 bytes in less.
FAST_MEMORY = Device({"float32": 2e6, "bfloat16": 4e6}, 0.5, 1e9, 1e9)
SLOW_MEMORY = replace(FAST_MEMORY, bandwidth=1e3)


def settings(**sections: dict[str, Any]) -> Config:
    model = {"layers": 2, "width": 16, "heads": 4, "context": 8, "vocab": 32}
    return Config.read({"model": model, "schedule": {"microbatch_size": 2}, **sections})


def measured(config: Config, team: int) -> list[LayerCosts]:
    generator, types = BorrowedGenerator(0, CPU), types_of(config.precision)
    with generator.borrowed():
        return measure(model_of(config), 0, sample_of(config), generator, types, team=team)


def modelled(config: Config, device: Device, team: int = 1) -> list[LayerCosts]:
    counts = counted_layers(model_of(config), config, sample_of(config), team)
    return [one.on(device) for one in counts]


def without_times(layer: LayerCosts) -> LayerCosts:
    return replace(layer, forward_s=0.0, input_s=0.0, weight_s=0.0, spread=0.0)


@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_what_is_counted_is_that_of_layers_that_run(team: int, weights: str) -> None:
    """Bytes sent, kept and exchanged, operations, pieces and parameters."""
    config = settings(precision={"weights": weights})
    found = modelled(config, FAST_MEMORY, team)
    ran = measured(config, team)
    assert list(map(without_times, found)) == list(map(without_times, ran))


@pytest.mark.parametrize(
    ("device", "seconds"),
    [(FAST_MEMORY, 2 * 64**3 / 1e6), (SLOW_MEMORY, 3 * 64**2 * 4 / 1e3)],
)
def test_a_product_takes_its_arithmetic_or_its_bytes(device: Device, seconds: float) -> None:
    with fake_tensors(0):
        one, other = torch.empty(64, 64), torch.empty(64, 64)
        with RooflineCounter() as line:
            one.view(8, 512), torch.empty(9)  # take nothing
            torch.mm(one, other.t())
    (counted,) = line.counted
    assert counted[1:] == ("float32", 2 * 64**3, 3 * 64**2 * 4)
    assert seconds_on(device, line.counted) == pytest.approx(seconds)


def test_narrow_products_have_a_rate_of_their_own() -> None:
    with fake_tensors(0), RooflineCounter() as line:
        one = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.mm(one, one)
    written, product = ([one] for one in line.counted)
    assert seconds_on(FAST_MEMORY, written) == pytest.approx(64**2 * 2 / 1e9)
    assert seconds_on(FAST_MEMORY, product) == pytest.approx(2 * 64**3 / 2e6)


def test_a_backward_takes_twice_a_forward_and_products_wait() -> None:
    """Where arithmetic is all that counts: input and weight gradients are a product each."""
    config = settings()
    arithmetic = replace(FAST_MEMORY, bandwidth=1e18)
    block = modelled(config, arithmetic)[1]
    attention = 4 * 2 * 8 * 8 * 16 / 1e6  # two products of all pairs of tokens; five go back
    assert block.weight_s == pytest.approx(block.forward_s - attention)
    assert block.input_s == pytest.approx(block.weight_s + 2.5 * attention)


def test_a_model_that_no_machine_holds_is_modelled() -> None:
    """A layer of 7.9e9 parameters, of which there are 128 (COMET's Transformer-1T)."""
    model = {"layers": 128, "width": 25600, "heads": 160, "context": 2048, "vocab": 51200}
    config = settings(model=model, precision={"weights": "bfloat16"})
    found = modelled(config, FAST_MEMORY, 8)
    assert found[1].parameters == pytest.approx(12 * 25600**2, rel=1e-3)
    assert sum(layer.parameters for layer in found) == pytest.approx(1e12, rel=0.02)
    assert found[1].held_parameters == pytest.approx(found[1].parameters / 8, rel=1e-3)


class AsksForAValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("layer", "device", "text"),
    [
        (AsksForAValue(), FAST_MEMORY, "a layer cannot be modelled: .*in layer 1"),
        (nn.Identity(), replace(FAST_MEMORY, operations={"float16": 1e12}), "of float32, only of"),
    ],
)
def test_what_cannot_be_modelled_is_refused(layer: nn.Module, device: Device, text: str) -> None:
    table = table_of([nn.Linear(4, 4), layer], nn.functional.mse_loss, device)
    with pytest.raises(ConfigError, match=text):
        table.of(1, 2)


def table_of(layers: list[nn.Module], loss: Any, device: Device = FAST_MEMORY) -> ModelledTable:
    """Of samples of four features."""
    cluster = Cluster(1, 1, device, Link(), Link())

    def sample(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
        shape = config.schedule.microbatch_size, 4
        return torch.ones(shape), torch.ones(shape)

    return ModelledTable(settings(), PipelineModule(layers, loss), cluster, sample)


@pytest.mark.parametrize("team", [1, 2])
def test_sizes_that_are_not_counted_are_as_if_they_were(team: int) -> None:
    config = settings()
    cluster = Cluster(1, 2, FAST_MEMORY, Link(), Link())
    table = ModelledTable(config, model_of(config), cluster, sample_of)
    six = replace(config, schedule=replace(config.schedule, microbatch_size=6))
    assert list(table.of(team, 6)) == modelled(six, FAST_MEMORY, team)
    assert (team, 6) not in table._known


def test_a_loss_that_compares_samples_is_counted_for_each_size() -> None:
    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out @ target.t()).sum()

    (_, last) = table_of([nn.Identity(), nn.Linear(4, 4)], loss).of(1, 16)
    assert last.operations == 2 * 16 * 4 * 4 + 2 * 16 * 16 * 4


class Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).contiguous()


def test_layers_that_are_alike_for_some_sizes_alone_are_told_apart() -> None:
    """With four samples both activations get the same shape, with two they do not."""
    layers = [axrt.LayerSpec(nn.Linear, 8, 8), axrt.LayerSpec(nn.GELU), axrt.LayerSpec(Transposed)]
    model = PipelineModule([*layers, *layers[1:], axrt.LayerSpec(nn.Linear, 8, 8)], mean_squares)

    def sample(config: Config) -> Any:
        value = torch.zeros(config.schedule.microbatch_size, 4, 8)
        return value, value

    config = Config.read({"schedule": {"microbatch_size": 2}})
    cluster = Cluster(1, 1, FAST_MEMORY, Link(1e-6, 1e9), Link(1e-6, 1e9))
    found = ModelledTable(config, model, cluster, sample).of(1, 16)
    every = replace(config, schedule=replace(config.schedule, microbatch_size=16))
    counted = [one.on(FAST_MEMORY) for one in counted_layers(model, every, sample(every))]
    assert list(found) == counted


def mean_squares(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (value - target).square().mean()
