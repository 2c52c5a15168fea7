"""Where costs are known, `adaptive`, `zb-h1` and `zb-h2` follow a plan: in another order, to the
same bits."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch

import axrt
from axrt import launch
from axrt.config import Config
from axrt.known_costs import costs_in_file
from axrt.model.costs import kinds_of
from axrt.observe.observer import Observer
from axrt.plan_from_costs import AT_START, BRIEF, SentPlan, plan_for
from axrt.plan_process import PlanProcess, planned
from axrt.rank import Rank
from axrt.replanning import Replanning
from axrt.scheduler.comparison import Run
from axrt.scheduler.cost_table import CostTable, LayerCosts
from axrt.scheduler.job import Job
from axrt.scheduler.longest import Graph, Kept
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.model_costs import ModelCosts, world_of
from axrt.scheduler.order import Order
from axrt.scheduler.placement import Linear, placement_by_name
from axrt.scheduler.plan_choice import job_along_plan
from axrt.scheduler.plan_room import shares_of_room
from axrt.scheduler.planner import World
from axrt.scheduler.policies import AlongPlan, policy_by_name
from axrt.scheduler.schedules import build_schedule
from axrt.scheduler.simulator import Costs, Edge, Work, order_of, simulate
from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import constant
from axrt.task_times import StageTimes, TaskTimes
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

    monkeypatch.setattr("axrt.plan_from_costs.job_along_plan", seen)
    layer = LayerCosts(0.01, 0.01, 0.01, 1000, 4000, measured, until_weight_bytes=4000)
    config, known = Config.read(configured(4)), ModelCosts([layer] * 8)
    plan_for(config, "adaptive", perceptron(), 2, known)
    assert {world.costs.jitter for world in among} == {reckoned}


def test_lengths_of_a_file_reach_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(replace(table(), lengths=0.3).to_json())
    config = Config.read(configured(MICROBATCHES, schedule={"costs": str(file)}))
    started = launch.World(torch.device("cpu"))
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
        (lambda of: of["microbatches"]["1"].pop(), "it has 7 layers; expected 8"),
        (lambda of: of["microbatches"]["1"][2].pop("weight_s"), r"1\[2\].weight_s is missing"),
        (
            lambda of: of["microbatches"]["1"][2].update(until_weight_bytes=5000),
            r"1\[2\].until_weight_bytes = 5000 is more than stash_bytes = 4000; expected a part",
        ),
        (lambda of: of["microbatches"]["1"][2].pop("pieces"), r"1\[2\].pieces is missing"),
        (lambda of: of.pop("lengths"), "lengths is missing; expected a number of 0 or more"),
        (lambda of: of["microbatches"]["1"][2].update(input_s=-1), r"1\[2\].input_s = -1; exp"),
        (lambda of: of["microbatches"]["1"][0].update(forward_s=1e999), "forward_s = inf; exp"),
        (lambda of: of["microbatches"]["1"][0].update(forward_s=10**400), "a number of 401 digits"),
        (
            lambda of: of["microbatches"].update({"2": of["microbatches"]["1"][1:]}),
            r"numbers of layers by samples are \{1: 8, 2: 7\}; expected one model",
        ),
        (lambda of: of["microbatches"]["1"][1].update(parameters=7), "its layer 1 is Block with 7"),
        (lambda of: of.update(units={"time": "ms", "size": "bytes"}), "units = {'time': 'ms', "),
        (lambda of: of.pop("format"), "its format is None; expected 'axrt costs 2'"),
        (lambda of: of.update(taks=1.0), "taks is no part of a table; expected format, units, ta"),
        (lambda of: of.update(settings=3), "settings is missing or is none; expected a table"),
        (lambda of: of["microbatches"]["1"][0].update(stash_bytes=1e300), "expected a number from"),
        (lambda of: of["microbatches"]["1"][0].update(stash_bytes=0.5), "= 0.5; expected a whole"),
        (
            lambda of: of["microbatches"]["1"][0].update(spread=1e3),
            "expected a number from 0 to 10",
        ),
        (
            lambda of: of["links"]["any"].update(bandwidth=1e-320),
            "bandwidth = 1e-320; expected a n",
        ),
        (lambda of: of.update(microbatches={"01": of["microbatches"]["1"]}), "01: expected a numb"),
        (lambda of: of.pop("units"), "units = None; expected {'time': 's'"),
        (lambda of: of.update(format="2"), "its format is '2'; expected 'axrt costs 2', as axrt"),
        (lambda of: of.update(format="axrt costs 1"), "of a former version; expected 'axrt costs"),
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


def test_a_table_is_what_it_was_after_it_was_written(tmp_path: Path) -> None:
    one = replace(table(), edges={(0, 1): Edge(0.5, 1e9)})
    file = tmp_path / "costs.json"
    file.write_text(one.to_json())
    assert CostTable.read(file) == one


class Ran(Observer):
    """The forwards and input gradients of a rank, in the order in which they ran."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def started(self, task: Task) -> None:
        if task.kind in (Kind.FORWARD, Kind.INPUT):
            self.tasks.append(task)


