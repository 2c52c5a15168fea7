"""`axrt plan` writes a file that trains as it is."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main

from .test_train import TINY

CLUSTER = """
[cluster]
nodes = 1
devices = 2

[device]
share = 0.5
memory = 1e9
bandwidth = 1e9

[device.operations]
float32 = 1e9

[links.node]
latency = 1e-6
bandwidth = 1e9
shared = false
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    Path("text.txt").write_text("all work and no play " * 20)
    Path("cluster.toml").write_text(CLUSTER)
    return tmp_path


def plan(*asked: str) -> Result:
    return CliRunner().invoke(main, ["plan", "tiny.toml", "--cluster", "cluster.toml", *asked])


def test_the_file_trains_as_it_is(files: Path) -> None:
    done = plan("cluster.devices=1", "schedule.microbatches=2", "--brief")
    assert done.exit_code == 0, done.output
    assert "pipe 1 x data 1 x tensor 1, 1f1b" in done.output
    assert "s a step by modelled costs" in done.output
    found = tomllib.loads(Path("planned.toml").read_text())
    schedule = found["schedule"]
    assert schedule.get("microbatches", 8) * schedule.get("microbatch_size", 1) == 2
    has_others = "evaluations have other samples" in done.output
    assert has_others == (schedule.get("microbatch_size", 1) != 1)
    trained = CliRunner().invoke(main, ["train", "planned.toml", "run.steps=1", "run.device=cpu"])
    assert trained.exit_code == 0, trained.output


def test_layouts_and_what_one_step_away_would_cost_are_told(files: Path) -> None:
    done = plan("schedule.microbatches=2", "--json", "--out", "two.toml")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    best = found["layouts"][0]
    assert found["source"] == "modelled"
    assert best["step_s"] <= min(one["step_s"] for one in found["layouts"])
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_s"])
    assert "parallel.pipe = 2" in {step["key"] for step in found["one_step_away"]}
    assert tomllib.loads(Path("two.toml").read_text()) == best["set"]


def test_where_nothing_fits_the_fullest_rank_and_the_key_that_helps_are_named(files: Path) -> None:
    big = ("model.width=512", "model.layers=3", "memory.bucket_mb=1", "schedule.microbatches=1")
    done = plan("device.memory=1e6", *big, "--brief")
    assert done.exit_code == 1
    assert "nothing fits: of all layouts, pipe" in done.output
    assert "on a device of 1.00 MB" in done.output
    assert (
        "With device.expanded_memory of the cluster memory.offload = 'stream' would" in done.output
    )
    assert not Path("planned.toml").exists()


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (("cluster.nodes=0",), "cluster.nodes = 0"),
        (("links.nodes.latency=1",), "links.nodes"),
        (("precision.weights=bfloat16", "--brief"), "the device has no operations a second of bf"),
        (("--costs", "none.json"), "none.json: No such file"),
        (("schedule.share=true",), "axrt plan does not take schedule.share = True; expected False"),
        (("memory.offload_activations=4",), "axrt plan does not take memory.offload_activations"),
        (("optimizer.name=muon",), "axrt plan does not take optimizer.name = 'muon', whose produ"),
        (("--out", "none/planned.toml"), "expected a file in a directory that is there"),
    ],
)
def test_what_cannot_be_is_refused(files: Path, asked: tuple[str, ...], text: str) -> None:
    done = plan(*asked)
    assert done.exit_code == 2, done.output
    assert text in done.output
    assert not Path("planned.toml").exists()


def test_keys_of_the_run_that_are_not_kept_are_told(files: Path) -> None:
    """They are what is chosen, and whoever has set one must know; microbatches are shared out
    anew, and the samples of a step stay."""
    asked = ("cluster.devices=1", "schedule.microbatches=2", "--brief")
    done = plan("parallel.tensor=2", "memory.recompute=full", "model.heads=2", *asked)
    assert done.exit_code == 0, done.output
    told = [line for line in done.stderr.splitlines() if "is not kept" in line]
    assert [line.split(" =")[0] for line in told] == [
        "axrt: parallel.tensor",
        "axrt: memory.recompute",
    ]
    assert "axrt sweep --over parallel.tensor=2 looks at those with 2 alone" in told[0]
    assert "not kept" not in plan(*asked).stderr


def test_costs_may_be_measured(files: Path) -> None:
    sizes = [word for size in ("1", "2") for word in ("--samples", size)]
    assert CliRunner().invoke(main, ["profile", "tiny.toml", *sizes]).exit_code == 0
    done = plan("cluster.devices=1", "schedule.microbatches=2", "--costs", "costs.json", "--brief")
    assert done.exit_code == 0, done.output
    assert "s a step by measured costs" in done.output
    missing = plan("cluster.devices=1", "schedule.microbatches=4", "--costs", "costs.json")
    assert missing.exit_code == 2
    assert "costs.json has no costs of 4 samples on teams of 1; expected those of" in missing.output
    assert "axrt profile FILE --tensor 1 --samples 1 --samples 2 --samples 4" in missing.output
