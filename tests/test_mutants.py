"""scripts/mutants: what it plants, that the draw stays, and what it says of the tests of a toy."""

import ast
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "scheduler"
TOY = '''
"""A toy."""

_MOST = 3


def larger(one: int, other: int) -> int:
    return one if one > other else other


def capped(value: int) -> int:
    if value > _MOST:
        value = _MOST
    return value


def counted(number: int) -> int:
    found = 0
    while found < number:
        found += 1
    return found


def never_called(value: int) -> int:
    return value + 1
'''
TESTS = """
import subprocess
import sys
from pathlib import Path

from scheduler.toy import capped, counted, larger

RUNS = Path(__file__).parents[2] / "runs"  # beside the copies of the project


def test_the_larger_one():
    assert (larger(1, 2), larger(2, 1)) == (2, 1)


def test_a_process_of_its_own():
    code = "from scheduler.toy import capped; print(capped(3), capped(4))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.stdout == "3 3\\n"


def test_that_counts():
    assert counted(2) == 2


def test_that_fails_but_for_its_first_run():
    capped(9)
    RUNS.touch(exist_ok=False)
"""


WAITS = """
import subprocess
from pathlib import Path
from threading import Event


child = subprocess.Popen(["sleep", "1000"])
Path(__file__).with_name("child").write_text(str(child.pid))


def test_that_waits():
    Event().wait()
"""


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def of(module: str) -> Any:
    return import_module(f"mutation.{module}")


def in_a_function(code: str) -> str:
    return f"def f(a, b, c):\n    {code}\n"


def faults(text: str) -> list[str]:
    """`operator: before -> after` of each."""
    return [
        f"{site.operator}: {site.before} -> {site.after}"
        for site in of("sites").sites_of("file.py", dedent(text))
    ]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("return a < b", ["comparison: a < b -> a <= b"]),
        ("return a is None", ["comparison: a is None -> a is not None"]),
        ("return a + b", ["sign: a + b -> a - b"]),
        ("return -a", ["sign: -a -> a"]),
        ("a += b", ["sign: a += b -> a -= b", "statement dropped: a += b -> pass"]),
        ("return range(a)", ["bound: a -> a - 1"]),
        ("return a[b:c]", ["bound: b -> b + 1", "bound: c -> c - 1"]),
        ("return a and b", ["condition: a and b -> a or b"]),
        ("return b if a else c", ["condition: a -> not a"]),
        ("a()", ["statement dropped: a() -> pass"]),
        ("a.b = c", ["statement dropped: a.b = c -> pass"]),
        ("return a(b, c)", ["arguments swapped: a(b, c) -> a(c, b)"]),
        ("return a(7)", ["constant: 7 -> 8"]),
        ("return a(b=True)", ["constant: True -> False"]),
    ],
)
def test_what_can_be_wrong(code: str, expected: list[str]) -> None:
    text = in_a_function(code)
    assert faults(text) == expected
    for site in of("sites").sites_of("file.py", text):
        changed = of("site").edited(text, [site.edit])
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        in_a_function('raise ValueError(f"{a + 1} of {b}, 3")'),
        in_a_function("a: list[1] = b"),
        in_a_function('return "a" + b'),
        in_a_function("return folder / a"),
        in_a_function("assert a < 3"),
        "def f(a=3): ...\n",
        "class A:\n    b = 3\n",
        "class A(Protocol):\n    def f(self):\n        return 3\n",
        "def __repr__(self):\n    return self.a + 3\n",
        "if TYPE_CHECKING:\n    a(3)\n",
    ],
)
def test_what_says_nothing_is_left_out(text: str) -> None:
    assert [one for one in faults(text) if "raise" not in one] == []


def test_a_number_of_the_module_counts_where_a_function_reads_it() -> None:
    assert faults("A = 3\nB = 4\n\n\ndef f():\n    return B\n") == ["constant: 4 -> 5"]


def test_faults_and_all_probes_of_a_folder_leave_code_with_as_many_lines() -> None:
    for path in of("draw").files_of(ROOT, "axrt/workers"):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        sites = of("sites").sites_of(name, text)
        made = [of("site").edited(text, [site.edit]) for site in sites[::5]]
        made.append(of("probes").probed(text, sites, "folder"))
        for code in made:
            ast.parse(code)
            assert code.count("\n") == text.count("\n")


def test_the_draw_stays_while_other_code_changes() -> None:
    before = of("sites").sites_of("toy.py", TOY)
    changed = TOY.replace("def larger", "def added(one):\n    return one * 2 + 1\n\n\ndef larger")
    changed = changed.replace("_MOST = 3", "# The most of all.\n_MOST = 3")
    after = of("sites").sites_of("toy.py", changed)
    added = {site.key for site in after if site.function == "added"}
    drawn = [
        [site.key for site in of("draw").drawn({"": sites}, len(sites), 7)[""]]
        for sites in (before, after)
    ]
    assert drawn[0] == [key for key in drawn[1] if key not in added]
    assert len(added) == len(after) - len(before) == 4


