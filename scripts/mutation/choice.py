"""Which tests are run beside a fault, and in which order.

Those that reached its site come first, the fastest first: by classes of which each takes twice as
long as the one before, and within a class a few of each file in turn, since tests of one file look
at the same things. Then, of files whose tests share what they look at (a job under mpirun, a run of
a fixture), the others: the first of them that ran made it, and only that one is known to have
reached the site.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SHARES = re.compile(r"@cache\b|scope=\"(module|session)\"|import .*\bsaid\b")
# They read code as text, and would find any change of it.
_READ_CODE = ("tests/device/test_device.py::test_every_fault_that_is_planted_has_its_place",)
_SHORTEST_S = 0.1  # a class of its own
_IN_TURN = 4  # tests of a file


@dataclass(frozen=True)
class Test:
    """A test of the run with probes.

    Args:
        outcome: how it ended there; only one that passed can find a fault.
        wall_s, cpu_s: what it took.
    """

    outcome: str
    wall_s: float
    cpu_s: float


def read_tests(file: Path) -> dict[str, Test]:
    rows = map(json.loads, file.read_text().splitlines())
    return {row["test"]: Test(row["outcome"], row["wall_s"], row["cpu_s"]) for row in rows}


class Choice:
    """The tests of a suite, and which of them go with which site.

    Args:
        root: where the tests are.
        tests: by id.
        reached: the tests that reached each site, as probes tell it.
        unfit: tests that are not to be run.
    """

    def __init__(
        self,
        root: Path,
        tests: Mapping[str, Test],
        reached: Mapping[str, Iterable[str]],
        unfit: Collection[str] = (),
    ) -> None:
        self.tests = {
            name: test
            for name, test in tests.items()
            if test.outcome == "passed" and name not in (*unfit, *_READ_CODE)
        }
        self._reached = {key: set(map(_id, names)) for key, names in reached.items()}
        files = {name.partition("::")[0] for name in tests}
        self._sharing = {file for file in files if _SHARES.search((root / file).read_text())}
        self._longest_s: dict[str, float] = defaultdict(float)
        for name, test in tests.items():
            self._longest_s[_file(name)] = max(self._longest_s[_file(name)], test.wall_s)

    def tests_for(self, key: str) -> list[str]:
        """The ids of the tests to run beside the fault at this site, in order."""
        direct = self._reached.get(key, set()) & set(self.tests)
        shared = {_file(name) for name in self._reached.get(key, ())} & self._sharing
        others = {name for name in self.tests if _file(name) in shared} - direct
        return [*self._in_order(direct), *self._in_order(others)]

    def usual_s(self, name: str) -> float:
        """What a test takes at most: any of a file may be the one that makes what they share."""
        own_s = self.tests[name].wall_s
        return max(own_s, self._longest_s[_file(name)]) if _file(name) in self._sharing else own_s

    def is_reached(self, key: str) -> bool:
        """Something reached the site, if only at import."""
        return key in self._reached

    def _in_order(self, names: Iterable[str]) -> list[str]:
        before: Counter[tuple[int, str]] = Counter()
        places = {}
        for name in sorted(names, key=lambda name: (self.tests[name].cpu_s, name)):
            takes_s = max(self.tests[name].cpu_s, _SHORTEST_S)
            of_class = (math.ceil(math.log2(takes_s)), _file(name))
            places[name] = (of_class[0], before[of_class] // _IN_TURN, _file(name))
            before[of_class] += 1
        return sorted(places, key=places.__getitem__)


def _id(told: str) -> str:
    """`tests/test_a.py::test_b (call)` without its phase."""
    return re.sub(r" \((setup|call|teardown)\)$", "", told)


def _file(name: str) -> str:
    return name.partition("::")[0]
