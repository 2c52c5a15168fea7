"""Costs that are measured on ranks, and plans that ranks follow, under mpirun."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import psutil

from axrt.scheduler.cost_table import CostTable
from axrt.scheduler.simulator import Edge

from ..cli.test_train import TINY
from .mpirun import mpirun

STEPS = 24
SETTINGS = (
    *("model.layers=7", f"run.steps={STEPS}", "run.log_every=1", "run.eval_every=0"),
    *("schedule.microbatches=5", "data.held_out=0"),
)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_ranks_follow_plans_from_measured_costs_with_the_same_losses(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 40)
    asked = ("-m", "axrt", "profile", "tiny.toml", *SETTINGS, "--samples", "1")
    profiled = mpirun(2, asked, cwd=tmp_path)
    assert profiled.code == 0, profiled.err
    table = CostTable.read(tmp_path / "costs.json")
    assert len(table.layers[1]) == 9
    assert table.edge.latency > 0
    train = ("-m", "axrt", "train", "tiny.toml", *SETTINGS)
    for name, more in {
        "quiet": ("schedule.policy=1f1b",),
        "planned": ("schedule.costs=costs.json",),
        "anew": ("schedule.costs=costs.json", "schedule.replan=3"),
    }.items():
        ended = mpirun(3, [*train, f"run.out={name}", *more], cwd=tmp_path)
        assert ended.code == 0, ended.err
        assert (" along a plan (" in ended.out) == ("schedule.costs=costs.json" in more)
        assert "keeps the order" not in ended.err, "no process has failed"
    assert len(losses(tmp_path / "quiet")) == STEPS
    assert losses(tmp_path / "planned") == losses(tmp_path / "quiet")
    assert losses(tmp_path / "anew") == losses(tmp_path / "quiet")
    assert not [one for one in psutil.process_iter(["cmdline", "cwd"]) if plans(one, tmp_path)]


SLOW = """
import time
import axrt
from axrt.models.gpt import gpt
from torch import nn

class Sleep(nn.Module):  # once a step, which the median of its six microbatches leaves out
    calls = 0

    def forward(self, value):
        Sleep.calls += 1
        time.sleep(0.08 * (Sleep.calls % 6 == 0))
        return value

def model(config):
    of = gpt(config)
    return axrt.PipelineModule([*of.layers[:-1], axrt.LayerSpec(Sleep), of.layers[-1]], of.loss_fn)
"""


def test_ranks_follow_a_plan_that_the_first_costs_did_not_lead_to(tmp_path: Path) -> None:
    """A table that has the layers too slow by far, so that messages seem to take no time, and
    weight gradients longest. Steps last long enough for a plan to be there before the run ends."""
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 40)
    (tmp_path / "slow.py").write_text(SLOW)
    settings = (*SETTINGS, "schedule.microbatches=6", "model.factory=slow:model")
    asked = ("-m", "axrt", "profile", "tiny.toml", *settings, "--samples", "1")
    assert mpirun(2, asked, cwd=tmp_path).code == 0
    table = CostTable.read(tmp_path / "costs.json")
    slow = [
        replace(layer, forward_s=1.0, input_s=1.0, weight_s=10.0, spread=0.0)
        for layer in table.layers[1]
    ]
    wrong = replace(table, layers={1: tuple(slow)}, edge=Edge(0.05))
    (tmp_path / "costs.json").write_text(wrong.to_json())
    train = ("-m", "axrt", "train", "tiny.toml", *settings, "run.steps=200", "run.log_every=50")
    for name, more in {
        "quiet": ("schedule.policy=zb-h2",),
        "anew": ("schedule.policy=zb-h2", "schedule.costs=costs.json", "schedule.replan=20"),
    }.items():
        ended = mpirun(3, [*train, f"run.out={name}", *more], cwd=tmp_path)
        assert ended.code == 0, ended.err
    assert ended.err.count(" on a new plan is followed, 1 % faster") == 1, ended.err
    assert losses(tmp_path / "anew") == losses(tmp_path / "quiet")


LENGTHY = """
import time
from math import exp
from random import Random
import axrt
import torch
from axrt.models.gpt import gpt
from torch import nn

class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None

class Naps(nn.Module):  # a microbatch is as long on every stage
    calls = 0

    def forward(self, value):
        self.calls += 1
        return Nap.apply(value, 0.01 * exp(0.4 * Random(self.calls).gauss(0, 1)))

def model(config):
    of = gpt(config)
    first, one, two, last = of.layers
    nap = axrt.LayerSpec(Naps)
    return axrt.PipelineModule([first, nap, one, nap, two, nap, last], of.loss_fn)
"""


def plans(process: psutil.Process, folder: Path) -> bool:
    """It is a process that makes a plan, of a run that was started in a folder."""
    line = process.info["cmdline"] or []
    makes_one = line[:3] == [sys.executable, "-m", "axrt.plan_process"]
    return makes_one and process.info["cwd"] == str(folder)


def test_lengths_of_microbatches_are_found_in_a_run(tmp_path: Path) -> None:
    """Sixty lengths of those that were drawn have a sigma of 0.33 within their steps. What a busy
    machine adds is jitter."""
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 40)
    (tmp_path / "lengthy.py").write_text(LENGTHY)
    of_model = ("model.factory=lengthy:model", "model.layers=2", "parallel.partition=[0,2,4,7]")
    settings = (*SETTINGS, "schedule.microbatches=6", *of_model)
    train = ("-m", "axrt", "train", "tiny.toml", *settings, "run.steps=12", "run.trace_steps=10")
    ended = mpirun(3, [*train, "schedule.policy=zb-h1"], cwd=tmp_path)
    assert ended.code == 0, ended.err
    asked = ("-m", "axrt", "profile", "tiny.toml", *settings, "--like", "out")
    fitted = mpirun(1, asked, cwd=tmp_path)
    assert fitted.code == 0, fitted.err
    table = CostTable.read(tmp_path / "costs.json")
    assert 0.2 < table.lengths < 0.45


def test_a_layer_that_fails_while_it_is_measured_ends_every_rank(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 40)
    (tmp_path / "odd.py").write_text(
        "import axrt\nfrom torch import nn\n"
        "def model(config):\n"
        "    return axrt.PipelineModule([nn.Linear(3, 3)] * 2, nn.functional.mse_loss)\n"
    )
    asked = ("-m", "axrt", "profile", "tiny.toml", "model.factory=odd:model")
    ended = mpirun(2, asked, cwd=tmp_path)
    assert ended.code == 2
    assert ended.err.count("axrt: axrt profile runs each layer by itself on the sample: ") == 1
    assert "Traceback" not in ended.err
    assert not (tmp_path / "costs.json").exists()