class GivenPlan:
    """A stand-in for the process that plans: the strict order of zb-h2, at once."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked.append(asked)

    def has_ended(self) -> bool:
        return True

    def plan(self) -> list[Any]:
        return list(SentPlan.of(along_zb_h2(), "zb-h1", (0, 2, 4, 8)))

    def close(self) -> None: ...


def along_zb_h2() -> Job:
    order = order_of(Job(Linear(3), policy_by_name("zb-h2"), MICROBATCHES)).split()
    return Job(Linear(3), AlongPlan(order, order.needs), MICROBATCHES, cuts=(0, 2, 4, 8))


def test_a_plan_made_anew_is_what_ranks_run_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From step 4 on: it is asked for after two steps, and told after two more."""
    monkeypatch.setattr("axrt.replanning.PlanProcess", GivenPlan)
    steps = 6
    config = configured(MICROBATCHES, schedule={"policy": "zb-h1", "replan": 2})

    def rank_main(transport: Transport) -> Any:
        ran = Ran()
        with axrt.initialize(
            perceptron(), adamw, constant, config, transport=transport, observers=[ran]
        ) as engine:
            losses = []
            for step in range(steps):
                losses.append(engine.train_batch(iter(BATCHES(step))).loss)
                engine.eval_batch(BATCHES(step)[:1])
            return losses, ran.tasks

    found = LocalWorld(3, 1).run(rank_main)
    plain = train_in_plain_torch(perceptron(), BATCHES, steps).losses
    rows = order_of(along_zb_h2()).rows
    for rank, (losses, tasks) in enumerate(found):
        assert losses == plain
        begin = 2 * MICROBATCHES * (steps - 1) + (steps - 1)  # an evaluation has one forward
        *last, _ = tasks[begin:]
        first = tasks[: 2 * MICROBATCHES]
        assert kinds(last) == kinds(rows[rank])
        assert (kinds(first) == kinds(last)) == (rank == 2), "zb-h1 has it that way nowhere else"


def kinds(tasks: Iterable[Task]) -> str:
    return "".join("F" if task.kind is Kind.FORWARD else "I" for task in tasks if task.kind in BOTH)


BOTH = (Kind.FORWARD, Kind.INPUT)


def replanning(job: Job) -> Replanning:
    """The plans of a run on the main rank, before anything is sent."""
    config = Config.read({"schedule": {"replan": 1}})
    return Replanning(cast(Rank, None), job, config, TaskTimes())


def asked(
    edge: float, of: Sequence[StageTimes], policy: str = "zb-h1", lengths: float = 0.0
) -> dict[str, Any]:
    """What a process would be given by ranks that have these times."""
    job = Job(Linear(len(of)), policy_by_name(policy), 8, cuts=tuple(range(len(of) + 1)))
    given: dict[str, Any] = replanning(job)._asked(
        of, ModelCosts((), Edge(edge, 1e9), lengths=lengths)
    )
    told: dict[str, Any] = json.loads(json.dumps(given))
    return told


EVEN = [StageTimes(1.0, 1.0, 1.0, 0.0, 0.0, 1.0)] * 4


def test_a_plan_is_made_where_it_is_faster_within_the_cap_of_each_rank() -> None:
    found = planned(asked(1.0, EVEN))
    assert found
    costs, job = Costs(edge=Edge(1.0), pieces=1), found.job()
    before = Job(Linear(4), policy_by_name("zb-h1"), 8)
    took, had = (simulate(one, costs, steps=8).makespan for one in (job, before))
    assert took * 1.03 < had
    bounds = [job.policy.bounds(Linear(4), rank, 8).held for rank in range(4)]
    assert all(held <= 4 for held in bounds)


def test_the_cap_of_each_rank_is_its_own() -> None:
    """In a strict plan: the deeper, the fewer."""
    order = order_of(Job(Linear(4), policy_by_name("1f1b"), 8)).split()
    along = AlongPlan(order, order.needs)
    assert len(set(order.needs)) > 1
    job = Job(Linear(4), along, 8, cuts=(0, 1, 2, 3, 4))
    given = replanning(job)._asked(EVEN, ModelCosts((), Edge(1.0)))
    assert given["kept"] == [Kept(0, 1 / held) for held in order.needs]


