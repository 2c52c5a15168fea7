"""One member of a team by itself computes and sends what a member of a real team does."""

from typing import Any

import pytest

import axrt
from axrt.cli.sample import sample_of
from axrt.config import Config
from axrt.device.device import CPU
from axrt.model.costs import measure
from axrt.model.precision import types_of
from axrt.model.seeds import BorrowedGenerator
from axrt.models.registry import model_of
from axrt.observe.observer import Observer
from axrt.scheduler.message import Meaning
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.transport.local import LocalWorld
from axrt.transport.transport import Transport

SETTINGS: dict[str, Any] = {
    "model": {"layers": 2, "width": 16, "heads": 4, "context": 8, "vocab": 32},
    "schedule": {"microbatches": 1, "microbatch_size": 2, "policy": "zb-h1"},
    "run": {"device": "cpu"},
}
CONFIG = Config.read(SETTINGS)


def costs(team: int) -> list[LayerCosts]:
    generator, types = BorrowedGenerator(0, CPU), types_of(CONFIG.precision)
    with generator.borrowed():
        return measure(model_of(CONFIG), 0, sample_of(CONFIG), generator, types, team=team)


class Sent(Observer):
    """Counts bytes of slices that a rank sends, forward and back."""

    def __init__(self) -> None:
        self.num_bytes = {Meaning.SLICE: 0, Meaning.SLICE_BACK: 0}

    def sent(self, rank: int, message: Any, payload: Any) -> None:
        meaning = getattr(message, "meaning", None)
        if meaning in self.num_bytes:
            self.num_bytes[meaning] += sum(tensor.nbytes for tensor in payload)


def sent_in_a_real_team(team: int) -> dict[Meaning, int]:
    """Bytes of slices that the first member sends in a step of one microbatch."""

    def rank_main(transport: Transport) -> dict[Meaning, int]:
        sent, settings = Sent(), {**SETTINGS, "parallel": {"tensor": team}}
        engine = axrt.initialize(
            model_of(CONFIG), config=settings, transport=transport, observers=[sent]
        )
        with engine:
            engine.train_batch(iter([sample_of(CONFIG)]))
        return sent.num_bytes

    found: list[dict[Meaning, int]] = LocalWorld(team, 1).run(rank_main)
    return found[0]


@pytest.mark.parametrize("team", [2, 4])
def test_it_sends_at_joints_what_a_member_of_a_real_team_sends(team: int) -> None:
    layers = costs(team)
    assert sent_in_a_real_team(team) == {
        Meaning.SLICE: sum(sum(layer.joints) for layer in layers),
        Meaning.SLICE_BACK: sum(sum(layer.back_joints) for layer in layers),
    }
    features = 2 * 8 * 16 * 4  # bytes of a microbatch's
    assert layers[1].joints == (features * (team - 1) // team,) * 4


@pytest.mark.parametrize("team", [2, 4])
def test_it_has_its_part_of_products_and_tokens(team: int) -> None:
    for alone, member in zip(costs(1), costs(team), strict=True):
        assert (member.name, member.parameters) == (alone.name, alone.parameters)
        assert alone.held_parameters == alone.parameters
        assert alone.parameters <= member.held_parameters * team
        assert member.sent_bytes * team == alone.sent_bytes
        assert (member.pieces, member.operations * team) == (alone.pieces, alone.operations)
