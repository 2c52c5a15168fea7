"""Schedules of teams on known costs: policy "auto" and plans, with slices on their way.

What is chosen without teams is in test_autoschedule.py and test_along_plan.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import axrt
from axrt.cli import main
from axrt.config import Config
from axrt.model.joints import Team
from axrt.model.team_layers import TeamLayers
from axrt.models.registry import model_of
from axrt.planning.autoschedule import choose
from axrt.planning.model_job import filling, job_with
from axrt.planning.plan_from_costs import plan_for
from axrt.scheduler.job import Job
from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.model_costs import ModelCosts
from axrt.scheduler.simulation.simulator import simulate
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from .reference import adamw, configured
from .test_default_plan import with_little_effort
from .test_tensor import MICROBATCHES, TOKENS, few_sentences, language

LAYER = LayerCosts(0.01, 0.012, 0.008, 1000, 100, 0.0)
BYTES = 5  # that a member sends at a joint


def joints_of(place: int) -> int:
    """The joints of a layer of the model, forward, and as many back."""
    layers, last = language().layers, place == 5
    return TeamLayers(language().tensor, Team(0, 2)).joints(place, layers[place : place + 1], last)


JOINTS = [joints_of(place) for place in range(6)]
LAYERS = [replace(LAYER, joints=(BYTES,) * of, back_joints=(BYTES,) * of) for of in JOINTS]
MODEL = {"vocab": 24, "width": 16, "heads": 2, "layers": 2, "context": TOKENS}
WITHIN, EDGE, TASK_S = Edge(0.001, 1000.0), Edge(0.002, 1e6), 1e-4
KNOWN = ModelCosts(LAYERS, EDGE, TASK_S, team=2, within=WITHIN)


def settings(policy: str, team: int = 2, **schedule: Any) -> Config:
    layout = {"tensor": team, "pipe": 2}
    return Config.read(
        configured(MICROBATCHES, parallel=layout, schedule={"policy": policy, **schedule})
    )


def taken(job: Job, steps: int = 3) -> float:
    """Seconds of a step, with the costs of each stage added up by hand."""
    works, exchanges = [], []
    for stage in range(job.stages):
        layers = range(job.cuts[stage], job.cuts[stage + 1])
        count = 2 * sum(JOINTS[n] for n in layers)
        assert job.team == 1 or count == sum(job.joints_of(stage))
        forward, back, weight = (of * len(layers) for of in (0.01, 0.012, 0.008))
        works.append(Work(forward, back, weight, 2 * LAYER.sent_bytes))
        exchanges.append(WITHIN.seconds(BYTES) if count else 0.0)
    costs = Costs(tuple(works), task=TASK_S, edge=EDGE, exchange_of=tuple(exchanges), pieces=1)
    return simulate(job, costs, steps=steps).makespan / steps


@pytest.mark.parametrize("fill", ["always", "never"])
def test_a_policy_is_foretold_with_slices_on_their_way(fill: str) -> None:
    """The fastest of them is chosen."""
    config = settings("auto", fill=fill)
    found = choose(config, language(), 2, KNOWN)
    of = {one.schedule.policy: one.step_s for one in found}
    assert {"1f1b", "zb-h1", "adaptive", "gpipe"} < of.keys()
    assert "chimera" not in of, "two pipes hold all weights twice"
    assert found[0].step_s <= 1.01 * min(of.values())
    for name in ("1f1b", "gpipe", "breadth-first"):
        job = job_of(name, config)
        assert of[name] == pytest.approx(taken(job), rel=1e-9)
        assert of[name] > taken(replace(job, team=1, joints={})), "slices take time"


def job_of(name: str, config: Config) -> Job:
    schedule = replace(config.schedule, policy=name)
    return filling(job_with(schedule, config, language(), 2)[1], config)


def test_a_plan_is_made_for_members_that_wait_at_joints() -> None:
    waiting = KNOWN.waiting()
    assert waiting.team == 1
    for count, layer in zip(JOINTS, waiting.layers, strict=True):
        waited = count * (TASK_S + 0.001 + BYTES / 1000)
        assert layer.forward_s == pytest.approx(0.01 + waited)
        assert layer.input_s == pytest.approx(0.012 + waited)
        assert layer.weight_s == 0.008
    config, late = (
        settings("adaptive", fill="never"),
        KNOWN._replace(edge=Edge(0.05), within=Edge(0.1)),
    )
    of_team = plan_for(config, "adaptive", language(), 2, late)
    alone = settings("adaptive", team=1)
    assert of_team == plan_for(alone, "adaptive", language(), 2, late.waiting())
    assert of_team != plan_for(alone, "adaptive", language(), 2, late._replace(team=1))


def run(table: Path | None = None, pipe: int = 2, **schedule: Any) -> tuple[list[float], Any]:
    """The losses of three steps, and the engine, closed."""
    layout = {"tensor": 2, "pipe": pipe}
    costs = {"costs": str(table)} if table else {}
    config = configured(
        MICROBATCHES,
        parallel=layout,
        schedule={**schedule, **costs},
        model=MODEL,
        optimizer={"clip": 0.5},
    )
    model = model_of(Config.read(config)) if table else language()

    def rank_main(transport: Transport) -> tuple[list[float], Any]:
        sample = few_sentences(0)[0]
        with axrt.initialize(
            model, adamw, config=config, transport=transport, sample=sample
        ) as engine:
            batches = [few_sentences(step) for step in range(3)]
            read = [iter(batch) if engine.reads else None for batch in batches]
            return [engine.train_batch(batch).loss for batch in read], engine

    found = LocalWorld(2 * pipe, 1).run(rank_main)
    assert all(losses == found[0][0] for losses, _ in found)
    return found[0]


def test_auto_measures_a_member_and_trains_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_little_effort(monkeypatch)
    measured: list[int] = []
    timed: list[int] = []

    def measure(*of: Any) -> list[LayerCosts]:
        measured.append(of[-1])
        return LAYERS

    def measured_edge(exchange: Any, device: Any, to: int) -> Edge:
        timed.append(to)
        return Edge(0.05) if to == 2 else Edge(1e-4)

    monkeypatch.setattr("axrt.planning.known_costs.measure", measure)
    monkeypatch.setattr("axrt.planning.known_costs.measured_edge", measured_edge)
    losses, engine = run(policy="auto")
    assert measured == [2], "on the main rank"
    assert timed == [2, 1] * 4, "the next rank of the pipeline, then of the team"
    assert engine.along_a_plan
    assert "along a plan" in engine.candidates[0]
    assert losses == run(policy="1f1b", fill="never")[0]


def test_auto_measures_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with_little_effort(monkeypatch)
    losses, engine = run(policy="auto")
    assert len(engine.candidates) > 10
    assert losses == run(policy="1f1b", fill="never")[0]


def test_plans_follow_a_table_of_the_same_degree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_little_effort(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("all work and no play " * 20)
    keys = "".join(f"{key} = {value}\n" for key, value in MODEL.items())
    Path("own.toml").write_text(f"[model]\n{keys}[data]\nsource = 'text.txt'\n")
    for degrees in ("1", "1,2"):
        command = ["profile", "own.toml", "--tensor", degrees, "--samples", "2"]
        done = CliRunner().invoke(main, [*command, "--out", f"of-{degrees}.json"])
        assert done.exit_code == 0, done.output
    of_size = {"microbatch_size": 2}
    losses, engine = run(Path("of-1,2.json"), policy="zb-h1", **of_size)
    assert engine.along_a_plan
    assert losses == run(Path("of-1,2.json"), policy="adaptive", **of_size)[0]
    with pytest.raises(axrt.ConfigError, match=r"schedule\.costs: .* of teams of 1; expected"):
        run(Path("of-1.json"), policy="zb-h1", **of_size)
    table = CostTable.read(Path("of-1,2.json"))
    expected_ms = []
    for link in (Edge(), Edge(1.0)):  # on one stage, members alone have a link
        Path("other.json").write_text(replace(table, edge=link).to_json())
        _, engine = run(Path("other.json"), pipe=1, policy="auto", **of_size)
        expected_ms.append(float(engine.candidates[0].split(": ")[1].split(" ms")[0]))
    assert expected_ms[1] > expected_ms[0] + 1000
