"""The figures of a run: how fast it is, why it waits, what of a device it uses."""

import pytest
import torch
from torch import nn

import axrt
from axrt.config import Config
from axrt.ledger.skeleton import Skeletons
from axrt.models.gpt import gpt
from axrt.observe.flops import peak_flops, training_flops
from axrt.observe.idle import Idle
from axrt.observe.observer import Wait
from axrt.observe.progress import Shown
from axrt.observe.rate import Rate
from axrt.observe.trackers import theirs


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_is_that_of_the_last_steps_and_known_after_the_first() -> None:
    clock = Clock()
    rate = Rate(10, clock)
    assert rate.at(10) == 0
    clock.now = 2.0
    assert rate.at(11) == 0.5
    for step in range(12, 40):
        clock.now += 0.25
        rate.at(step)
    assert rate.at(39) == pytest.approx(4, rel=0.1), "the slow first one is long ago"
    clock.now += 60
    rate.skip()
    assert rate.at(39) == pytest.approx(4, rel=0.1), "it does not go back to nothing"
    clock.now += 0.5
    assert rate.at(40) == 2


def test_a_rate_that_is_not_known_yet_is_not_shown_as_zero() -> None:
    assert "tokens/s" not in Shown(1, 2.0).text()


def test_idle_time_is_shared_out_by_cause() -> None:
    clock = Clock()
    idle = Idle(clock)

    def wait(cause: str, until: float) -> None:
        idle.waiting(Wait(lambda: "", lambda: cause, lambda: ()))
        idle.waiting(Wait(lambda: "", lambda: "later", lambda: ()))  # the first cause counts
        clock.now = until
        idle.resumed()

    clock.now = 1.0
    wait("input", 2.0)
    clock.now = 3.0
    wait("room", 5.0)
    clock.now = 10.0
    assert idle.shares() == {"input": pytest.approx(0.1), "room": pytest.approx(0.2)}
    clock.now = 11.0
    assert idle.shares() == {}


def test_operations_are_those_of_the_published_formula() -> None:
    """6 P + 12 L H Q T a token (Chowdhery et al. 2022), P without the embedding."""
    sizes = {"layers": 3, "width": 32, "heads": 4, "context": 16, "vocab": 300}
    model = gpt(Config.read({"model": sizes}))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    in_products = sum(
        p.numel()
        for name, p in model.sequential(0).named_parameters()
        if p.dim() == 2 and "tokens" not in name
    )
    expected = 2 * 16 * (6 * in_products + 12 * 3 * 32 * 16)
    assert training_flops(Skeletons(model.layers), (tokens, tokens)) == expected


def test_operations_of_other_layers_are_counted_too() -> None:
    model = axrt.PipelineModule([nn.Conv2d(3, 4, 3), nn.Flatten()], nn.functional.cross_entropy)
    sample = torch.zeros(2, 3, 8, 8)
    counted = training_flops(Skeletons(model.layers), (sample, None))
    assert counted == 3 * 2 * 2 * 4 * 6 * 6 * 3 * 9


def test_what_a_device_can_do_is_measured_where_nobody_knows() -> None:
    assert 1e8 < peak_flops(torch.device("cpu"), torch.float32) < 1e14


def test_metrics_go_by_torchtitans_names() -> None:
    line = {"step": 3, "loss": 2.0, "grad_norm": None, "mfu": 0.5, "memory_bytes": {"host": 1}}
    assert theirs(line) == {"loss_metrics/global_avg_loss": 2.0, "mfu(%)": 50.0}
