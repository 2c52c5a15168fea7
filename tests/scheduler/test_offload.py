"""State that is offloaded: the moves of a rank, and the time that copies add to a step."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.bucket import copies_by_pipe
from axrt.scheduler.job import Job
from axrt.scheduler.lacks import CAUSES, COPIES, INPUT
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.refusals import IllegalMove
from axrt.scheduler.rules import OnDevice
from axrt.scheduler.simulation.costs import Costs, Work
from axrt.scheduler.simulation.reader_messages import has_read
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.simulation.timeline import Timeline
from axrt.scheduler.task import AnyKind, Kind, Task

from ..sweeps import examples, fewer, swept
from .pipelines import Pipeline, drawn, run_in_random_order

COMPUTE, IN, OUT = OnDevice.COMPUTE, OnDevice.COPIES_IN, OnDevice.COPIES_OUT


# The moves.


def state_of(slots: int, buckets: int = 2, clips: bool = False) -> RankState:
    """One rank, whose only microbatch of step 0 has gone forward and back."""
    job = Job(Linear(1), policy_by_name("1f1b"), 1, votes=clips, slots=slots)
    copies = {0: [copies_by_pipe(0, bucket, 1) for bucket in range(buckets)]}
    state = RankState(job, 0, buckets=copies)
    state.ask_step()
    microbatch(state, 0)
    return state


def microbatch(state: RankState, number: int) -> None:
    for message in has_read(state.job, 0, number):
        state.deliver(message)
    run(state, COMPUTE, f"F0.{number}")
    run(state, COMPUTE, f"B0.{number}")


def start(state: RankState, queue: OnDevice, task: str) -> None:
    assert str(state.pick(queue)) == task
    state.start(Task.parse(task))


def finish(state: RankState, task: str) -> None:
    for message in state.finish(Task.parse(task)):
        if state.is_here(message):
            state.deliver(message)


def run(state: RankState, queue: OnDevice, task: str) -> None:
    start(state, queue, task)
    finish(state, task)


def lacks(state: RankState) -> list[str]:
    return [str(lack) for lack in state.waiting_for()]


def test_a_bucket_comes_steps_and_goes_back_while_the_next_one_comes() -> None:
    state = state_of(slots=2)
    assert state.pick() is None
    run(state, IN, "fetch0.0")
    start(state, IN, "fetch0.0/1")
    run(state, COMPUTE, "step0.0")
    start(state, OUT, "store0.0")
    finish(state, "fetch0.0/1")
    run(state, COMPUTE, "step0.0/1")
    assert state.finished, "weights are in place"
    assert not state.settled, "state is still on its way"
    finish(state, "store0.0")
    run(state, OUT, "store0.0/1")
    assert state.settled


def test_a_step_waits_for_the_end_of_its_fetch_and_a_store_for_the_end_of_the_step() -> None:
    state = state_of(slots=2)
    start(state, IN, "fetch0.0")
    assert state.pick() is None
    finish(state, "fetch0.0")
    start(state, COMPUTE, "step0.0")
    assert state.pick(OUT) is None
    finish(state, "step0.0")
    assert str(state.pick(OUT)) == "store0.0"


def test_a_fetch_without_a_free_slot_is_refused_and_changes_nothing() -> None:
    state = state_of(slots=1)
    run(state, IN, "fetch0.0")
    assert state.pick(IN) is None
    before = [str(counters) for counters in state._table.all_counters()], lacks(state)
    with pytest.raises(
        IllegalMove,
        match=r"fetch0.0/1 cannot start: no slot is free; stage 0: .* bucket 1: .*fetch 0 started",
    ):
        state.start(Task.parse("fetch0.0/1"))
    assert ([str(counters) for counters in state._table.all_counters()], lacks(state)) == before
    assert "fetch0.0/1 lacks a slot" in lacks(state)


def test_a_slot_is_free_when_the_store_has_ended_and_not_before() -> None:
    state = state_of(slots=1)
    run(state, IN, "fetch0.0")
    run(state, COMPUTE, "step0.0")
    assert state.pick(IN) is None
    start(state, OUT, "store0.0")
    assert state.pick(IN) is None
    assert "fetch0.0/1 lacks a slot" in lacks(state)
    finish(state, "store0.0")
    assert str(state.pick(IN)) == "fetch0.0/1"


def test_state_does_not_come_before_that_of_the_step_before_has_left() -> None:
    state = state_of(slots=3)
    for bucket in ("", "/1"):
        run(state, IN, f"fetch0.0{bucket}")
        run(state, COMPUTE, f"step0.0{bucket}")
    run(state, OUT, "store0.0")
    start(state, OUT, "store0.0/1")
    state.ask_step()
    microbatch(state, 1)  # does not wait for stores
    assert state.pick(IN) is None
    assert "fetch0.1 lacks stores" in lacks(state)
    with pytest.raises(IllegalMove, match=r"fetch0.1 cannot start"):
        state.start(Task.parse("fetch0.1"))
    finish(state, "store0.0/1")
    assert str(state.pick(IN)) == "fetch0.1"


def test_a_rank_whose_step_lacks_only_its_state_is_idle_for_copies() -> None:
    state = state_of(slots=1)
    assert (state.pick(), state.why_idle()) == (None, "copies"), "before the copy has started"
    start(state, IN, "fetch0.0")
    assert (state.pick(), state.why_idle()) == (None, "copies")
    finish(state, "fetch0.0")
    run(state, COMPUTE, "step0.0")
    assert (state.pick(), state.why_idle()) == (None, "copies"), "the next bucket lacks a slot"
    run(state, OUT, "store0.0")
    run(state, IN, "fetch0.0/1")
    run(state, COMPUTE, "step0.0/1")
    assert (state.pick(), state.why_idle()) == (None, "end"), "a store keeps nobody waiting"


def test_a_rank_that_lacks_more_than_state_is_idle_for_what_it_was_before() -> None:
    job = Job(Linear(2), policy_by_name("1f1b"), 1, slots=1)
    state = RankState(job, 0)
    state.ask_step()
    state.deliver(Message(Meaning.ACTIVATION, 0, 0))
    run(state, COMPUTE, "F0.0")
    assert state.why_idle() == "input"
    state.deliver(Message(Meaning.GRADIENT, 0, 0))
    run(state, COMPUTE, "B0.0")
    assert (state.pick(), state.why_idle()) == (None, "input"), "the losses have not come"
    state.deliver(Message(Meaning.LOSS, 0, 0))
    assert (state.pick(), state.why_idle()) == (None, "copies")


def test_state_comes_while_a_vote_is_awaited() -> None:
    state = state_of(slots=1, buckets=1, clips=True)
    start(state, COMPUTE, "norm0.0")
    run(state, IN, "fetch0.0")
    assert (state.pick(), state.why_idle()) == (None, "input")
    finish(state, "norm0.0")
    run(state, COMPUTE, "vote0.0")
    run(state, COMPUTE, "step0.0")


@pytest.mark.parametrize("slots", [1, 3, 9])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_in_any_order_of_events_state_is_never_older_than_its_weights(
    name: str, slots: int
) -> None:
    """`SlotWatch` looks at every task. With nine slots there is always a free one, so a fetch
    waits for stores alone."""
    for seed in range(fewer(10, quick=6)):
        pipeline = Pipeline(
            policy_by_name(name),
            *(2, 2),
            steps=3,
            buckets=2,
            clips=seed % 2 == 0,
            slots=slots,
        )
        run_in_random_order(pipeline, seed)
        assert all(state.finished and state.settled for state in pipeline.states)


# The time that copies take.


def offloaded(
    fetch: float,
    step: float,
    store: float,
    *,
    slots: int,
    buckets: int | Sequence[int],
    name: str = "1f1b",
    ranks: int = 1,
    microbatches: int = 1,
    steps: int = 1,
    work: Work = Work(1, 1, 1),  # noqa: B008 - frozen
) -> Timeline:
    """Copies of state of size 1; the bandwidth of a direction gives what they take."""
    inf = float("inf")
    costs = Costs(
        work,
        step=step,
        state=1.0,
        copies_in=1 / fetch if fetch else inf,
        copies_out=1 / store if store else inf,
    )
    job = Job(Linear(ranks), policy_by_name(name), microbatches, slots=slots)
    return simulate(job, costs, steps=steps, buckets=buckets)


def timetable(line: Timeline) -> str:
    """Three rows a rank: its tasks, copies in, copies out. One column a tick; s1 is the optimizer
    step of bucket 1, and <1 and >1 are its state on the way."""
    columns = round(max(span.end for span in line.spans))
    rows = [["  ." for _ in range(columns)] for _ in range(3 * line.ranks)]
    counters: dict[AnyKind, int] = {Kind.FETCH: 1, Kind.STORE: 2}
    marks: dict[AnyKind, str] = {Kind.STEP: "s", Kind.FETCH: "<", Kind.STORE: ">"}
    for rank, (kind, _, number, part), start, end in line.spans:
        name = f"{marks.get(kind, kind.value)}{part if kind.of_a_bucket else number}"
        for tick in range(round(start), round(end)):
            rows[3 * rank + counters.get(kind, 0)][tick] = name if tick == round(start) else "--"
    return "\n".join(" ".join(f"{cell.strip():2}" for cell in row).rstrip(" .") for row in rows)


def rows_of(picture: str) -> str:
    return "\n".join(line.rstrip(" .") for line in drawn(picture).splitlines())


def test_the_second_stage_hides_what_the_first_one_shows() -> None:
    """Two buckets of each stage, two slots. The first stage's copies keep its next forward waiting
    for three ticks; by then the second stage, which was done earlier, has stepped."""
    line = offloaded(1, 1, 1, slots=2, buckets=2, ranks=2, microbatches=2, steps=2, name="gpipe")
    assert timetable(line) == rows_of("""
        F0 F1 .  .  .  B0 -- B1 -- .  s0 s1 F2 F3 .  .  .  B2 -- B3 -- .  s0 s1 .
        .  .  .  .  .  .  .  .  .  <0 <1 .  .  .  .  .  .  .  .  .  .  <0 <1 .  .
        .  .  .  .  .  .  .  .  .  .  .  >0 >1 .  .  .  .  .  .  .  .  .  .  >0 >1
        .  F0 F1 B0 -- B1 -- .  s0 s1 .  .  .  F2 F3 B2 -- B3 -- .  s0 s1 .  .  .
        .  .  .  .  .  .  .  <0 <1 .  .  .  .  .  .  .  .  .  .  <0 <1 .  .  .  .
        .  .  .  .  .  .  .  .  .  >0 >1 .  .  .  .  .  .  .  .  .  .  >0 >1 .  .""")


def test_one_slot_lets_nothing_overlap_and_three_let_all_three_moves_overlap() -> None:
    def of(slots: int) -> str:
        return timetable(offloaded(1, 1, 1, slots=slots, buckets=4, work=Work(1, 0, 0)))

    assert of(1) == rows_of("""
        F0 .  s0 .  .  s1 .  .  s2 .  .  s3 .
        .  <0 .  .  <1 .  .  <2 .  .  <3 .  .
        .  .  .  >0 .  .  >1 .  .  >2 .  .  >3""")
    assert of(3) == rows_of("""
        F0 .  s0 s1 s2 s3 .
        .  <0 <1 <2 <3 .  .
        .  .  .  >0 >1 >2 >3""")


def time_of_step(fetch: float, step: float, store: float, buckets: int, slots: int) -> float:
    """From the moment at which all buckets of a stage are whole to the end of its last step.

    Of a line of three machines with so many trays, the longest way through it: over the trays that
    come back `rounds` times, and else along the slowest machine.
    """
    ways = []
    for rounds in range((buckets - 1) // slots + 1):
        slowest = max(fetch, step, store) if rounds else max(fetch, step)
        others = buckets - 1 - slots * rounds
        ways.append((rounds + 1) * (fetch + step) + rounds * store + others * slowest)
    return max(ways)


def test_the_time_of_a_step_has_a_short_form_where_all_buckets_have_a_slot_or_one_has() -> None:
    assert time_of_step(2, 3, 9, buckets=5, slots=5) == 2 + 3 + 4 * 3
    assert time_of_step(2, 3, 9, buckets=5, slots=1) == 5 * (2 + 3) + 4 * 9


times = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0])  # sums of these are exact


@given(times, times, times, st.integers(1, 9), st.integers(1, 5))
@examples(150, quick=40)
def test_the_time_of_a_step_is_that_of_a_line_of_three_with_so_many_slots(
    fetch: float, step: float, store: float, buckets: int, slots: int
) -> None:
    line = offloaded(fetch, step, store, slots=slots, buckets=buckets)
    (last_step,), (last_backward,) = (
        ends_of_steps(line, 0, kind, a_step=1) for kind in (Kind.STEP, Kind.BACKWARD)
    )
    assert last_step - last_backward == pytest.approx(
        time_of_step(fetch, step, store, buckets, slots)
    )


def ends_of_steps(line: Timeline, stage: int, kind: Kind, a_step: int) -> list[float]:
    """By step, the last end of a kind of task on a stage."""
    ends = [0.0] * (1 + max(span.task.microbatch for span in line.spans) // a_step)
    for _, task, _, end in line.spans:
        if (task.kind, task.stage) == (kind, stage):
            step = task.microbatch // a_step if task.kind.of_a_microbatch else task.microbatch
            ends[step] = max(ends[step], end)
    return ends


@swept(
    ("name", ["1f1b", "gpipe"]),
    ("ranks, microbatches", [(1, 3), (2, 4), (4, 4), (3, 8)]),
    ("copies", [(1.0, 0.5, 1.5), (0.25, 0.25, 0.0), (3.0, 1.0, 3.0), (0.5, 2.0, 0.5)]),
    ("slots", [1, 3, 2]),
    ("heavy", [0, 1, 3, 2]),
)
def test_a_step_shows_only_what_is_longer_than_the_way_down_and_back(
    name: str,
    ranks: int,
    microbatches: int,
    copies: tuple[float, float, float],
    slots: int,
    heavy: int,
) -> None:
    """Without clipping, stage k comes to its next forward k (tF + tB) after its last backward,
    since it ends a step k tB earlier and begins the next k tF later than stage 0. So it keeps that
    forward waiting for max(0, O_k - k (tF + tB)), O_k being the time of its step. A forward that is
    late on one stage is late on all stages behind it."""
    forward, backward, steps = 1.0, 2.0, 4
    buckets = [6 if stage == heavy % ranks else 1 for stage in range(ranks)]
    line = offloaded(
        *copies,
        slots=slots,
        buckets=buckets,
        name=name,
        ranks=ranks,
        microbatches=microbatches,
        steps=steps,
    )
    of_step = [time_of_step(*copies, number, slots) for number in buckets]
    own = [max(0.0, time - k * (forward + backward)) for k, time in enumerate(of_step)]
    delays = list(accumulate(own, max))
    first = {span.task: span.start for span in line.spans if span.task.kind is Kind.FORWARD}
    of_first_stage = ends_of_steps(line, 0, Kind.BACKWARD, microbatches)
    for k in range(ranks):
        backs = ends_of_steps(line, k, Kind.BACKWARD, microbatches)
        stepped = ends_of_steps(line, k, Kind.STEP, microbatches)
        for step in range(steps - 1):
            assert backs[step] == pytest.approx(of_first_stage[step] - k * backward)
            assert stepped[step] - backs[step] == pytest.approx(of_step[k])
            next_one = first[Task(Kind.FORWARD, k, (step + 1) * microbatches)]
            undelayed = of_first_stage[step] + k * forward
            assert next_one - undelayed == pytest.approx(delays[k])
            activation = undelayed + (delays[k - 1] if k else 0.0)
            assert max(0.0, stepped[step] - activation) == pytest.approx(
                max(0.0, own[k] - (delays[k - 1] if k else 0.0))
            )
    without = offloaded(
        0, 0, 0, slots=slots, buckets=1, name=name, ranks=ranks, microbatches=microbatches, steps=4
    )
    assert line.makespan - without.makespan == pytest.approx((steps - 1) * max(own))


def test_the_time_that_is_shown_is_idle_for_copies() -> None:
    line = offloaded(1, 0.5, 0, slots=3, buckets=4, ranks=2, microbatches=4, steps=2)
    assert line.idle(COPIES)[0] == 4 * 1 + 0.5 - 4 * 0.5, "the steps themselves are no pause"
    assert line.idle() == pytest.approx(
        [sum(line.idle(cause)[rank] for cause in CAUSES) for rank in range(2)]
    )


def test_what_runs_beside_occupies_no_rank() -> None:
    work = offloaded(0, 1, 0, slots=3, buckets=2, ranks=2, microbatches=8, steps=3)
    slow = offloaded(0, 1, 5, slots=3, buckets=2, ranks=2, microbatches=8, steps=3)
    assert slow.idle() == work.idle(), "its stores are hidden under the next step"
    assert slow.makespan == work.makespan
    assert slow.span == work.span
    assert slow.utilisation == work.utilisation


def test_stores_that_are_longer_than_a_step_hold_the_next_fetch() -> None:
    fast, slow = (
        offloaded(0, 0, store, slots=2, buckets=2, microbatches=2, steps=3) for store in (1, 10)
    )
    assert slow.makespan > fast.makespan == 3 * 2 * 3
    ends = {str(span.task): span.end for span in slow.spans}
    starts = {str(span.task): span.start for span in slow.spans}
    assert starts["fetch0.1"] == ends["store0.0/1"]
    assert ends["B0.3"] < starts["fetch0.1"]


def test_a_barrier_does_not_wait_for_stores_and_the_last_ones_are_in_the_timeline() -> None:
    job = Job(Linear(2), policy_by_name("1f1b"), 8, slots=2)
    lines = [
        simulate(job, Costs(state=1.0, copies_out=out), steps=3, barrier=True, buckets=2)
        for out in (float("inf"), 0.5)
    ]
    assert lines[0].makespan == lines[1].makespan
    for line in lines:
        assert sum(span.task.kind is Kind.STORE for span in line.spans) == 2 * 3 * 2


def test_each_bucket_is_reduced_and_stepped_by_itself() -> None:
    job = Job(Linear(2), policy_by_name("1f1b"), 4, replicas=2, slots=3)
    line = simulate(job, Costs(reduce=1.0, step=0.5, state=1.0), steps=2, buckets=(1, 3))
    for kind in (Kind.REDUCE, Kind.FETCH, Kind.STEP, Kind.STORE):
        assert sum(span.task.kind is kind for span in line.spans) == 2 * (1 + 3) * 2


@pytest.mark.parametrize("buckets", [0, (1, 2), (1, 0, 1)])
def test_buckets_are_those_of_the_stages(buckets: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="buckets on 3 stages; expected a number for each stage"):
        simulate(Job(Linear(3), policy_by_name("1f1b"), 4), Costs(), buckets=buckets)


def test_a_rank_that_waits_for_the_weights_of_others_waits_for_input() -> None:
    line = offloaded(4, 0, 0, slots=1, buckets=[3, 1], ranks=2, microbatches=2, steps=2)
    assert line.idle(COPIES)[0] == 12
    assert line.idle(INPUT)[1] > line.idle(COPIES)[1]
