"""What every queue owes, as checks of pairs of queues; tried on the host by test_queues.py, and on
the simulated accelerator by device/cases.py, whose checker also sees what only luck kept right."""

import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from axrt.device.device import CPU
from axrt.device.queues import Moment, Queue, wait_for

SIZE = 1000


class Keeper(NamedTuple):
    """A keeper of the contract.

    Args:
        new: function that makes a queue.
        device: device on which what is put works.
    """

    new: Callable[[], Queue]
    device: torch.device

    def numbers(self, value: float = 0.0) -> Tensor:
        return torch.full((SIZE,), value, device=self.device)


def doubled(value: Tensor) -> None:
    """Work that is not done at once."""
    time.sleep(2e-4)
    value.mul_(2).add_(1)


def what_is_put_runs_in_order(one: Keeper, other: Keeper) -> None:
    queue, value = one.new(), one.numbers()
    with queue.current():
        moments = [queue.put(lambda: doubled(value)) for _ in range(10)]
        for moment in moments:
            wait_for(moment)
            assert all(earlier.passed() for earlier in moments[: moments.index(moment)])
    assert value.tolist() == [2.0**10 - 1] * SIZE


def the_moment_of_a_queue_is_the_end_of_all_that_was_put(one: Keeper, other: Keeper) -> None:
    queue, value = one.new(), one.numbers()
    wait_for(queue.moment())  # of nothing
    with queue.current():
        for _ in range(5):
            queue.put(lambda: doubled(value))
        wait_for(queue.moment())
        assert value.cpu()[0] == 31


def a_queue_goes_on_after_a_moment_of_another(one: Keeper, other: Keeper) -> None:
    first, second = one.new(), other.new()
    value, on_host = one.numbers(), torch.zeros(SIZE)
    on_host = on_host if one.device == other.device == CPU else on_host.pin_memory()
    copies = [other.numbers() for _ in range(5)]

    def next_value() -> None:
        doubled(value)
        on_host.copy_(value, non_blocking=True)

    with first.current(), second.current():
        for copy in copies:
            second.after(first.put(next_value))
            first.after(second.put(partial(copy.copy_, on_host, non_blocking=True)))
        wait_for(second.moment())
        wait_for(first.moment())
    assert [copy[0].item() for copy in copies] == [1, 3, 7, 15, 31]


def memory_that_is_dropped_lives_until_it_was_used(one: Keeper, other: Keeper) -> None:
    queue, total = one.new(), one.numbers()
    with queue.current():
        for number in range(10):
            queue.put(partial(_added_late, total, one.numbers(number)))
            gc.collect()
        queue.drain()
    assert total[0] == 45


def _added_late(total: Tensor, value: Tensor) -> None:
    time.sleep(1e-4)
    total.add_(value)


def what_is_around_the_context_is_in_order_with_the_queue(one: Keeper, other: Keeper) -> None:
    queue, value = one.new(), one.numbers()
    for _ in range(3):
        value.add_(1)
        with queue.current():
            queue.put(lambda: doubled(value))
    assert value[0].item() == 21


def what_fails_is_raised_and_nothing_behind_it_runs(one: Keeper, other: Keeper) -> None:
    queue, ran = one.new(), threading.Event()

    def fails() -> None:
        raise LookupError("in the queue")

    def all_of_it() -> None:
        failed.append(queue.put(fails))
        wait_for(queue.put(ran.set))

    failed: list[Moment] = []
    with pytest.raises(LookupError, match="in the queue"):
        all_of_it()
    if queue.apart:
        waits = other.new()
        with pytest.raises(LookupError):  # at once, where the caller waits
            _behind(failed[0], waits, ran.set)
    assert not ran.is_set()
    queue.drain()
    wait_for(queue.moment())
    wait_for(queue.put(ran.set))
    assert ran.is_set()


def _behind(moment: Moment, queue: Queue, run: Callable[[], None]) -> None:
    queue.after(moment)
    wait_for(queue.put(run))


CHECKS = (
    what_is_put_runs_in_order,
    the_moment_of_a_queue_is_the_end_of_all_that_was_put,
    a_queue_goes_on_after_a_moment_of_another,
    memory_that_is_dropped_lives_until_it_was_used,
    what_is_around_the_context_is_in_order_with_the_queue,
    what_fails_is_raised_and_nothing_behind_it_runs,
)
