"""`axrt profile` writes what `axrt simulate` and `schedule.costs` read."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main
from axrt.cli.profile import _told_slow
from axrt.cli.task_cost import measured_task_s
from axrt.planning.cluster_file import read_cluster
from axrt.runtime.task_runner import TaskRunner
from axrt.scheduler.placement import Linear
from axrt.scheduler.simulation.comparison import Run
from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.fit import fit_costs
from axrt.scheduler.simulation.fit_layers import slowness

from ..mpi.runs import alone, write_files
from .test_train import TINY


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 20)
    monkeypatch.setattr("axrt.cli.task_cost.measured_task_s", lambda: 0.25)
    asked = ["profile", "tiny.toml", "model.layers=4", "--samples", "1", "--samples", "3"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert "6 layers, 3 samples: forward" in done.output
    return tmp_path / "costs.json"


def test_a_table_has_what_every_layer_takes_sends_and_keeps(costs: Path) -> None:
    table = CostTable.read(costs)
    assert sorted(table.layers) == [1, 3]
    assert table.task_s == 0.25
    for samples, layers in table.layers.items():
        assert [layer.name for layer in layers] == ["Embedding", *["Block"] * 4, "Head"]
        assert all(layer.forward_s > 0 and layer.input_s > 0 for layer in layers)
        block = layers[2]
        assert 0 < block.until_weight_bytes <= block.stash_bytes
        assert block.operations == samples * table.layers[1][2].operations
        assert block.sent_bytes == samples * table.layers[1][2].sent_bytes
        assert block.parameters > 0
        assert block.pieces == 4, "the weights of four products; those of norms do not wait"


def test_a_table_has_members_of_teams_where_that_is_asked_for(costs: Path) -> None:
    asked = [
        "profile",
        "tiny.toml",
        "model.layers=1",
        "model.heads=2",
        "--tensor",
        "2,1",
        "--out",
        "teams.json",
    ]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert "3 layers, 1 sample, 2 members: forward" in done.output
    table = CostTable.read(Path("teams.json"))
    (_, alone, _), (_, member, _) = table.layers[1], table.of_degree(2)[1]
    assert (len(alone.joints), len(member.joints)) == (0, 4)
    assert member.held_parameters < alone.held_parameters == member.parameters
    with pytest.raises(ValueError, match="costs of teams of 1, 2; expected those of parallel.ten"):
        table.of_degree(4)


def test_costs_on_a_cluster_are_modelled_and_say_of_which(costs: Path) -> None:
    file = Path(__file__).parent.parent.parent / "examples" / "cluster.toml"
    asked = ["profile", "tiny.toml", "--tensor", "1", "--samples", "2", "--cluster", str(file)]
    done = CliRunner().invoke(main, [*asked, "--out", "modelled.json"])
    assert done.exit_code == 0, done.output
    assert "the table is modelled, and in modelled.json" in done.output
    table, cluster = CostTable.read(Path("modelled.json")), read_cluster(file)
    assert (table.source, sorted(table.layers)) == ("modelled", [2])
    table.check_cluster(cluster.device.digest)
    assert table.edge == Edge(2e-6, 25e9), "between nodes, of which there are four"
    with pytest.raises(ValueError, match="is modelled on cluster"):
        table.check_cluster(replace(cluster.device, share=0.5).digest)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (["--cluster", "c.toml", "--like", "run"], "--cluster: costs like a run's are of its ran"),
        (["--cluster", "c.toml"], "c.toml: No such file"),
        (["--tensor", "1,1"], "'1,1'; expected numbers of members with commas between them"),
        (["--tensor", "0"], "'0'; expected numbers of members"),
        (["--tensor", "3"], "parallel.tensor = 3"),
        (["--tensor", "2", "--like", "run"], "--tensor: costs like a run's are of its ranks"),
        (["parallel.tensor_shards=2"], "axrt profile does not take parallel.tensor_shards = 2"),
    ],
)
def test_members_that_cannot_be_are_refused(costs: Path, asked: list[str], text: str) -> None:
    done = CliRunner().invoke(main, ["profile", "tiny.toml", "--out", "other.json", *asked])
    assert done.exit_code == 2
    assert text in done.output
    assert not Path("other.json").exists()


def test_a_simulation_takes_the_table(costs: Path) -> None:
    asked = ["simulate", "--costs", str(costs), "--ranks", "2", "--microbatches", "4"]
    for more in (["--policy", "1f1b"], ["--plan", "--memory", "2"]):
        done = CliRunner().invoke(main, [*asked, *more, "--json"])
        assert done.exit_code == 0, done.output
        took = json.loads(done.output)["makespan"]
        layers = CostTable.read(costs).layers[1]
        work = sum(layer.forward_s + layer.input_s + layer.weight_s for layer in layers)
        assert took > 4 * work / 2, "in seconds, the work of four microbatches on two ranks"
    for words in (["--latency", "1"], ["world.pieces=1"]):
        done = CliRunner().invoke(main, [*asked, "--policy", "1f1b", *words])
        assert done.exit_code == 2
        name = words[0].partition("=")[0]
        assert f"{name} and --costs with a file, which says that" in done.output
    other = [*asked[:2], "costs", *asked[3:], "--policy", "1f1b"]
    said = CliRunner().invoke(main, other).output
    assert "none below 0; or a file whose name ends with .json" in " ".join(said.split())
    many = ["simulate", "--costs", str(costs), "--ranks", "4", "--microbatches", "4"]
    done = CliRunner().invoke(main, [*many, "--policy", "adaptive"])
    assert done.exit_code == 2
    assert "6 layers, which cannot fill 8 stages" in done.output


def _step_s(costs: Path, *more: str) -> float:
    asked = ["simulate", "--costs", str(costs), "--ranks", "4", "--microbatches", "8", "--json"]
    policy = [] if "--plan" in more else ["--policy", "zb-h1"]
    done = CliRunner().invoke(main, [*asked, *policy, *more])
    assert done.exit_code == 0, done.output
    took: float = json.loads(done.output)["makespan"]
    return took


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with a timeline."""
    folder = tmp_path_factory.mktemp("traced")
    write_files(folder)
    of_run = ("model.layers=4", "schedule.policy=zb-v", "run.trace_steps=2")
    alone(folder, "train", "tiny.toml", *of_run)
    return folder / "out"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda of: of["spans"][3].__setitem__(3, -1.0), "on rank 0 is from"),
        (lambda of: of["spans"][3].__setitem__(2, float("nan")), "on rank 0 is from nan to"),
        (lambda of: of["spans"][3].__setitem__(0, 7), "on rank 7 is from"),
        (lambda of: of["spans"][3].__setitem__(3, None), "no timeline: '<=' not supported"),
        (lambda of: of.update(schedule=[1]), "schedule is [1]"),
        (lambda of: of.update(ranks=0), "numbers (0, "),
        (lambda of: of.update(ranks=3), "is of 1 rank and 1 replica, and it has rows of 3"),
        (lambda of: of.update(residencies=[1]), "it has residencies of 1 stage; expected 2"),
        (
            lambda of: of["schedule"].update(name="fixed", order=[1]),
            "its schedule is not as a run writes it",
        ),
    ],
)
def test_a_damaged_timeline_makes_no_table(
    costs: Path, traced: Path, change: Any, text: str
) -> None:
    shutil.copytree(traced, "out")
    file, good = Path("out/timeline.json"), costs.read_text()
    told = json.loads(file.read_text())
    change(told)
    file.write_text(json.dumps(told))
    refused = _profiled("--like", "out")
    assert refused.exit_code == 2, refused.output
    assert text in " ".join(refused.output.split())
    assert costs.read_text() == good


