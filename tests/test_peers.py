"""Nobody waits for a rank that has gone, and nobody gives one up too early."""

import pytest

from axrt import PeerLeftError
from axrt.runtime.peers import Peers, Place
from axrt.scheduler.lacks import Coordinates, Lack
from axrt.scheduler.task import Task
from axrt.world.heartbeat import Silence

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


def accused(mine: list[int], its: Place) -> bool:
    """What a rank that has entered these sessions thinks of one that waits for it, long before
    the last of them began."""
    clock = Clock()
    peers = Peers(lambda place: place.rank, Silence(), clock)
    for generation in mine[:-1]:
        peers.begin_session(generation)
    peers.waits_for_me(2, its)
    peers.begin_session(mine[-1])
    try:
        for clock.now in (0.0, 3.0):
            peers.check(lambda: OWED)
    except PeerLeftError as error:
        return "rank 2, which waits for this rank in another call" in str(error)
    return False


TRAINING, EVALUATION, NEXT_EVALUATION = 1, 2, 3


def test_a_rank_that_waits_in_another_session_is_missed_at_once_in_the_next() -> None:
    assert accused([TRAINING, TRAINING], Place(2, EVALUATION)), "of the same number, another one"
    assert accused([TRAINING, EVALUATION], Place(2, TRAINING))
    assert accused([TRAINING, TRAINING], Place(3, TRAINING)), "it is ahead"


def test_a_rank_that_waits_in_the_same_session_or_waited_in_one_before_is_no_stranger() -> None:
    assert not accused([TRAINING, EVALUATION], Place(2, EVALUATION)), "it was there first"
    assert not accused([TRAINING, EVALUATION, TRAINING], Place(3, TRAINING)), "entered anew"
    assert not accused([TRAINING, EVALUATION, TRAINING], Place(2, EVALUATION)), "it went on since"
    assert not accused([TRAINING, EVALUATION, NEXT_EVALUATION], Place(1, TRAINING))