def test_another_seed_draws_others() -> None:
    sites = {"": of("sites").sites_of("toy.py", TOY)}
    first, second = (of("draw").drawn(sites, 5, seed)[""] for seed in (1, 2))
    assert len(first) == len(second) == 5
    assert first != second


def test_each_folder_gives_its_share_and_no_small_one_is_left_out() -> None:
    sizes = {"large": 900, "small": 90, "tiny": 3}
    assert of("draw").quotas(sizes, 100) == {"large": 80, "small": 17, "tiny": 3}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    root = tmp_path / "toy"
    for folder in ("scheduler", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "scheduler" / "__init__.py").touch()  # a package, before any other of this name
    (root / "scheduler" / "toy.py").write_text(TOY)
    (root / "tests" / "test_toy.py").write_text(TESTS)
    return root


def ends(measurement: Any) -> Iterator[str]:
    for result in measurement.results().values():
        test = result.ended.test.rpartition("::")[-1]
        yield f"{result.ended.outcome}: {result.before} -> {result.after}" + f", {test}" * bool(
            test
        )


def test_a_fault_is_found_by_a_test_that_reaches_it(toy: Path, tmp_path: Path) -> None:
    """Also by one whose process starts another. A test that fails without the fault finds none."""
    wanted = ("value > _MOST -> value >= _MOST", "3 -> 4", "value + 1 -> value - 1")
    every = of("draw").all_sites(toy, [FOLDER])[FOLDER]
    sites = {FOLDER: [one for one in every if f"{one.before} -> {one.after}" in wanted]}
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    measurement = of("measure").Measurement(toy, tmp_path / "out", suite)
    limits = of("trial").Limits()
    measurement.probe(sites[FOLDER])
    measurement.plant(sites, measurement.choice(), limits, 2)
    unfit = measurement.confirm(measurement.choice(), limits)
    assert unfit == {"tests/test_toy.py::test_that_fails_but_for_its_first_run"}
    measurement.forget(unfit)
    measurement.plant(sites, measurement.choice(unfit), limits, 2)
    assert sorted(ends(measurement)) == [
        "found: 3 -> 4, test_a_process_of_its_own",
        "not reached: value + 1 -> value - 1",
        "survived: value > _MOST -> value >= _MOST",
    ]


def test_a_test_that_hangs_is_ended_with_all_that_it_has_started(toy: Path) -> None:
    (toy / "tests" / "test_toy.py").write_text(WAITS)
    ended = trial(toy, ["test_that_waits"], hang_s=0.5)
    assert (str(ended.outcome), ended.test) == ("hung", "tests/test_toy.py::test_that_waits")
    child = int((toy / "tests" / "child").read_text())
    until_s = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def is_running(process: int) -> bool:
    """It is there, and no zombie."""
    try:
        return ") Z" not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


def test_time_that_has_run_out_is_no_fault_found(toy: Path) -> None:
    ended = trial(toy, ["test_that_counts", "test_the_larger_one"], cpu_s=-1.0)
    assert (str(ended.outcome), ended.tests) == ("time ran out", 1)


def trial(root: Path, names: list[str], **limits: float) -> Any:
    tests = [f"tests/test_toy.py::{name}" for name in names]
    return of("trial").run(root, tests, {}, of("trial").Limits(**limits))


def test_a_report_has_shares_and_what_changes_nothing_apart() -> None:
    def result(key: str, outcome: str) -> Any:
        of_site = (key, FOLDER, f"{key}.py:3", "f", "sign", f"{key} + 1", f"{key} - 1")
        ended = of("trial").Ended(of("trial").Outcome(outcome), "test_it" * (outcome == "found"))
        return of("measure").Result(*of_site, 5, ended, 1.0)

    outcomes = ("found", "hung", "survived", "time ran out", "not reached", "survived")
    results = [result(f"k{place}", outcome) for place, outcome in enumerate(outcomes)]
    page = of("report").report(results, {"k5": "it is never read"}, "Took 3 s.", "5 tests.")
    assert "| scheduler | 5 | 2 | 1 | 40% | 1 |" in page
    missed, _, alike = page.partition("## Change nothing")
    assert [key for key in ("k2", "k3", "k4", "k5") if f"`{key} + 1`" in missed] == [
        *("k2", "k3", "k4"),
    ]
    assert "`k5 + 1` -> `k5 - 1` (k5): it is never read" in alike
