"""Where costs are known, `adaptive`, `zb-h1` and `zb-h2` follow a plan: in another order, to the
same bits."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import axrt
from axrt.model.costs import kinds_of
from axrt.observe.observer import Observer
from axrt.plan_process import planned
from axrt.rank import Rank
from axrt.replanning import Replanning, TaskTimes
from axrt.scheduler.comparison import Run
from axrt.scheduler.cost_table import CostTable, LayerCosts
from axrt.scheduler.job import Job
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import AlongPlan, policy_by_name
from axrt.scheduler.simulator import Edge, order_of
from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import constant
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

STEPS, MICROBATCHES = 3, 6
AUTO = {"recompute": "auto", "offload_activations": 4}
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda of: of["microbatches"]["1"].pop(), "it has 7 layers; expected 8"),
        (lambda of: of["microbatches"]["1"][2].pop("weight_s"), r"1\[2\].weight_s is missing"),
        (lambda of: of["microbatches"]["1"][2].update(input_s=-1), r"1\[2\].input_s = -1; exp"),
        (lambda of: of["microbatches"]["1"][0].update(forward_s=1e999), "forward_s = inf; exp"),
        (lambda of: of["microbatches"]["1"][1].update(parameters=7), "its layer 1 is Block with 7"),
        (lambda of: of.update(units={"time": "ms", "size": "bytes"}), "units = {'time': 'ms', "),
        (lambda of: of.pop("units"), "units = None; expected {'time': 's'"),
        (lambda of: of.update(format="2"), "expected a table with format = 'axrt costs 1'"),
        (lambda of: of["links"].pop("any"), "links.any is missing"),
        (lambda of: of["links"]["any"].update(bandwidth=0), "links.any.bandwidth = 0; expected"),
        (lambda of: of.update(microbatches={"2": of["microbatches"]["1"]}), "of 2 samples; expec"),
        (lambda of: of.update(microbatches={"x": []}), "microbatches.x: expected a number of sam"),
        (lambda of: of["microbatches"].update({"1": {}}), "microbatches.1 is missing or is none"),
        (lambda of: of["links"].update({"0-": {}}), "links.0-: expected any, or two ranks"),
        (lambda of: of["links"].update({"any": 3}), "links.any is missing or is none"),
        (lambda of: of.update(task="fast"), "task = 'fast'; expected a number"),
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


def test_a_table_is_what_it_was_after_it_was_written(tmp_path: Path) -> None:
    one = replace(table(), edges={(0, 1): Edge(0.5, 1e9)})
    file = tmp_path / "costs.json"
    file.write_text(one.to_json())
    assert CostTable.read(file) == one


class SlowForwards(Observer):
    """One rank is slow: its forwards take longer."""

    def started(self, task: Task) -> None:
        if task.kind is Kind.FORWARD:
            time.sleep(0.003)


@pytest.mark.parametrize("policy", ["adaptive", "zb-h1"])
def test_a_plan_is_made_anew_with_the_same_bits(policy: str) -> None:
    """By a process beside the run, for whose plan steps are taken until it is followed."""
    steps = 40
    config = configured(MICROBATCHES, schedule={"policy": policy, "replan": 2})
    followed = []

    def rank_main(transport: Transport) -> Any:
        slow = [SlowForwards()] if transport.rank == 1 else []
        with axrt.initialize(
            perceptron(), adamw, constant, config, transport=transport, observers=slow
        ) as engine:
            losses = []
            for step in range(steps):
                losses.append(engine.train_batch(iter(BATCHES(step))).loss)
                time.sleep(0.2 * (not isinstance(engine._trainer.training.state.policy, AlongPlan)))
            followed.append(engine._trainer.training.state.policy)
            return losses

    found = LocalWorld(3, 1).run(rank_main)
    assert all(losses == found[0] for losses in found)
    assert found[0] == train_in_plain_torch(perceptron(), BATCHES, steps).losses
    along = [one for one in followed if isinstance(one, AlongPlan)]
    assert [one.name for one in along] == [policy] * 3
    assert len({str(one.order) for one in along}) == 1


@pytest.mark.parametrize(
    ("schedule", "more", "text"),
    [
        ({"policy": "1f1b"}, {}, "policy '1f1b' follows no plan; expected one of adaptive, zb-h1"),
        ({}, {"parallel": {"data": 2}, "memory": {"zero": 3}}, "rests on the order of tasks"),
    ],
)
def test_plans_that_cannot_be_made_anew_are_refused(
    schedule: dict[str, Any], more: dict[str, Any], text: str
) -> None:
    config = configured(MICROBATCHES, schedule={"replan": 5, **schedule}, **more)

    def rank_main(transport: Transport) -> None:
        axrt.initialize(perceptron(), config=config, transport=transport)

    with pytest.raises(axrt.ConfigError, match=f"schedule.replan = 5: .*{text}"):
        LocalWorld(2 * more.get("parallel", {}).get("data", 1), 1).run(rank_main)


@pytest.mark.parametrize(
    ("schedule", "more", "text"),
    [
        ({"policy": "1f1b"}, {}, "policy '1f1b' follows no plan; expected auto or one of adaptive"),
        ({}, {"memory": AUTO}, "memory.recompute = 'auto' settles the schedule"),
        ({}, {"memory": {"activations_mb": 1e-3}}, "too little for any order on 2 ranks; expected"),
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


def test_a_plan_made_anew_keeps_the_cap_of_each_rank() -> None:
    """In a strict plan each rank has its own: the deeper, the fewer."""
    order = order_of(Job(Linear(3), policy_by_name("1f1b"), 6)).split()
    along = AlongPlan(order, order.needs)
    assert len(set(order.needs)) > 1
    job = Job(Linear(3), along, 6, cuts=(0, 2, 4, 8))
    asked = Replanning(cast(Rank, None), job, 5, TaskTimes())._asked(
        {stage: [[1.0, 1.0, 1.0]] for stage in range(3)}
    )
    again = planned({**asked, "edge": [1.0, 1e9], "task_s": 0.0}).job().policy
    bounds = [again.bounds(Linear(3), rank, 6).held for rank in range(3)]
    assert all(new <= old for new, old in zip(bounds, order.needs, strict=True))


def test_nothing_is_planned_before_every_stage_has_run() -> None:
    job = Job(Linear(2), policy_by_name("zb-h1"), 6)
    plans = Replanning(cast(Rank, None), job, 1, TaskTimes())
    assert plans._made_and_asked([{}, {}]) is None
    assert plans._made_and_asked([{"0": [1.0, 1.0, 1.0]}, {}]) is None
    assert plans._planner is None
