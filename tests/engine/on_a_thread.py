"""Tasks on a thread of their own, for ranks of one process."""

import random
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch

import axrt.runtime.rank as rank_module
from axrt.device.queues import Moment
from axrt.device.thread_queue import ThreadQueue
from axrt.model import layers
from axrt.model.seeds import BorrowedGenerator
from axrt.runtime.compute import Compute

# Ranks of one process share torch's generator, and take turns with it as their loops do.
_GENERATOR = threading.RLock()


class Late(ThreadQueue):
    """Begins what was put when it likes."""

    def put(self, run: Callable[[], object]) -> Moment:
        return super().put(lambda: self._late(run))

    def _late(self, run: Callable[[], object]) -> None:
        time.sleep(random.choice((0.0, 0.0, 1e-4, 5e-4)))
        with _GENERATOR:
            run()


def in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def alone(*arguments: Any) -> Any:
        with _GENERATOR:
            return method(*arguments)

    return alone


def run_tasks_on_a_thread(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Let ranks run tasks so, with that many under way."""

    def compute_on(device: torch.device) -> Compute:
        return Compute(Late("tasks"), depth)

    monkeypatch.setattr(rank_module, "compute_on", compute_on)
    monkeypatch.setattr(layers, "_built", in_turn(layers._built))
    for method in ("lent_back", "go_on_from", "states"):
        monkeypatch.setattr(BorrowedGenerator, method, in_turn(getattr(BorrowedGenerator, method)))
