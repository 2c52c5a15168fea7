"""Stages that a team holds: pieces of tasks, the slices between them, and what a rank does while it
waits at a joint."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.counters import Counters
from axrt.scheduler.follows import Follows
from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.placement import Linear
from axrt.scheduler.planning.shards import with_shards
from axrt.scheduler.policies import NAMES, Nested, placement_for, policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.refusals import IllegalMove
from axrt.scheduler.simulation.costs import Costs, Work
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.scheduler.simulation.simulator import order_of, simulate
from axrt.scheduler.task import Kind, Task

from ..sweeps import examples, first
from .pipelines import Pipeline, run_in_random_order
from .test_policies import everything_once, fitting

SEVEN = StageJoints(7, 7)


def first_of_three() -> RankState:
    """The first member of a team on one stage, whose forwards have two joints."""
    job = Job(Linear(1), policy_by_name("1f1b"), 4, team=3, joints={0: StageJoints(2, 1)})
    state = RankState(job, 0)
    state.ask_step()
    for number in range(2):
        state.deliver(Message(Meaning.ACTIVATION, 0, number))
        state.deliver(Message(Meaning.TARGET, 0, number))
    return state


def run(state: RankState, text: str) -> list[Message]:
    task = Task.parse(text)
    assert state.pick() == task
    state.start(task)
    return state.finish(task)


# What a piece needs, and what follows from it.


def test_a_piece_but_the_last_sends_each_other_member_its_slices() -> None:
    state = first_of_three()
    first = run(state, "F0.0")
    assert first == [Message(Meaning.SLICE, 0, 0, 1), Message(Meaning.SLICE, 0, 0, 2)]
    assert state.pick() is None
    for sender in range(2):
        state.deliver(Message(Meaning.SLICE, 0, sender))
    second = run(state, "F0.0/1")
    assert second == [Message(Meaning.SLICE, 0, 2, 1), Message(Meaning.SLICE, 0, 2, 2)]
    for sender in range(2):
        state.deliver(Message(Meaning.SLICE, 0, 2 + sender))
    assert run(state, "F0.0/2") == []
    assert (state.in_flight, state.held) == (1, 1)


def test_a_piece_lacks_the_slices_of_each_member_that_has_sent_none() -> None:
    state = first_of_three()
    run(state, "F0.0")
    assert str(state.waiting_for()[0]) == "F0.0/1 lacks a slice from rank 1"
    state.deliver(Message(Meaning.SLICE, 0, 0))
    assert str(state.waiting_for()[0]) == "F0.0/1 lacks a slice from rank 2"
    with pytest.raises(IllegalMove, match=r"F0\.0/1 cannot start"):
        state.start(Task.parse("F0.0/1"))


def test_the_rank_that_owes_a_slice_is_that_of_the_job() -> None:
    """On the third rank of a pipeline of teams of two, its first member waits for the second."""
    job = Job(Linear(3), policy_by_name("1f1b"), 4, team=2, joints={2: StageJoints(3, 3)})
    state = RankState(job, 2)
    state.ask_step()
    state.deliver(Message(Meaning.ACTIVATION, 2, 0))
    state.deliver(Message(Meaning.TARGET, 2, 0))
    run(state, "F2.0")
    assert str(state.waiting_for()[0]) == "F2.0/1 lacks a slice from rank 5"


def test_slices_that_come_early_or_twice() -> None:
    """Another member may be a joint ahead; what is nobody's next slice is refused."""
    state = first_of_three()
    state.deliver(Message(Meaning.SLICE, 0, 1))  # before the piece has begun here
    run(state, "F0.0")
    with pytest.raises(IllegalMove, match="has come before"):
        state.deliver(Message(Meaning.SLICE, 0, 1))
    with pytest.raises(IllegalMove, match="neither this one nor the next"):
        state.deliver(Message(Meaning.SLICE, 0, 2 * 2 * 4 * 2))
    state.deliver(Message(Meaning.SLICE, 0, 0))
    assert state.pick() == Task.parse("F0.0/1")


def test_a_team_reads_once_and_each_member_of_the_next_stage_gets_its_own() -> None:
    job = Job(Linear(2), policy_by_name("1f1b"), 4, team=2, joints={0: StageJoints(1, 1)})
    states = [RankState(job, 0, member=member) for member in range(2)]
    for state in states:
        state.ask_step()
    assert [state.microbatch_to_read() for state in states] == [0, None]
    for pipe, state in enumerate(states):
        state.deliver(Message(Meaning.ACTIVATION, 0, 0, pipe))
        run(state, "F0.0")
        state.deliver(Message(Meaning.SLICE, 0, 0, pipe))
        assert run(state, "F0.0/1") == [Message(Meaning.ACTIVATION, 1, 0, pipe)]
        assert state.place_of(Message(Meaning.ACTIVATION, 1, 0, pipe)) == (0, 2 + pipe)


