"""Cuts into stages, and layouts within a stage, are held to every other choice there is."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.planning.cuts import CostOf, Cuts, CutStage, MemberCost, best_cuts
from axrt.scheduler.planning.layouts import Layouts, best_layouts

from ..sweeps import examples

DEGREES = (1, 2, 4, 8)
MOST_LAYERS, MOST_RANKS = 6, 8
LAYOUTS = ("columns", "context", "samples", "whole", "experts")

# Numbers are small and whole: many steps are equally long, and sums are exact in any order.
member_costs = st.builds(
    MemberCost, st.integers(0, 6).map(float), st.integers(0, 6), st.integers(0, 3)
)
runs = [
    (first, end, degree)
    for first in range(MOST_LAYERS)
    for end in range(first + 1, MOST_LAYERS + 1)
    for degree in DEGREES
]
Table = Mapping[tuple[int, int, int], MemberCost | None]
tables: st.SearchStrategy[Table] = st.lists(
    st.none() | member_costs, min_size=len(runs), max_size=len(runs)
).map(lambda costs: dict(zip(runs, costs, strict=True)))
rooms = st.integers(0, 14) | st.just(inf)
some_degrees = st.sets(st.sampled_from(DEGREES), min_size=1).map(tuple)
cases = (
    tables,
    st.integers(1, MOST_LAYERS),
    st.integers(1, MOST_RANKS),
    some_degrees,
    st.integers(1, 7),
    rooms,
)


@given(*cases)
@examples(400, quick=100)
def test_no_way_to_cut_a_model_is_better_than_the_one_that_is_found(
    table: Table,
    layers: int,
    ranks: int,
    degrees: Sequence[int],
    microbatches: int,
    room: float,
) -> None:
    found = best_cuts(cost_in(table), layers, ranks, degrees, microbatches, room)
    ways = list(all_cuts(table, layers, ranks, degrees, microbatches, room))
    assert found == min(ways, key=better_cuts, default=None)
    for stages in range(1, layers + 2):
        found = best_cuts(cost_in(table), layers, ranks, degrees, microbatches, room, stages)
        of = [way for way in ways if len(way.stages) == stages]
        assert found == min(of, key=better_cuts, default=None)


def cost_in(table: Table) -> CostOf:
    return lambda first, end, degree: table[first, end, degree]


def better_cuts(cuts: Cuts) -> tuple[float, int, Sequence[CutStage]]:
    return cuts.seconds, len(cuts.stages), cuts.stages


def all_cuts(
    table: Table, layers: int, ranks: int, degrees: Sequence[int], microbatches: int, room: float
) -> Iterator[Cuts]:
    """Every way to cut that fits, one by one."""
    for count in range(1, layers + 1):
        teams = [of for of in product(degrees, repeat=count) if sum(of) == ranks]
        for inner in combinations(range(1, layers), count - 1):
            for team in teams:
                ends = pairwise([0, *inner, layers])
                stages = [CutStage(*of, degree) for of, degree in zip(ends, team, strict=True)]
                costs = [table[stage] for stage in stages]
                if seconds := seconds_of(costs, microbatches, room):
                    yield Cuts(tuple(stages), seconds[0])


def seconds_of(
    costs: Sequence[MemberCost | None], microbatches: int, room: float
) -> tuple[float] | None:
    seconds = []
    for stage, cost in enumerate(costs):
        if cost is None:
            return None
        in_flight = len(costs) - stage
        if in_flight > microbatches:
            in_flight = microbatches
        if cost.fixed + in_flight * cost.kept > room:
            return None
        seconds.append(cost.seconds)
    return (sum(seconds) + (microbatches - 1) * max(seconds),)


@given(*cases)
@examples(150, quick=30)
def test_more_room_or_another_degree_is_never_slower_and_a_microbatch_more_is_never_quicker(
    table: Table,
    layers: int,
    ranks: int,
    degrees: Sequence[int],
    microbatches: int,
    room: float,
) -> None:
    cost_of = cost_in(table)
    takes = duration(best_cuts(cost_of, layers, ranks, degrees, microbatches, room))
    assert duration(best_cuts(cost_of, layers, ranks, degrees, microbatches, room + 1)) <= takes
    assert duration(best_cuts(cost_of, layers, ranks, degrees, microbatches + 1, room)) >= takes
    assert duration(best_cuts(cost_of, layers, ranks, DEGREES, microbatches, room)) <= takes


def duration(cuts: Cuts | None) -> float:
    return inf if cuts is None else cuts.seconds


def test_a_step_is_the_sum_of_all_stages_and_the_slowest_once_for_every_other_microbatch() -> None:
    """The drawing in cuts.py; and one as Alpa has it, where the third of four is the slowest."""
    assert cut([1, 2, 1], ranks=3, microbatches=4) == ([1, 2], 1 + 2 + 1 + 3 * 2)
    assert cut([2, 1, 3, 2], ranks=4, microbatches=3) == ([1, 2, 3], 2 + 1 + 3 + 2 + 2 * 3)


def test_many_microbatches_want_equal_stages_and_few_want_a_small_sum() -> None:
    """Two ranks take 0.75 of the time of one. With one microbatch only the sum counts, and of the
    cuts that are equal the earliest one wins."""
    seconds = [4, 4, 4, 4]
    assert cut(seconds, ranks=4, microbatches=1, degrees=(1, 2)) == ([1], 12)
    assert cut(seconds, ranks=4, microbatches=8, degrees=(1, 2)) == ([1, 2, 3], 16 + 7 * 4)


def test_the_first_stage_keeps_most_so_tight_bytes_give_it_fewest_layers() -> None:
    """1f1b: of 3 stages the first keeps 3 microbatches; each keeps a byte a layer."""
    assert cut([1] * 6, ranks=3, microbatches=3, room=6) == ([2, 4], 6 + 2 * 2)
    assert cut([1] * 6, ranks=3, microbatches=3, room=5) == ([1, 3], 6 + 2 * 3)
    assert cut([1] * 6, ranks=3, microbatches=3, room=4) == ([1, 3], 6 + 2 * 3)
    assert cut([1] * 6, ranks=3, microbatches=2, room=4) == ([2, 4], 6 + 1 * 2)
    assert cut([1] * 6, ranks=3, microbatches=3, room=3) is None


def cut(
    seconds: Sequence[float],
    ranks: int,
    microbatches: int,
    degrees: Sequence[int] = (1,),
    room: float = inf,
) -> tuple[list[int], float] | None:
    """Where later stages begin, and the duration. A layer keeps one byte a microbatch, and two
    ranks take 0.75 of the time of one."""

    def cost_of(first: int, end: int, degree: int) -> MemberCost:
        return MemberCost(sum(seconds[first:end]) * 0.75 ** (degree - 1), 0, end - first)

    found = best_cuts(cost_of, len(seconds), ranks, degrees, microbatches, room)
    return found and ([stage.first for stage in found.stages[1:]], found.seconds)


@pytest.mark.parametrize("none", ["layers", "ranks", "microbatches", "stages", "degrees"])
def test_a_number_below_one_is_refused(none: str) -> None:
    good = {"layers": 2, "ranks": 2, "degrees": (1, 2), "microbatches": 2, "stages": 2}
    bad = good | {none: (0, 1) if none == "degrees" else 0}
    with pytest.raises(ValueError, match="expected 1 or more of each"):
        best_cuts(lambda *of: MemberCost(1.0, 0, 0), room=inf, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [inf, float("nan")])
def test_seconds_that_are_no_number_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="layers 0 to 0 on 2 ranks take"):
        best_cuts(lambda *of: MemberCost(seconds, 0, 0), 1, 2, [2], 1, inf)


class Counted(float):
    """Seconds that count how often they are added."""

    sums = 0

    def __add__(self, other: float) -> float:
        Counted.sums += 1
        return float(self) + other


def test_each_cost_is_asked_for_once_and_few_limits_are_tried() -> None:
    """There are 2,112 runs of layers and degrees, and about as many limits: a table for each takes
    some ten million sums."""
    asked = []

    def cost_of(first: int, end: int, degree: int) -> MemberCost:
        asked.append((first, end, degree))
        layers = range(first, end)
        seconds = sum(1 + (7 * layer % 11) / 16 for layer in layers) / degree**0.875
        return MemberCost(Counted(seconds), len(layers) // degree, len(layers) // degree)

    Counted.sums = 0
    found = best_cuts(cost_of, 32, 16, DEGREES, 16, 60.0)
    assert found is not None
    assert len(asked) == len({*asked}) == 32 * 33 // 2 * 4
    assert Counted.sums < 300_000


layer_costs = st.dictionaries(st.sampled_from(LAYOUTS), member_costs, max_size=4)
joint_seconds = st.sampled_from([0.0, 1.0, 2.0, 5.0, inf])
joints = st.lists(joint_seconds, min_size=29, max_size=29)


@given(
    st.lists(layer_costs, max_size=5), joints, st.integers(0, 3), st.integers(0, 40) | st.just(inf)
)
@examples(500, quick=150)
def test_no_layouts_are_better_than_those_that_are_found(
    costs: Sequence[Mapping[str, MemberCost]], drawn: list[float], in_flight: int, room: float
) -> None:
    def between(layer: int, one: str, other: str) -> float:
        return drawn[(7 * layer + 5 * LAYOUTS.index(one) + LAYOUTS.index(other)) % len(drawn)]

    ways = []
    for order, names in enumerate(product(*costs)):
        chosen = [of[name] for of, name in zip(costs, names, strict=True)]
        seconds = sum(cost.seconds for cost in chosen)
        for layer, (one, other) in enumerate(pairwise(names)):
            seconds += between(layer, one, other)
        fixed, kept = sum(cost.fixed for cost in chosen), sum(cost.kept for cost in chosen)
        held = fixed + in_flight * kept
        if seconds < inf and held <= room:
            ways.append((seconds, held, order, Layouts(names, MemberCost(seconds, fixed, kept))))
    expected = min(ways)[-1] if ways else None
    assert best_layouts(costs, between, in_flight, room) == expected


def test_the_quickest_layouts_are_a_shortest_path() -> None:
    """The drawing in layouts.py, and a joint that is too dear."""
    columns, samples = ([2, 2, 9], [5, 5, 1])
    costs = [
        {"columns": MemberCost(one, 0, 0), "samples": MemberCost(other, 0, 0)}
        for one, other in zip(columns, samples, strict=True)
    ]
    assert names_of(costs, joint=3.0) == ("columns", "columns", "samples")
    assert names_of(costs, joint=4.0) == ("columns", "columns", "samples")
    assert names_of(costs, joint=7.0) == ("samples", "samples", "samples")
    assert names_of([*costs, {}], joint=0.0) is None
    assert names_of([], joint=0.0) == ()


def names_of(costs: Sequence[Mapping[str, MemberCost]], joint: float) -> tuple[str, ...] | None:
    """The layouts, where a joint between two that differ takes so long."""

    def between(_: int, one: str, other: str) -> float:
        return 0.0 if one == other else joint

    found = best_layouts(costs, between)
    return found and found.names


def test_layers_that_are_alike_are_laid_out_in_tight_bytes_however_many_they_are() -> None:
    """Each of 60 layers that is slow saves 2 bytes: 20 of them must be."""
    costs = [{"quick": MemberCost(1.0, 1, 2), "slow": MemberCost(2.0, 1, 0)}] * 60
    found = best_layouts(costs, lambda *of: 0.0, in_flight=1, room=140)
    assert found is not None
    assert found == Layouts(("quick",) * 40 + ("slow",) * 20, MemberCost(80.0, 60, 80))


def test_the_cost_of_layers_that_are_laid_out_is_that_of_a_stage() -> None:
    """A whole layer fits one rank only in the last stage, which keeps one microbatch."""
    of_degree = {1: {"whole": MemberCost(2.0, 3, 2)}, 2: {"columns": MemberCost(1.5, 1, 1)}}

    def cost_of(first: int, end: int, degree: int) -> MemberCost | None:
        found = best_layouts([of_degree[degree]] * (end - first), lambda *of: 0.25)
        return found and found.cost

    found = best_cuts(cost_of, 3, 3, [1, 2], 2, 6.0)
    assert found == Cuts((CutStage(0, 2, 2), CutStage(2, 3, 1)), 3.25 + 2.0 + 3.25)