@pytest.mark.parametrize("strict", [True, False])
def test_a_plan_made_anew_keeps_no_more_bytes_than_the_first(strict: bool) -> None:
    """Where chunks differ: as many of them could keep more."""
    sizes = [Kept(0, 1.0), *[Kept(0.5, 0.5)] * 6, Kept(1.0, 5.0)]
    where, limit = placement_by_name("vee", 4, 0), 48.0  # eight of the largest chunks
    order = order_of(Job(where, policy_by_name("zb-v"), 8)).split()
    first = Job(where, AlongPlan(order, order.needs, 0 if strict else 8, strict), 8)
    shares = shares_of_room(first, sizes)
    graph = Graph.of(where, Costs(), 8, shares)
    most = [graph.most_kept(row) for row in graph.rows(order)]
    assert all(kept == pytest.approx(1) if strict else kept <= 1 for kept in most)
    for rank in range(4):
        of = [sum(shares[stage]) / sum(sizes[stage]) for stage in where.stages_of(rank)]
        assert of[0] == pytest.approx(of[1]), "in one unit"
        assert 1 / of[0] <= limit, "what the first may keep"
    least = shares_of_room(first, sizes, 24.0)
    assert all(sum(of) / sum(size) >= 1 / 24.0 for of, size in zip(least, sizes, strict=True))
    world = World(where, Costs(edge=Edge(1.0)), tuple(shares))
    again = job_along_plan([world], 8, 1.0, effort=AT_START, trial=BRIEF).policy
    assert isinstance(again, AlongPlan)
    assert max(map(graph.most_kept, graph.rows(again.order))) <= 1 + 1e-9


def test_a_limit_of_bytes_goes_with_plans_made_anew_where_costs_say_those_of_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("axrt.replanning.PlanProcess", GivenPlan)
    limit = {"memory": {"activations_mb": 0.2}}
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(GivenPlan, "asked", asked)
    config = settings(tmp_path, policy="zb-h1", replan=2) | limit
    config["run"]["trace_steps"] = 0

    def rank_main(transport: Transport) -> Any:
        with axrt.initialize(perceptron(), adamw, constant, config, transport=transport) as engine:
            return [engine.train_batch(iter(BATCHES(step))).loss for step in range(5)]

    losses, *_ = LocalWorld(3, 1).run(rank_main)
    assert losses == train_in_plain_torch(perceptron(), BATCHES, 5).losses
    kept = [Kept(*of) for of in asked[0]["kept"]]
    assert len(kept) == 3
    assert all(until_input > 0 and until_weight > 0 for until_input, until_weight in kept)


def test_a_plan_that_is_followed_stays_where_none_is_faster() -> None:
    given = asked(1.0, EVEN)
    again = {**given, "followed": planned(given)}
    assert planned(again) is None


def test_a_rank_that_turns_slow_is_planned_for() -> None:
    slow = [*EVEN[:2], EVEN[2]._replace(forward=1.4, input=1.4, weight=1.4), EVEN[3]]
    given = asked(1.0, EVEN)
    turned = {**asked(1.0, slow), "followed": planned(given)}
    new, old = planned(turned), planned(given)
    assert new
    assert old
    costs = Costs(tuple(Work(*of[:4]) for of in slow), edge=Edge(1.0), pieces=1)
    took, had = (simulate(one.job(), costs, steps=8).makespan for one in (new, old))
    assert took * 1.005 < had


def test_large_messages_and_durations_that_vary_are_told() -> None:
    large = [of._replace(sent=5e8, spread=0.3, pieces=3.2) for of in EVEN]
    given = asked(0.0, large)
    assert [of[3] for of in given["work"]] == [5e8] * 4
    assert (given["jitter"], given["lengths"], given["pieces"]) == (0.3, 0.0, 3)
    many = [of._replace(pieces=pieces) for of, pieces in zip(large, (0, 9, 9, 9), strict=True)]
    given = asked(0.0, many, lengths=0.24)
    assert given["jitter"] == pytest.approx(0.18), "the rest of what ranks have seen vary"
    assert (given["lengths"], given["pieces"]) == (0.24, 4)


def test_a_plan_made_anew_reckons_with_some_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[float, float]] = []

    def seen(job: Job, world: World, *_: Any) -> float:
        found.append((round(world.costs.jitter, 3), world.costs.lengths))
        return 1.0

    monkeypatch.setattr("axrt.plan_process.takes", seen)
    planned(asked(1.0, EVEN))
    planned(asked(1.0, [of._replace(spread=0.3) for of in EVEN], lengths=0.2))
    assert found == [(0.05, 0.0)] * 2 + [(0.224, 0.2)] * 2


