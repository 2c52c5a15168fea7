"""The engine's tests on another queue, where the environment says so: AXRT_TEST_QUEUE=thread-2 runs
tasks on a thread, two of them under way. `scripts/test_queues` does."""

import os

import pytest

from .on_a_thread import run_tasks_on_a_thread

QUEUE = "AXRT_TEST_QUEUE"


@pytest.fixture(autouse=True)
def other_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, depth = os.environ.get(QUEUE, "").partition("-")
    if name == "thread":
        run_tasks_on_a_thread(monkeypatch, int(depth))
