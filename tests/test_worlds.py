"""Worlds that vary, in scripts/bench_peers: what tasks and messages take there."""

import time
from importlib import import_module
from math import log
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import mpi4py
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts" / "benchmarks")
    monkeypatch.setattr(mpi4py.rc, "initialize", False)  # this process forks others


def world(name: str) -> Any:
    return import_module("peers.worlds").WORLDS[name]


def test_a_world_differs_from_the_even_one_in_what_it_is_named_after() -> None:
    assert [world("even").stage(kind, True, 2) for kind in "FIW"] == [0.5, 0.5, 0.5]
    head = world("head")
    assert head.stage("F", False, 2) == 0.5
    assert head.stage("F", True, 2) == 0.5 + head.head
    assert 0.3 < head.head < 1, "a vocabulary of 8,192 beside four blocks"
    assert [world("weight").stage(kind, False, 1) for kind in "FIW"] == [1, 1, 0.5]
    assert [world("slow").rank(rank) for rank in range(3)] == [1, 1.2, 1]
    assert world("delay").delay_s == import_module("peers.worlds").CHUNK_S


def test_a_long_microbatch_is_long_on_all_stages_and_for_every_runtime() -> None:
    lengths = world("lengths").microbatches(seed=1, count=4000)
    assert lengths == world("lengths").microbatches(seed=1, count=4000)
    assert lengths[:9] != world("lengths").microbatches(seed=2, count=9)
    assert fmean(map(log, lengths)) == pytest.approx(0, abs=0.05)
    assert stdev(map(log, lengths)) == pytest.approx(0.5, abs=0.05)
    sleeper = import_module("peers.sleeping").Sleeper
    first, last = (sleeper(stage, 2, 4) for stage in (0, 7))
    for layer in (first, last):
        layer.begin(world("lengths"), 1, 9)
    assert first.takes_s == last.takes_s
    assert first.takes_s["F"] == [pytest.approx(0.005 * length) for length in lengths[:9]]


def test_a_table_of_costs_says_what_layers_take_and_not_which_rank_is_slow() -> None:
    table = import_module("peers.varied")._table(world("slow"), 8)
    assert {layer.forward_s for layer in table.layers[1]} == {0.005}
    late = import_module("peers.varied")._table(world("delay"), 8)
    assert late.edge.latency == pytest.approx(0.005, abs=5e-4)


def test_a_message_is_late_by_when_it_was_sent() -> None:
    late, sent = import_module("peers.late"), torch.ones(2, 3)
    late.stamp(sent)
    assert late.left_s(sent, 1e-9) == 0
    assert 4.0 < late.left_s(sent, 5.0) <= 5.0
    time.sleep(0.02)
    assert late.left_s(sent, 5.0) <= 4.98
    assert torch.equal(sent.view(-1)[1:], torch.ones(5))
