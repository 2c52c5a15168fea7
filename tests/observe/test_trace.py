"""The spans of a traced rank, by a clock of the test's own."""

import pytest

from axrt.observe.trace import Trace
from axrt.scheduler.task import Task


def test_what_starts_behind_a_task_of_its_queue_takes_time_from_the_end_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies of a direction are made one after the other, beside tasks and other copies."""
    trace, clock = Trace(0, steps=1), [0.0]
    monkeypatch.setattr(trace, "_now", lambda: clock[0])
    with trace.step():
        pass  # warms up
    with trace.step():
        for task in ("fetch0.1", "fetch0.1/1", "B0.7", "step0.1"):
            trace.started(Task.parse(task))
        for task in ("B0.7", "fetch0.1", "step0.1", "fetch0.1/1"):
            clock[0] += 1.0
            trace.finished(Task.parse(task))
    assert [(str(span.task), span.start, span.end) for span in trace.spans] == [
        ("B0.7", 0.0, 1.0),
        ("fetch0.1", 0.0, 2.0),
        ("step0.1", 1.0, 3.0),
        ("fetch0.1/1", 2.0, 4.0),
    ]
