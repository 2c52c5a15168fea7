"""With no policy named: rows of a table, or with a sample a plan for what layers take."""

from dataclasses import replace
from typing import Any

import pytest

import axrt
from axrt.config import Config
from axrt.default_schedule import free_bytes, plans_by_default, settled, with_a_plan
from axrt.known_costs import KnownCosts
from axrt.mesh import Mesh
from axrt.scheduler.cost_table import LayerCosts
from axrt.scheduler.policies import AlongPlan
from axrt.scheduler.simulator import Edge
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from .models import perceptron
from .reference import (
    Outcome,
    adamw,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
)

MICROBATCHES, STEPS = 8, 3
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
MIB = 2**20
LAYER = LayerCosts(0.01, 0.01, 0.01, 1000, MIB, 0.0, until_weight_bytes=MIB, parameters=1000)
LATE = KnownCosts([LAYER] * 8, Edge(0.01))  # messages take as long as a layer


def choice(free: float, costs: KnownCosts = LATE, **schedule: Any) -> Any:
    config = Config.read(configured(MICROBATCHES, schedule=schedule))
    return with_a_plan(config, perceptron(), Mesh.of(0, 4, 4, 1, "pipe"), costs, free)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_with_a_sample_has_the_bits_of_plain_torch_and_says_what_it_took(ranks: int) -> None:
    def rank_main(transport: Transport) -> tuple[Outcome, list[str], Any]:
        sample = BATCHES(0)[0] if transport.rank == 0 else None
        config = configured(MICROBATCHES)
        with axrt.initialize(
            perceptron(), adamw, config=config, transport=transport, sample=sample
        ) as engine:
            losses = [
                engine.train_batch(iter(BATCHES(step)) if engine.reads else None).loss
                for step in range(STEPS)
            ]
            mine = {name: value.detach().clone() for name, value in engine.named_parameters()}
            return Outcome(losses, [], mine), engine.candidates, engine.schedule

    found = LocalWorld(ranks, 1).run(rank_main)
    reference = train_in_plain_torch(perceptron(), BATCHES, STEPS)
    assert together([outcome for outcome, _, _ in found]) == Outcome(
        reference.losses, [], reference.parameters
    )
    _, candidates, schedule = found[0]
    assert all((those, of) == (candidates, schedule) for _, those, of in found)
    assert candidates[0].startswith(schedule.policy)
    assert any("along a plan" in text for text in candidates)


def test_more_activations_are_held_where_that_is_faster_and_the_memory_is_there() -> None:
    policy, cap, plan, texts = choice(free=1e12)
    assert (policy, cap) == ("adaptive", 16)
    assert plan is not None
    assert isinstance(plan.job().policy, AlongPlan)
    assert "adaptive max_held 16" in texts[0]
    # 12 chunks need 4 MiB more than 8; and 18 bytes a parameter are taken, of a quarter of 8 layers
    enough = 10 * 4 * MIB + 8 * MIB + 18 * 2 * 1000
    assert choice(free=enough)[1] == 12
    assert choice(free=enough - 1)[1] == 0


def test_where_more_activations_gain_nothing_the_cap_stays() -> None:
    at_once = KnownCosts([LAYER] * 8, Edge(0.0))
    assert choice(free=1e12, costs=at_once)[1] == 0


def test_a_cap_that_is_given_is_kept() -> None:
    policy, cap, plan, _ = choice(free=1e12, max_held=16)
    assert (policy, cap) == ("adaptive", 16)
    assert plan is not None


def test_what_a_plan_cannot_have_is_left_to_the_rows() -> None:
    policy, cap, plan, texts = choice(free=1e12, placement="looped")
    assert (policy, cap, plan) == ("breadth-first", 0, None)
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("ranks", "settings", "plans"),
    [
        (4, {}, True),
        (1, {}, False),
        (4, {"schedule": {"policy": "zb-v"}}, False),
        (4, {"schedule": {"chunks": 3}}, False),
        (4, {"schedule": {"costs": "costs.json"}}, False),
        (4, {"memory": {"recompute": "auto", "offload_activations": 4}}, False),
    ],
)
def test_which_runs_are_planned(ranks: int, settings: dict[str, Any], plans: bool) -> None:
    config = Config.read(configured(MICROBATCHES, **settings))
    assert plans_by_default(config, Mesh.of(0, ranks, ranks, 1, "pipe")) is plans


def test_a_long_step_is_not_planned() -> None:
    mesh = Mesh.of(0, 4, 4, 1, "pipe")
    assert plans_by_default(Config.read(configured(64)), mesh)
    assert not plans_by_default(Config.read(configured(65)), mesh)


def test_without_a_sample_nothing_is_measured() -> None:
    def rank_main(transport: Transport) -> tuple[list[str], Any, Any]:
        config = configured(MICROBATCHES)
        with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
            by_row = settled(Config.read(config), perceptron(), Mesh.of(0, 2, 2, 1, "pipe"))[1]
            return engine.candidates, replace(engine._job, votes=by_row.votes), by_row

    for candidates, job, by_row in LocalWorld(2).run(rank_main):
        assert candidates == []
        assert job == by_row


def test_ranks_of_a_host_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axrt.default_schedule.free_memory", lambda device: 600)

    def rank_main(transport: Transport) -> float:
        with axrt.initialize(
            perceptron(), config=configured(MICROBATCHES), transport=transport
        ) as engine:
            return free_bytes(engine._rank)

    assert LocalWorld(3).run(rank_main) == [200.0, 0.0, 0.0]