def test_times_of_tasks_leave_out_evaluations() -> None:
    times = TaskTimes()
    with times.aside():
        for kind in (Kind.FORWARD, Kind.INPUT):
            times.started(Task(kind, 0, 0))
            times.finished(Task(kind, 0, 0), 0.0, 1.0)
    assert times.take() == {}
    with times.aside():
        times.sent(1, Message(Meaning.ACTIVATION, 1, 0), torch.zeros(7))
    for kind, ended_s in ((Kind.FORWARD, 7.5), (Kind.INPUT, 9.0), (Kind.WEIGHT, 7.25)):
        times.started(Task(kind, 0, 0))
        times.finished(Task(kind, 0, 0), 7.0, ended_s)
    payload = torch.zeros(3)
    times.sent(1, Message(Meaning.ACTIVATION, 1, 0), payload)
    found = times.take()[0]
    assert (found.forward, found.input, found.weight) == (0.5, 2.0, 0.25)
    assert found.sent == 12


def ended(process: Any) -> Any:
    deadline = time.monotonic() + 120
    while not process.has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def test_a_process_makes_a_plan() -> None:
    made = ended(PlanProcess(asked(1.0, EVEN))).plan()
    assert SentPlan(*made) == SentPlan(*json.loads(json.dumps(planned(asked(1.0, EVEN)))))


def test_a_large_plan_comes_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its text is larger than what a pipe takes."""
    (tmp_path / "prints").write_text("#!/bin/sh\nexec head -c 200000 /dev/zero | tr '\\0' 1\n")
    (tmp_path / "prints").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "prints"))
    process = ended(PlanProcess({}))
    process._plan.seek(0)
    assert len(process._plan.read()) == 200_000
    process.close()


def test_what_cannot_start_costs_no_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    plans = replanning(Job(Linear(2), policy_by_name("zb-h1"), 6))
    plans._ask([[(0, *EVEN[0])], [(1, *EVEN[1])]])
    assert "cannot start: No such file" in capsys.readouterr().err
    assert plans._has_failed


def test_a_process_that_fails_is_told_once_and_nothing_hangs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="has ended with code 1"):
        ended(PlanProcess({})).plan()
    job = Job(Linear(2), policy_by_name("zb-h1"), 6)
    plans = replanning(job)
    plans._process = ended(PlanProcess({}))
    assert plans._made() is None
    assert "schedule.replan: the process that makes plans has ended" in capsys.readouterr().err
    plans._ask([[(0, *EVEN[0])], [(1, *EVEN[1])]])
    assert plans._process is None


def test_a_process_ends_with_the_one_that_has_asked() -> None:
    command = [sys.executable, "-m", "axrt.plan_process", str(os.getpid() + 1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as orphan:  # which waits for what to plan
        assert orphan.wait(60) == 69


@pytest.mark.parametrize(
    ("schedule", "more", "text"),
    [
        ({"policy": "1f1b"}, {}, "policy '1f1b' follows no plan; expected one of adaptive, zb-h1"),
        ({}, {"parallel": {"data": 2}, "memory": {"zero": 3}}, "rests on the order of tasks"),
        ({}, {"memory": {"activations_mb": 9.0}}, "limits bytes, and only schedule.costs says"),
        ({}, {"memory": {"recompute": "full"}}, "leave out forwards that run again"),
        ({}, {"memory": {"offload_activations": 4}}, "which activations leave the device rests"),
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_policy_that_nobody_named_and_that_follows_no_plan_stays(
    ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of ranks has led to it, as after the loss of one."""
    chunks = 3 * (ranks > 1)  # breadth-first
    config = configured(MICROBATCHES, schedule={"replan": 1, "chunks": chunks})

    def rank_main(transport: Transport) -> Any:
        with axrt.initialize(perceptron(), adamw, constant, config, transport=transport) as engine:
            return [engine.train_batch(iter(BATCHES(step))).loss for step in range(STEPS)]

    found = LocalWorld(ranks, 1).run(rank_main)
    assert found[0] == train_in_plain_torch(perceptron(), BATCHES, STEPS).losses
    assert "schedule.replan = 1 does nothing: " in capsys.readouterr().err


def test_nothing_is_planned_before_every_stage_has_run() -> None:
    job = Job(Linear(2), policy_by_name("zb-h1"), 6)
    plans = replanning(job)
    plans._ask([[], []])
    plans._ask([[(0, *EVEN[0])], []])
    assert plans._process is None
