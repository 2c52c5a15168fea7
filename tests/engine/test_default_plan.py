"""With no policy named and a sample: a plan for what layers take, where that is faster.

These cases alone prove when a run without a policy is planned, what a plan may hold, and that every
rank follows it with the bits of the row. How good a plan is, tests/scheduler shows; here one is
made with little effort, but for one case.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import axrt
from axrt.config import Config
from axrt.planning import default_plan
from axrt.planning.default_schedule import settled
from axrt.planning.plan_from_costs import Decided
from axrt.scheduler.planning.plan_choice import Trial
from axrt.scheduler.planning.planner import Effort
from axrt.scheduler.policies import AlongPlan
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.scheduler.simulation.costs import Edge
from axrt.scheduler.simulation.model_costs import ModelCosts
from axrt.transport import Transport
from axrt.transport.local import LocalWorld
from axrt.world.mesh import Mesh

from ..sweeps import first
from .models import perceptron
from .reference import (
    Outcome,
    adamw,
    configured,
    plain_torch,
    random_batches,
    together,
)

MICROBATCHES, STEPS = 8, 2
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
MIB = 2**20
LAYER = LayerCosts(0.01, 0.01, 0.01, 1000, MIB, 0.0, until_weight_bytes=MIB, parameters=1000)
LATE = ModelCosts([LAYER] * 8, Edge(0.01))  # messages take as long as a layer
PLENTY = 1e12


def with_little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axrt.planning.plan_from_costs.AT_START", Effort(moves=1, work=100_000))
    monkeypatch.setattr("axrt.planning.plan_from_costs.BRIEF", Trial(steps=2, seeds=1, orders=1))


@pytest.fixture(autouse=True)
def little_effort(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "as_a_user_has_it" not in request.fixturenames:
        with_little_effort(monkeypatch)


@pytest.fixture
def as_a_user_has_it() -> None:
    """With all the effort of a run."""


def mesh(data: int = 1) -> Mesh:
    return Mesh.of(0, 4 * data, 4, data, "pipe")


def decided(
    free: float = PLENTY, costs: ModelCosts = LATE, data: int = 1, **settings: Any
) -> Decided:
    config = Config.read(configured(MICROBATCHES, **settings))
    return default_plan.decided(config, perceptron(), mesh(data), costs, free)


def as_if_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and messages are measured as those of `LATE`."""
    monkeypatch.setattr("axrt.planning.known_costs.measure", lambda *_: LATE.layers)
    monkeypatch.setattr("axrt.planning.known_costs.measured_edge", lambda *_: LATE.edge)


def train(transport: Transport, **settings: Any) -> tuple[Outcome, Any]:
    """Outcome of a training, and the engine, closed."""

    def items(engine: Any, step: int) -> list[Any]:
        return [(value + engine.data_rank, target) for value, target in BATCHES(step)]

    sample = BATCHES(0)[0] if transport.rank == 0 else None
    config = configured(MICROBATCHES, **settings)
    with axrt.initialize(
        perceptron(), adamw, config=config, transport=transport, sample=sample
    ) as engine:
        losses = [
            engine.train_batch(iter(items(engine, step)) if engine.reads else None).loss
            for step in range(STEPS)
        ]
        mine = {name: value.detach().clone() for name, value in engine.named_parameters()}
        return Outcome(losses, [], mine), engine


def assert_bits_of_plain_torch(outcomes: list[Outcome]) -> None:
    reference = plain_torch(perceptron, BATCHES, STEPS)
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


def test_every_rank_follows_the_plan_on_the_stages_of_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_if_late(monkeypatch)
    found = LocalWorld(4, 1).run(train)
    assert_bits_of_plain_torch([outcome for outcome, _ in found])
    _, by_row = settled(Config.read(configured(MICROBATCHES)), perceptron(), mesh())
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

    monkeypatch.setattr("axrt.planning.known_costs.measure", fails)
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


@pytest.mark.usefixtures("as_a_user_has_it")
@cache
def most_held() -> Decided:
    return decided()


def test_with_all_the_effort_of_a_run_most_are_held() -> None:
    most = most_held()
    assert (most.policy, most.max_held) == ("adaptive", 16)
    assert most.plan is not None


def test_more_activations_are_held_where_that_is_faster_and_the_memory_is_there() -> None:
    most = most_held()
    assert (most.policy, most.max_held) == ("adaptive", 16)
    assert most.candidates[0].startswith("adaptive max_held 16")
    assert most.candidates[0].endswith("along a plan")
    # 12 chunks need 4 MiB more than 8; and 18 bytes a parameter are taken, of a quarter of 8 layers
    enough = 10 * 4 * MIB + 8 * MIB + 18 * 2 * 1000
    assert decided(free=enough).max_held == 12
    assert decided(free=enough - 1).max_held == 0
    assert not any("max_held" in text for text in decided(free=0).candidates)


