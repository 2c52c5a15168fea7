"""The example of the pages under mpirun: a model of transformers as it is, trained by the command,
and its checkpoint given back to transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import axrt
from axrt.config import Config

from ..mpi.mpirun import ROOT, mpirun

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
FACTORY = "examples.traced_gpt2:model"
SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 32}


def test_the_example_trains_and_its_weights_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    settings = [f"model.{key}={value}" for key, value in SIZES.items()]
    settings += [f"model.factory={FACTORY}", f"run.out={run}", "checkpoint.every=4"]
    settings += ["run.steps=4", "run.eval_every=0", "optimizer.warmup_steps=1"]
    command = ["-m", "axrt", "train", "examples/quickstart.toml", *settings]
    ended = mpirun(2, command, cwd=ROOT)
    assert ended.code == 0, ended.err
    saved: dict[str, Tensor] = {}
    for file in (run / "checkpoints" / "step-00000004").glob("layer-*.safetensors"):
        saved |= {name.partition(".")[2]: of for name, of in load_file(file).items()}
    monkeypatch.syspath_prepend(ROOT)
    gpt2 = theirs()
    missing, unexpected = gpt2.load_state_dict(saved, strict=False)
    assert (missing, unexpected) == ([], [])
    tokens = torch.arange(4 * SIZES["context"]).reshape(4, -1) % 256
    loaded = axrt.load(run, FACTORY)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, gpt2.eval()(tokens).logits)


def theirs() -> torch.nn.Module:
    from examples.traced_gpt2 import untraced

    gpt2: torch.nn.Module = untraced(Config.read({"model": SIZES}))
    return gpt2
