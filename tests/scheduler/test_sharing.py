"""Replicas share the microbatches of a step: each is taken once, and a slow replica takes fewer."""

from collections import Counter
from dataclasses import replace
from random import Random
from statistics import median

import pytest

from axrt.scheduler.job import Job
from axrt.scheduler.sharing import Choice, Hand, microbatch_for_slot, with_sharing
from axrt.scheduler.simulation.costs import Costs, Work
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.simulation.timeline import Timeline
from axrt.scheduler.task import Kind


def job_of(policy: str, ranks: int, microbatches: int, replicas: int, chunks: int = 0) -> Job:
    return replace(build_schedule(policy, ranks, microbatches, chunks=chunks), replicas=replicas)


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_each_microbatch_is_taken_once_whoever_asks_when(replicas: int) -> None:
    """Answers come late, and others take from the one that was asked meanwhile."""
    job = with_sharing(job_of("1f1b", 2, 6, replicas))
    for seed in range(50):
        random = Random(seed)
        hands = [Hand.of(job, replica) for replica in range(replicas)]
        asked: list[int] = []  # replicas that wait for an answer
        taken, done = Counter[int](), set[int]()
        while len(done) < replicas:
            if asked and random.random() < 0.5:
                hand = hands[asked.pop(random.randrange(len(asked)))]
                assert hand.asked is not None
                other = hands[hand.asked]
                index = other.draw() if other.spare else None
                hand.answered(index, other.spare)
                continue
            hand = random.choice(hands)
            choice = hand.choice()
            if choice is Choice.ASK:
                assert hand.ask() != hand.replica
                asked.append(hand.replica)
            elif choice is Choice.LEAVE_EMPTY:
                done.add(hand.replica)
            elif choice is not Choice.WAIT:
                taken[hand.draw() if choice is Choice.DRAW else hand.take()] += 1
        assert taken == Counter(range(6 * replicas))


def test_one_that_never_has_room_gives_all_but_the_last_away() -> None:
    job = with_sharing(job_of("1f1b", 1, 4, 2))
    hands = [Hand.of(job, replica) for replica in range(2)]
    given = [microbatch_for_slot(hands, 1, is_last=False) for _ in range(8)]
    assert given == [4, 5, 6, 7, 0, 1, 2, None]
    assert [microbatch_for_slot(hands, 0, is_last=False) for _ in range(2)] == [3, None]


def slots(line: Timeline, rank: int) -> int:
    """Forwards of stage 0 on a rank that took time."""
    return sum(
        span.rank == rank and span.task.kind is Kind.FORWARD and span.end > span.start
        for span in line.spans
    )


def test_one_slow_rank_of_four_replicas_costs_the_others_little() -> None:
    """1.3 where microbatches are dealt out; what the ranks can do at most is 1.061."""
    for microbatches in (16, 32):
        alone = job_of("1f1b", 2, microbatches, 4)
        slow = Costs(work=Work(1, 1, 1), stragglers={0: 1.3})
        usual = simulate(alone, Costs(work=Work(1, 1, 1)), steps=4, barrier=True).makespan
        assert simulate(alone, slow, steps=4, barrier=True).makespan > 1.25 * usual
        line = simulate(with_sharing(alone), slow, steps=4, barrier=True)
        assert line.makespan < 1.07 * usual
        computed = [slots(line, 2 * replica) for replica in range(4)]
        assert computed[0] < min(computed[1:])
        assert sum(computed) == 4 * 4 * microbatches


@pytest.mark.parametrize("factor", [3, 10, 30])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 8), (1, 16), (2, 16), (2, 9)])
def test_nothing_is_lost_however_slow_a_rank_is(
    factor: float, ranks: int, microbatches: int
) -> None:
    shared = with_sharing(job_of("1f1b", ranks, microbatches, 2))
    line = simulate(shared, Costs(work=Work(1, 1, 1), stragglers={0: factor}), steps=2)
    computed = [slots(line, ranks * replica) for replica in range(2)]
    assert sum(computed) == 2 * 2 * microbatches
    assert computed[0] < computed[1]


def test_sequences_of_different_lengths_are_faster_shared_than_dealt_out() -> None:
    alone = job_of("1f1b", 2, 16, 8)
    gains = []
    for seed in range(5):
        costs = Costs(work=Work(1, 1, 1), lengths=0.5, seed=seed)
        took = [simulate(of, costs, steps=4).makespan for of in (alone, with_sharing(alone))]
        gains.append(took[0] / took[1])
    assert median(gains) > 1.1


@pytest.mark.parametrize(
    "policy", ["1f1b", "eager-1f1b", "axonn", "interleaved-1f1b", "zb-h1", "zb-v", "v-half"]
)
def test_where_nothing_is_slow_little_is_lost(policy: str) -> None:
    for ranks, replicas in ((2, 3), (4, 2)):
        alone = job_of(policy, ranks, 4 * ranks, replicas)
        found, usual = (
            simulate(of, Costs(work=Work(1, 1, 1)), steps=3) for of in (with_sharing(alone), alone)
        )
        assert found.makespan == pytest.approx(usual.makespan, rel=0.06), "plans of more slots"


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (job_of("1f1b", 2, 8, 1), "there is one replica"),
        (
            job_of("gpipe", 2, 8, 2),
            "may take all that it can get.*policy whose bound does not grow",
        ),
        (job_of("breadth-first", 2, 8, 2, chunks=2), "may take all that it can get"),
        (job_of("chimera", 2, 8, 2), "two pipes"),
        (
            job_of("1f1b", 8, 8, 2),
            "8 in flight with schedule.microbatches = 8; expected at least 10",
        ),
        (
            replace(build_schedule("fixed", 2, 8, order="1f1b"), replicas=2),
            "an order of tasks is fixed beforehand",
        ),
    ],
)
def test_what_cannot_be_shared_says_why(job: Job, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        with_sharing(job)
