"""The measurement: the run with probes, then every fault beside its tests, then what they found is
confirmed on code without a fault. What is known is written at once, so that a run can go on later.

In the folder of a measurement:

    probed.json    the sites whose probes were planted, and how long that run took
    tests.jsonl    the tests of the run with probes, and what each took
    reached/       which of them reached which site
    results.jsonl  a line a fault
    report.md      what it shows
"""

import json
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from . import probes, recording
from .choice import Choice, read_tests
from .site import Site
from .tree import copied, planted
from .trial import Ended, Limits, Outcome, environment, run

_FIRST = 12  # tests of the first round: most faults are found there, and few files are collected


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    Args:
        key, place, function, operator, before, after: the site.
        folder: folder that it was drawn from.
        candidates: how many tests could find it.
        ended: how the trial ended.
        wall_s: seconds that it took.
    """

    key: str
    folder: str
    place: str
    function: str
    operator: str
    before: str
    after: str
    candidates: int
    ended: Ended
    wall_s: float

    @property
    def is_found(self) -> bool:
        return self.ended.outcome in (Outcome.FOUND, Outcome.HUNG)

    def line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> "Result":
        told = json.loads(line)
        ended = {**told.pop("ended")}
        return cls(**told, ended=Ended(**{**ended, "outcome": Outcome(ended["outcome"])}))


class Measurement:
    """One measurement of what the tests of a project find.

    Args:
        root: the project.
        out: folder of the measurement.
        suite: command that runs the tests, in a copy of the project.
    """

    def __init__(self, root: Path, out: Path, suite: Sequence[str]) -> None:
        self._root, self._out, self._suite = root, out, suite
        out.mkdir(parents=True, exist_ok=True)

    def probe(self, sites: Sequence[Site]) -> None:
        """Run the suite on a copy with probes, unless that has been done for these sites."""
        done, keys = self._out / "probed.json", sorted(site.key for site in sites)
        if done.exists() and set(keys) <= set(json.loads(done.read_text())["keys"]):
            return
        began_s = time.monotonic()
        tree, reached = copied(self._root, self._out / "tree-probed"), self._out / "reached"
        for old in reached.glob("*"):
            old.unlink()
        tests = self._out / "tests.jsonl"
        tests.write_text("")
        probes.plant(tree, sites, reached)
        told = {recording.FILE: str(tests), "PYTEST_ADDOPTS": "-p mutation.recording"}
        with (self._out / "suite.log").open("w") as log:
            environ = environment(tree, **told)
            subprocess.run(self._suite, cwd=tree, env=environ, stdout=log, stderr=log)
        took_s = round(time.monotonic() - began_s)
        done.write_text(json.dumps({"keys": keys, "took_s": took_s}))

    def choice(self, unfit: Collection[str] = ()) -> Choice:
        """The tests for each site, without those that are unfit."""
        tests = read_tests(self._out / "tests.jsonl")
        return Choice(self._root, tests, probes.read(self._out / "reached"), unfit)

    def took(self) -> str:
        """How long it took, in words; a measurement may have gone on later."""
        suite_s = json.loads((self._out / "probed.json").read_text())["took_s"]
        faults_s = sum(result.wall_s for result in self.results().values())
        return (
            f"The run with probes took {suite_s / 60:.0f} minutes, and the faults"
            f" {faults_s / 60:.0f} minutes of one worker's time."
        )

    def results(self) -> dict[str, Result]:
        """What is known by now, by the keys of the sites."""
        file = self._out / "results.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return {result.key: result for result in map(Result.read, lines)}

    def plant(
        self, drawn: Mapping[str, Sequence[Site]], choice: Choice, limits: Limits, workers: int
    ) -> None:
        """Try every fault that has no result yet, several at a time, each in a copy of its own."""
        known = self.results()
        left = [(folder, site) for folder, of in drawn.items() for site in of]
        left = [(folder, site) for folder, site in left if site.key not in known]
        trees: SimpleQueue[Path] = SimpleQueue()
        for tree in self._trees(workers if left else 0):
            trees.put(tree)

        def tried(folder: str, site: Site) -> None:
            tree = trees.get()
            try:
                self._write(_tried(tree, folder, site, choice, limits))
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(workers) as pool:
            for done in [pool.submit(tried, *one) for one in left]:
                done.result()

    def confirm(self, choice: Choice, limits: Limits) -> set[str]:
        """Run the tests that found a fault on code without one; those that fail there."""
        found = [result.ended.test for result in self.results().values() if result.is_found]
        left = sorted({test for test in found if test in choice.tests})
        (tree,), unfit = self._trees(1), set[str]()
        usual_s = {name: choice.usual_s(name) for name in left}
        all_s = 10 * len(left) * limits.wall_s
        while left:
            ended = run(tree, left, usual_s, Limits(all_s, all_s))
            if ended.outcome is Outcome.SURVIVED:
                break
            unfit.add(ended.test)
            left = left[left.index(ended.test) + 1 :]
        return unfit

    def forget(self, finders: Collection[str]) -> None:
        """Faults that these tests found have no result."""
        kept = [one for one in self.results().values() if one.ended.test not in finders]
        (self._out / "results.jsonl").write_text("".join(f"{one.line()}\n" for one in kept))

    def _trees(self, number: int) -> list[Path]:
        return [copied(self._root, self._out / f"tree-{place}") for place in range(number)]

    def _write(self, result: Result) -> None:
        with (self._out / "results.jsonl").open("a") as file:
            file.write(result.line() + "\n")
        change = f"{result.before} -> {result.after}"
        print(f"{result.ended.outcome:14} {result.place}  {change}", flush=True)


def _tried(tree: Path, folder: str, site: Site, choice: Choice, limits: Limits) -> Result:
    """Plant a fault and run its tests: a few, then the others."""
    began_s, tests = time.monotonic(), choice.tests_for(site.key)
    usual_s = {name: choice.usual_s(name) for name in tests}
    ended = Ended(Outcome.SURVIVED if choice.is_reached(site.key) else Outcome.NOT_REACHED)
    left = tests
    with planted(tree, site):
        while left and ended.outcome is Outcome.SURVIVED:
            some = left[:_FIRST] if left is tests else left
            within = replace(limits, cpu_s=limits.cpu_s - ended.cpu_s)
            now, passed = _run_twice(tree, some, usual_s, within)
            left = left[passed:]
            ended = replace(
                now, tests=now.tests + ended.tests, cpu_s=round(now.cpu_s + ended.cpu_s, 2)
            )
    return Result(
        site.key,
        folder,
        site.place,
        site.function,
        site.operator,
        site.before,
        site.after,
        len(tests),
        ended,
        round(time.monotonic() - began_s, 1),
    )


def _run_twice(
    tree: Path, tests: Sequence[str], usual_s: Mapping[str, float], limits: Limits
) -> tuple[Ended, int]:
    """Run tests, and one that hangs once more: the machine may have stood still. Returns how it
    ended and how many of the tests are done."""
    ended = run(tree, tests, usual_s, limits)
    if ended.outcome is not Outcome.HUNG or ended.test not in tests:
        return ended, len(tests)
    again = run(tree, [ended.test], usual_s, limits)
    taken = replace(again, tests=ended.tests, cpu_s=ended.cpu_s + again.cpu_s)
    return taken, tests.index(ended.test) + 1
