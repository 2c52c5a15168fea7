"""`axrt profile` writes what `axrt simulate` and `schedule.costs` read."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from axrt.cli import main
from axrt.scheduler.cost_table import CostTable

from .test_train import TINY


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 20)
    asked = ["profile", "tiny.toml", "model.layers=4", "--samples", "1", "--samples", "3"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert "6 layers, 3 samples: forward" in done.output
    return tmp_path / "costs.json"


def test_a_table_has_what_every_layer_takes_sends_and_keeps(costs: Path) -> None:
    table = CostTable.read(costs)
    assert sorted(table.layers) == [1, 3]
    for samples, layers in table.layers.items():
        assert [layer.name for layer in layers] == ["Embedding", *["Block"] * 4, "Head"]
        assert all(layer.forward_s > 0 and layer.input_s > 0 for layer in layers)
        block = layers[2]
        assert 0 < block.until_weight_bytes <= block.stash_bytes
        assert block.operations == samples * table.layers[1][2].operations
        assert block.sent_bytes == samples * table.layers[1][2].sent_bytes
        assert block.parameters > 0


def test_a_simulation_takes_the_table(costs: Path) -> None:
    asked = ["simulate", "--costs", str(costs), "--ranks", "2", "--microbatches", "4"]
    for more in (["--policy", "1f1b"], ["--plan", "--memory", "2"]):
        done = CliRunner().invoke(main, [*asked, *more, "--json"])
        assert done.exit_code == 0, done.output
        took = json.loads(done.output)["makespan"]
        layers = CostTable.read(costs).layers[1]
        work = sum(layer.forward_s + layer.input_s + layer.weight_s for layer in layers)
        assert took > 4 * work / 2, "in seconds, the work of four microbatches on two ranks"
    done = CliRunner().invoke(main, [*asked, "--policy", "1f1b", "--latency", "1"])
    assert done.exit_code == 2
    assert "--latency and --costs with a file, which says that" in done.output
    many = ["simulate", "--costs", str(costs), "--ranks", "4", "--microbatches", "4"]
    done = CliRunner().invoke(main, [*many, "--policy", "adaptive"])
    assert done.exit_code == 2
    assert "6 layers, which cannot fill 8 stages" in done.output
