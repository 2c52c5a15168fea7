"""With no policy named and a sample: a plan for what layers take, where that is faster."""

from typing import Any

import pytest

import axrt
from axrt import default_plan
from axrt.config import Config
from axrt.default_schedule import row
from axrt.known_costs import KnownCosts
from axrt.mesh import Mesh
from axrt.model_job import job_for
from axrt.plan_from_costs import Decided
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
PLENTY = 1e12


def mesh(data: int = 1) -> Mesh:
    return Mesh.of(0, 4 * data, 4, data, "pipe")


def decided(
    free: float = PLENTY, costs: KnownCosts = LATE, data: int = 1, **settings: Any
) -> Decided:
    config = Config.read(configured(MICROBATCHES, **settings))
    return default_plan.decided(config, perceptron(), mesh(data), costs, free)


def train(transport: Transport, **settings: Any) -> tuple[Outcome, Any]:
    """Outcome of a training, and the engine, closed."""
    sample = BATCHES(0)[0] if transport.rank == 0 else None
    config = configured(MICROBATCHES, **settings)
    with axrt.initialize(
        perceptron(), adamw, config=config, transport=transport, sample=sample
    ) as engine:
        losses = [
            engine.train_batch(iter(BATCHES(step)) if engine.reads else None).loss
            for step in range(STEPS)
        ]
        mine = {name: value.detach().clone() for name, value in engine.named_parameters()}
        return Outcome(losses, [], mine), engine


def assert_bits_of_plain_torch(outcomes: list[Outcome]) -> None:
    reference = train_in_plain_torch(perceptron(), BATCHES, STEPS)
    assert together(outcomes) == Outcome(reference.losses, [], reference.parameters)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_with_a_sample_has_the_bits_of_plain_torch_and_says_what_it_took(ranks: int) -> None:
    found = LocalWorld(ranks, 1).run(train)
    assert_bits_of_plain_torch([outcome for outcome, _ in found])
    engine = found[0][1]
    assert all(
        (one.candidates, one.schedule) == (engine.candidates, engine.schedule) for _, one in found
    )
    assert engine.candidates[0].startswith(engine.schedule.policy)
    assert any("along a plan" in text for text in engine.candidates)


def test_every_rank_follows_the_plan_on_the_stages_of_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(default_plan, "measured_layers", lambda *_: LATE.layers)
    monkeypatch.setattr(default_plan, "measured_edge", lambda *_: LATE.edge)
    found = LocalWorld(4, 1).run(train)
    assert_bits_of_plain_torch([outcome for outcome, _ in found])
    _, by_row = row(Config.read(configured(MICROBATCHES)), perceptron(), 4)
    plan = decided().plan
    assert plan is not None
    for _, engine in found:
        assert engine._job.policy == plan.job().policy
        assert (engine._job.cuts, engine._job.placement) == (by_row.cuts, by_row.placement)
        assert (engine.schedule.policy, engine.schedule.max_held) == ("adaptive", 16)


def test_layers_that_do_not_run_alone_leave_the_row_and_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such shape")

    monkeypatch.setattr("axrt.known_costs.measure", fails)
    found = LocalWorld(2, 1).run(train)
    assert_bits_of_plain_torch([outcome for outcome, _ in found])
    assert all(engine.candidates == [] for _, engine in found)
    assert all(not isinstance(engine._job.policy, AlongPlan) for _, engine in found)
    assert capsys.readouterr().err.count("RuntimeError: no such shape") == 1


def test_a_sample_that_is_no_pair_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def rank_main(transport: Transport) -> None:
        config = configured(MICROBATCHES)
        axrt.initialize(perceptron(), config=config, transport=transport, sample=3).close()

    LocalWorld(2, 1).run(rank_main)
    assert "sample is of type int" in capsys.readouterr().err


