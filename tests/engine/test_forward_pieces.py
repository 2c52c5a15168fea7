"""A layer of three pieces has the bits of one, under every policy. That tasks of other microbatches
run between two pieces of a forward is shown in tests/scheduler/test_state.py."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.model.in_pieces import InPieces
from axrt.observe.observer import Observer
from axrt.scheduler.policies import NAMES, policy_by_name
from axrt.scheduler.task import Kind, Task
from axrt.transport.local import LocalWorld

from .reference import (
    Outcome,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

MICROBATCHES, STEPS, RANKS = 4, 2, 2
BATCHES = random_batches((6, 16), classes=16, microbatches=MICROBATCHES)


def pieces() -> list[nn.Module]:
    """The second one draws random numbers, and the third one goes on drawing."""
    second = nn.Sequential(nn.Dropout(0.2), nn.Tanh())
    third = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 16))
    return [nn.Linear(16, 16), second, third]


class Three(InPieces):
    def __init__(self) -> None:
        super().__init__(pieces())


class One(nn.Module):
    """The same as one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces())

    def forward(self, value: Tensor) -> Tensor:
        first, second, third = self.pieces
        out: Tensor = third(second(first(value)))
        return out


def planted(layer: type[nn.Module] = Three) -> axrt.PipelineModule:
    """Twelve layers, of which every third one comes in pieces."""
    layers: list[Any] = []
    for _ in range(4):
        layers += [
            axrt.LayerSpec(layer),
            axrt.LayerSpec(nn.Linear, 16, 16),
            axrt.LayerSpec(nn.Dropout, 0.1),
        ]
    return axrt.PipelineModule(layers, functional.cross_entropy)


def trained(
    policy: str, layer: type[nn.Module] = Three, seed: int = 0, **sections: Any
) -> tuple[Outcome, "Watch"]:
    watch = Watch()
    config = configured(MICROBATCHES, schedule={"policy": policy}, **sections)
    outcomes = LocalWorld(RANKS, seed).run(
        lambda t: train_on_a_rank(
            t, planted(layer), BATCHES, STEPS, config, observers=[watch] if t.rank == 0 else []
        )
    )
    pipes = 2 if policy_by_name(policy).placements[0] == "bidirectional" else 1
    return together(outcomes, pipes), watch


class Watch(Observer):
    """The tasks of a rank."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def started(self, task: Task) -> None:
        self.tasks.append(task)

    @property
    def parts(self) -> set[int]:
        return {task.part for task in self.tasks if task.kind is Kind.FORWARD}


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return train_in_plain_torch(planted(), BATCHES, STEPS)


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_has_the_bits_of_a_forward_in_one_piece(policy: str, plain: Outcome) -> None:
    found, watch = trained(policy, seed=len(policy))
    has_two_copies = policy_by_name(policy).placements[0] == "bidirectional"
    assert found == (trained(policy, One)[0] if has_two_copies else plain)
    assert max(watch.parts) >= 2


@pytest.mark.parametrize(
    "sections",
    [
        {"memory": {"recompute": "full"}},
        {"memory": {"recompute": 2}},
        {"memory": {"bucket_mb": 0.0005}},
        {"memory": {"offload_activations": 3}},
    ],
)
@pytest.mark.parametrize("policy", ["1f1b", "zb-h1"])
def test_what_else_is_done_to_forwards_goes_with_pieces(
    sections: dict[str, Any], policy: str, plain: Outcome
) -> None:
    found, _ = trained(policy, **sections)
    assert found == plain


def test_the_layer_itself_is_never_called(monkeypatch: pytest.MonkeyPatch, plain: Outcome) -> None:
    def forward(layer: nn.Module, value: Tensor) -> Tensor:
        raise AssertionError("run as one piece")

    monkeypatch.setattr(InPieces, "forward", forward)
    assert trained("1f1b")[0] == plain


class Hooked(Three):
    """Its own hook changes what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda _, given, out: out + given[0])


class HookedLater(Three):
    """Its hook comes with its first forward, as some tools put theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces[0].register_forward_hook(self._once)
        self.hooked = False

    def _once(self, *_: object) -> None:
        if not self.hooked:
            self.hooked = True
            self.register_forward_pre_hook(lambda _, given: (given[0] * 2,))


class WithItsOwnForward(Three):
    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = super().forward(value)
        return out * 2


@pytest.mark.parametrize("layer", [Hooked, HookedLater, WithItsOwnForward])
def test_what_a_layer_does_around_its_pieces_is_done(layer: type[nn.Module]) -> None:
    assert trained("1f1b", layer)[0] == train_in_plain_torch(planted(layer), BATCHES, STEPS)
