"""What each policy does, drawn; and what it promises, under any order of events."""

from collections import defaultdict
from collections.abc import Callable, Collection

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.placement import (
    Bidirectional,
    Linear,
    Looped,
    Placement,
    Vee,
    placement_by_name,
)
from axrt.scheduler.policies import NAMES, Nested, Policy, placement_for, policy_by_name
from axrt.scheduler.rules.collectives import by_library, leader, places
from axrt.scheduler.stash_places import least_places
from axrt.scheduler.task import Counts, Kind, Task

from ..sweeps import examples, some
from .pipelines import PIECES, Pipeline, drawn, run_in_random_order, timetable


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


def test_two_pipes_meet_in_the_middle() -> None:
    """Even microbatches go down, odd ones up."""
    assert timetable("chimera", ranks=4, microbatches=4) == drawn("""
        F0 F2 .. F1 B1 -- F3 B3 -- .. B0 -- .. .. B2 --
        .. F0 F1 F2 F3 .. B1 -- B0 -- B3 -- B2 -- .. ..
        .. F1 F0 F3 F2 .. B0 -- B1 -- B2 -- B3 -- .. ..
        F1 F3 .. F0 B0 -- F2 B2 -- .. B1 -- .. .. B3 --""")


def test_two_pipes_that_split_their_backwards_leave_nothing_idle_on_two_ranks() -> None:
    assert timetable("dualpipe", ranks=2, microbatches=4) == drawn("""
        F0 F1 I1 I0 W0 W0 W0 F2 F3 I3 I2 W1 W1 W1 W2 W2 W2 W3 W3 W3
        F1 F0 I0 I1 W0 W0 W0 F3 F2 I2 I3 W1 W1 W1 W2 W2 W2 W3 W3 W3""")


def test_a_recomputation_is_done_when_the_gradient_comes_and_backwards_come_first() -> None:
    assert timetable("merak", ranks=3, microbatches=4, recomputes=(0, 1)) == drawn("""
        F0 F1 F2 R0 R1 .. .. B0 -- F3 B1 -- R2 R3 B2 -- .. B3 --
        .. F0 F1 R0 R1 B0 -- F2 B1 -- F3 R2 B2 -- R3 B3 -- .. ..
        .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. .. ..""")


def test_where_the_gradient_is_late_the_next_forward_runs() -> None:
    assert timetable("varuna", ranks=3, microbatches=4) == drawn("""
        F0 F1 F2 F3 .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
        .. F0 F1 F2 F3 B0 -- .. B1 -- .. B2 -- .. B3 -- .. ..
        .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..""")


def test_chunks_that_split_their_backwards() -> None:
    """Two microbatches of two ranks: a chunk is as long as a rank's forward in these pictures."""
    assert timetable("dualpipe-v", ranks=2, microbatches=2) == drawn("""
        F0 F1 .. F0 I0 F1 I1 I0 W0 I1 W0 W0 W1 W1 W1 W0 W0 W0 W1 W1 W1
        .. F0 F0 F1 F1 I0 I0 I1 I1 W0 W0 W0 W1 W1 W1 W0 W0 W0 W1 W1 W1""")
    assert timetable("v-half", ranks=2, microbatches=2) == drawn("""
        F0 F1 .. F0 I0 F1 I1 I0 W0 I1 W0 W0 W0 W0 W0 W1 W1 W1 W1 W1 W1
        .. F0 F0 F1 F1 I0 I0 I1 I1 W0 W0 W0 W0 W0 W0 W1 W1 W1 W1 W1 W1""")
    assert timetable("v-min", ranks=2, microbatches=2) == drawn("""
        F0 .. .. F0 I0 W0 W0 W0 F1 I0 W0 W0 W0 .. .. F1 I1 W1 W1 I1 W1 W1 W1 W1 ..
        .. F0 F0 .. .. I0 I0 W0 W0 W0 F1 W0 W0 W0 F1 .. .. I1 I1 W1 W1 W1 W1 W1 W1""")
    assert timetable("interleaved-zb", ranks=2, microbatches=2) == drawn("""
        F0 F1 F0 F1 .. I0 W0 I1 I0 I1 W0 W0 W1 W1 W1 W0 W0 W0 W1 W1 W1
        .. F0 F1 F0 I0 F1 I1 I0 I1 W0 W0 W0 W1 W1 W1 W0 W0 W0 W1 W1 W1""")