LEAVES = """
import sys
import axrt
from torch import nn

class Leaves(nn.Module):
    def forward(self, value):
        sys.exit(0)

def model(config):
    return axrt.PipelineModule([nn.Embedding(256, 8), Leaves()], nn.functional.cross_entropy)
"""


def test_a_layer_that_leaves_while_it_is_measured_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "leaves_early.py").write_text(LEAVES)
    asked = ["profile", "tiny.toml", "model.factory=leaves_early:model"]
    refused = CliRunner().invoke(main, asked)
    assert refused.exit_code == 2, refused.output
    assert "axrt profile runs each layer by itself on the sample: SystemExit: 0" in refused.output
    assert not Path("costs.json").exists()


def test_the_layout_of_the_run_is_not_that_of_the_measurement(costs: Path) -> None:
    done = _profiled("parallel.data=2", "--out", "again.json")
    assert done.exit_code == 0, done.output


def test_options_beside_a_table_count_in_its_units(tmp_path: Path) -> None:
    """Layers of a second, and activations that take a tenth on a link."""
    layer = LayerCosts(1.0, 1.0, 1.0, 10**8, 10**6, 0.3, pieces=1)
    table = CostTable({1: (layer,) * 4}, Edge(0.01, 1e9), lengths=0.3)
    costs = tmp_path / "costs.json"
    costs.write_text(table.to_json())
    even = _step_s(costs, "--jitter", "0", "world.lengths=0")
    assert even != _step_s(costs, "--jitter", "0") != _step_s(costs)
    steady = ("--jitter", "0", "world.lengths=0")
    slower = _step_s(costs, *steady, "world.node=2,5") - even
    assert 0.4 <= slower < 4, "on the way there and back at the beginning and the end, 0.4 longer"
    replicas = (*steady, "--steps", "2", "--replicas", "2")
    summed = _step_s(costs, *replicas, "world.reduce_transfer=5") - _step_s(costs, *replicas)
    assert 4 < summed <= 5, "half of it there and half of it back, between two replicas"
    assert 24 < _step_s(costs, *steady, "--plan") <= even, "on linear placement: four layers"


