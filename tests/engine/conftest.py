"""The engine's tests with brains that check every move, and on another queue, where the environment
says so: AXRT_TEST_QUEUE=thread-2 runs tasks on a thread, two of them under way.
`scripts/test_queues` does."""

import os
from typing import Any

import pytest
from torch import Tensor

from axrt.runtime import trainer
from axrt.scheduler.rank_state import RankState
from axrt.transport import envelope
from axrt.transport.landing import fits
from axrt.transport.wire import Layout

from .on_a_thread import run_tasks_on_a_thread

QUEUE = "AXRT_TEST_QUEUE"


@pytest.fixture(autouse=True)
def other_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, depth = os.environ.get(QUEUE, "").partition("-")
    if name == "thread":
        run_tasks_on_a_thread(monkeypatch, int(depth))


@pytest.fixture(autouse=True)
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The brains of runs do without some checks, which show here what the loop does wrong."""
    if request.path.name != "test_calls.py":

        def checking(*arguments: Any, **named: Any) -> RankState:
            return RankState(*arguments, **{**named, "checks": True})

        monkeypatch.setattr(trainer, "RankState", checking)


@pytest.fixture
def landed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of large tensors that came to lie where they were expected, in bytes."""
    found: list[int] = []

    def noted(room: Tensor, layout: Layout) -> bool:
        if lands := fits(room, layout):
            found.append(room.nbytes)
        return lands

    monkeypatch.setattr(envelope, "fits", noted)
    return found
