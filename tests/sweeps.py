"""A sweep has a case for every policy, size and seed. The quick run takes a few of them.

For the full run a set is made in which every two values of two axes meet (all pairs), and every
second case of it is taken, or all where there are few. The quick run is `scripts/test`, the full
run `scripts/test --full`. The mark `sweep` is on what the quick run leaves out, and `combination`
on what both leave out. The run of all, `scripts/test --all`, takes what is drawn by chance eight
times as often as the full one.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any, TypeVar

import pytest
from hypothesis import settings

FULL = "AXRT_TEST_FULL"  # the environment's variable that says so, to the ranks of jobs too
_MORE = 8  # of what is drawn by chance, in the run of all
_FEW = 8  # cases of a sweep of which the full run takes all
T = TypeVar("T")
U = TypeVar("U")


def is_full() -> bool:
    """All cases are wanted, or this is no run of pytest."""
    return os.environ.get(FULL) != "no"


def swept(*axes: tuple[str, Iterable[Any]], quick: int = 0) -> pytest.MarkDecorator:
    """Give a test every combination of these values; mark all but a few of them `sweep`, and
    `combination` what the full run leaves out.

    The first of the few has the first value of each axis, the second has the second, and so on; an
    axis that is shorter begins again. So the quick run has every value of every axis.

    Args:
        axes: each a name, or names with commas between, and its values, as parametrize takes them.
        quick: how many are kept. 0 is the length of the longest axis. Fewer are for values that
            are alike, such as seeds.
    """
    names = [name.strip() for of, _ in axes for name in of.split(",")]
    lists = [[value if "," in of else (value,) for value in values] for of, values in axes]
    lengths = tuple(len(values) for values in lists)
    kept = places_on_a_diagonal(lengths, quick)
    of_pairs = all_pairs(lengths, frozenset(kept))
    if len(of_pairs) > _FEW:
        of_pairs = every_second(of_pairs, lengths) | kept
    cases = []
    for places in product(*map(range, lengths)):
        of_case = [
            each for values, place in zip(lists, places, strict=True) for each in values[place]
        ]
        marks = [pytest.mark.sweep] * (places not in kept)
        marks += [pytest.mark.combination] * (places not in of_pairs)
        cases.append(pytest.param(*of_case, marks=marks))
    return pytest.mark.parametrize(names, cases)


def first(cases: Iterable[Any], quick: int = 1, full: int | None = None) -> list[Any]:
    """What parametrize takes: the quick run keeps the first `quick`, and the others are marked
    `sweep`; the full run keeps the first `full`, or all, and the others are marked `combination`
    too."""
    found = []
    for place, case in enumerate(cases):
        marks = [pytest.mark.sweep] * (place >= quick)
        marks += [pytest.mark.combination] * (full is not None and place >= full)
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return found


def places_on_a_diagonal(lengths: Sequence[int], count: int = 0) -> set[tuple[int, ...]]:
    """Combinations, by place, that together have every place of every axis, if there are enough."""
    return {tuple(number % length for length in lengths) for number in range(count or max(lengths))}


@cache
def all_pairs(
    lengths: tuple[int, ...], first: frozenset[tuple[int, ...]]
) -> frozenset[tuple[int, ...]]:
    """Few combinations, by place, those of `first` among them, such that every two places of two
    axes are in one of them; all, where there are two axes or fewer."""
    every = list(product(*map(range, lengths)))
    if len(lengths) <= 2:
        return frozenset(every)
    chosen = set(first)
    left = {pair for places in every for pair in _pairs(places)}
    left -= {pair for places in first for pair in _pairs(places)}
    while left:
        best = max(every, key=lambda places: sum(pair in left for pair in _pairs(places)))
        chosen.add(best)
        left.difference_update(_pairs(best))
    return frozenset(chosen)


def every_second(
    chosen: Collection[tuple[int, ...]], lengths: tuple[int, ...]
) -> frozenset[tuple[int, ...]]:
    """Half of some combinations: of each value of the longest axis every second one, beginning with
    the first and the second in turn, so that the other axes keep theirs."""
    longest = lengths.index(max(lengths))
    kept: set[tuple[int, ...]] = set()
    for place in range(lengths[longest]):
        kept.update(sorted(one for one in chosen if one[longest] == place)[place % 2 :: 2])
    return frozenset(kept)


def _pairs(places: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(combinations(enumerate(places), 2))


def examples(full: int, quick: int) -> settings:
    """So many examples of hypothesis in the full run, and so many in the quick one."""
    return settings(max_examples=draws(full, quick), deadline=None)


def draws(full: int, quick: int) -> int:
    """So many draws by chance in the full run, and so many in the quick one."""
    return fewer(full * _MORE if os.environ.get(FULL) == "all" else full, quick)


def fewer(full: int, quick: int) -> int:
    """So many, of steps to train for example, in the full run, and so many in the quick one."""
    return full if is_full() else quick


def partners(outer: Sequence[T], inner: Sequence[U]) -> list[tuple[T, list[U]]]:
    """What two loops within a test go through: each value of the outer one with those of the inner
    one that it meets. In the run of all it meets all of them; otherwise there are as many pairs as
    the longer list has values, and each value is in one."""
    if os.environ.get(FULL, "all") == "all":
        return [(one, list(inner)) for one in outer]
    pairs = max(len(outer), len(inner))
    return [
        (one, [inner[at % len(inner)] for at in range(place, pairs, len(outer))])
        for place, one in enumerate(outer)
    ]


def some(values: Collection[T], quick: Collection[T]) -> Collection[T]:
    """What a loop within a test goes through: all values, or in the quick run a few of them."""
    assert set(quick) <= set(values), f"{quick} are not among {values}"
    return values if is_full() else quick
