"""Steps on the host: the moves of a rank, what holds in any order of events, and the time that they
take."""

from itertools import pairwise

import pytest

from axrt.scheduler.bucket import copies_by_pipe
from axrt.scheduler.job import Job
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import NAMES, policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.refusals import IllegalMove
from axrt.scheduler.rules import OnDevice
from axrt.scheduler.simulation.costs import Costs, Work
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.task import Kind, Task

from ..sweeps import fewer, swept
from . import pipelines
from .pipelines import Pipeline, run_in_random_order
from .test_offload import COMPUTE, IN, OUT, finish, lacks, microbatch, run, start, time_of_step

HOST = OnDevice.HOST


def state_of(slots: int, buckets: int = 2, clips: bool = False) -> RankState:
    """One rank, whose only microbatch of step 0 has gone forward and back."""
    job = Job(Linear(1), policy_by_name("1f1b"), 1, votes=clips, host_slots=slots)
    copies = {0: [copies_by_pipe(0, bucket, 1) for bucket in range(buckets)]}
    state = RankState(job, 0, buckets=copies)
    state.ask_step()
    microbatch(state, 0)
    return state


def test_one_bucket_steps_while_the_next_leaves_and_the_last_comes_back() -> None:
    state = state_of(slots=3, buckets=3)
    for bucket in ("", "/1", "/2"):
        run(state, COMPUTE, f"scale0.0{bucket}")
    run(state, OUT, "unload0.0")
    start(state, HOST, "hoststep0.0")
    start(state, OUT, "unload0.0/1")
    finish(state, "hoststep0.0")
    start(state, IN, "load0.0")
    finish(state, "unload0.0/1")
    run(state, HOST, "hoststep0.0/1")
    assert (state.pick(), state.why_idle()) == (None, "copies")
    run(state, OUT, "unload0.0/2")
    run(state, HOST, "hoststep0.0/2")
    finish(state, "load0.0")
    run(state, IN, "load0.0/1")
    assert not state.finished, "weights are not in place"
    run(state, IN, "load0.0/2")
    assert state.finished
    assert state.settled


def test_each_move_waits_for_the_end_of_the_one_before() -> None:
    state = state_of(slots=3, buckets=1)
    chain = (COMPUTE, "scale0.0"), (OUT, "unload0.0"), (HOST, "hoststep0.0"), (IN, "load0.0")
    for (queue, task), (after, _) in pairwise(chain):
        start(state, queue, task)
        assert state.pick(after) is None
        finish(state, task)
    state.ask_step()
    start(state, *chain[-1])
    assert state.microbatch_to_read() is None, "the weights of the next step are not open"
    finish(state, "load0.0")
    assert state.microbatch_to_read() == 1


def test_a_step_waits_for_the_end_of_its_stages_backward() -> None:
    """A bucket may leave with a piece of the backward, which looks at gradients until its end."""
    job = Job(Linear(1), policy_by_name("1f1b"), 1, host_slots=3)
    state = RankState(job, 0, buckets={0: [copies_by_pipe(0, 0, 1)]})
    state.ask_step()
    for message in pipelines.read(state):
        state.deliver(message)
    run(state, COMPUTE, "F0.0")
    start(state, COMPUTE, "B0.0")
    run(state, COMPUTE, "scale0.0")
    run(state, OUT, "unload0.0")
    assert state.pick(HOST) is None
    assert "hoststep0.0 lacks B" in lacks(state)
    finish(state, "B0.0")
    run(state, HOST, "hoststep0.0")


def test_a_room_is_free_when_its_weights_have_come_back_and_not_before() -> None:
    state = state_of(slots=1)
    run(state, COMPUTE, "scale0.0")
    run(state, COMPUTE, "scale0.0/1")
    run(state, OUT, "unload0.0")
    run(state, HOST, "hoststep0.0")
    start(state, IN, "load0.0")
    assert state.pick(OUT) is None
    assert "unload0.0/1 lacks a slot on the host" in lacks(state)
    with pytest.raises(IllegalMove, match=r"unload0.0/1 cannot start: no slot on the host is free"):
        state.start(Task.parse("unload0.0/1"))
    finish(state, "load0.0")
    assert str(state.pick(OUT)) == "unload0.0/1"


def test_a_gradient_leaves_while_a_vote_is_awaited_and_the_step_waits_for_it() -> None:
    state = state_of(slots=1, buckets=1, clips=True)
    run(state, COMPUTE, "norm0.0")
    run(state, COMPUTE, "scale0.0")
    run(state, OUT, "unload0.0")
    assert state.pick(HOST) is None
    assert "hoststep0.0 lacks vote" in lacks(state)
    run(state, COMPUTE, "vote0.0")
    run(state, HOST, "hoststep0.0")


@pytest.mark.parametrize("name", NAMES)
def test_in_any_order_of_events_nobody_gets_stuck(name: str) -> None:
    """`SlotWatch` looks at every task."""
    for seed in range(fewer(16, quick=6)):
        pipeline = Pipeline(
            policy_by_name(name),
            *(2, 4),
            steps=3,
            buckets=2,
            replicas=1 + seed % 2,
            clips=seed % 3 == 0,
            host_slots=3 if seed % 3 == 1 else 1,
            shards=seed % 4 > 1,
            room=seed % 8 // 4,
            tied=seed % 5 == 0,
        )
        run_in_random_order(pipeline, seed)
        assert all(state.finished and state.settled for state in pipeline.states)


def test_steps_have_one_side() -> None:
    with pytest.raises(ValueError, match="slots on the device and on the host"):
        Job(Linear(1), policy_by_name("1f1b"), 1, slots=3, host_slots=3)


@swept(
    ("out, step, back", [(1.0, 0.5, 1.5), (0.25, 3.0, 0.25), (2.0, 1.0, 0.0)]),
    ("slots", [1, 2, 3]),
    ("buckets", [1, 4, 6]),
)
def test_the_time_of_a_step_is_that_of_a_line_of_three_with_so_many_rooms(
    out: float, step: float, back: float, slots: int, buckets: int
) -> None:
    """A line as that of offloaded state: gradients out, steps, and weights back, with which it
    ends."""
    inf = float("inf")
    costs = Costs(
        Work(1, 1, 1),
        bucket=1.0,
        copies_out=1 / out,
        copies_in=1 / back if back else inf,
        others={Kind.HOST_STEP: step},
    )
    job = Job(Linear(1), policy_by_name("1f1b"), 1, host_slots=slots)
    line = simulate(job, costs, buckets=buckets)
    ends = {span.task.kind: span.end for span in line.spans}  # of the last one of each kind
    stepped = ends[Kind.HOST_STEP] - ends[Kind.BACKWARD]
    assert stepped == pytest.approx(time_of_step(out, step, back, buckets, slots))
    assert ends[Kind.LOAD] >= ends[Kind.HOST_STEP] + back


def test_forwards_of_the_next_step_wait_for_the_weights_and_backwards_do_not() -> None:
    job = Job(Linear(2), policy_by_name("1f1b"), 4, host_slots=2)
    costs = Costs(bucket=1.0, copies_in=0.5, copies_out=1.0, others={Kind.HOST_STEP: 0.5})
    line = simulate(job, costs, steps=2, buckets=2)
    ends = {str(span.task): span.end for span in line.spans}
    starts = {str(span.task): span.start for span in line.spans}
    assert starts["F0.4"] == ends["load0.0/1"] == ends["B0.3"] + 1 + 0.5 + 2 * 2
