"""The route of optimizer steps beside a host."""

import pytest

from axrt.scheduler.routes import Route, StepCosts, routes


def fastest(costs: StepCosts, buckets: int = 16) -> Route:
    return routes(costs, buckets, rooms=3)[0]


def test_a_fast_device_behind_slow_copies_leaves_steps_to_the_host() -> None:
    assert fastest(StepCosts(8, 0.1, 8, 2, 1, 2)).offload == "cpu"


def test_a_slow_host_behind_fast_copies_leaves_steps_to_the_device() -> None:
    assert fastest(StepCosts(1, 0.1, 1, 0.5, 9, 0.5)).offload == "stream"


def test_two_sides_that_are_as_fast_share_steps() -> None:
    found, *others = routes(StepCosts(0.1, 2, 0.1, 0.1, 2, 0.1), 16, rooms=3)
    assert (found.offload, found.host_share) == ("hybrid", 0.5)
    alone = [route.seconds for route in others if route.offload != "hybrid"]
    assert found.seconds < 0.6 * min(alone)


def test_one_bucket_has_one_side() -> None:
    assert {route.offload for route in routes(StepCosts(1, 1, 1, 1, 1, 1), 1, 3)} == {
        "stream",
        "cpu",
    }


@pytest.mark.parametrize("buckets", [1, 5, 64])
def test_the_time_is_that_of_a_line_of_three(buckets: int) -> None:
    """Of each route: the slowest of three, and once the others; `test_offload.py` has the
    formula."""
    of = {route.offload: route for route in routes(StepCosts(1, 3, 1, 1, 4, 1), buckets, 3)}
    assert of["stream"].seconds == pytest.approx(3 * buckets, rel=0.7 if buckets == 1 else 0.2)
    assert of["cpu"].seconds == pytest.approx(4 * buckets, rel=0.7 if buckets == 1 else 0.2)


def test_many_buckets_take_as_much_longer() -> None:
    costs = StepCosts(1, 3, 1, 1, 4, 1)
    few, many = (
        {(route.offload, route.host_share): route.seconds for route in routes(costs, count, 3)}
        for count in (64, 640)
    )
    assert all(many[which] == pytest.approx(10 * took) for which, took in few.items())