@pytest.mark.parametrize("option", ["world.node=2,5", "world.reduce_transfer=5"])
def test_options_that_need_a_bandwidth_are_refused_without_one(costs: Path, option: str) -> None:
    asked = ["simulate", "--costs", str(costs), "--ranks", "2", "--microbatches", "4", option]
    done = CliRunner().invoke(main, [*asked, "--policy", "1f1b"])
    assert done.exit_code == 2
    assert f"{option.partition('=')[0]} counts on the bandwidth of links" in done.output


def test_a_table_of_several_sizes_is_simulated_for_one(costs: Path) -> None:
    asked = ["simulate", "--costs", str(costs), "--ranks", "2", "--microbatches", "4", "--json"]
    asked += ["--policy", "zb-h1", "--jitter", "0"]
    table = CostTable.read(costs)
    for samples in (1, 3):
        done = CliRunner().invoke(main, [*asked, f"world.samples={samples}"])
        told = json.loads(done.output)
        first, middle, end = told["cuts"]
        assert (first, end) == (0, 6)
        layers = table.layers[samples]
        kept = [sum(of.stash_bytes for of in part) for part in (layers[:middle], layers[middle:])]
        held = [chunks * of / 2**20 for chunks, of in zip(told["held"], kept, strict=True)]
        assert told["held_mib"] == pytest.approx(held)
    refused = CliRunner().invoke(main, [*asked, "world.samples=2"])
    assert refused.exit_code == 2
    assert "microbatches of 1, 3 samples; expected one of them" in refused.output


@pytest.mark.parametrize(
    "other", ["model.context=4", "model.heads=2", "precision.compute=bfloat16"]
)
def test_a_table_that_was_measured_with_other_settings_is_refused(costs: Path, other: str) -> None:
    asked = ["train", "tiny.toml", "model.layers=4", f"schedule.costs={costs}"]
    refused = CliRunner().invoke(main, [*asked, other])
    assert refused.exit_code == 2, refused.output
    assert f"measured with {other.partition('=')[0]} = " in refused.output
    assert not Path("out").exists()
    taken = CliRunner().invoke(main, asked)
    assert taken.exit_code == 0, taken.output
    assert "schedule.costs does nothing: a pipeline of one rank follows no plan" in taken.output


def test_a_slow_rank_is_told_where_costs_are_fitted() -> None:
    layer = LayerCosts(1.0, 1.0, 1.0, 8, 0, 0.0)
    alone, work = CostTable({1: (layer,) * 6}), [Work(2, 2, 2), Work(4, 4, 4), Work(2.2, 2, 2)]
    costs = Costs(tuple(work))
    slow = slowness(alone, 1, costs, [0, 2, 4, 6], Linear(3).held)
    assert slow == pytest.approx([6 / 6.2, 12 / 6.2, 1.0])
    told = _told_slow(1, slow[1], [0, 2, 4, 6])
    assert "rank 1 took 1.9 times what its layers take alone" in told
    assert "parallel.partition=[0, 2, 4, 6] with schedule.costs" in told


def test_what_the_loop_takes_for_a_task_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TaskRunner._run

    def slowly(*given: Any) -> None:
        time.sleep(4e-3)
        run(*given)

    monkeypatch.setattr(TaskRunner, "_run", slowly)
    assert 4e-3 < measured_task_s() < 40e-3


