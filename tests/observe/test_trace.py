"""The spans of a traced rank, by a clock of the test's own."""

import time
from collections import Counter

import pytest

import axrt
from axrt.device.queues import NOW, Moment
from axrt.observe.observer import Observer
from axrt.observe.trace import Trace
from axrt.scheduler.simulation.timeline import Timeline
from axrt.scheduler.task import Task
from axrt.transport import Transport
from axrt.transport.control import News
from axrt.transport.local import LocalWorld
from axrt.transport.transport import Parcel

from ..engine.models import perceptron
from ..engine.reference import adamw, configured, random_batches


def test_spans_are_of_tasks_that_start_in_a_step_that_is_kept() -> None:
    trace = Trace(0, lambda rank: rank, steps=1)
    tasks = ("F0.0", "fetch0.1", "B0.7", "step0.1")
    with trace.step():
        trace.started(Task.parse(tasks[0]))  # warms up
    with trace.step():
        for task in tasks[1:]:
            trace.started(Task.parse(task))
        for second, task in enumerate(tasks):
            trace.finished(Task.parse(task), second + 0.25, second + 1.0)
    assert [str(span.task) for span in trace.spans] == [*tasks[1:]]
    assert [span.end - span.start for span in trace.spans] == pytest.approx([0.75] * 3, abs=1e-6)
    ago = time.time() - time.perf_counter()
    assert trace.spans[0].start == pytest.approx(1.25 + ago, abs=0.1)


@pytest.mark.parametrize("order", ["pipe", "data"])
def test_messages_have_both_ends_and_the_size_of_what_they_carry(order: str) -> None:
    """Two replicas of three stages; each row sends to the next one of its replica."""
    microbatches, steps, traced = 4, 4, 2
    batches = random_batches((6, 16), classes=5, microbatches=2 * microbatches)

    def rank_main(transport: Transport) -> Timeline | None:
        config = configured(
            microbatches,
            parallel={"pipe": 3, "data": 2, "rank_order": order},
            schedule={"policy": "1f1b"},
            run={"trace_steps": traced},
        )
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * microbatches, (engine.data_rank + 1) * microbatches)
            for step in range(steps):
                engine.train_batch(iter(batches(step)[mine]))
            return engine.timeline()

    line = LocalWorld(6, seed=1).run(rank_main)[0]
    assert line is not None
    again = Timeline.from_json(line.to_json())
    assert again.messages == line.messages
    number = Counter(one.meaning for one in line.messages)
    assert number["activation"] == number["gradient"] == 2 * 2 * microbatches * traced
    for one in line.messages:
        assert one.took >= 0
        if one.meaning in ("activation", "gradient"):
            assert one.num_bytes == 6 * 16 * 4
            assert one.to - one.source == (1 if one.meaning == "activation" else -1)
            assert one.to // 3 == one.source // 3
        if one.meaning in ("part", "sum"):
            assert one.to % 3 == one.source % 3
            assert one.num_bytes > 0


class Leaving(Observer):
    """What leaves, at the time at which the loop tells it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def sent(self, rank: int, message: News, payload: object) -> None:
        self.seen.append(("told", str(message)))


def test_a_message_is_stamped_before_the_call_that_sends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank of the same host may have it before that call has ended."""
    batches = random_batches((6, 16), classes=5, microbatches=2)

    def rank_main(transport: Transport) -> list[tuple[str, str]]:
        leaving, sends = Leaving(), transport.send

        def send(rank: int, parcel: Parcel, after: Moment = NOW) -> None:
            leaving.seen.append(("sent", str(parcel.message)))
            sends(rank, parcel, after)

        monkeypatch.setattr(transport, "send", send)
        of = configured(2)
        with axrt.initialize(
            perceptron(), adamw, config=of, transport=transport, observers=[leaving]
        ) as engine:
            engine.train_batch(iter(batches(0)))
        return leaving.seen

    for seen in LocalWorld(2, seed=1).run(rank_main):
        told, sent = seen[::2], seen[1::2]
        assert told == [("told", what) for _, what in sent]


def test_ranks_of_a_host_have_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lost its core for 7 ms between its two readings had all its times 7 ms off."""
    steady, late = [100.0], iter([0.007, 0.0, 0.007, 0.007])
    monkeypatch.setattr(time, "perf_counter", lambda: steady[0])

    def time_of_day() -> float:
        now = 5000.0 + steady[0]
        steady[0] += next(late, 0.007)
        return now

    monkeypatch.setattr(time, "time", time_of_day)
    now = Trace(0, lambda rank: rank, steps=1)._now
    assert now() == pytest.approx(5000.0 + steady[0], abs=1e-6)
