"""Where costs are known, `adaptive`, `zb-h1` and `zb-h2` follow a plan: in another order, to the
same bits."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import axrt
from axrt.config import Config
from axrt.model.costs import kinds_of
from axrt.planning.known_costs import costs_in_file
from axrt.planning.plan_from_costs import plan_for
from axrt.runtime.rank import Rank
from axrt.scheduler.job import Job
from axrt.scheduler.order import Order
from axrt.scheduler.placement import Linear
from axrt.scheduler.planning.plan_choice import job_along_plan
from axrt.scheduler.planning.planner import World
from axrt.scheduler.policies import AlongPlan
from axrt.scheduler.simulation.comparison import Run
from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts
from axrt.scheduler.simulation.costs import Edge
from axrt.scheduler.simulation.model_costs import ModelCosts, world_of
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.transport import Transport
from axrt.transport.local import LocalWorld
from axrt.world.world import World as Alone

from .models import perceptron
from .reference import (
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

STEPS, MICROBATCHES = 3, 6
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)


def table(latency: float = 0.01) -> CostTable:
    """Layers that take equally long, and messages that take as long as a layer."""
    layer = LayerCosts(0.01, 0.01, 0.01, 1000, 4000, 0.1, until_weight_bytes=1000)
    layers = [replace(layer, name=name, parameters=count) for name, count in kinds_of(perceptron())]
    return CostTable({1: tuple(layers)}, Edge(latency), task_s=1e-4)


def settings(folder: Path, **schedule: Any) -> dict[str, Any]:
    file = folder / "costs.json"
    file.write_text(table().to_json())
    return configured(
        MICROBATCHES,
        schedule={"costs": str(file), **schedule},
        run={"trace_steps": 2, "out": str(folder)},
    )


@pytest.mark.parametrize(
    ("ranks", "schedule", "policy"),
    [
        (2, {}, "adaptive"),
        (3, {"policy": "adaptive", "max_held": 9}, "adaptive"),
        (3, {"policy": "zb-h1"}, "zb-h1"),
        (4, {"policy": "zb-h2"}, "zb-h2"),
    ],
)
def test_a_plan_has_the_bits_of_plain_torch(
    tmp_path: Path, ranks: int, schedule: dict[str, Any], policy: str
) -> None:
    config = settings(tmp_path, **schedule)
    jobs = []

    def rank_main(transport: Transport) -> Any:
        with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
            jobs.append((engine.schedule.policy, engine._job))
        return train_on_a_rank(transport, perceptron(), BATCHES, STEPS, config)

    found = together(LocalWorld(ranks, 3).run(rank_main))
    assert found == train_in_plain_torch(perceptron(), BATCHES, STEPS)
    assert {name for name, _ in jobs} == {policy}
    job, *others = [job for _, job in jobs]
    assert all(other == job for other in others)
    assert isinstance(job.policy, AlongPlan)
    assert job.policy.name == policy


@pytest.mark.parametrize(("pieces", "strict"), [(1, True), (6, False)])
def test_weight_gradients_of_one_piece_keep_their_places(pieces: int, strict: bool) -> None:
    """No machine is quite steady, and there a large piece at a wrong time costs more than it
    fills: 2 % on four ranks."""
    layer = LayerCosts(0.01, 0.01, 0.01, 1000, 4000, 0.0, until_weight_bytes=4000, pieces=pieces)
    config, known = Config.read(configured(8)), ModelCosts([layer] * 8, Edge(2e-4))
    plan = plan_for(config, "adaptive", perceptron(), 4, known)
    assert plan.strict is strict


@pytest.mark.parametrize(("measured", "reckoned"), [(0.0, 0.05), (0.2, 0.2)])
def test_a_first_plan_reckons_with_some_jitter(
    monkeypatch: pytest.MonkeyPatch, measured: float, reckoned: float
) -> None:
    among: list[World] = []

    def seen(worlds: Sequence[World], *others: Any, **options: Any) -> Job:
        among.extend(worlds)
        return job_along_plan(worlds, *others, **options)

    monkeypatch.setattr("axrt.planning.plan_from_costs.job_along_plan", seen)
    layer = LayerCosts(0.01, 0.01, 0.01, 1000, 4000, measured, until_weight_bytes=4000)
    config, known = Config.read(configured(4)), ModelCosts([layer] * 8)
    plan_for(config, "adaptive", perceptron(), 2, known)
    assert {world.costs.jitter for world in among} == {reckoned}


def test_lengths_of_a_file_reach_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(replace(table(), lengths=0.3).to_json())
    config = Config.read(configured(MICROBATCHES, schedule={"costs": str(file)}))
    started = Alone(torch.device("cpu"))
    with_file = Rank(config, started, LocalWorld(1).alone(), ())
    known = costs_in_file(config, perceptron(), with_file)
    assert (known.lengths, known.task_s) == (0.3, 1e-4)
    world = world_of(Linear(4), (0, 2, 4, 6, 8), known)
    assert (world.costs.lengths, world.costs.jitter) == (0.3, 0.1)


def test_the_timeline_of_a_run_tells_its_plan(tmp_path: Path) -> None:
    config = settings(tmp_path, policy="adaptive")

    def rank_main(transport: Transport) -> Any:
        with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
            for step in range(4):
                engine.train_batch(iter(BATCHES(step)))
            line = engine.timeline()
            return engine._job, line and line.to_json()

    (job, line), *_ = LocalWorld(3, 1).run(rank_main)
    (tmp_path / "timeline.json").write_text(line)
    run = Run.read(tmp_path)
    assert run.job.placement == job.placement
    assert run.job.policy == job.policy


def test_a_plan_whose_ranks_have_other_caps_is_read_again() -> None:
    order = Order.parse(
        "F0.0,F0.1,F0.2,I0.0,W0.0,I0.1,W0.1,I0.2,W0.2\nF1.0,I1.0,W1.0,F1.1,I1.1,W1.1,F1.2,I1.2,W1.2"
    )
    assert order.needs == (3, 1)
    asked: dict[str, Any] = {"placement": "linear", "order": str(order), "max_held": 2}
    job = build_schedule("fixed", 2, 3, along="loosely", **asked)
    assert job.policy == AlongPlan(order, order.needs, 2, strict=False)
    assert [job.policy.bounds(Linear(2), rank, 3).held for rank in range(2)] == [3, 2]
    with pytest.raises(ValueError, match="holds 3 chunks; set max_held = 3 or more"):
        build_schedule("fixed", 2, 3, **asked)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda of: of["degrees"]["1"]["1"].pop(), "it has 7 layers; expected 8"),
        (lambda of: of["degrees"]["1"]["1"][2].pop("weight_s"), r"1\[2\].weight_s is missing"),
        (
            lambda of: of["degrees"]["1"]["1"][2].update(until_weight_bytes=5000),
            r"1\[2\].until_weight_bytes = 5000 is more than stash_bytes = 4000; expected a part",
        ),
        (lambda of: of["degrees"]["1"]["1"][2].pop("pieces"), r"1\[2\].pieces is missing"),
        (lambda of: of.pop("lengths"), "lengths is missing; expected a number of 0 or more"),
        (lambda of: of["degrees"]["1"]["1"][2].update(input_s=-1), r"1\[2\].input_s = -1; exp"),
        (lambda of: of["degrees"]["1"]["1"][0].update(forward_s=1e999), "forward_s = inf; exp"),
        (lambda of: of["degrees"]["1"]["1"][0].update(forward_s=10**400), "a number of 401 digits"),
        (
            lambda of: of["degrees"]["1"].update({"2": of["degrees"]["1"]["1"][1:]}),
            r"numbers of layers by samples are \{1: 8, 2: 7\}; expected one model",
        ),
        (lambda of: of["degrees"]["1"]["1"][1].update(parameters=7), "its layer 1 is Block with 7"),
        (lambda of: of.update(units={"time": "ms", "size": "bytes"}), "units = {'time': 'ms', "),
        (lambda of: of.pop("format"), "its format is None; expected 'axrt costs 3'"),
        (lambda of: of.update(taks=1.0), "taks is no part of a table; expected format, units, so"),
        (lambda of: of.update(settings=3), "settings is missing or is none; expected a table"),
        (lambda of: of["degrees"]["1"]["1"][0].update(stash_bytes=1e300), "expected a number from"),
        (lambda of: of["degrees"]["1"]["1"][0].update(stash_bytes=0.5), "= 0.5; expected a whole"),
        (
            lambda of: of["degrees"]["1"]["1"][0].update(spread=1e3),
            "expected a number from 0 to 10",
        ),
        (
            lambda of: of["links"]["any"].update(bandwidth=1e-320),
            "bandwidth = 1e-320; expected a n",
        ),
        (
            lambda of: of["degrees"].update({"1": {"01": of["degrees"]["1"]["1"]}}),
            "01: expected a numb",
        ),
        (lambda of: of.pop("units"), "units = None; expected {'time': 's'"),
        (lambda of: of.update(format="2"), "its format is '2'; expected 'axrt costs 3', as axrt"),
        (lambda of: of.update(format="axrt costs 1"), "of a former version; expected 'axrt costs"),
        (lambda of: of["links"].pop("any"), "links.any is missing"),
        (lambda of: of["links"]["any"].update(bandwidth=0), "links.any.bandwidth = 0; expected"),
        (
            lambda of: of["degrees"].update({"1": {"2": of["degrees"]["1"]["1"]}}),
            "of 2 samples; expec",
        ),
        (
            lambda of: of["degrees"].update({"1": {"x": []}}),
            "degrees.1.x: expected a number of sam",
        ),
        (lambda of: of["degrees"]["1"].update({"1": {}}), "degrees.1.1 is missing or is none"),
        (lambda of: of["links"].update({"0-": {}}), "links.0-: expected any, or two ranks"),
        (lambda of: of["links"].update({"any": 3}), "links.any is missing or is none"),
        (lambda of: of.update(task="fast"), "task = 'fast'; expected a number"),
        (lambda of: of.update(source="guessed"), "source = 'guessed'; expected one of measured, "),
        (lambda of: of.update(cluster=3), "cluster = 3; expected a digest"),
        (lambda of: of.update(degrees={}), "degrees has no layers; expected the costs of each"),
        (lambda of: of["degrees"].update({"0": {}}), "degrees.0: expected a number of members"),
        (
            lambda of: of.update(degrees={"2": of["degrees"]["1"]}),
            "costs of teams of 2; expected those of parallel.tensor = 1",
        ),
        (
            lambda of: of["degrees"].update({"2": {"1": of["degrees"]["1"]["1"][1:]}}),
            r"numbers of layers by members are \{1: 8, 2: 7\}; expected one model",
        ),
        (
            lambda of: of["degrees"]["1"]["1"][0].update(joints=[0.5]),
            r"1\[0\].joints.0 = 0.5; expected a whole number",
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_name(tmp_path: Path, change: Any, text: str) -> None:
    config = settings(tmp_path)
    file = Path(config["schedule"]["costs"])
    of = json.loads(file.read_text())
    change(of)
    file.write_text(json.dumps(of))

    def rank_main(transport: Transport) -> None:
        axrt.initialize(perceptron(), config=config, transport=transport)

    with pytest.raises(axrt.ConfigError, match=f"schedule.costs: .*{text}"):
        LocalWorld(2, 1).run(rank_main)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 1, "format": 2}', "format is there twice; expected one of them"),
        ("[" * 100_000, "it nests deeper than 100 levels"),
        ('{"format": ', "it is no JSON: Expecting value"),
        ("[]", "its format is none; expected"),
    ],
)
def test_what_is_no_table_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CostTable.from_json(text)


def test_a_link_that_differs_counts_in_the_plan(tmp_path: Path) -> None:
    """The link between two of three ranks is slow, by the table."""
    config = settings(tmp_path, policy="adaptive")
    told = Path(config["schedule"]["costs"])

    def plan(edges: dict[tuple[int, int], Edge]) -> str:
        told.write_text(replace(table(0.0), edges=edges).to_json())
        jobs = []

        def rank_main(transport: Transport) -> None:
            with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
                jobs.append(engine._job)

        LocalWorld(3, 1).run(rank_main)
        assert all(job == jobs[0] for job in jobs)
        policy = jobs[0].policy
        assert isinstance(policy, AlongPlan)
        return str(policy.order)

    assert plan({}) != plan({(1, 2): Edge(0.05, 1e9), (2, 1): Edge(0.05, 1e9)})


def test_a_table_of_the_format_before_teams_is_read_as_that_of_one_rank() -> None:
    one = table()
    former = json.loads(one.to_json())
    layers = former.pop("degrees")["1"]["1"]
    for layer in layers:
        del layer["joints"], layer["back_joints"], layer["held_parameters"]
    del former["source"], former["cluster"]
    former |= {"format": "axrt costs 2", "microbatches": {"1": layers}}
    assert CostTable.from_json(json.dumps(former)) == one


def test_a_modelled_table_is_of_its_cluster_alone() -> None:
    modelled = replace(table(), source="modelled", cluster="0a")
    modelled.check_cluster("0a")
    with pytest.raises(ValueError, match="is modelled on cluster 0a, and this one is 0b; expected"):
        modelled.check_cluster("0b")
    table().check_cluster("0b")  # a measured one is of whatever it was measured on


def test_a_table_is_what_it_was_after_it_was_written(tmp_path: Path) -> None:
    teams = {2: {1: tuple(replace(layer, joints=(8, 16)) for layer in table().layers[1])}}
    one = replace(table(), edges={(0, 1): Edge(0.5, 1e9)}, teams=teams, source="fitted")
    file = tmp_path / "costs.json"
    file.write_text(one.to_json())
    assert CostTable.read(file) == one


@pytest.mark.parametrize(
    ("schedule", "more", "text"),
    [
        ({"policy": "1f1b"}, {}, "policy '1f1b' follows no plan; expected auto or one of adaptive"),
        (
            {},
            {"memory": {"activations_mb": 1e-3}},
            "activations_mb = 0.001 is too little .* of adaptive on 2 ranks; expected 0.1",
        ),
    ],
)
def test_costs_that_make_no_plan_are_refused(
    tmp_path: Path, schedule: dict[str, Any], more: dict[str, Any], text: str
) -> None:
    config = settings(tmp_path, **schedule) | more

    def rank_main(transport: Transport) -> None:
        axrt.initialize(perceptron(), config=config, transport=transport)

    with pytest.raises(axrt.ConfigError, match=f"schedule.costs: .*{text}"):
        LocalWorld(2, 1).run(rank_main)
