"""Who is alive, by the signs that ranks pass on: simulated, a second a tick."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import axrt
from axrt.engine import start
from axrt.transport import Transport
from axrt.transport.local import LocalWorld
from axrt.world.heartbeat import Silence
from axrt.world.liveness import Liveness, Sign
from axrt.world.world import World

from .engine.reference import configured, random_batches

PATIENCE_S = 10.0


class Job:
    """Ranks that live a second at a time.

    Args:
        waits: whom each rank waits for; none where it runs.
        works: whether a rank that runs does something.
        answers: whether it answers.
    """

    def __init__(
        self,
        waits: dict[int, set[int]],
        works: Callable[[int], bool] = lambda rank: True,
        answers: Callable[[int], bool] = lambda rank: True,
    ) -> None:
        self.waits, self.works, self.answers = waits, works, answers
        self.ranks = {rank: Liveness(rank, PATIENCE_S) for rank in waits}

    def live(self, seconds: int) -> "dict[int, Sign]":
        """Who has given up for lost whom after so many seconds."""
        for _ in range(seconds):
            for rank, liveness in self.ranks.items():
                if self.answers(rank):
                    liveness.pass_time(
                        1.0, self.waits[rank], not self.waits[rank] and self.works(rank)
                    )
            for rank, liveness in self.ranks.items():
                for other in self.waits[rank]:
                    if self.answers(rank) and self.answers(other):
                        sign = self.ranks[other].sign()
                        liveness.heard(other, sign.silent_s, sign.about)
        return {
            rank: lost
            for rank, liveness in self.ranks.items()
            if (lost := liveness.lost()) and self.answers(rank)
        }


CHAIN: dict[int, set[int]] = {0: set(), 1: {0}, 2: {1}, 3: {2}}


def test_who_computes_for_long_is_alive_and_so_is_who_waits_for_it() -> None:
    assert Job(CHAIN).live(1000) == {}


def test_who_does_not_answer_is_lost_and_everyone_says_so_of_it() -> None:
    job = Job(CHAIN, answers=lambda rank: rank != 0)
    assert job.live(9) == {}
    assert {rank: sign.about for rank, sign in job.live(6).items()} == {1: 0, 2: 0, 3: 0}


def test_who_answers_and_does_nothing_is_lost() -> None:
    job = Job(CHAIN, works=lambda rank: rank != 0)
    assert job.live(9) == {}
    assert {(rank, sign.about, sign.answered) for rank, sign in job.live(6).items()} == {
        (1, 0, True),
        (2, 0, True),
        (3, 0, True),
    }


def test_ranks_that_wait_for_each_other_in_a_circle_are_lost() -> None:
    job = Job({0: {2}, 1: {0}, 2: {1}})
    assert job.live(9) == {}
    assert job.live(6).keys() == {0, 1, 2}


def test_one_that_is_alive_makes_up_for_none_that_is_not() -> None:
    job = Job({0: set(), 1: set(), 2: {0, 1}}, answers=lambda rank: rank != 1)
    assert {rank: sign.about for rank, sign in job.live(12).items()} == {2: 1}


def test_a_rank_that_is_stopped_for_less_than_the_patience_is_forgiven() -> None:
    stopped: set[int] = {0}
    job = Job(CHAIN, answers=lambda rank: rank not in stopped)
    assert job.live(8) == {}
    stopped.clear()
    assert job.live(100) == {}


def test_what_was_known_of_a_rank_is_forgotten_when_nobody_waits_for_it_any_more() -> None:
    liveness = Liveness(0, PATIENCE_S)
    liveness.pass_time(9.0, {1}, False)
    liveness.pass_time(1.0, (), True)
    liveness.pass_time(9.0, {1}, False)
    assert liveness.lost() is None
    liveness.pass_time(9.0, {1}, False)
    assert liveness.lost() == Sign(18.0, 1)


class Watched(Silence):
    """Knows whether its rank says that it waits."""

    waiting = False

    def waits(self, owing: Callable[[], Iterable[int]]) -> None:
        self.waiting = True

    def moves(self) -> None:
        self.waiting = False


class WatchedWorld(World):
    def heartbeat(self, patience_s: float) -> Silence:
        mine = heartbeats.mine = Watched()
        return mine


heartbeats = threading.local()  # a rank is a thread here


class Looks(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        assert not heartbeats.mine.waiting
        return value


def test_a_rank_that_runs_a_task_or_reads_does_not_say_that_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have waited for its input until then; and a deadlock in the task would look like
    patience."""
    monkeypatch.setattr(start, "World", WatchedWorld)

    def batches() -> Iterator[Any]:
        for item in random_batches((4, 8), classes=3, microbatches=8)(0):
            assert not heartbeats.mine.waiting
            yield item

    def rank_main(transport: Transport) -> None:
        layers: list[Any] = [
            axrt.LayerSpec(torch.nn.Linear, 8, 8),
            Looks(),
            Looks(),
            axrt.LayerSpec(torch.nn.Linear, 8, 3),
        ]
        model = axrt.PipelineModule(layers, torch.nn.functional.cross_entropy)
        with axrt.initialize(
            model, config=configured(4, schedule={"policy": "1f1b"}), transport=transport
        ) as engine:
            mine = batches()
            for _ in range(2):
                engine.train_batch(mine)

    for seed in range(4):
        LocalWorld(4, seed).run(rank_main)