def test_steps_follow_each_other_without_a_barrier() -> None:
    assert timetable("1f1b", ranks=2, microbatches=2, steps=2) == drawn("""
        F0 F1 .. .. B0 -- .. B1 -- F0 F1 .. .. B0 -- .. B1 --
        .. F0 B0 -- F1 B1 -- .. .. .. F0 B0 -- F1 B1 -- .. ..""")


@pytest.mark.parametrize("name", ["1f1b", "axonn", "eager-1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (4, 8), (5, 3)])
def test_with_equal_costs_whole_backwards_on_a_line_take_the_published_time(
    name: str, ranks: int, microbatches: int
) -> None:
    grid = timetable(name, ranks, microbatches)
    assert max(len(row.split()) for row in grid.splitlines()) == (microbatches + ranks - 1) * (
        1 + 2
    )


@pytest.mark.parametrize(
    ("name", "in_flight", "held"),
    [
        ("gpipe", [8, 8, 8, 8], [8, 8, 8, 8]),
        ("1f1b", [4, 3, 2, 1], [4, 3, 2, 1]),
        ("axonn", [4, 4, 4, 1], [4, 4, 4, 1]),
        ("eager-1f1b", [7, 5, 3, 1], [7, 5, 3, 1]),
        ("interleaved-1f1b", [11, 9, 7, 5], [11, 9, 7, 5]),
        ("breadth-first", [16, 16, 16, 16], [16, 16, 16, 16]),
        ("zb-h1", [4, 3, 2, 1], [4, 4, 4, 4]),
        ("zb-h2", [7, 5, 3, 1], [8, 8, 8, 8]),
        ("zb-v", [8, 8, 8, 8], [8, 8, 8, 8]),
        ("adaptive", [8, 8, 8, 8], [8, 8, 8, 8]),
        ("interleaved-zb", [8, 7, 6, 5], [8, 8, 8, 8]),
        ("v-half", [6, 6, 6, 6], [6, 6, 6, 6]),
        ("v-min", [4, 4, 4, 4], [4, 4, 4, 4]),
        ("chimera", [3, 4, 4, 3], [3, 4, 4, 3]),
        ("dualpipe", [5, 5, 5, 5], [5, 5, 5, 5]),
        ("dualpipe-v", [9, 9, 9, 9], [9, 9, 9, 9]),
        ("merak", [4, 3, 2, 1], [4, 3, 2, 1]),
        ("varuna", [8, 8, 8, 8], [8, 8, 8, 8]),
    ],
)
def test_the_stated_bound_is_the_published_one(
    name: str, in_flight: list[int], held: list[int]
) -> None:
    policy = policy_by_name(name)
    bounds = [policy.bounds(placement_for(policy, 4, 8), rank, 8) for rank in range(4)]
    assert [bound.in_flight for bound in bounds] == in_flight
    assert [bound.held for bound in bounds] == held


def test_an_evaluation_keeps_the_pipeline_full() -> None:
    assert timetable("nested", ranks=3, microbatches=5, evaluate=True) == drawn("""
        F0 F1 F2 F3 F4 .. ..
        .. F0 F1 F2 F3 F4 ..
        .. .. F0 F1 F2 F3 F4""")


def gathers_of(job: Job, stage: int, buckets: int, steps: int) -> set[Task]:
    """What gathers the weights of a stage; without shards nothing."""
    residencies = range(steps * job.a_step(Counts.RESIDENCIES, stage) if job.shards else 0)
    once = (Kind.SHARE, Kind.RELEASE) if job.residencies else ()
    of_buckets = {Task(Kind.GATHER, stage, n, part) for n in residencies for part in range(buckets)}
    return of_buckets | {Task(kind, stage, n) for kind in once for n in residencies}


def everything_once(pipeline: Pipeline, steps: int) -> list[set[Task]]:
    expected = []
    for state in pipeline.states:
        everything: set[Task] = set()
        every = [(Kind.FORWARD, 0), (Kind.BACKWARD, 0)]
        if state.policy.splits:
            every = [
                (Kind.FORWARD, 0),
                (Kind.INPUT, 0),
                *[(Kind.WEIGHT, piece) for piece in range(PIECES)],
            ]
        for stage, pipe in state.pipe_of.items():
            voters = state.job.pipes_a_group if state.job.shards else state.job.team
            votes = state.job.votes and pipe < voters
            pipes = state.placement.pipes
            kinds = every + [(Kind.RECOMPUTE, 0)] * (Kind.RECOMPUTE in state._counters[stage].needs)
            numbers = range(pipe // state.job.team % pipes, steps * state.microbatches, pipes)
            of_step = {(Kind.NORM, 0)} if votes else set()
            of_step |= {(Kind.VOTE, 0)} if votes and stage == pipe == 0 else set()
            for bucket, copies in enumerate(pipeline.buckets[stage]):
                copied = (Kind.FETCH, Kind.STORE) if state.job.slots else ()
                of_step |= {(kind, bucket) for kind in (Kind.STEP, *copied)}
                of_step |= {(Kind.PRECONDITION, bucket)} if state.job.preconditions else set()
                behind = range(steps - 1 if state.job.lag else 0)  # the last step has none
                everything |= {Task(Kind.REFRESH, stage, step, bucket) for step in behind}
                if by_library(state.job, copies):
                    of_step |= {(Kind.COLLECT, bucket)}
                    if leader(state.job, copies) == (pipe, stage, bucket):
                        of_step |= {(Kind.ANNOUNCE, bucket)}
                elif len(copies) > 1:
                    runs = steps * state.job.reductions
                    everything |= {Task(Kind.REDUCE, stage, run, bucket) for run in range(runs)}
                    between = (Kind.ACROSS,) if state.job.shards else (Kind.ACROSS, Kind.JOIN)
                    of_step |= {(kind, bucket) for kind in between if state.job.is_grouped}
            everything |= gathers_of(state.job, stage, len(pipeline.buckets[stage]), steps)
            every_task = {Task(kind, stage, n, part) for kind, part in kinds for n in numbers}
            for task in list(every_task):
                if task.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
                    pieces = range(pipeline.pieces_of(task))
                    every_task |= {task._replace(part=piece) for piece in pieces}
            everything |= every_task
            everything |= {
                Task(kind, stage, step, part) for kind, part in of_step for step in range(steps)
            }
        expected.append(everything)
    return expected


def fitting(policy: Policy, ranks: int, microbatches: int, chunks: int) -> tuple[Placement, int]:
    """A placement of the policy's own with so many chunks where it has the choice; the next numbers
    of ranks and microbatches."""
    if policy.name.startswith("interleaved"):
        microbatches = -(-microbatches // ranks) * ranks
    if policy.placements[0] == "bidirectional":
        ranks, microbatches = ranks + ranks % 2, microbatches + microbatches % 2
    return placement_for(
        policy, ranks, microbatches, chunks=chunks if policy.placements[0] == "looped" else 0
    ), microbatches


@pytest.mark.parametrize(("reductions", "room"), [(3, 1), (3, 2), (2, 1), (2, 2), (3, 3)])
def test_ties_keep_no_run_back_where_they_would_wait_in_a_circle(
    reductions: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = tied_with_residencies(reductions, room)
    may_wait = pipeline.job.ties_may_wait_in_a_circle
    run_in_random_order(pipeline, 0)
    assert pipeline.finished
    monkeypatch.setattr(Job, "ties_may_wait_in_a_circle", False)
    pipeline = tied_with_residencies(reductions, room)
    run_in_random_order(pipeline, 0)
    assert pipeline.finished is not may_wait


def tied_with_residencies(reductions: int, room: int) -> Pipeline:
    placement, microbatches = fitting(policy := policy_by_name("breadth-first"), 1, 6, 3)
    return Pipeline(
        policy,
        placement.ranks,
        microbatches,
        replicas=2,
        tied=True,
        placement=placement,
        shards=True,
        reductions=reductions,
        room=room,
    )


COPIES = (Kind.OFFLOAD, Kind.RELOAD)


OF_CLASSES = ("1f1b", "zb-h1", "breadth-first", "zb-v", "chimera", "adaptive")


def of_every_policy(
    *rest: object, quick: Collection[str] = NAMES
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What is drawn leaves some policies out now and then; so much is always run of each, or of
    those that the default run has."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        for name in some(NAMES, quick):
            test = example(name, *rest)(test)
        return test

    return decorate


@given(
    st.sampled_from(NAMES),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([0, 1, 2, 3, 9]),
    st.sampled_from([None, 0, 1, 2, 3, 5, 9]),
    st.integers(),
)
@of_every_policy(3, 4, 2, 0, 2, 2, 2, True, True, 2, 1, None, 1)
@of_every_policy(4, 8, 2, 4, 1, 1, 2, False, False, 0, 0, 0, 2, quick=OF_CLASSES)
# shards in groups, and sums in groups
@of_every_policy(2, 2, 2, 0, 4, 2, 2, True, True, 2, 1, None, 1, quick=OF_CLASSES)
@of_every_policy(2, 2, 2, 0, 4, 2, 2, True, True, 2, 1, None, 4, quick=OF_CLASSES)
@examples(75, quick=15)
def test_every_task_runs_once_in_any_order_of_events_and_within_the_bound(
    name: str,
    ranks: int,
    microbatches: int,
    steps: int,
    in_flight: int,
    replicas: int,
    buckets: int,
    chunks: int,
    tied: bool,
    clips: bool,
    recomputes: int,
    slots: int,
    spare: int | None,
    seed: int,
) -> None:
    policy = policy_by_name(
        name,
        in_flight
        if name == "axonn"
        else 2 * ranks + in_flight
        if name in ("adaptive", "dualpipe-v")
        else 0,
    )
    placement, microbatches = fitting(policy, ranks, microbatches, chunks)
    replicas = min(replicas, 9 // ranks + 1)
    pipeline = Pipeline(
        policy,
        placement.ranks,
        microbatches,
        steps=steps,
        replicas=replicas,
        buckets=buckets,
        tied=tied,
        clips=clips,
        placement=placement,
        recomputes=range(recomputes % 2, placement.stages, recomputes) if recomputes else (),
        leaves=seed % 2 == 0,
        by_library=seed % 3 == 0,
        slots=slots,
        shards=seed % 7 < 3,
        group=2 if replicas == 4 and seed % 3 else 0,
        reductions=1 + seed % 4,
        room=seed % 11 % 4,
        spare=spare,
        forward_pieces=1 + seed % 13 % 3,
        lag=seed % 17 % 4,
        preconditions=seed % 19 < 6,
    )
    run_in_random_order(pipeline, seed)
    assert pipeline.finished, [
        str(lack) for state in pipeline.states for lack in state.waiting_for()
    ]
    computed = [[task for task in ran if task.kind not in COPIES] for ran in pipeline.ran]
    assert [set(ran) for ran in computed] == (expected := everything_once(pipeline, steps))
    assert [len(ran) for ran in computed] == [len(tasks) for tasks in expected]
    for state, stash in zip(pipeline.states, pipeline.stash, strict=True):
        bounds = policy.bounds(placement, state.rank, microbatches)
        all_there_are = microbatches * placement.chunks // placement.pipes
        assert stash.in_flight <= min(bounds.in_flight, all_there_are)
        assert stash.held <= min(bounds.held, all_there_are)
    check_order_of_collectives(pipeline)
    assert all(state.settled for state in pipeline.states)
    assert not any(watch.on_device for watch in pipeline.watches)
    assert not any(watch.on_device or watch.down for watch in pipeline.stashes)
    assert not any(state.held_on_device for state in pipeline.states)


def check_order_of_collectives(pipeline: Pipeline) -> None:
    """Every rank of a group issues the same collectives in the same order."""
    issued: dict[tuple[tuple[int, int], ...], list[list[object]]] = defaultdict(list)
    for ran in pipeline.ran:
        of_rank: dict[tuple[tuple[int, int], ...], list[object]] = defaultdict(list)
        for task in ran:
            if task.kind is Kind.COLLECT:
                copies = pipeline.buckets[task.stage][task.part]
                group = tuple(sorted(places(pipeline.job, copies)))
                of_rank[group].append((copies, task.microbatch))
        for group, order in of_rank.items():
            issued[group].append(order)
    for group, orders in issued.items():
        assert len(orders) == len(group)
        assert all(order == orders[0] for order in orders), group


@pytest.mark.parametrize("name", NAMES)
def test_stashes_go_down_where_a_rank_holds_more_than_it_has_room_for(name: str) -> None:
    cap = 12 if name in ("adaptive", "dualpipe-v") else 0
    policy = policy_by_name(name, cap)
    placement, microbatches = fitting(policy, 4, 8, 2)
    pipeline = Pipeline(policy, placement.ranks, microbatches, placement=placement, spare=0)
    run_in_random_order(pipeline, seed=1)
    assert pipeline.finished
    may_hold = [policy.bounds(placement, rank, microbatches).held for rank in range(4)]
    has_no_room = [may > least_places(placement.chunks) for may in may_hold]
    went_down = [bool(watch.went_down) for watch in pipeline.stashes]
    assert all(lacks >= down for lacks, down in zip(has_no_room, went_down, strict=True))
    assert any(went_down) == any(has_no_room)


def test_replicas_whose_buckets_become_ready_in_other_orders_collect_in_one() -> None:
    orders = set()
    for seed in range(20):
        pipeline = Pipeline(
            policy_by_name("1f1b"), 2, 2, steps=2, replicas=3, buckets=4, by_library=True
        )
        run_in_random_order(pipeline, seed)
        assert pipeline.finished
        check_order_of_collectives(pipeline)
        orders.add(tuple(task for task in pipeline.ran[0] if task.kind is Kind.COLLECT))
    assert len(orders) > 10, "the order is nobody's in particular"


@given(
    st.sampled_from(["linear", "looped", "vee"]),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 24),
    st.integers(),
)
@examples(100, quick=25)
def test_an_evaluation_of_any_length_on_any_placement_ends_and_keeps_the_bound(
    name: str, ranks: int, chunks: int, microbatches: int, length: int, seed: int
) -> None:
    placement = placement_by_name(name, ranks, chunks if name == "looped" else 0)
    pipeline = Pipeline(Nested(), ranks, microbatches, evaluate=length, placement=placement)
    run_in_random_order(pipeline, seed)
    assert pipeline.finished
    assert [len(ran) for ran in pipeline.ran] == [2 * length * placement.chunks] * ranks
    for rank, stash in enumerate(pipeline.stash):
        assert stash.in_flight <= Nested().bounds(placement, rank, microbatches).in_flight


@given(
    st.sampled_from(NAMES),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 11),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0, 1, 3]),
    st.integers(),
)
@examples(100, quick=25)
def test_a_reader_that_ends_cuts_one_step_short_and_all_before_it_are_whole(
    name: str,
    ranks: int,
    microbatches: int,
    end: int,
    replicas: int,
    clips: bool,
    slots: int,
    seed: int,
) -> None:
    placement, microbatches = fitting(policy_by_name(name), ranks, microbatches, 2)
    steps = end // microbatches + 1
    pipeline = Pipeline(
        policy_by_name(name),
        placement.ranks,
        microbatches,
        steps=steps,
        end=end,
        replicas=replicas,
        clips=clips,
        placement=placement,
        slots=slots,
        shards=seed % 7 < 3,
        group=2 if replicas == 4 and seed % 3 else 0,
        reductions=1 + seed % 4,
        room=seed % 11 % 4,
    )
    run_in_random_order(pipeline, seed)
    assert all(state.cut_short and not state.finished for state in pipeline.states)
    assert all(state.settled for state in pipeline.states)
    assert not any(watch.on_device for watch in pipeline.watches), "no step that is cut has fetched"
    for state, ran in zip(pipeline.states, pipeline.ran, strict=True):
        for stage in state.pipe_of:
            assert [
                task.microbatch for task in ran if task.kind is Kind.STEP and task.stage == stage
            ] == list(range(steps - 1))


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 8), st.integers())
@examples(100, quick=25)
def test_microbatches_run_in_order_within_a_kind_and_a_stage(
    name: str, ranks: int, microbatches: int, seed: int
) -> None:
    placement, microbatches = fitting(policy_by_name(name), ranks, microbatches, 2)
    pipeline = Pipeline(
        policy_by_name(name), placement.ranks, microbatches, steps=2, placement=placement
    )
    run_in_random_order(pipeline, seed)
    for ran in pipeline.ran:
        for kind, stage in {(task.kind, task.stage) for task in ran}:
            numbers = [
                (task.microbatch, task.part)
                for task in ran
                if task.kind is kind and task.stage == stage
            ]
            assert numbers == sorted(numbers)


def test_a_policy_is_found_by_name_and_a_wrong_one_is_refused_with_the_names() -> None:
    assert [policy_by_name(name).name for name in NAMES] == list(NAMES)
    with pytest.raises(ValueError, match="no policy '1f2b'; expected one of 1f1b, adaptive, axonn"):
        policy_by_name("1f2b")
    with pytest.raises(
        ValueError, match="max_held = 3 needs policy adaptive or axonn or dualpipe-v or fixed"
    ):
        policy_by_name("gpipe", max_held=3)


@pytest.mark.parametrize(
    ("name", "placement", "chunks", "microbatches", "text"),
    [
        (
            "zb-v",
            "linear",
            0,
            8,
            "policy zb-v is made for placement vee, not linear; set placement = 'vee'",
        ),
        (
            "interleaved-1f1b",
            "",
            2,
            6,
            "takes multiples of 4 ranks; set microbatches = 8, not 6, or policy breadth-first",
        ),
        ("interleaved-zb", "", 2, 6, "takes multiples of 4 ranks; set microbatches = 8, not 6"),
        (
            "chimera",
            "",
            0,
            7,
            "has 2 pipes, and each takes as many microbatches; set microbatches = 8, not 7",
        ),
        (
            "1f1b",
            "",
            2,
            8,
            "placement linear has 1 stage a rank; chunks = 2 needs placement looped, or set "
            "chunks = 0",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_does(
    name: str, placement: str, chunks: int, microbatches: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        placement_for(policy_by_name(name), 4, microbatches, placement, chunks)


@pytest.mark.parametrize("placement", [Linear(4), Looped(4, 3), Vee(4), Bidirectional(4)])
def test_every_stage_of_every_pipe_is_on_the_rank_that_holds_it(placement: Placement) -> None:
    held = [
        (placement.pipe_of(rank, stage), stage)
        for rank in range(4)
        for stage in placement.stages_of(rank)
    ]
    assert sorted(held) == [
        (pipe, stage) for pipe in range(placement.pipes) for stage in range(placement.stages)
    ]
    for rank in range(4):
        stages = placement.stages_of(rank)
        assert len(stages) == placement.chunks
        assert stages == tuple(sorted(set(stages)))
        assert {placement.rank_of(stage, placement.pipe_of(rank, stage)) for stage in stages} == {
            rank
        }
    assert [placement.rank_of(stage, pipe) for pipe, stage in placement.stage_copies()] == list(
        range(4)
    )


def test_an_odd_number_of_ranks_has_no_two_pipes() -> None:
    with pytest.raises(
        ValueError, match="takes an even number of ranks; start 4 ranks a pipeline, not 3"
    ):
        placement_by_name("bidirectional", 3)
