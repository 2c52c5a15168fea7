"""Commands of axrt on three ranks: costs that are measured there, plans that ranks follow, texts
that a pipeline writes, and the doctor's look at a job.

Nothing else measures a link between ranks, follows a plan made anew by a process of a job, or
writes texts with stages on several ranks. They share the three ranks of one job (`trials.py`).
"""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from axrt.scheduler.simulation.cost_table import CostTable

from .jobs import ends
from .mpirun import Ended, mpirun
from .runs import alone, lines, write_files
from .trials import Trial

RANKS = 3
STEPS = 8
SETTINGS = (
    *("model.layers=7", f"run.steps={STEPS}", "run.log_every=1", "run.eval_every=0"),
    *("schedule.microbatches=5", "data.held_out=0"),
)
COSTS = ("schedule.costs=costs.json",)
PLANS = {
    "quiet": ("schedule.policy=1f1b",),
    "planned": COSTS,
}
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


OF_LENGTHY = (
    *(*SETTINGS, "schedule.microbatches=6", "model.factory=lengthy:model", "model.layers=2"),
    "parallel.partition=[0,2,4,7]",
)
FEWER = """
from axrt import PipelineModule
from axrt.models.gpt import gpt

def model(config):
    of = gpt(config)
    return PipelineModule([of.layers[0], of.layers[-1]], of.loss_fn)
"""
GENERATE = ("generate", "out", "--prompts", "prompts", "--tokens", "12")


def folder_of_files() -> Path:
    folder = Path(mkdtemp())
    write_files(folder)
    return folder


@cache
def planned() -> Path:
    """Where costs are measured, and plans on them are followed."""
    folder = folder_of_files()
    (folder / "lengthy.py").write_text(LENGTHY)
    return folder


@cache
def written() -> dict[str, Path]:
    """Runs that texts are written from: one that is whole, one whose newest checkpoint is damaged,
    and one with fewer layers than ranks."""
    folder = folder_of_files()
    (folder / "prompts").write_text("all\nwork and no play\n\nno\n")
    settings = ("model.tied=true", "run.steps=8", "checkpoint.every=4")
    alone(folder, "train", "tiny.toml", *settings)
    hurt, small = Path(mkdtemp()) / "hurt", Path(mkdtemp()) / "small"
    for copy in (hurt, small):
        shutil.copytree(folder, copy)
    damaged = hurt / "out/checkpoints/step-00000008/layer-0002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    shutil.rmtree(small / "out")
    (small / "fewer.py").write_text(FEWER)
    alone(small, "train", "tiny.toml", "model.factory=fewer:model", "run.steps=1")
    return {"whole": folder, "hurt": hurt, "small": small}


@cache
def tried() -> dict[str, Ended]:
    """The ends of all commands."""
    at = str(planned())
    train = ("train", "tiny.toml")
    lengthy = (*train, *OF_LENGTHY, "run.steps=12", "run.trace_steps=10", "schedule.policy=zb-h1")
    trials = [
        Trial("doctor", ("doctor", "--json")),
        Trial("profile", ("profile", "tiny.toml", *SETTINGS, "--samples", "1"), at),
        *[
            Trial(name, (*train, *SETTINGS, f"run.out={name}", *more), at)
            for name, more in PLANS.items()
        ],
        Trial("lengthy", (*lengthy, "run.out=lengthy"), at),
        *[Trial(name, GENERATE, str(folder)) for name, folder in written().items()],
    ]
    return dict(ends(RANKS, tuple(trials)))


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


def test_ranks_follow_plans_from_measured_costs_with_the_same_losses() -> None:
    assert tried()["profile"].code == 0, tried()["profile"].err
    table = CostTable.read(planned() / "costs.json")
    assert len(table.layers[1]) == 9
    assert table.edge.latency > 0
    for name, more in PLANS.items():
        ended = tried()[name]
        assert ended.code == 0, ended.err
        assert (" along a plan" in ended.out) == (COSTS[0] in more)
    assert len(losses(planned() / "quiet")) == STEPS
    assert losses(planned() / "planned") == losses(planned() / "quiet")


def test_lengths_of_microbatches_are_found_in_a_run() -> None:
    """Sixty lengths of those that were drawn have a sigma of 0.33 within their steps. What a busy
    machine adds is jitter, and what it takes besides, for all of them alike, makes it smaller."""
    assert tried()["lengthy"].code == 0, tried()["lengthy"].err
    fitted = ("--like", "lengthy", "--out", "fitted.json")
    alone(planned(), "profile", "tiny.toml", *OF_LENGTHY, *fitted)
    assert 0.1 < CostTable.read(planned() / "fitted.json").lengths < 0.45


def test_a_pipeline_writes_what_one_process_does() -> None:
    """Of a model whose embedding and head are tied."""
    one = alone(written()["whole"], *GENERATE)
    several = tried()["whole"]
    assert (several.code, several.out) == (0, one), several.err
    assert len(one.splitlines()) == 3
    older = tried()["hurt"]
    assert older.code == 0, older.err
    assert older.err.count("damaged, and not taken: ") == 1, "all ranks take the same one"
    assert alone(written()["hurt"], *GENERATE).endswith(older.out)
    assert older.out != one
    refused = tried()["small"]
    assert refused.code == 2
    assert "layers" in refused.err


def test_doctor_looks_at_all_ranks_and_measures_between_them() -> None:
    found = json.loads(tried()["doctor"].out)
    assert [facts["mpi"]["rank"] for facts in found["ranks"]] == list(range(RANKS))
    assert [(link["source"], link["target"]) for link in found["links"]] == [(0, 1), (1, 2)]
    assert all(link["gb_per_s"] > 0 for link in found["links"])
    assert not [finding for finding in found["findings"] if finding["level"] == "problem"]


@pytest.mark.sweep
def test_doctor_looks_at_one_rank() -> None:
    found = json.loads(mpirun(1, ["-m", "axrt", "doctor", "--json"]).out)
    assert (len(found["ranks"]), found["links"]) == (1, [])
