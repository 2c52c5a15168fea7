"""Stashes that leave the device: the moves of a rank, and what its room is worth."""

from dataclasses import replace

import pytest

from axrt.scheduler.job import Job
from axrt.scheduler.lacks import COPIES
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.order import Order
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import AlongPlan, Fixed, policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.refusals import IllegalMove
from axrt.scheduler.rules import OnDevice
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.reader_messages import has_read
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.task import Kind, Task

COMPUTE, IN, OUT = OnDevice.COMPUTE, OnDevice.COPIES_IN, OnDevice.COPIES_OUT


def first_of(ranks: int, held_on_device: int) -> RankState:
    """The first rank under 1f1b, which holds as many microbatches as there are ranks."""
    job = Job(Linear(ranks), policy_by_name("1f1b"), 8, held_on_device=held_on_device)
    state = RankState(job, 0)
    state.ask_step()
    return state


def forward(state: RankState, number: int) -> None:
    for message in has_read(state.job, 0, number):
        if state.is_here(message):
            state.deliver(message)
    run(state, COMPUTE, f"F0.{number}")


def run(state: RankState, queue: OnDevice, task: str) -> None:
    assert str(state.pick(queue)) == task
    state.start(Task.parse(task))
    state.finish(Task.parse(task))


def test_a_rank_with_room_for_all_that_its_policy_holds_has_no_copies() -> None:
    assert first_of(ranks=4, held_on_device=4).queues == (COMPUTE,)
    assert set(first_of(ranks=5, held_on_device=4).queues) == {COMPUTE, IN, OUT}


def test_a_stash_without_a_lasting_room_goes_down_and_comes_back() -> None:
    state = first_of(ranks=5, held_on_device=4)  # of the four places one is lasting
    forward(state, 0)
    assert state.pick(OUT) is None
    forward(state, 1)
    assert (state.held, state.held_on_device) == (2, 2)
    run(state, OUT, "offload0.1")
    assert (state.held, state.held_on_device) == (2, 1)
    run(state, IN, "reload0.1")
    assert (state.held, state.held_on_device) == (2, 2)


def test_a_forward_waits_for_what_goes_down() -> None:
    state = first_of(ranks=5, held_on_device=3)
    forward(state, 0)
    for message in has_read(state.job, 0, 1):
        if state.is_here(message):
            state.deliver(message)
    assert state.pick(COMPUTE) is None
    with pytest.raises(IllegalMove, match=r"F0.1 cannot start: the device has no place"):
        state.start(Task.parse("F0.1"))
    run(state, OUT, "offload0.0")
    assert str(state.pick(COMPUTE)) == "F0.1"


def test_a_backward_waits_for_the_end_of_its_reload_and_says_so() -> None:
    state = first_of(ranks=5, held_on_device=3)
    forward(state, 0)
    run(state, OUT, "offload0.0")
    state.deliver(Message(Meaning.GRADIENT, 0, 0, 0))
    state.start(Task.parse("reload0.0"))
    assert state.pick(COMPUTE) is None
    assert "B0.0 lacks reload" in [str(lack) for lack in state.waiting_for()]
    assert state.why_idle() == COPIES
    state.finish(Task.parse("reload0.0"))
    assert str(state.pick(COMPUTE)) == "B0.0"


def test_a_second_stash_comes_back_when_the_backward_before_it_has_ended() -> None:
    state = first_of(ranks=5, held_on_device=3)
    for number in (0, 1):
        forward(state, number)
        run(state, OUT, f"offload0.{number}")
    run(state, IN, "reload0.0")
    assert state.pick(IN) is None
    with pytest.raises(IllegalMove, match=r"reload0.1 cannot start: the device has no place"):
        state.start(Task.parse("reload0.1"))
    state.deliver(Message(Meaning.GRADIENT, 0, 0, 0))
    run(state, COMPUTE, "B0.0")
    assert str(state.pick(IN)) == "reload0.1"


def test_less_room_than_a_stash_needs_on_its_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r"_activations = 3 with 2 stages a rank; .* least 4"):
        replace(build_schedule("adaptive", 4, 8), held_on_device=3)


def time_of(held: int, on_device: int, copy: float, seed: int) -> tuple[float, int]:
    job = replace(build_schedule("adaptive", 8, 16, max_held=held), held_on_device=on_device)
    costs = Costs(jitter=0.5, offload=copy, reload=copy, seed=seed)
    line = simulate(job, costs, steps=4)
    return line.makespan, max(line.held_on_device)


def test_an_order_whose_weight_gradient_keeps_the_next_stash_out_is_refused() -> None:
    late = "F0.0,F0.1,F0.2,F0.3,I0.0,I0.1,W0.0,W0.1,I0.2,W0.2,I0.3,W0.3\n"
    order = Order.parse(late)
    assert order.weights_in_turn == (False,)
    job = Job(Linear(1), Fixed(order, order.needs), 4)
    with pytest.raises(ValueError, match="weight gradient of rank 0 comes behind the next"):
        replace(job, held_on_device=3)
    in_turn = Order.parse(late.replace("I0.1,W0.0", "W0.0,I0.1"))
    for of in (
        Fixed(in_turn, in_turn.needs),
        Fixed(order.without_weights(), order.needs),
        AlongPlan(order, order.needs, strict=False),
    ):
        simulate(replace(job, policy=of, held_on_device=3), Costs(offload=1, reload=1), steps=2)
    with pytest.raises(ValueError, match="weight gradient of rank 0"):
        replace(job, policy=AlongPlan(order, order.needs), held_on_device=3)


def test_slack_of_three_p_in_the_device_memory_of_two_p_is_most_of_its_gain() -> None:
    """The stash of a rank's layers takes half a forward to copy."""
    for seed in range(2):
        own, most = time_of(0, 0, 0.0, seed)
        slack, _ = time_of(24, 0, 0.0, seed)
        offloaded, on_device = time_of(24, 16, 0.5, seed)
        assert most == on_device + 1 == 16, "one more is gathered on its way down"
        assert own - offloaded > 0.5 * (own - slack) > 0


def test_copies_that_take_long_cost_time_and_not_memory() -> None:
    fast, slow = (time_of(24, 16, copy, 0) for copy in (0.5, 8.0))
    assert slow[0] > 1.3 * fast[0]
    assert slow[1] == fast[1]


def test_what_is_copied_is_in_the_timeline() -> None:
    job = Job(Linear(6), policy_by_name("gpipe"), 6, held_on_device=3)
    line = simulate(job, Costs(offload=0.5, reload=1.0))
    spans = {str(span.task): span for span in line.spans}
    assert spans["reload0.5"].end - spans["reload0.5"].start == 1.0
    assert spans["offload0.5"].end - spans["offload0.5"].start == 0.5
    downs = [span for span in line.spans if span.task.kind is Kind.OFFLOAD]
    assert len(downs) == 6 * 6
