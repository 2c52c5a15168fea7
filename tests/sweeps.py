"""A sweep has a case for every policy, size and seed. The default run makes a few of them.

The default run is `scripts/test`, the full run `scripts/test --full`. For the full run a set is
drawn in which every two values of two axes meet (all pairs), and half of it is made, or all where
there are few; these cases have the mark `sweep`. The seed AXRT_TEST_SEED, which is 0 unless set,
draws others. Of a test that is named by its id there is what the full run makes.
"""

import os
import random
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, islice, product
from typing import Any, TypeVar

import pytest
from hypothesis import settings

FULL = "AXRT_TEST_FULL"  # the environment's variable that says so, to the ranks of jobs too
SEED = "AXRT_TEST_SEED"
_FEW = 8  # cases of a sweep of which the full run takes all
_TRIES = 20  # cases of which the one with most new pairs is taken
T = TypeVar("T")
U = TypeVar("U")
Places = tuple[int, ...]  # of a case: the place of its value on each axis


def is_full() -> bool:
    """More than the default run's cases are wanted, or this is no run of pytest."""
    return os.environ.get(FULL) != "no"


def swept(*axes: tuple[str, Iterable[Any]], quick: int = 0) -> pytest.MarkDecorator:
    """Give a test combinations of these values: few in the default run, more in the full one, where
    what is added has the mark `sweep`.

    The first of the few has the first value of each axis, the second has the second, and so on; an
    axis that is shorter begins again. So the default run has every value of every axis.

    Args:
        axes: each a name, or names with commas between, and its values, as parametrize takes them.
        quick: how many the default run has. 0 is the length of the longest axis. Fewer are for
            values that are alike, such as seeds.
    """
    names = [name.strip() for of, _ in axes for name in of.split(",")]
    lists = [[value if "," in of else (value,) for value in values] for of, values in axes]
    lengths = tuple(len(values) for values in lists)
    kept = places_on_a_diagonal(lengths, quick)
    cases = []
    for places in sorted(drawn(lengths, kept) if is_full() else kept):
        values = [
            each for listed, place in zip(lists, places, strict=True) for each in listed[place]
        ]
        spelled = "-".join(
            _spelled(each, f"{of.replace(', ', '_')}{place}")
            for (of, _), listed, place in zip(axes, lists, places, strict=True)
            for each in listed[place]
        )
        marks = [pytest.mark.sweep] * (places not in kept)
        cases.append(pytest.param(*values, marks=marks, id=spelled))
    return pytest.mark.parametrize(names, cases)


def _spelled(value: Any, otherwise: str) -> str:
    """A value in the id of a case, which is the same one in every run."""
    if isinstance(value, str | int | float | None):
        return str(value)
    return getattr(value, "__name__", otherwise)


def first(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """What parametrize takes: the first cases alone in the default run; in the full one all, the
    others with the mark `sweep`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.sweep] * (place >= quick),
        )
        for place, case in enumerate(cases if is_full() else islice(cases, quick))
    ]


def places_on_a_diagonal(lengths: Sequence[int], count: int = 0) -> set[Places]:
    """Combinations, by place, that together have every place of every axis, if there are enough."""
    return {tuple(number % length for length in lengths) for number in range(count or max(lengths))}


def drawn(lengths: Places, kept: Collection[Places]) -> set[Places]:
    """What the full run takes: these, and a half of the others in which all pairs meet; or all."""
    draw = random.Random(f"{os.environ.get(SEED, '0')} {lengths}")
    others = sorted(all_pairs(lengths, kept, draw) - {*kept})
    if len(others) + len(kept) > _FEW:
        others = draw.sample(others, len(others) // 2)
    return {*kept, *others}


def all_pairs(lengths: Places, kept: Collection[Places], draw: random.Random) -> set[Places]:
    """Few combinations, by place, with those that are kept among them, such that every two places
    of two axes are in one of them; all, where there is one axis."""
    if len(lengths) == 1:
        return {(place,) for place in range(lengths[0])}
    pairs = [
        ((one, at), (other, there))
        for one, other in combinations(range(len(lengths)), 2)
        for at, there in product(range(lengths[one]), range(lengths[other]))
    ]
    draw.shuffle(pairs)
    chosen, met = {*kept}, {pair for places in kept for pair in _pairs(places)}
    for pair in pairs:
        if pair not in met:
            tries = [_with(pair, lengths, draw) for _ in range(_TRIES)]
            best = max(tries, key=lambda places: sum(each not in met for each in _pairs(places)))
            chosen.add(best)
            met.update(_pairs(best))
    return chosen


def _pairs(places: Places) -> list[tuple[tuple[int, int], ...]]:
    return list(combinations(enumerate(places), 2))


def _with(pair: Iterable[tuple[int, int]], lengths: Places, draw: random.Random) -> Places:
    """A case with two given places; the others are drawn."""
    given = dict(pair)
    return tuple(given.get(axis, draw.randrange(length)) for axis, length in enumerate(lengths))


def examples(full: int, quick: int) -> settings:
    """So many examples of hypothesis in the full run, and so many in the default one."""
    return settings(max_examples=fewer(full, quick), deadline=None)


def fewer(full: int, quick: int) -> int:
    """So many, of steps to train for example, in the full run, and so many in the default one."""
    return full if is_full() else quick


def partners(outer: Sequence[T], inner: Sequence[U]) -> list[tuple[T, list[U]]]:
    """What two loops within a test go through: each value of the outer one with those of the inner
    one that it meets. On a GPU it meets all of them; otherwise there are as many pairs as the
    longer list has values, and each value is in one."""
    if os.environ.get(FULL, "all") == "all":
        return [(one, list(inner)) for one in outer]
    pairs = max(len(outer), len(inner))
    return [
        (one, [inner[at % len(inner)] for at in range(place, pairs, len(outer))])
        for place, one in enumerate(outer)
    ]


def some(values: Collection[T], quick: Collection[T]) -> Collection[T]:
    """What a loop within a test goes through: all values, or in the default run a few of them."""
    assert set(quick) <= set(values), f"{quick} are not among {values}"
    return values if is_full() else quick
