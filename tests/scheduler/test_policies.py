"""What each policy does, drawn; and what it promises, under any order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axrt.scheduler.policies import NAMES, named
from axrt.scheduler.task import Kind, Task

from .pipelines import Pipeline, drawn, run_in_random_order, timetable


def test_backwards_first_under_a_tapered_cap_is_one_forward_one_backward() -> None:
    assert timetable("1f1b", ranks=3, microbatches=4) == drawn("""
        F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
        .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..""")


def test_all_forwards_then_all_backwards_is_gpipe() -> None:
    assert timetable("gpipe", ranks=3, microbatches=4) == drawn("""
        F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
        .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
        .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..""")


def test_a_limit_at_the_entrance_alone_lets_the_middle_run_ahead() -> None:
    assert timetable("axonn", ranks=3, microbatches=4) == drawn("""
        F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        .. F0 F1 F2 .. B0 -- .. B1 -- F3 B2 -- .. B3 -- .. ..
        .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..""")


def test_room_for_what_is_on_the_wire_is_eager_one_forward_one_backward() -> None:
    assert timetable("eager-1f1b", ranks=3, microbatches=4) == drawn("""
        F0 F1 F2 F3 .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
        .. F0 F1 F2 .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
        .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..""")


def test_steps_follow_each_other_without_a_barrier() -> None:
    assert timetable("1f1b", ranks=2, microbatches=2, steps=2) == drawn("""
        F0 F1 .. .. B0 -- .. B1 -- F0 F1 .. .. B0 -- .. B1 --
        .. F0 B0 -- F1 B1 -- .. .. .. F0 B0 -- F1 B1 -- .. ..""")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (4, 8), (5, 3)])
def test_with_equal_costs_every_policy_takes_the_published_time(name: str, ranks: int, microbatches: int) -> None:
    grid = timetable(name, ranks, microbatches)
    assert max(len(row.split()) for row in grid.splitlines()) == (microbatches + ranks - 1) * (1 + 2)


@pytest.mark.parametrize(
    ("name", "stash"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]), ("axonn", [4, 4, 4, 1]), ("eager-1f1b", [7, 5, 3, 1])]
)
def test_the_stash_is_the_published_one(name: str, stash: list[int]) -> None:
    assert [named(name).stash_bound(rank, 4, 8) for rank in range(4)] == stash


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "gpipe"])
def test_an_evaluation_keeps_the_pipeline_full(name: str) -> None:
    assert timetable(name, ranks=3, microbatches=5, evaluate=True) == drawn("""
        F0 F1 F2 F3 F4 .. ..
        .. F0 F1 F2 F3 F4 ..
        .. .. F0 F1 F2 F3 F4""")


def everything_once(pipeline: Pipeline, steps: int) -> list[set[Task]]:
    expected = []
    for state in pipeline.states:
        (stage,) = state.lanes
        of_batch = {Task(kind, stage, n) for kind in (Kind.FORWARD, Kind.BACKWARD) for n in range(steps * state.microbatches)}
        votes = state.clips and state.replica == 0
        of_step = {(Kind.NORM, 0)} if votes else set()
        of_step |= {(Kind.VOTE, 0)} if votes and stage == 0 else set()
        for bucket, holders in enumerate(state.holders[stage]):
            of_step |= {(Kind.STEP, bucket)} | ({(Kind.REDUCE, bucket)} if len(holders) > 1 else set())
        expected.append(of_batch | {Task(kind, stage, step, bucket) for kind, bucket in of_step for step in range(steps)})
    return expected


@given(
    st.sampled_from(NAMES),
    st.integers(1, 8),
    st.integers(1, 24),
    st.integers(1, 3),
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(),
)
@settings(max_examples=300, deadline=None)
def test_every_task_runs_once_in_any_order_of_events_and_within_the_bound(
    name: str, ranks: int, microbatches: int, steps: int, in_flight: int, replicas: int, buckets: int, tied: bool, clips: bool, seed: int
) -> None:
    policy = named(name, in_flight if name == "axonn" else 0)
    replicas = min(replicas, 9 // ranks + 1)
    pipeline = Pipeline(policy, ranks, microbatches, steps=steps, replicas=replicas, buckets=buckets, tied=tied, clips=clips)
    run_in_random_order(pipeline, seed)
    assert pipeline.finished, [str(lack) for state in pipeline.states for lack in state.waiting_for()]
    assert [set(ran) for ran in pipeline.ran] == (expected := everything_once(pipeline, steps))
    assert [len(ran) for ran in pipeline.ran] == [len(tasks) for tasks in expected]
    for state, stash in zip(pipeline.states, pipeline.stash, strict=True):
        assert stash <= min(microbatches, policy.stash_bound(state.rank, ranks, microbatches))


@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 6), st.integers(0, 24), st.integers())
@settings(max_examples=200, deadline=None)
def test_an_evaluation_of_any_length_ends_and_keeps_the_bound(name: str, ranks: int, microbatches: int, length: int, seed: int) -> None:
    pipeline = Pipeline(named(name), ranks, microbatches, evaluate=length)
    run_in_random_order(pipeline, seed)
    assert pipeline.finished
    assert [len(ran) for ran in pipeline.ran] == [2 * length] * ranks
    for rank, stash in enumerate(pipeline.stash):
        assert stash <= named(name).stash_bound(rank, ranks, microbatches)


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 4), st.integers(0, 11), st.integers(1, 3), st.booleans(), st.integers())
@settings(max_examples=200, deadline=None)
def test_a_reader_that_ends_cuts_one_step_short_and_all_before_it_are_whole(
    name: str, ranks: int, microbatches: int, end: int, replicas: int, clips: bool, seed: int
) -> None:
    steps = end // microbatches + 1
    pipeline = Pipeline(named(name), ranks, microbatches, steps=steps, end=end, replicas=replicas, clips=clips)
    run_in_random_order(pipeline, seed)
    assert all(state.cut_short and not state.finished for state in pipeline.states)
    for ran in pipeline.ran:
        assert [task.microbatch for task in ran if task.kind is Kind.STEP] == list(range(steps - 1))


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 8), st.integers())
@settings(max_examples=100, deadline=None)
def test_microbatches_run_in_order_within_a_kind(name: str, ranks: int, microbatches: int, seed: int) -> None:
    pipeline = Pipeline(named(name), ranks, microbatches, steps=2)
    run_in_random_order(pipeline, seed)
    for ran in pipeline.ran:
        for kind in Kind:
            numbers = [task.microbatch for task in ran if task.kind is kind]
            assert numbers == sorted(numbers)


def test_a_policy_is_found_by_name_and_a_wrong_one_is_refused_with_the_names() -> None:
    assert [named(name).name for name in NAMES] == list(NAMES)
    with pytest.raises(ValueError, match="no policy '1f2b'; expected one of 1f1b, axonn"):
        named("1f2b")
    with pytest.raises(ValueError, match="in_flight = 3 needs policy axonn"):
        named("gpipe", in_flight=3)
