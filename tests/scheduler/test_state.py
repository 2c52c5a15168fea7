"""The moves of one rank: what opens what, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.placement import Bidirectional, Linear, Looped
from axrt.scheduler.policies import placement_for, policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.refusals import IllegalMove
from axrt.scheduler.simulation.reader_messages import has_read
from axrt.scheduler.task import Kind, Task

from .pipelines import Pipeline, run_in_random_order


def state_of(rank: int, ranks: int = 3, microbatches: int = 2, policy: str = "1f1b") -> RankState:
    state = RankState(Job(Linear(ranks), policy_by_name(policy), microbatches), rank)
    state.ask_step()
    return state


def activation(stage: int, microbatch: int) -> Message:
    return Message(Meaning.ACTIVATION, stage, microbatch)


def gradient(stage: int, microbatch: int) -> Message:
    return Message(Meaning.GRADIENT, stage, microbatch)


def run(state: RankState, task: str) -> list[Message]:
    assert str(state.pick()) == task
    state.start(Task.parse(task))
    return state.finish(Task.parse(task))


@given(st.builds(Task, st.sampled_from(Kind), st.integers(0), st.integers(0), st.integers(0)))
def test_a_task_prints_shortly_and_reads_back(task: Task) -> None:
    assert Task.parse(str(task)) == task


def test_the_short_notation_names_kind_stage_and_microbatch() -> None:
    assert str(Task(Kind.FORWARD, 2, 7)) == "F2.7"
    with pytest.raises(ValueError, match="'X1' is not a task"):
        Task.parse("X1")


def test_an_activation_makes_a_forward_ready_and_the_forward_sends_one_on() -> None:
    state = state_of(rank=1)
    assert state.pick() is None
    state.deliver(activation(1, 0))
    assert run(state, "F1.0") == [activation(2, 0)]


def test_a_gradient_makes_a_backward_ready_and_the_backward_sends_one_back() -> None:
    state = state_of(rank=1)
    state.deliver(activation(1, 0))
    run(state, "F1.0")
    state.deliver(gradient(1, 0))
    assert run(state, "B1.0") == [gradient(0, 0)]


def test_the_last_stage_wants_its_target_and_owes_nobody_a_gradient_but_the_stage_before() -> None:
    state = state_of(rank=2)
    state.deliver(activation(2, 0))
    assert [str(lack) for lack in state.waiting_for() if lack.task.kind is Kind.FORWARD] == [
        "F2.0 lacks target from rank 0"
    ]
    state.deliver(Message(Meaning.TARGET, 2, 0))
    assert run(state, "F2.0") == []
    assert run(state, "B2.0") == [gradient(1, 0)]


def test_the_next_step_waits_for_the_weights_and_the_step_for_the_last_backward() -> None:
    state = state_of(rank=1, microbatches=1)
    state.deliver(activation(1, 0))
    run(state, "F1.0")
    state.deliver(gradient(1, 0))
    state.deliver(activation(1, 1))
    run(state, "B1.0")
    assert state.pick() is None
    state.deliver(Message(Meaning.LOSS, 1, 0))
    assert not state.finished
    assert run(state, "step1.0") == []
    assert state.finished
    assert state.pick() is None  # nobody has asked for it
    state.ask_step()
    assert str(state.pick()) == "F1.1"


def test_activations_that_overtake_each_other_wait_for_their_turn() -> None:
    state = state_of(rank=1)
    state.deliver(activation(1, 1))
    assert state.pick() is None
    state.deliver(activation(1, 0))
    assert str(state.pick()) == "F1.0"


def test_the_reader_reads_one_microbatch_ahead_of_its_stage() -> None:
    state = state_of(rank=0)
    assert state.microbatch_to_read() == 0
    state.deliver(activation(0, 0))
    assert state.microbatch_to_read() is None
    run(state, "F0.0")
    assert state.microbatch_to_read() == 1
    assert state_of(rank=1).microbatch_to_read() is None


def test_nothing_is_read_beyond_the_steps_that_were_asked_for() -> None:
    state = state_of(rank=0, microbatches=1)
    state.deliver(activation(0, 0))
    run(state, "F0.0")
    assert state.microbatch_to_read() is None


@pytest.mark.parametrize(
    ("message", "story"),
    [
        (
            activation(1, 0),
            "activation 0 for stage 1 has come before: stage 1: F 1 started 1 finished",
        ),
        (gradient(1, 1), "gradient 1 for stage 1 before its forward"),
        (activation(1, 4), "of step 2, neither this one nor the next"),
        (activation(2, 1), r"rank 1 holds stages \[1\]"),
    ],
)
def test_an_illegal_message_is_refused_with_the_lanes_story_and_changes_nothing(
    message: Message, story: str
) -> None:
    state = state_of(rank=1)
    state.deliver(activation(1, 0))
    run(state, "F1.0")
    before = str(state._counters[1])
    with pytest.raises(IllegalMove, match=story):
        state.deliver(message)
    assert str(state._counters[1]) == before


@pytest.mark.parametrize("task", ["F1.1", "B1.0", "step1.0", "F0.0"])
def test_only_a_ready_head_starts_and_only_what_started_finishes(task: str) -> None:
    state = state_of(rank=1)
    state.deliver(activation(1, 0))
    before = str(state._counters[1])
    with pytest.raises(IllegalMove, match="cannot start"):
        state.start(Task.parse(task))
    with pytest.raises(IllegalMove, match="cannot finish"):
        state.finish(Task.parse(task))
    assert str(state._counters[1]) == before


def test_a_task_does_not_finish_before_those_of_its_kind_that_started_before() -> None:
    state = state_of(rank=0, ranks=2, policy="gpipe")
    for n in range(2):
        state.deliver(activation(0, n))
        state.start(Task.parse(f"F0.{n}"))
    with pytest.raises(IllegalMove, match="F0.1 cannot finish"):
        state.finish(Task.parse("F0.1"))
    for n in range(2):
        state.finish(Task.parse(f"F0.{n}"))


def test_an_end_that_is_told_to_another_rank_is_refused() -> None:
    with pytest.raises(IllegalMove, match="rank 1 is not there"):
        state_of(rank=1).deliver(Message(Meaning.END, 0, 2))


def test_what_is_waited_for_is_named_with_the_rank_that_owes_it() -> None:
    state = state_of(rank=1)
    state.deliver(activation(1, 0))
    run(state, "F1.0")
    assert [str(lack) for lack in state.waiting_for()] == [
        "F1.1 lacks activation from rank 0",
        "B1.0 lacks gradient from rank 2",
        "step1.0 lacks B",
        "step1.0 lacks loss from rank 2",
    ]


def test_a_forward_that_its_cap_refuses_waits_for_room() -> None:
    state = state_of(rank=1, ranks=2)
    for n in (0, 1):
        state.deliver(activation(1, n))
        state.deliver(Message(Meaning.TARGET, 1, n))
    state.start(Task.parse("F1.0"))
    assert "F1.1 lacks room" in [str(lack) for lack in state.waiting_for()]


def test_the_end_is_told_once() -> None:
    state = state_of(rank=1)
    state.deliver(Message(Meaning.END, 1, 2))
    assert not state.cut_short  # the step that was asked for is whole
    with pytest.raises(IllegalMove, match="the end was told before: 2 microbatches, and now 4"):
        state.deliver(Message(Meaning.END, 1, 4))
    state.ask_step()
    assert state.cut_short


def test_a_state_may_begin_at_any_step() -> None:
    state = RankState(Job(Linear(3), policy_by_name("1f1b"), 2), 1, first_step=5)
    state.ask_step()
    state.deliver(activation(1, 10))
    assert run(state, "F1.10") == [activation(2, 10)]


@pytest.mark.parametrize("policy", ["interleaved-1f1b", "breadth-first", "zb-v"])
@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_job_with_shards_may_begin_at_any_step(policy: str, room: int) -> None:
    """It does what one from the start does, with the numbers of later steps."""

    def ran(first_step: int) -> list[set[Task]]:
        rule, chunks = policy_by_name(policy), 2 if policy == "zb-v" else 3
        where = placement_for(rule, 2, 4, chunks=chunks)
        pipeline = Pipeline(
            rule,
            2,
            4,
            steps=2,
            replicas=2,
            buckets=2,
            placement=where,
            slots=1,
            shards=True,
            reductions=2,
            room=room,
            first_step=first_step,
        )
        run_in_random_order(pipeline, seed=first_step)
        assert pipeline.finished

        def from_the_start(task: Task) -> Task:
            a_step = pipeline.job.a_step(task.kind.counts, task.stage)
            return task._replace(microbatch=task.microbatch - first_step * a_step)

        return [set(map(from_the_start, tasks)) for tasks in pipeline.ran]

    assert ran(5) == ran(0)


def test_the_gradient_of_one_run_more_is_on_its_way_and_no_third_begins() -> None:
    """A replica whose other copy has not sent a part yet; with each backward a run ends."""
    job = Job(Linear(1), policy_by_name("1f1b"), 4, replicas=2, shards=True, reductions=4)
    state, ran = RankState(job, 0), []
    state.ask_step()

    def reads() -> None:
        while (number := state.microbatch_to_read()) is not None:
            for message in has_read(state.job, 0, number):
                state.deliver(message)

    reads()
    while task := state.pick():
        ran.append(str(task))
        run(state, str(task))
        reads()
    assert ran == ["F0.0", "B0.0", "F0.1", "B0.1", "F0.2"]
    lacks = [str(lack) for lack in state.waiting_for() if lack.task.kind is Kind.BACKWARD]
    assert lacks == ["B0.2 lacks sums of the run before last"]
    state.deliver(Message(Meaning.PART, 0, 1))  # of the other copy, for the first run
    run(state, "reduce0.0")
    assert str(state.pick()) == "B0.2"


def test_groups_add_up_among_themselves_and_then_across() -> None:
    """Four replicas in two groups: what replica 2 hears of its bucket, and says of it."""
    job = Job(Linear(1), policy_by_name("1f1b"), 1, replicas=4, group=2)
    state = RankState(job, 0, replica=2)
    state.ask_step()
    for message in has_read(state.job, 2, 0):
        state.deliver(message)

    def sent(task: str) -> list[str]:
        return [str(message) for message in run(state, task) if message.meaning is not Meaning.LOSS]

    assert sent("F0.0") == []
    assert sent("B0.0") == ["part 0 for stage 0 bucket 0 of pipe 3"]
    state.deliver(Message(Meaning.PART, 0, 1, 2))  # of replica 3, the other one of the group
    assert sent("reduce0.0") == ["subtotal 1 for stage 0 bucket 0"]
    state.deliver(Message(Meaning.SUBTOTAL, 0, 0, 2))  # of replica 0, which owns the same shard
    assert sent("across0.0") == ["total 1 for stage 0 bucket 0"]
    state.deliver(Message(Meaning.TOTAL, 0, 0, 2))
    assert sent("join0.0") == ["sum 0 for stage 0 bucket 0 of pipe 3"]


def test_work_that_may_come_in_pieces_has_no_head_until_it_was_told() -> None:
    state = state_of(rank=1, policy="zb-h1")
    for number in range(2):
        state.deliver(activation(1, number))
        run(state, f"F1.{number}")
        state.deliver(gradient(1, number))
        run(state, f"I1.{number}")
    first = Task.parse("W1.0")
    assert state.pick() == first
    assert state.start(first, None) == []
    assert state.pick() is None, "whether it was all of W1.0 is not known"
    with pytest.raises(IllegalMove, match=r"W1.0 cannot start: it runs"):
        state.start(first)
    with pytest.raises(IllegalMove, match=r"W1.0 cannot finish"):
        state.finish(first)
    with pytest.raises(IllegalMove, match=r"W1.1 cannot be told"):
        state.tell(Task.parse("W1.1"), more=False)
    with pytest.raises(IllegalMove, match="cannot complete buckets"):
        state.tell(first, more=True, completes=[3])
    state.tell(first, more=True)
    assert state.held == 2
    assert str(state.pick()) == "W1.0/1"
    state.finish(first)
    state.start(Task.parse("W1.0/1"), None)
    state.tell(Task.parse("W1.0/1"), more=False)
    with pytest.raises(IllegalMove, match=r"W1.0/1 cannot be told"):
        state.tell(Task.parse("W1.0/1"), more=False)
    assert (str(state.pick()), state.held) == ("W1.1", 1)


def test_a_backward_runs_between_two_pieces_of_a_forward_which_counts_from_the_first() -> None:
    state = state_of(rank=1, policy="merak")
    for number in range(2):
        state.deliver(activation(1, number))
    run(state, "F1.0")
    first, second = Task.parse("F1.1"), Task.parse("F1.1/1")
    with pytest.raises(IllegalMove, match=r"F1.1/1 cannot start: piece 0 is next"):
        state.start(second)
    assert state.start(first, more=True) == []
    assert state.finish(first) == [], "no activation leaves before the last piece has ended"
    assert (state.pick(), state.held, state.in_flight_of(1)) == (second, 2, 2)
    state.deliver(gradient(1, 0))
    assert str(state.pick()) == "B1.0"
    run(state, "B1.0")
    assert (state.pick(), state.held) == (second, 1)
    assert run(state, "F1.1/1") == [activation(2, 1)]
    assert (state.held, state.in_flight) == (1, 1)


def test_a_weight_gradient_stays_the_head_until_its_last_piece_and_others_run_in_between() -> None:
    state = state_of(rank=1, policy="zb-h1")
    for number in range(2):
        state.deliver(activation(1, number))
    run(state, "F1.0")
    state.deliver(gradient(1, 0))
    run(state, "F1.1")
    assert run(state, "I1.0") == [gradient(0, 0)]
    first, second = Task.parse("W1.0"), Task.parse("W1.0/1")
    assert (state.pick(), state.held, state.in_flight) == (first, 2, 1)
    with pytest.raises(IllegalMove, match=r"W1.0/1 cannot start: piece 0 is next"):
        state.start(second)
    state.start(first, more=True)
    assert state.finish(first) == []
    state.deliver(gradient(1, 1))
    assert run(state, "I1.1") == [gradient(0, 1)]
    assert (state.pick(), state.held) == (second, 2)
    state.start(second)
    state.finish(second)
    assert (str(state.pick()), state.held) == ("W1.1", 1)


def test_a_step_that_was_not_asked_for_does_not_begin_though_its_inputs_are_here() -> None:
    state = state_of(rank=1, ranks=2, microbatches=1)
    for number in range(2):
        state.deliver(activation(1, number))
        state.deliver(Message(Meaning.TARGET, 1, number))
    for task in ("F1.0", "B1.0", "step1.0"):
        for message in run(state, task):
            if message.meaning is Meaning.LOSS and message.stage == 1:
                state.deliver(message)
    assert state.finished
    assert state.pick() is None
    state.ask_step()
    assert str(state.pick()) == "F1.1"


def test_why_nothing_runs_is_told() -> None:
    state = state_of(rank=0, ranks=2, microbatches=4)
    assert (state.pick(), state.why_idle()) == (None, "input")
    for number in range(4):
        state.deliver(activation(0, number))
    for task in ("F0.0", "F0.1"):
        run(state, task)
    assert (state.pick(), state.why_idle()) == (None, "room")
    for number in range(4):
        state.deliver(gradient(0, number))
        run(state, f"B0.{number}")
        if number < 2:
            run(state, f"F0.{number + 2}")
    state.deliver(Message(Meaning.LOSS, 0, 0))
    run(state, "step0.0")
    assert (state.pick(), state.why_idle()) == (None, "end")


def test_what_nobody_has_asked_for_is_not_what_a_cap_refuses() -> None:
    state = RankState(Job(Looped(2, 2), policy_by_name("breadth-first"), 1, replicas=2), 1)
    state.ask_step()

    def runs(task: str) -> None:
        for message in run(state, task):
            if state.is_here(message):
                state.deliver(message)

    for message, task in (
        (activation(1, 0), "F1.0"),
        (Message(Meaning.TARGET, 3, 0), None),
        (activation(3, 0), "F3.0"),
        (None, "B3.0"),
        (gradient(1, 0), "B1.0"),
        (Message(Meaning.LOSS, 1, 1), None),
        (Message(Meaning.LOSS, 3, 1), None),
        (Message(Meaning.PART, 1, 1), "reduce1.0"),
        (Message(Meaning.SUM, 1, 1), "step1.0"),
        (activation(1, 1), None),  # from rank 0, which is in its next call
    ):
        if message is not None:
            state.deliver(message)
        if task is not None:
            runs(task)
    assert (state.pick(), state.why_idle()) == (None, "input"), (
        "stage 3 lacks a part of the other replica"
    )
    assert (
        next(str(lack) for lack in state.waiting_for())
        == "reduce3.0 lacks part from rank 1 of replica 1"
    )


def test_a_recomputation_has_its_backwards_place_once_nothing_else_is_lacking() -> None:
    state = RankState(Job(Linear(3), policy_by_name("merak"), 8, recomputed={0: 1}), 0)
    state.ask_step()
    for number in range(3):
        state.deliver(activation(0, number))
    run(state, "F0.0")
    run(state, "F0.1")
    assert state.pick() == Task.parse("F0.2"), "nobody wants the recomputation yet"
    state.deliver(gradient(0, 0))
    assert state.pick() == Task.parse("R0.0"), (
        "backwards come first, and this one lacks nothing else"
    )
    run(state, "R0.0")
    run(state, "B0.0")


def test_a_recomputation_that_is_not_wanted_yet_is_no_cap() -> None:
    state = RankState(Job(Linear(3), policy_by_name("merak"), 8, recomputed={0: 1}), 0)
    state.ask_step()
    for number in range(4):
        state.deliver(activation(0, number))
    for task in ("F0.0", "F0.1", "F0.2", "R0.0", "R0.1"):
        run(state, task)
    assert state.pick() is None
    assert [str(lack) for lack in state.waiting_for()][:2] == [
        "F0.3 lacks room",
        "B0.0 lacks gradient from rank 1",
    ]


def test_a_microbatch_of_the_other_pipe_is_refused() -> None:
    state = RankState(Job(Bidirectional(2), policy_by_name("chimera"), 4), 0)
    state.ask_step()
    assert state.pipe_of == {0: 0, 1: 1}
    with pytest.raises(IllegalMove, match="activation 1 for stage 0 is of another pipe"):
        state.deliver(Message(Meaning.ACTIVATION, 0, 1))
    with pytest.raises(IllegalMove, match="holds stages"):
        state.deliver(Message(Meaning.ACTIVATION, 1, 1))
    up = RankState(Job(Bidirectional(2), policy_by_name("chimera"), 4), 1)
    up.ask_step()
    assert (
        str(next(lack for lack in up.waiting_for() if lack.task == Task.parse("F0.1")))
        == "F0.1 lacks activation from rank 0"
    )