def test_where_a_plan_gains_nothing_the_row_stays() -> None:
    found = decided(costs=ModelCosts([LAYER] * 8))
    assert (found.max_held, found.plan) == (0, None)


@pytest.mark.parametrize("free", [0, PLENTY])
def test_a_cap_that_is_given_is_kept(free: float) -> None:
    given = decided(free=free, schedule={"max_held": 16})
    assert given.max_held == 16
    assert (given.plan is not None) is (free > 0)  # the plan holds a little more
    assert all("max_held 16" in text for text in given.candidates)


@pytest.mark.parametrize(
    "settings",
    [{"activations_mb": 1000}, {"device_gb": 1.0}, {"offload_activations": 4}],
)
def test_with_a_limit_of_memory_no_rank_holds_more(settings: dict[str, Any]) -> None:
    found = decided(memory=settings)
    assert found.max_held == 0
    assert mib(found) <= 8


def mib(found: Decided) -> float:
    """What the fullest rank holds of the activations, in MiB."""
    mb = float(found.candidates[0].rpartition(", ")[2].split()[0])  # one decimal
    return round(mb * 1e6 / MIB, 1)


def test_a_plan_for_uneven_layers_holds_no_more_than_the_row_where_nothing_is_free() -> None:
    head = replace(LAYER, stash_bytes=8 * MIB, until_weight_bytes=0)
    late = ModelCosts([*LATE.layers[:7], head], LATE.edge)
    assert mib(decided(free=0, costs=late)) <= 15 < mib(decided(costs=late))


@pytest.mark.parametrize("memory", first([{}, {"zero": 3}]))
def test_a_long_step_of_replicas_and_shards_is_predicted_for_one_replica(
    memory: dict[str, Any],
) -> None:
    config = Config.read(configured(16, memory=memory, parallel={"data": 2}))
    found = default_plan.decided(config, perceptron(), mesh(2), LATE, PLENTY)
    assert found.plan is not None
    assert found.plan.job().microbatches == 16


@pytest.mark.parametrize(
    "settings",
    first(
        [
            {"memory": {"offload": "stream", "offload_parameters": True}},
            {"parallel": {"data": 2}},
            {"parallel": {"data": 2}, "memory": {"zero": 3}},
            {"parallel": {"data": 2}, "memory": {"zero": 1}},
            {"parallel": {"data": 2}, "memory": {"zero": 2}},
        ],
        quick=3,
    ),
    ids=str,
)
def test_along_a_plan_the_bits_are_those_of_the_row(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings.get("parallel", {}).get("data", 1)

    def outcome(transport: Transport) -> tuple[Outcome, Any]:
        return train(transport, **settings)

    planned = LocalWorld(2 * data, 1)
    as_if_late(monkeypatch)
    along = planned.run(outcome)
    assert all(isinstance(engine._job.policy, AlongPlan) for _, engine in along)
    monkeypatch.setattr(default_plan, "takes_a_plan", lambda *_: False)
    rows = LocalWorld(2 * data, 1).run(outcome)
    assert not any(isinstance(engine._job.policy, AlongPlan) for _, engine in rows)
    assert [found.losses for found, _ in along] == [found.losses for found, _ in rows]


@pytest.mark.parametrize(
    ("ranks", "settings", "plans"),
    [
        (4, {}, True),
        (1, {}, False),
        (4, {"schedule": {"policy": "zb-v"}}, False),
        (4, {"schedule": {"chunks": 3}}, False),
        (4, {"schedule": {"placement": "looped"}}, False),
        (4, {"schedule": {"placement": "linear"}}, False),
        (4, {"run": {"compile": "eager"}}, False),
        (4, {"schedule": {"share": True}, "parallel": {"data": 2}}, False),
    ],
)
def test_which_runs_are_planned(ranks: int, settings: dict[str, Any], plans: bool) -> None:
    config = Config.read(configured(MICROBATCHES, **settings))
    data = config.parallel.data or 1
    of = Mesh.of(0, ranks * data, ranks, data, "pipe")
    assert default_plan.takes_a_plan(config, perceptron(), of) is plans


def test_a_long_step_is_not_planned() -> None:
    def plans(microbatches: int) -> bool:
        return default_plan.takes_a_plan(
            Config.read(configured(microbatches)), perceptron(), mesh()
        )

    assert plans(32)
    assert not plans(33)


def test_without_a_sample_nothing_is_measured() -> None:
    def rank_main(transport: Transport) -> tuple[list[str], Any]:
        config = configured(MICROBATCHES)
        with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
            return engine.candidates, engine._job

    two = Mesh.of(0, 2, 2, 1, "pipe")
    _, by_row = settled(Config.read(configured(MICROBATCHES)), perceptron(), two)
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
