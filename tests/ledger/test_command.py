"""`axrt memory`: what it prints, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main

TINY = """
[model]
layers = 2
width = 8
heads = 1
context = 8
[run]
device = "cpu"
"""
OWN = """
import torch
from torch import nn
from axrt import PipelineModule

def of(config):
    return PipelineModule([nn.Embedding(256, 4), nn.Linear(4, 256)], loss)

def loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def looks_at_values(config):
    return PipelineModule([nn.Embedding(256, 4), lambda x: x * float(x.sum())], loss)
"""


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "own_of_memory.py").write_text(OWN)


def axrt(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["memory", *arguments])


def test_a_row_for_ranks_that_are_alike() -> None:
    result = axrt("tiny.toml", "--ranks", "4", "parallel.data=2")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "ranks in the pipeline: 2, replicas: 2" in lines[0]
    rows = [line.split()[0] for line in lines[2:6]]
    assert rows == ["in", "ranks", "0,2", "1,3"]
    assert "fullest: rank " in result.output
    assert " would save " in result.output


def test_all_cells_are_in_one_unit() -> None:
    result = axrt("tiny.toml", "--ranks", "2", "--json", "model.vocab=100000")
    ranks = json.loads(result.output)["ranks"]
    lines = axrt("tiny.toml", "--ranks", "2", "model.vocab=100000").output.splitlines()
    assert lines[2] == "in MB (1,000,000 bytes)"
    assert max(one["device_bytes"] for one in ranks) >= 1e6
    at = lines[3].split().index("on")  # "on device" is one column
    sums = [float(line.split()[at]) for line in lines[4:6]]
    assert sums == [pytest.approx(one["device_bytes"] / 1e6, abs=0.006) for one in ranks]
    assert not any(unit in line for line in lines[3:6] for unit in ("kB", "MB", "GB"))


@pytest.mark.parametrize(
    "keys",
    [
        ("memory.zero=1", "memory.offload=stream"),
        ("memory.zero=2", "memory.scratch_gb=1e-6", "memory.offload=stream"),
        ("memory.device_gb=1e-5",),
        ("model.vocab=100000", "memory.device_gb=0.001"),
        ("precision.weights=bfloat16", "memory.offload=cpu"),
        ("memory.zero=3", "memory.offload=stream", "memory.offload_parameters=true"),
    ],
)
def test_one_output_has_one_unit(keys: tuple[str, ...]) -> None:
    result = axrt("tiny.toml", "--ranks", "4", "parallel.data=2", *keys)
    (unit,) = re.findall(r"^in (.*) \(", result.output, re.MULTILINE)
    assert set(re.findall(r"\d ([kMGT]?B)\b", result.output)) == {unit}, result.output


def test_json_says_the_same() -> None:
    result = axrt("tiny.toml", "--ranks", "2", "--json", "precision.weights=bfloat16")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert [one["rank"] for one in told["ranks"]] == [0, 1]
    fullest = told["ranks"][told["fullest"]]
    on_device = [one["bytes"] for one in fullest["entries"] if one["tier"] == "device"]
    assert fullest["device_bytes"] == sum(on_device)
    assert fullest["device_bytes"] == max(one["device_bytes"] for one in told["ranks"])
    assert any(one["host_bytes"] for one in told["ranks"]), "the originals of frozen buffers"
    assert told["refused"] == ""
    for one in told["advice"]:
        assert one["saves_bytes"] == fullest["device_bytes"] - one["device_bytes"]


OWNED = ("tiny.toml", "--ranks", "2", "parallel.data=2", "memory.zero=1", "optimizer.name=muon")


def test_each_owner_is_told_with_its_matrices() -> None:
    """Those that are called alike by one name, and in JSON each."""
    lines = axrt(*OWNED, "model.layers=8").output.splitlines()
    head = lines.index("stage  owner  share  matrices")
    assert lines[head - 1].startswith("each matrix has one of 2 owners; of stage 0 owner ")
    told = json.loads(axrt(*OWNED, "--json", "model.layers=8").output)["owners"]
    assert [(one["stage"], one["owner"]) for one in told] == [(0, 0), (0, 1)]
    assert sum(one["share"] for one in told) == pytest.approx(1)
    kinds = ["attention.project_in", "attention.project_out", "feed.up", "feed.down"]
    every = {f"{layer}.{kind}.weight" for layer in range(1, 9) for kind in kinds}
    assert sorted(name for one in told for name in one["matrices"]) == sorted(every)
    for one, line in zip(told, lines[head + 1 :], strict=False):
        _, owner, share, *texts = line.split()
        assert (owner, share) == (str(one["owner"]), f"{one['share']:.1%}")
        for kind in kinds:
            mine = [name for name in one["matrices"] if name[2:] == f"{kind}.weight"]
            alike = f"*.{kind}.weight ({len(mine)} matrices)"
            assert (alike if len(mine) > 1 else mine[0]) in " ".join(texts)


def test_a_table_of_many_owners_says_where_the_others_are() -> None:
    said = axrt(*OWNED, "--ranks", "32", "model.layers=14").output.splitlines()
    head = said.index("stage  owner  share  matrices")
    assert said[head + 25] == "... 4 owners more: --json has them all"
    assert said[head + 1].startswith("    1      0  "), "the first stage has no matrix"
    assert "owner" not in axrt("tiny.toml", "--ranks", "2", "parallel.data=2").output


def test_a_size_that_does_not_fit_leaves_with_a_code() -> None:
    result = axrt("tiny.toml", "memory.device_gb=0.00001")
    assert result.exit_code == 1
    assert "memory.device_gb = 1e-05, but rank 0 will hold" in result.output
    assert axrt("tiny.toml", "memory.device_gb=1").exit_code == 0


def test_a_model_of_the_users_own() -> None:
    result = axrt("tiny.toml", "model.factory=own_of_memory:of", "--json")
    assert result.exit_code == 0, result.output
    purposes = [one["purpose"] for one in json.loads(result.output)["ranks"][0]["entries"]]
    assert purposes == ["weights", "gradients", "moments", "stash"]


def test_a_layer_that_looks_at_values_leaves_the_stash_unknown() -> None:
    result = axrt("tiny.toml", "model.factory=own_of_memory:looks_at_values")
    assert result.exit_code == 0, result.output
    assert "stash and messages: not known, since a layer cannot run" in result.output


def test_a_mistake_is_refused_as_it_is_in_training() -> None:
    result = axrt("tiny.toml", "--ranks", "3", "parallel.data=2")
    assert result.exit_code == 2
    assert "3 ranks do not factor" in result.output
    assert axrt("missing.toml").exit_code == 2
