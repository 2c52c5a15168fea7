"""The queues of the host keep the contract, alone and in pairs; the device's is tried in
device/cases.py."""

import threading
from collections.abc import Callable

import pytest
import torch

from axrt.device.device import CPU
from axrt.device.queues import Inline
from axrt.device.thread_queue import ThreadQueue

from .queue_contract import CHECKS, Keeper

KEEPERS = {
    "inline": Keeper(Inline, CPU),
    "thread": Keeper(lambda: ThreadQueue("of a test"), CPU),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("other", KEEPERS)
@pytest.mark.parametrize("keeper", KEEPERS)
def test_the_contract_holds(keeper: str, other: str, check: Callable[..., None]) -> None:
    check(KEEPERS[keeper], KEEPERS[other])


def test_a_thread_does_not_run_what_is_put_in_the_callers_time() -> None:
    queue, may_go_on = ThreadQueue("of a test"), threading.Event()
    moment = queue.put(may_go_on.wait)
    behind = queue.put(lambda: None)
    assert not moment.passed()
    assert not behind.passed()
    may_go_on.set()
    queue.drain()
    assert moment.passed()
    assert behind.passed()


def test_a_thread_runs_in_the_grad_mode_of_the_caller() -> None:
    queue, value = ThreadQueue("of a test"), torch.ones(1, requires_grad=True)
    made: list[torch.Tensor] = []
    with torch.no_grad():
        queue.put(lambda: made.append(value * 2))
    queue.put(lambda: made.append(value * 2))
    queue.drain()
    assert [one.requires_grad for one in made] == [False, True]


def test_a_thread_runs_under_the_autocast_of_the_caller() -> None:
    queue, layer = ThreadQueue("of a test"), torch.nn.Linear(2, 2)
    made: list[torch.Tensor] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        queue.put(lambda: made.append(layer(torch.ones(1, 2))))
    queue.put(lambda: made.append(layer(torch.ones(1, 2))))
    queue.drain()
    assert [one.dtype for one in made] == [torch.bfloat16, torch.float32]


def test_a_thread_ends_with_its_queue() -> None:
    queue = ThreadQueue("that ends")
    queue.put(lambda: None)
    queue.drain()
    (thread,) = [one for one in threading.enumerate() if one.name == "that ends"]
    del queue
    thread.join(10)
    assert not thread.is_alive()
