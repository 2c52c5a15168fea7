"""Cuts into stages, and layouts within a stage, are held to every other choice there is."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.planning.cuts import CostOf, Cuts, CutStage, MemberCost, best_cuts
from axrt.scheduler.planning.layouts import Layouts, best_layouts

from ..sweeps import examples, fewer

DEGREES = (1, 2, 4, 8)
MOST_LAYERS, MOST_RANKS = 6, 8
SPANS = (1, 6, 99)
LAYOUTS = ("columns", "context", "samples", "whole", "experts")

Table = Mapping[tuple[int, int, int], MemberCost | None]


def table_of(seed: int) -> Table:
    """Costs of all runs of layers at all degrees, of which some cannot be."""
    draw = random.Random(seed)
    span = draw.choice(SPANS)
    return {
        (first, end, degree): drawn_cost(draw, span) if draw.random() < 0.9 else None
        for first in range(MOST_LAYERS)
        for end in range(first + 1, MOST_LAYERS + 1)
        for degree in DEGREES
    }


def drawn_cost(draw: random.Random, span: int) -> MemberCost:
    """Whole numbers, whose sums are exact in any order. Of few there are many that are equal."""
    fixed, kept = draw.randint(0, min(span, 6)), draw.randint(0, min(span, 3))
    return MemberCost(float(draw.randint(0, span)), fixed, kept)


seeds = st.integers(0, 2**32)
rooms = st.integers(0, 12) | st.just(inf)
some_degrees = st.sets(st.sampled_from(DEGREES), min_size=1).map(tuple)
cases = (
    seeds.map(table_of),
    st.integers(1, MOST_LAYERS),
    st.integers(1, MOST_RANKS),
    some_degrees,
    st.integers(1, 7),
    rooms,
)


@given(*cases)
@examples(1000, quick=200)
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


def test_none_is_better_where_a_smaller_sum_has_a_slower_stage() -> None:
    """Ranks that share a layer are slower together than one by one, and no two runs of layers take
    the same time: there are many limits to try, and few may be dropped."""
    for seed in range(fewer(500, 100)):
        draw = random.Random(seed)
        table = {
            (first, end, degree): MemberCost(
                float(int((end - first) * draw.randint(50, 99) / degree**0.5)), 0, 0
            )
            for first, end, degree in table_of(0)
        }
        microbatches = draw.randint(2, 6)
        found = best_cuts(cost_in(table), MOST_LAYERS, MOST_RANKS, DEGREES, microbatches, inf)
        ways = all_cuts(table, MOST_LAYERS, MOST_RANKS, DEGREES, microbatches, inf)
        assert found == min(ways, key=better_cuts), seed


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
@examples(300, quick=60)
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


def test_of_steps_that_are_as_long_one_with_fewest_stages_wins() -> None:
    # 1 + 1 + 5 and once 5; 4 + 4 and once 4
    seconds = {(0, 1, 1): 1, (1, 2, 1): 1, (2, 3, 2): 5, (0, 1, 2): 4, (1, 3, 2): 4}
    assert cut_in(seconds) == Cuts((CutStage(0, 1, 2), CutStage(1, 3, 2)), 12)
    # 2 + 3 + 3 and once 3, which is found before 3 + 4 and once 4; 2 + 5 and once 5 takes longer
    seconds = {(0, 1, 2): 2, (1, 2, 1): 3, (2, 3, 1): 3, (1, 3, 2): 5, (0, 2, 2): 3, (2, 3, 2): 4}
    assert cut_in(seconds) == Cuts((CutStage(0, 2, 2), CutStage(2, 3, 2)), 11)


def test_of_steps_that_are_as_long_one_with_the_earliest_cut_wins() -> None:
    # 1 + 5 and once 5, which is found first; 3 + 4 and once 4
    seconds = {(0, 2, 2): 1, (2, 3, 2): 5, (0, 1, 2): 3, (1, 3, 2): 4}
    assert cut_in(seconds) == Cuts((CutStage(0, 1, 2), CutStage(1, 3, 2)), 11)


def cut_in(seconds: Mapping[tuple[int, int, int], float]) -> Cuts | None:
    """A step of 2 microbatches, of three layers on four ranks."""

    def cost_of(first: int, end: int, degree: int) -> MemberCost | None:
        takes = seconds.get((first, end, degree))
        return None if takes is None else MemberCost(takes, 0, 0)

    return best_cuts(cost_of, 3, 4, (1, 2), 2, inf)


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


@pytest.mark.parametrize("microbatches", [1, 16])
def test_each_cost_is_asked_for_once_and_few_limits_are_tried(microbatches: int) -> None:
    """There are 2,112 runs of layers and degrees, and about as many limits: a table for each takes
    some ten million sums."""
    asked = []

    def cost_of(first: int, end: int, degree: int) -> MemberCost:
        asked.append((first, end, degree))
        layers = range(first, end)
        seconds = sum(1 + (7 * layer % 11) / 16 for layer in layers) / degree**0.875
        return MemberCost(Counted(seconds), len(layers) // degree, len(layers) // degree)

    Counted.sums = 0
    found = best_cuts(cost_of, 32, 16, (8, 4, 2, 1, 2, 32), microbatches, 60.0)
    assert found is not None
    assert len(asked) == len({*asked}) == 32 * 33 // 2 * 4
    assert Counted.sums < 300_000


@given(seeds, st.integers(0, 5), st.integers(0, 3), st.integers(0, 40) | st.just(inf))
@examples(1000, quick=300)
def test_no_layouts_are_better_than_those_that_are_found(
    seed: int, layers: int, in_flight: int, room: float
) -> None:
    draw = random.Random(seed)
    span = draw.choice(SPANS)
    costs = [
        {
            name: drawn_cost(draw, span)
            for name in draw.sample(LAYOUTS, draw.choice([0, 1, 2, 2, 3, 3]))
        }
        for _ in range(layers)
    ]
    joints = {
        (layer, *names): draw.choice([0.0, 1.0, 2.0, 5.0, inf])
        for layer in range(layers - 1)
        for names in product(LAYOUTS, repeat=2)
    }

    def between(layer: int, one: str, other: str) -> float:
        return joints[layer, one, other]

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


def test_of_layouts_that_are_as_quick_one_with_fewest_bytes_wins_and_then_the_first() -> None:
    alike = {"whole": MemberCost(1.0, 2, 1), "columns": MemberCost(1.0, 1, 2)}
    assert names_of([alike, alike], joint=0.0) == ("whole", "whole")
    assert names_of([alike | {"samples": MemberCost(1.0, 1, 1)}], joint=0.0) == ("samples",)


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