def test_more_activations_are_held_where_that_is_faster_and_the_memory_is_there() -> None:
    most = decided()
    assert (most.policy, most.max_held) == ("adaptive", 16)
    assert most.candidates[0].startswith("adaptive max_held 16")
    assert most.candidates[0].endswith("along a plan")
    # 12 chunks need 4 MiB more than 8; and 18 bytes a parameter are taken, of a quarter of 8 layers
    enough = 10 * 4 * MIB + 8 * MIB + 18 * 2 * 1000
    assert decided(free=enough).max_held == 12
    assert decided(free=enough - 1).max_held == 0
    assert not any("max_held" in text for text in decided(free=0).candidates)
    assert decided(free=0).plan is not None


def test_where_more_activations_gain_nothing_the_cap_stays() -> None:
    at_once = KnownCosts([LAYER] * 8, Edge(0.0))
    assert decided(costs=at_once).max_held == 0


@pytest.mark.parametrize("free", [0, PLENTY])
def test_a_cap_that_is_given_is_kept(free: float) -> None:
    given = decided(free=free, schedule={"max_held": 16})
    assert given.max_held == 16
    assert given.plan is not None
    assert all("max_held 16" in text for text in given.candidates)


@pytest.mark.parametrize(
    "settings",
    [{"activations_mb": 8}, {"device_gb": 1.0}],
)
def test_with_a_limit_of_memory_the_cap_stays(settings: dict[str, Any]) -> None:
    assert decided(memory=settings).max_held == 0


@pytest.mark.parametrize("microbatches", [8, 32])
@pytest.mark.parametrize("memory", [{}, {"zero": 1}, {"zero": 3}])
def test_replicas_and_shards_have_the_plan_of_one_replica(
    memory: dict[str, Any], microbatches: int
) -> None:
    config = Config.read(configured(microbatches, memory=memory, parallel={"data": 2}))
    found = default_plan.decided(config, perceptron(), mesh(2), LATE, PLENTY)
    assert found.policy == "adaptive"
    assert found.plan is not None
    assert (
        job_for(found.plan.job(), config, perceptron(), found.plan.cuts).microbatches
        == microbatches
    )


@pytest.mark.parametrize(
    ("ranks", "settings", "plans"),
    [
        (4, {}, True),
        (1, {}, False),
        (4, {"schedule": {"policy": "zb-v"}}, False),
        (4, {"schedule": {"chunks": 3}}, False),
        (4, {"schedule": {"placement": "looped"}}, False),
        (4, {"schedule": {"placement": "linear"}}, False),
        (4, {"memory": {"recompute": "auto", "offload_activations": 4}}, False),
        (4, {"run": {"compile": "eager"}}, False),
    ],
)
def test_which_runs_are_planned(ranks: int, settings: dict[str, Any], plans: bool) -> None:
    config = Config.read(configured(MICROBATCHES, **settings))
    of = Mesh.of(0, ranks, ranks, 1, "pipe")
    assert default_plan.takes_a_plan(config, perceptron(), of) is plans


def test_a_long_step_is_not_planned() -> None:
    def plans(microbatches: int) -> bool:
        return default_plan.takes_a_plan(
            Config.read(configured(microbatches)), perceptron(), mesh()
        )

    assert plans(64)
    assert not plans(65)


def test_without_a_sample_nothing_is_measured() -> None:
    def rank_main(transport: Transport) -> tuple[list[str], Any]:
        config = configured(MICROBATCHES)
        with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
            return engine.candidates, engine._job

    _, by_row = row(Config.read(configured(MICROBATCHES)), perceptron(), 2)
    for candidates, job in LocalWorld(2).run(rank_main):
        assert candidates == []
        assert (job.policy, job.cuts) == (by_row.policy, by_row.cuts)


def test_ranks_that_share_a_device_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_plan, "free_memory", lambda _: 600)

    def rank_main(transport: Transport, name: Any) -> float:
        monkeypatch.setattr(default_plan, "identity", name)
        with axrt.initialize(
            perceptron(), config=configured(MICROBATCHES), transport=transport
        ) as engine:
            return default_plan.free_bytes(engine._rank)

    def sharing(name: Any) -> list[float]:
        return LocalWorld(3).run(lambda transport: rank_main(transport, name))

    assert sharing(lambda _: "") == [200.0, 0.0, 0.0]
