"""`axrt train` on one rank: what it writes, and what it refuses."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main

TINY = """
[model]
layers = 1
width = 8
heads = 1
context = 8
[schedule]
microbatches = 2
[data]
source = "text.txt"
held_out = 0.2
[run]
steps = 4
log_every = 2
eval_every = 2
eval_microbatches = 2
out = "out"
device = "cpu"
"""


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 20)
    return tmp_path


def axrt(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", *arguments])


def lines(path: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(path, "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_its_configuration_and_its_metrics() -> None:
    result = axrt("tiny.toml", "run.seed=5")
    assert result.exit_code == 0, result.output
    assert tomllib.loads(Path("out/config.toml").read_text())["run"]["seed"] == 5
    metrics = lines("out")
    assert [line["step"] for line in metrics] == [0, 2, 2, 4, 4]
    assert [line["step"] for line in metrics if "val_loss" in line] == [0, 2, 4]
    assert {"step", "loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "time_s"} <= metrics[1].keys()
    assert metrics[1]["tokens_per_s"] == pytest.approx(8 * metrics[1]["samples_per_s"], rel=0.01)
    assert "files in out" in result.output
    assert "step 4: validation loss" in result.output


def test_a_second_run_gets_a_directory_of_its_own_and_the_same_losses() -> None:
    axrt("tiny.toml")
    axrt("out/config.toml", "run.out=out")
    assert [line.get("loss") for line in lines("out")] == [line.get("loss") for line in lines("out-2")]


def test_a_wrong_key_leaves_with_code_2_and_writes_nothing() -> None:
    result = axrt("tiny.toml", "run.step=3")
    assert result.exit_code == 2
    assert "there is no key run.step; did you mean run.steps?" in result.output
    assert not Path("out").exists()


def test_missing_data_is_named() -> None:
    result = axrt("tiny.toml", "data.source=nowhere")
    assert result.exit_code == 70
    assert "nowhere: No such file or directory" in result.output


def test_more_stages_than_layers_are_refused() -> None:
    result = axrt("tiny.toml", "parallel.pipe=2")
    assert result.exit_code == 2
    assert "1 ranks do not factor into" in result.output


OWN = """
import scheduler
from torch import nn
import axrt
from axrt.models.gpt import cross_entropy

def build(config):
    layers = [axrt.LayerSpec(nn.Embedding, 256, 8), nn.Linear(8, 256)]
    return axrt.PipelineModule(layers[:scheduler.DEPTH], cross_entropy)

def broken(config):
    return None
"""


def test_a_model_of_the_users_own_trains_and_a_scheduler_py_beside_it_does_no_harm(in_a_directory: Path) -> None:
    (in_a_directory / "mine.py").write_text(OWN)
    (in_a_directory / "scheduler.py").write_text("DEPTH = 2\n")
    (in_a_directory / "offload.py").write_text("raise RuntimeError('nobody asked for me')\n")
    result = axrt("tiny.toml", "model.factory=mine:build")
    assert result.exit_code == 0, result.output
    assert len(lines("out")) == 5


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("mine", "expected 'package.module:function'"),
        ("nowhere_at_all:build", "No module named 'nowhere_at_all'"),
        ("json:nothing", "nothing is not in json"),
        ("builtins:repr", "repr returned str; expected a function that returns a PipelineModule"),
    ],
)
def test_a_factory_that_gives_no_model_is_refused(factory: str, text: str) -> None:
    result = axrt("tiny.toml", f"model.factory={factory}")
    assert result.exit_code == 2, result.output
    assert text in result.output
