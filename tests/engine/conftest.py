"""The engine's tests on another queue, where the environment says so: AXRT_TEST_QUEUE=thread-2 runs
tasks on a thread, two of them under way. `scripts/test_queues` does."""

import os

import pytest
from torch import Tensor

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