def test_joints_without_a_team_are_refused() -> None:
    with pytest.raises(ValueError, match="a team of 1 with joints of 1 stage; expected"):
        Job(Linear(1), policy_by_name("1f1b"), 4, joints={0: StageJoints(1, 1)})


# Any order.


@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.integers(),
)
@examples(150, quick=25)
def test_no_order_of_events_stops_a_team_under_any_policy(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    team: int,
    joints: tuple[int, int],
    fills: bool,
    whole: bool,
    clips: bool,
    replicas: int,
    seed: int,
) -> None:
    policy = policy_by_name(name, 2 * ranks if name in ("adaptive", "dualpipe-v") else 0)
    placement, microbatches = fitting(policy, ranks, microbatches, chunks)
    pipeline = Pipeline(
        policy,
        placement.ranks,
        microbatches,
        steps=2,
        replicas=replicas,
        placement=placement,
        clips=clips,
        recomputes=range(0, placement.stages, 2) if seed % 3 == 0 else (),
        slots=seed % 2,
        shards=seed % 5 == 0 and replicas > 1,
        spare=seed % 4 if seed % 2 else None,
        team=team,
        joints=StageJoints(*joints),
        fills=fills,
        whole=whole and seed % 5 != 0,
    )
    run_in_random_order(pipeline, seed)
    assert pipeline.finished, [
        str(lack) for state in pipeline.states for lack in state.waiting_for()
    ]
    computed = [[task for task in ran if not task.kind.beside] for ran in pipeline.ran]
    expected = [
        {task for task in tasks if not task.kind.beside} for tasks in everything_once(pipeline, 2)
    ]
    assert [set(ran) for ran in computed] == expected
    assert [len(ran) for ran in computed] == [len(tasks) for tasks in expected]
    for state, stash in zip(pipeline.states, pipeline.stash, strict=True):
        bounds = policy.bounds(placement, state.rank, microbatches)
        all_there_are = microbatches * placement.chunks // placement.pipes
        assert stash.in_flight <= min(bounds.in_flight, all_there_are)
        assert stash.held <= min(bounds.held, all_there_are)


@given(
    st.sampled_from(NAMES),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(2, 4),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.integers(),
)
@examples(100, quick=20)
def test_weights_that_come_and_go_are_there_for_every_piece(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    team: int,
    joints: tuple[int, int],
    brings: bool,
    clips: bool,
    room: int,
    seed: int,
) -> None:
    """Shards that are gathered for a residency, or weights that come from scratch."""
    policy = policy_by_name(name, 2 * ranks if name in ("adaptive", "dualpipe-v") else 0)
    placement, microbatches = fitting(policy, ranks, microbatches, chunks)
    pipeline = Pipeline(
        policy,
        placement.ranks,
        microbatches,
        steps=2,
        replicas=1 if brings and seed % 2 else 2,
        placement=placement,
        clips=clips,
        recomputes=range(0, placement.stages, 2) if seed % 3 == 0 else (),
        slots=2 if brings else 0,
        shards=not (brings and seed % 2),
        room=room,
        brings=brings,
        team=team,
        joints=StageJoints(*joints),
    )
    assert pipeline.job.residencies is not None
    run_in_random_order(pipeline, seed)
    assert pipeline.finished, [
        str(lack) for state in pipeline.states for lack in state.waiting_for()
    ]


@given(st.sampled_from(NAMES), st.integers(2, 4), st.integers(0, 9), st.booleans(), st.integers())
@examples(60, quick=12)
def test_data_that_end_within_a_step_stop_every_member(
    name: str, team: int, end: int, fills: bool, seed: int
) -> None:
    policy = policy_by_name(name)
    placement, microbatches = fitting(policy, 3, 4, 2)
    pipeline = Pipeline(
        policy,
        placement.ranks,
        microbatches,
        steps=3,
        end=end,
        placement=placement,
        team=team,
        joints=StageJoints(2, 2),
        fills=fills,
    )
    run_in_random_order(pipeline, seed)
    done = end // microbatches
    for state in pipeline.states:
        assert state.cut_short == (done < 3)
        assert state._steps_done == min(done, 3)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.booleans(), st.integers())
@examples(40, quick=8)
def test_an_evaluation_of_a_team_ends(
    team: int, ranks: int, length: int, fills: bool, seed: int
) -> None:
    pipeline = Pipeline(
        Nested(), ranks, 4, evaluate=length, team=team, joints=StageJoints(2, 2), fills=fills
    )
    run_in_random_order(pipeline, seed)
    assert pipeline.finished
    assert {len(ran) for ran in pipeline.ran} == {length * ((3 if team > 1 else 1) + 1)}


