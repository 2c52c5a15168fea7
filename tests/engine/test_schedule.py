"""Orders that are given, and timelines of real runs."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import axrt
from axrt.config import Schedule
from axrt.observe.picture import draw
from axrt.planning.schedule import digest_of_order
from axrt.scheduler.job import Job
from axrt.scheduler.lacks import CAUSES
from axrt.scheduler.placement import Vee
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.simulator import order_of, simulate
from axrt.scheduler.simulation.timeline import Timeline
from axrt.scheduler.task import Kind
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..scheduler.test_torch_order import dumped, made_by_torch
from .models import perceptron
from .reference import (
    Outcome,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

MICROBATCHES, STEPS = 6, 3
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)


def on_ranks(ranks: int, schedule: dict[str, Any]) -> Outcome:
    config = configured(MICROBATCHES, schedule=schedule)
    return together(
        LocalWorld(ranks, 3).run(lambda t: train_on_a_rank(t, perceptron(), BATCHES, STEPS, config))
    )


def test_a_given_order_has_the_bits_of_plain_torch(tmp_path: Path) -> None:
    reference, file = train_in_plain_torch(perceptron(), BATCHES, STEPS), tmp_path / "order.csv"
    file.write_text(str(order_of(Job(Vee(3), policy_by_name("zb-v"), MICROBATCHES))))
    assert on_ranks(3, {"policy": "fixed", "order": str(file)}) == reference
    assert on_ranks(3, {"policy": "fixed", "order": "zb-v", "max_held": 8}) == reference
    assert on_ranks(3, {"policy": "fixed", "order": "breadth-first", "chunks": 2}) == reference


@pytest.mark.parametrize(
    "name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV"]
)
def test_a_file_of_torch_is_followed_with_the_bits_of_plain_torch(
    name: str, tmp_path: Path
) -> None:
    """Whole backwards, split ones, and both in one order; microbatches go back as they went."""
    made = made_by_torch(name, chunks=2, ranks=2, microbatches=MICROBATCHES)
    dumped(made, tmp_path)
    schedule = {"policy": "fixed", "order": str(tmp_path / "order.csv")}
    assert on_ranks(2, schedule) == train_in_plain_torch(perceptron(), BATCHES, STEPS)


def test_backwards_in_another_order_than_microbatches_are_summed_as_ever(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text(
        "0F0,0F1,0F2,0F3,0F4,0F5,0B5,0B4,0B3,0B2,0B1,0B0\n"
        "1F0,1F1,1F2,1F3,1F4,1F5,1B5,1B4,1B3,1B2,1B1,1B0\n"
    )
    schedule = {"policy": "fixed", "order": str(tmp_path / "order.csv")}
    assert on_ranks(2, schedule) == train_in_plain_torch(perceptron(), BATCHES, STEPS)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (
            {"policy": "fixed"},
            "schedule.policy = 'fixed' and schedule.order = ''; expected an order with policy "
            "'fixed'",
        ),
        (
            {"policy": "1f1b", "order": "zb-v"},
            "expected an order with policy 'fixed' and schedule.order = '' with any other",
        ),
        (
            {"policy": "fixed", "order": "none.csv"},
            r"\[schedule\] order = 'none.csv': No such file or directory",
        ),
        (
            {"policy": "fixed", "order": "zb-v", "placement": "linear"},
            "made for placement vee, not linear",
        ),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused(schedule: dict[str, Any], text: str) -> None:
    with pytest.raises(axrt.ConfigError, match=text):
        on_ranks(2, schedule)


def timeline_of(policy: str, ranks: int, data: int = 1) -> Timeline:
    """Of the second and third of four steps, with evaluations in between."""
    config = configured(
        MICROBATCHES,
        schedule={"policy": policy},
        parallel={"data": data},
        memory={"bucket_mb": 0.001},
        run={"trace_steps": 2},
    )

    def rank_main(transport: Transport) -> Timeline | None:
        with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
            batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
            for step in range(4):
                assert engine.traced == (step > 2)
                engine.train_batch(iter(batches(step + 10 * engine.data_rank)))
                engine.eval_batch(iter(BATCHES(9)[: 3 + engine.data_rank]))
            return engine.timeline()

    found, *others = LocalWorld(ranks * data, 1).run(rank_main)
    assert others == [None] * (ranks * data - 1)
    assert found is not None
    return found


@pytest.mark.parametrize(("policy", "data"), [("1f1b", 1), ("adaptive", 1), ("zb-h1", 2)])
def test_a_timeline_has_every_task_of_the_traced_steps_once_and_looks_like_a_simulated_one(
    policy: str, data: int
) -> None:
    line = timeline_of(policy, 3, data)
    assert line.ranks == 3 * data
    counts = Counter((span.rank, span.task) for span in line.spans)
    assert set(counts.values()) == {1}
    assert {span.task.microbatch // MICROBATCHES for span in line.computing()} == {1, 2}
    forwards = Counter(span.rank for span in line.spans if span.task.kind is Kind.FORWARD)
    assert set(forwards.values()) == {2 * MICROBATCHES * (2 if policy == "adaptive" else 1)}
    assert {span.task.microbatch for span in line.spans if span.task.kind is Kind.STEP} == {1, 2}
    for rank in range(line.ranks):
        mine = [(span.start, span.end) for span in line.spans if span.rank == rank]
        assert all(0 <= start <= end <= after for (start, end), (after, _) in pairwise(mine))
        most = policy_by_name(policy).bounds(Vee(3), rank % 3, MICROBATCHES)
        assert line.in_flight[rank] <= most.in_flight
        assert line.held[rank] <= most.held
    assert line.pauses
    assert all(0 <= idle <= line.makespan for idle in line.idle())
    for pause in line.pauses:
        same = [span for span in line.spans if span.rank == pause.rank]
        assert not any(span.start < pause.end and pause.start < span.end for span in same)
    assert "input" in {pause.cause for pause in line.pauses} <= set(CAUSES)
    assert all(pause.end >= pause.start for pause in line.pauses)
    busy = [
        sum(span.end - span.start for span in line.computing() if span.rank == rank)
        for rank in range(line.ranks)
    ]
    assert line.ideal == pytest.approx(max(busy))
    assert 0 < line.utilisation < 1
    assert Timeline.from_json(line.to_json()) == line
    titles = Counter(re.findall("<title>(.*?)</title>", draw(line)))
    assert all(titles[str(span.task)] == data for span in line.computing())
    assert titles["step 2"] == line.ranks
    drawn = sum(1 for _ in line.computing()) + line.ranks + len(line.pauses)
    assert titles.total() == drawn


def test_what_a_timeline_says_is_the_same_after_it_was_written() -> None:
    line = simulate(Job(Vee(2), policy_by_name("adaptive"), 4), Costs(jitter=0.3), steps=2)
    again = Timeline.from_json(line.to_json())
    assert again == line
    assert (again.makespan, again.held, again.in_flight, again.idle()) == (
        line.makespan,
        line.held,
        line.in_flight,
        line.idle(),
    )
    assert line.stash(lambda stage: 10.0) == [10.0 * held for held in line.held]


def test_a_dropped_step_is_not_in_the_timeline() -> None:
    config = configured(MICROBATCHES, schedule={"policy": "1f1b"}, run={"trace_steps": 2})

    def rank_main(transport: Transport) -> Timeline | None:
        with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
            engine.train_batch(iter(BATCHES(0)))
            with pytest.raises(StopIteration):
                engine.train_batch(iter(BATCHES(1)[:4]))
            assert not engine.traced
            for step in (1, 2):
                engine.train_batch(iter(BATCHES(step)))
            return engine.timeline()

    for seed in range(4):
        line, *_ = LocalWorld(3, seed).run(rank_main)
        assert line is not None
        assert set(Counter((span.rank, span.task) for span in line.spans).values()) == {1}
        assert len(list(line.computing())) == 3 * 2 * 2 * MICROBATCHES


def test_the_digest_of_an_order_is_that_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"

    def digest(text: str) -> str:
        file.write_text(text)
        return digest_of_order(Schedule(policy="fixed", order=str(file)))

    assert digest("F0.0,B0.0") == digest("F0.0,B0.0") != digest("F0.0,B0.0\n")
    assert digest_of_order(Schedule(policy="1f1b")) == ""
