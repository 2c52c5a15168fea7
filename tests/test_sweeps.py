"""What the default run leaves out, and what it never does."""

import random
import re
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from .sweeps import FULL, SEED, all_pairs, drawn, first, partners, places_on_a_diagonal, swept

TESTS = Path(__file__).resolve().parent


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL, "yes")
    monkeypatch.delenv(SEED, raising=False)


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL, "no")


def cases(found: pytest.MarkDecorator) -> list[Any]:
    return list(found.mark.args[1])


def values(of: Any, marked: bool | None = None) -> list[Any]:
    return [case.values for case in of if marked in (None, bool(case.marks))]


def test_the_default_run_has_every_value_of_every_axis() -> None:
    for lengths in product(range(1, 8), repeat=3):
        kept = places_on_a_diagonal(lengths)
        assert len(kept) <= len(list(product(*map(range, lengths))))
        for axis, length in enumerate(lengths):
            assert {places[axis] for places in kept} == set(range(length))


@pytest.mark.usefixtures("default")
def test_the_default_run_makes_no_case_that_it_does_not_take() -> None:
    axes: Any = (("pipe, data", [(1, 2), (3, 4), (5, 6)]), ("policy", "ab"))
    assert swept(*axes).mark.args[0] == ["pipe", "data", "policy"]
    assert sorted(values(cases(swept(*axes)), marked=False)) == [
        (1, 2, "a"),
        (3, 4, "b"),
        (5, 6, "a"),
    ]
    assert values(cases(swept(*axes)), marked=True) == []
    assert values(cases(swept(("seed", range(9)), quick=2))) == [(0,), (1,)]
    assert values(first([(1, "a"), (2, "b")])) == [(1, "a")]


@pytest.mark.usefixtures("full")
def test_the_full_run_has_more_and_marks_it() -> None:
    found = cases(swept(("pipe, data", [(1, 2), (3, 4), (5, 6)]), ("policy", "ab")))
    assert len(found) == 6
    assert sorted(values(found, marked=False)) == [(1, 2, "a"), (3, 4, "b"), (5, 6, "a")]
    assert {mark.name for case in found for mark in case.marks} == {"sweep"}
    listed = first([1, 2, 3], quick=2)
    assert values(listed, marked=False) == [(1,), (2,)]
    assert values(listed, marked=True) == [(3,)]


def test_a_case_has_the_same_name_in_both_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    of_each = {}
    for run in ("no", "yes"):
        monkeypatch.setenv(FULL, run)
        found = cases(swept(("model", [first, drawn]), ("keys", [{}, {"a": 1}]), ("on", [True])))
        of_each[run] = {str(case.id): case.values for case in found}
    assert of_each["no"].items() <= of_each["yes"].items()
    assert set(of_each["no"]) == {"first-keys0-True", "drawn-keys1-True"}


def test_in_all_pairs_every_two_values_of_two_axes_meet() -> None:
    lengths = (3, 8, 3, 2)
    found = all_pairs(lengths, places_on_a_diagonal(lengths), random.Random(0))
    assert found >= places_on_a_diagonal(lengths)
    for one, other in combinations(range(4), 2):
        met = {(places[one], places[other]) for places in found}
        assert met == set(product(range(lengths[one]), range(lengths[other])))
    assert len(found) < 50 < 3 * 8 * 3 * 2


@pytest.mark.usefixtures("full")
def test_the_full_run_draws_half_of_many_pairs_by_a_seed_and_takes_all_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(cases(swept(("policy", range(4)), ("ranks", range(2))))) == 8
    assert len(cases(swept(("policy", range(9))))) == 9
    many: Any = (("policy", range(20)), ("ranks", range(3)), ("seed", "ab"))
    found = values(cases(swept(*many)))
    assert 20 + 20 * 2 / 2 <= len(found) <= 20 + 20 * 3 / 2
    assert found == values(cases(swept(*many)))
    monkeypatch.setenv(SEED, "1")
    others = values(cases(swept(*many)))
    assert set(others) != set(found)
    assert set(others) & set(found) >= set(values(cases(swept(*many)), marked=False))


def test_a_loop_has_each_value_and_on_a_gpu_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL, "yes")
    assert partners("abc", (1, 2)) == [("a", [1]), ("b", [2]), ("c", [1])]
    assert partners("ab", (1, 2, 3)) == [("a", [1, 3]), ("b", [2])]
    for of_all in ("all", None):
        monkeypatch.setenv(FULL, of_all) if of_all else monkeypatch.delenv(FULL)
        assert partners("ab", (1, 2)) == [("a", [1, 2]), ("b", [1, 2])]


def test_no_test_is_left_out_whole_but_some_that_take_long() -> None:
    """Each is the long or the real form of what the default run has: Slurm beside stand-ins, a
    storm beside single faults, a tutorial that is read, ways beside a few of them, a plan made anew
    beside one that is followed, an end that another one has for a hundredth of its price, layers
    that a compiler really makes, the whole effort of a choice of plans, an imported model on teams
    beside its layers on teams, an example that learns beside its first step, and plans of eight
    ranks beside those of two to four."""
    marked = {
        file.relative_to(TESTS).as_posix()
        for file in TESTS.rglob("test_*.py")
        if re.search(r"^(@|pytestmark = )pytest\.mark\.(long|sweep)\b", file.read_text(), re.M)
    }
    assert marked == {
        "slurm/test_pretrain.py",
        "network/test_two_hosts.py",
        "models/test_alexnet.py",
        "scheduler/test_planner.py",
        "attacks/test_storm.py",
        "test_package.py",
        "docs/test_tutorial.py",
        "engine/test_compile.py",
        "scheduler/test_plan_choice.py",
        "gpu/test_gpu.py",
        "device/test_device.py",
        "mpi/test_failures.py",
        "mpi/test_runs.py",
        "mpi/test_commands.py",
        "models/test_hugging_face.py",
    }