# Planted faults, and what tells.


def check_a_world(seed: int) -> None:
    test_no_order_of_events_stops_a_team_under_any_policy.hypothesis.inner_test(  # type: ignore[attr-defined]
        "1f1b", 3, 4, 1, 3, (2, 2), True, False, False, 1, seed
    )


def sent_when_the_piece_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice leaves before its piece has run."""
    monkeypatch.setattr(Follows, "holds_at_once", lambda self, message, row: True)


def misses_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joint is passed without the slices of the last member."""

    def is_joined(self: Counters, kind: Any) -> bool:
        meaning, number, members = self.joints[kind]
        passed = self.count[kind] // self._pipes * number + self.part[kind]
        return self.count[meaning] >= passed * len(members) - 1

    monkeypatch.setattr(Counters, "is_joined", is_joined)


def counts_at_the_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held counts when a forward ends."""
    count = RankState._count

    def counted(self: RankState, task: Task, entry: Any, more: bool, completes: Any) -> Any:
        held, in_flight = self.held, self.in_flight
        found = count(self, task, entry, more, completes)
        if entry.row.joints is not None and task.kind is Kind.FORWARD:
            last = task.part == entry.row.joints.number
            self.held, self.in_flight = held + last, in_flight + last
        return found

    monkeypatch.setattr(RankState, "_count", counted)


@pytest.mark.parametrize(
    "fault", [sent_when_the_piece_starts, misses_a_member, counts_at_the_last_piece]
)
def test_a_planted_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4):
        check_a_world(seed)
    fault(monkeypatch)
    found = 0
    for seed in range(12):
        try:
            check_a_world(seed)
        except AssertionError:
            found += 1
    assert found > 3


# Time.


@pytest.mark.parametrize(
    ("ranks", "microbatches", "exchange", "policy", "waiting", "filled"),
    first(
        [
            (1, 8, 0.5, "1f1b", 248, 199),
            (1, 8, 0.5, "eager-1f1b", 248, 199),
            (1, 8, 0.5, "zb-h2", 248, 195.5),
            (4, 16, 0.1, "1f1b", 482.6, 629.9),
            (4, 16, 0.1, "eager-1f1b", 482.6, 461.6),
            (4, 16, 0.5, "zb-h2", 530.5, 429.5),
            (4, 16, 0.1, "zb-h2", 432.5, 415.5),
            (4, 16, 0.5, "eager-1f1b", 589, 484),
            (8, 16, 0.5, "eager-1f1b", 713, 608),
            (8, 16, 0.5, "zb-h2", 576.5, 468),
        ],
        quick=6,
    ),
)
def test_a_step_takes_as_long_as_reckoned(
    ranks: int, microbatches: int, exchange: float, policy: str, waiting: float, filled: float
) -> None:
    """Eight pieces of F, I and W each take 1, and slices `exchange`."""
    costs = Costs(Work(8.0, 8.0, 8.0), exchange=exchange, pieces=8)
    for fills, expected in ((False, waiting), (True, filled)):
        joints = dict.fromkeys(range(ranks), SEVEN)
        job = Job(
            Linear(ranks), policy_by_name(policy), microbatches, team=2, joints=joints, fills=fills
        )
        assert simulate(job, costs).makespan == pytest.approx(expected)


def test_where_slices_take_no_time_a_team_is_as_fast_as_a_rank() -> None:
    for policy in ("1f1b", "zb-h1", "adaptive"):
        placement = placement_for(policy_by_name(policy), 4, 8)
        alone = Job(placement, policy_by_name(policy), 8)
        joints = dict.fromkeys(range(placement.stages), StageJoints(3, 3))
        together = Job(placement, policy_by_name(policy), 8, team=2, joints=joints, fills=False)
        assert simulate(together, Costs()).makespan == pytest.approx(
            simulate(alone, Costs()).makespan
        )


def test_groups_are_whole_replicas_and_orders_those_of_one_member() -> None:
    """Sixteen replicas add up in groups of eight, each of two members."""
    job = replace(build_schedule("1f1b", 2, 4), replicas=16, team=2)
    joints = {stage: StageJoints(3, 3) for stage in range(2)}
    assert with_shards(replace(job, joints=joints), 0, group=8).group == 16
    with pytest.raises(ValueError, match="groups of 9 pipes, of 18 in all"):
        replace(job, replicas=9, group=9)
    alone = replace(job, replicas=1)
    assert order_of(replace(alone, joints=joints)) == order_of(replace(alone, team=1))
    assert with_shards(replace(job, joints=joints), 2).shards
    assert not with_shards(replace(job, replicas=1, joints=joints), 1).shards  # of cut weights one
