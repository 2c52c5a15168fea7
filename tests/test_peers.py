"""Nobody waits for a rank that has gone, and nobody gives one up too early."""

import pytest

from axrt import PeerLeftError
from axrt.heartbeat import Silence
from axrt.peers import Peers
from axrt.scheduler.state import Coordinates, Lack
from axrt.scheduler.task import Task

OWED = [
    Lack(Task.parse("B1.3"), "gradient", Coordinates(0, 2)),
    Lack(Task.parse("F1.4"), "room", None),
]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_a_rank_owes_that_has_gone_is_missed_after_a_grace() -> None:
    clock = Clock()
    peers = Peers(lambda place: place.rank + 10, Silence(), clock)
    peers.check(lambda: OWED)
    peers.is_elsewhere(12)
    peers.check(lambda: OWED)
    clock.now = 1.9
    peers.check(lambda: OWED)
    clock.now = 2.1
    with pytest.raises(
        PeerLeftError, match="B1.3 lacks gradient from rank 2, which has gone on to another call"
    ):
        peers.check(lambda: OWED)


def test_what_comes_after_all_was_not_missed() -> None:
    clock = Clock()
    peers = Peers(lambda place: place.rank, Silence(), clock)
    peers.has_left(2)
    peers.check(lambda: OWED)
    clock.now = 1.9
    peers.check(list)
    clock.now = 3.0
    peers.check(lambda: OWED)
    clock.now = 5.1
    with pytest.raises(PeerLeftError, match="rank 2, which has closed its engine"):
        peers.check(lambda: OWED)


def test_in_the_next_call_everyone_is_there_who_has_not_left() -> None:
    clock = Clock()
    peers = Peers(lambda place: place.rank, Silence(), clock)
    peers.is_elsewhere(2)
    peers.begin_call()
    for clock.now in (0.0, 10.0):
        peers.check(lambda: OWED)
    peers.has_left(1)
    assert not peers.still_there([1])
    assert peers.still_there([1, 2])
