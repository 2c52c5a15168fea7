"""What the quick run leaves out, and what it never does."""

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from .sweeps import FULL, all_pairs, every_second, first, partners, places_on_a_diagonal, swept

TESTS = Path(__file__).resolve().parent


def test_the_quick_run_has_every_value_of_every_axis() -> None:
    for lengths in product(range(1, 8), repeat=3):
        kept = places_on_a_diagonal(lengths)
        assert len(kept) <= len(list(product(*map(range, lengths))))
        for axis, length in enumerate(lengths):
            assert {places[axis] for places in kept} == set(range(length))


def quick(cases: Any) -> list[Any]:
    return [case.values for case in cases if not case.marks]


def test_a_sweep_has_all_combinations_and_marks_those_that_the_quick_run_leaves_out() -> None:
    names, cases = swept(("pipe, data", [(1, 2), (3, 4), (5, 6)]), ("policy", "ab")).mark.args
    assert names == ["pipe", "data", "policy"]
    assert len(cases) == 6
    assert quick(cases) == [(1, 2, "a"), (3, 4, "b"), (5, 6, "a")]
    assert {mark.name for case in cases for mark in case.marks} == {"sweep"}
    assert quick(swept(("seed", range(9)), quick=2).mark.args[1]) == [(0,), (1,)]


def test_in_all_pairs_every_two_values_of_two_axes_meet() -> None:
    lengths = (3, 8, 3, 2)
    found = all_pairs(lengths, frozenset(places_on_a_diagonal(lengths)))
    for one, other in combinations(range(4), 2):
        met = {(places[one], places[other]) for places in found}
        assert met == set(product(range(lengths[one]), range(lengths[other])))
    assert len(found) < 40 < 3 * 8 * 3 * 2
    _, cases = swept(*[(name, range(3)) for name in "abcd"]).mark.args
    marks = [{mark.name for mark in case.marks} for case in cases]
    assert len(marks) == 81
    assert {"combination"} not in marks, "the full run has what the quick one has"
    assert marks.count({"sweep", "combination"}) > 70


def test_the_full_run_takes_half_of_many_cases_and_all_of_few() -> None:
    def taken(*axes: tuple[str, Any]) -> int:
        _, cases = swept(*axes).mark.args
        return sum(all(mark.name != "combination" for mark in case.marks) for case in cases)

    assert taken(("policy", range(4)), ("ranks", range(2))) == 8
    many = taken(("policy", range(20)), ("ranks", range(3)), ("seed", "ab"))
    assert 20 * 3 / 2 <= many <= 20 * 3 / 2 + 20 / 2


def test_half_of_a_sweep_still_has_every_value_of_every_axis() -> None:
    for lengths in ((3, 18, 3), (4, 16), (4, 18), (6, 16)):
        pairs = all_pairs(lengths, frozenset(places_on_a_diagonal(lengths)))
        found = every_second(pairs, lengths)
        assert abs(len(found) - len(pairs) / 2) <= 1
        for axis, length in enumerate(lengths):
            assert {places[axis] for places in found} == set(range(length))


def test_a_loop_has_each_value_and_in_the_run_of_all_each_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FULL, "yes")
    assert partners("abc", (1, 2)) == [("a", [1]), ("b", [2]), ("c", [1])]
    assert partners("ab", (1, 2, 3)) == [("a", [1, 3]), ("b", [2])]
    for of_all in ("all", None):
        monkeypatch.setenv(FULL, of_all) if of_all else monkeypatch.delenv(FULL)
        assert partners("ab", (1, 2)) == [("a", [1, 2]), ("b", [1, 2])]


def test_of_a_list_the_first_are_kept() -> None:
    def marked(*cases: Any) -> list[tuple[Any, list[str]]]:
        return [(case.values, [mark.name for mark in case.marks]) for case in cases]

    assert marked(*first([1, 2, 3], quick=2)) == [((1,), []), ((2,), []), ((3,), ["sweep"])]
    assert marked(*first([(1, "a"), (2, "b")])) == [((1, "a"), []), ((2, "b"), ["sweep"])]
    of_all = marked(*first("abc", quick=1, full=2))
    assert [marks for _, marks in of_all] == [[], ["sweep"], ["sweep", "combination"]]


def test_no_test_is_left_out_whole_but_long_trainings_under_attack() -> None:
    """On a cluster the quick run has two jobs, and test_rules.py the rest with stand-ins. A storm
    trains for half a minute; the quick run has each kind of fault by itself. A type checker reads
    all of torch. The tutorial is a dozen commands, which the quick run reads and does not start."""
    marked = {
        file.relative_to(TESTS).as_posix()
        for file in TESTS.rglob("test_*.py")
        if "\n@pytest.mark.sweep" in file.read_text()
    }
    assert marked == {
        "slurm/test_pretrain.py",
        "attacks/test_storm.py",
        "test_package.py",
        "docs/test_tutorial.py",
    }
