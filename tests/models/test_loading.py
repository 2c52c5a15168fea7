"""A trained model as a plain module, and the built-in one with a part of the user's own."""

import re
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

import axrt
from axrt.cli import main
from axrt.config import Config
from axrt.models.registry import model_of

from ..cli.test_train import TINY
from ..mpi.mpirun import ROOT

TOKENS = torch.arange(8).reshape(1, 8)


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("tiny.toml").write_text(TINY)
    Path("text.txt").write_text("all work and no play " * 20)
    sys.modules.pop("mine", None)


def command(*words: str) -> str:
    ended = CliRunner().invoke(main, list(words))
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.mark.parametrize("feed", ["relu", "silu", "relu2"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_run_is_a_plain_module_elsewhere(feed: str, tied: str) -> None:
    command("train", "tiny.toml", f"model.feed={feed}", f"model.tied={tied}")
    loaded = axrt.load("out")
    assert type(loaded) is nn.Sequential
    assert not loaded.training
    assert torch.isfinite(loaded(TOKENS)).all()
    saved = {
        name: value
        for file in Path("out/checkpoints/step-00000004").glob("layer-*.safetensors")
        for name, value in load_file(file).items()
    }
    assert loaded.state_dict().keys() == saved.keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, saved[name]), name
    first, last = (loaded.get_parameter(of) for of in ("0.tokens.weight", "2.logits.weight"))
    assert (first is last) == (tied == "true")
    again = axrt.load("out/checkpoints/step-00000004")
    assert torch.equal(again(TOKENS), loaded(TOKENS))


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(axrt.ConfigError, match="nowhere"):
        axrt.load("nowhere")


def snippet() -> str:
    page = (ROOT / "docs/models.md").read_text()
    found = re.search(r"^## One part of your own.*?^```python\n(.*?)^```", page, re.M | re.S)
    assert found
    return found[1]


def test_one_part_of_the_built_in_model_is_replaced_as_the_page_says() -> None:
    Path("mine.py").write_text(snippet())
    command("train", "tiny.toml", "run.out=plain")
    mine = "model.factory=mine:my_gpt"
    command("train", "tiny.toml", mine, "checkpoint.resume=plain", "run.steps=6")
    whole = axrt.load("out")
    assert type(whole[1].attention_norm).__name__ == "UnitNorm"
    assert torch.isfinite(whole(TOKENS)).all()
    assert command("generate", "out", "--tokens", "3")
    refused = CliRunner().invoke(main, ["export", "out", "--hf", "theirs"])
    assert refused.exit_code == 2
    assert "model.factory" in refused.output


def test_layers_with_such_a_part_are_cut_into_stages() -> None:
    Path("mine.py").write_text(snippet())
    config = Config.read("tiny.toml", ["model.factory=mine:my_gpt", "model.layers=3"])
    made = model_of(config)
    cuts = made.boundaries(2)
    assert cuts[0] == 0
    assert 0 < cuts[1] < cuts[2] == 5
