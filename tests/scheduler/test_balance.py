"""Cuts of weights are held to every other cut there is."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.placement import Linear, Looped, Placement, Vee
from axrt.scheduler.planning.balance import balanced, busiest, evened


@given(st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(any), st.integers(1, 10))
def test_no_cut_is_better_than_the_balanced_one(weights: list[int], stages: int) -> None:
    if stages > len(weights):
        return
    cuts = balanced(weights, stages)
    assert cuts[0] == 0
    assert cuts[-1] == len(weights)
    assert all(a < b for a, b in pairwise(cuts))
    assert heaviest(weights, cuts) == min(
        heaviest(weights, other) for other in all_cuts(len(weights), stages)
    )


def heaviest(weights: list[int], cuts: list[int]) -> int:
    return max(sum(weights[a:b]) for a, b in pairwise(cuts))


def all_cuts(layers: int, stages: int, first: int = 0) -> list[list[int]]:
    if stages == 1:
        return [[first, layers]]
    return [
        [first, *rest]
        for cut in range(first + 1, layers - stages + 2)
        for rest in all_cuts(layers, stages - 1, cut)
    ]


@given(
    st.lists(st.integers(0, 9), min_size=6, max_size=12).filter(any),
    st.sampled_from([Vee(2), Vee(3), Looped(3, 2), Linear(4)]),
)
def test_no_cut_that_moves_makes_the_busiest_rank_less_busy(
    weights: list[int], placement: Placement
) -> None:
    held = [placement.stages_of(rank) for rank in range(placement.ranks)]
    begun = balanced(weights, placement.stages)
    cuts = evened(weights, begun, held)
    assert busiest(weights, cuts, held) <= busiest(weights, begun, held)
    for one in range(1, placement.stages):
        for at in range(cuts[one - 1] + 1, cuts[one + 1]):
            moved = [*cuts[:one], at, *cuts[one + 1 :]]
            assert busiest(weights, moved, held) >= busiest(weights, cuts, held)
