"""What an optimizer step takes on a rank."""

import time

import pytest

from axrt.observe.step_time import StepTime
from axrt.scheduler.task import Task


def test_a_step_takes_until_the_last_end_whatever_end_is_told_last() -> None:
    """The loop asks one queue after the other."""
    times, now_s = StepTime(), time.perf_counter()
    for step in range(3):
        times.started(Task.parse(f"step0.{step}"))
        times.finished(Task.parse(f"step0.{step}"), now_s, now_s + 900)
        times.finished(Task.parse(f"store0.{step}"), now_s, now_s + 500)
    assert times.seconds == pytest.approx([900, 900], abs=200)
