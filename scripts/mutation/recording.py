"""A plugin of pytest that writes down how long each test took and how it ended, at once.

MUTATION_TESTS names the file. A line is an object: `test`, `outcome`, `wall_s`, `cpu_s` (of the
process that ran the test and of what it started and waited for).
"""

import json
import os
from collections.abc import Generator

import pytest

FILE = "MUTATION_TESTS"


class Recording:
    def __init__(self) -> None:
        self._began_cpu_s = 0.0
        self._wall_s: dict[str, float] = {}
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began_cpu_s = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown":
            report.user_properties.append(("cpu_s", round(cpu_s() - self._began_cpu_s, 3)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In the process that says how the run goes; a worker of xdist runs what it reports."""
        if "PYTEST_XDIST_WORKER" in os.environ:
            return
        test = report.nodeid
        self._wall_s[test] = self._wall_s.get(test, 0.0) + report.duration
        if report.outcome != "passed" or report.when == "call":
            self._outcomes.setdefault(test, report.outcome)
        if report.when == "teardown":
            taken = dict(report.user_properties)
            told = {
                "test": test,
                "outcome": self._outcomes.pop(test, "passed"),
                "wall_s": round(self._wall_s.pop(test), 3),
                "cpu_s": taken.get("cpu_s", 0.0),
            }
            with open(os.environ[FILE], "a") as file:
                file.write(json.dumps(told) + "\n")


def cpu_s() -> float:
    return sum(os.times()[:4])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recording(), "mutation-recording")