@pytest.mark.parametrize("out", ["nowhere/costs.json", "."])
def test_a_table_that_cannot_be_written_is_refused_before_it_is_made(
    costs: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.setattr("axrt.model.costs.measure", lambda *_: pytest.fail("it measures"))
    refused = _profiled("--out", out)
    assert refused.exit_code == 2, refused.output
    assert f"--out {out}: expected a file in a directory that is there" in refused.output


def _profiled(*arguments: str) -> Result:
    asked = ["profile", "tiny.toml", "model.layers=4", *arguments]
    return CliRunner().invoke(main, asked)


def test_a_table_like_a_run_shares_out_what_its_stages_took(costs: Path) -> None:
    of_run = ["model.layers=4", "schedule.policy=zb-v", "parallel.partition=[0,4,6]"]
    ran = CliRunner().invoke(main, ["train", "tiny.toml", *of_run, "run.trace_steps=3"])
    assert ran.exit_code == 0, ran.output
    done = _profiled("--like", "out", "--out", "like.json")
    assert done.exit_code == 0, done.output
    table, run = CostTable.read(Path("like.json")), Run.read(Path("out"))
    found = fit_costs(run.line, run.job.placement)
    assert not isinstance(found.work, Work)
    for work, layers in zip(found.work, (table.layers[1][:4], table.layers[1][4:]), strict=True):
        assert sum(layer.forward_s for layer in layers) == pytest.approx(work.forward)
        assert sum(layer.input_s for layer in layers) == pytest.approx(work.input)
        assert sum(layer.weight_s for layer in layers) == pytest.approx(work.weight)
    assert table.task_s == found.task
    assert [layer.name for layer in table.layers[1]] == ["Embedding", *["Block"] * 4, "Head"]

    others = (
        (("--like", "out", "--samples", "3"), "expected --like alone"),
        (("--like", "out", "schedule.microbatch_size=2"), "its microbatches are of 1 sample"),
        (("--like", "out", "model.layers=2"), "out is of another model; expected one of [model]"),
        (("--like", "out", "model.width=16"), "out is of another model"),
        (("--like", "out/timeline.json", "model.layers=2"), "the run had 6 layers, and the mod"),
        (("--like", "nowhere"), "expected a run that was traced"),
    )
    for asked, word in others:
        refused = _profiled(*asked, "--out", "none.json")
        assert refused.exit_code == 2, refused.output
        assert word in refused.output
        assert not Path("none.json").exists()


def test_a_simulation_of_a_team_takes_a_members_costs_and_its_joints(tmp_path: Path) -> None:
    """One microbatch on one rank, and on two: what is added up by hand."""
    member = LayerCosts(0.2, 0.3, 0.4, 500, 1, 0.0, pieces=1, joints=(100, 300), back_joints=(200,))
    alone = replace(member, forward_s=9.0, joints=(), back_joints=())
    edge, task_s = Edge(0.01, 1e4), 0.001
    table = CostTable({2: (alone,) * 2}, edge, task_s=task_s, teams={2: {2: (member,) * 2}})
    file = tmp_path / "costs.json"
    file.write_text(table.to_json())

    def takes(*words: str) -> float:
        command = ["simulate", "--costs", str(file), "--microbatches", "1", "--policy", "1f1b"]
        done = CliRunner().invoke(main, [*command, *words, "--json", "world.fill=never"])
        assert done.exit_code == 0, done.output
        return float(json.loads(done.output)["makespan"])

    # Of a stage all exchanges take equally long: 600 bytes of a layer at three joints.
    joints = 3 * 2 * 0.01 + 2 * 600 / 1e4
    pieces = 2 + 3 * 2
    computing = 2 * (0.2 + 0.3 + 0.4)
    of_one = takes("--tensor", "2", "--ranks", "1")
    assert of_one == pytest.approx(computing + joints + pieces * task_s)
    # There and back a member sends half of an activation, of which the table has its half.
    of_two = takes("--tensor", "2", "--ranks", "2")
    assert of_two == pytest.approx(of_one + 2 * task_s + 2 * (0.01 + 500 / 1e4))
    assert takes("--ranks", "1") == pytest.approx(2 * (9.0 + 0.3 + 0.4) + 2 * task_s)
    for words, text in (
        (("--tensor", "2", "--joints", "3"), "--joints and --costs with a file, which says that"),
        (("--tensor", "3"), "there are costs of teams of 1, 2; expected those of parallel.tensor"),
    ):
        command = ["simulate", "--costs", str(file), "--ranks", "1", "--microbatches", "1"]
        refused = CliRunner().invoke(main, [*command, "--policy", "1f1b", *words])
        assert refused.exit_code == 2
        assert text in refused.output
