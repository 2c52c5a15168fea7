"""A plugin of pytest that runs the tests it is given in the order given, and tells how it goes.

MUTATION_CHOSEN names a file with an object: `tests`, `cpu_s` (the limit, from the first test on),
`log` (the file that it tells, a line an event: `began`, `failed` with `words`, `ended`, `limit`).
Arguments of pytest stay files, since one that names a test would select cases that the default run
leaves out.
"""

import json
import os
import time
from pathlib import Path

import pytest

from .recording import cpu_s

FILE = "MUTATION_CHOSEN"
WORDS = 2000  # characters of a failure that are kept


class Chosen:
    def __init__(self, tests: list[str], limit_cpu_s: float, log: Path) -> None:
        self._place = {test: place for place, test in enumerate(tests)}
        self._limit_cpu_s, self._log = limit_cpu_s, log
        self._began_cpu_s: float | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(kept, key=lambda item: self._place[item.nodeid])
        self._tell(collected=len(items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._began_cpu_s is None:
            self._began_cpu_s = cpu_s()
        self._tell(began=nodeid, at_s=time.time())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell(failed=report.nodeid, words=report.longreprtext[-WORDS:])

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        taken_s = cpu_s() - (self._began_cpu_s or 0.0)
        self._tell(ended=item.nodeid, cpu_s=taken_s)
        if taken_s > self._limit_cpu_s:
            self._tell(limit=item.nodeid)
            item.session.shouldstop = "the limit of time"

    def _tell(self, **event: object) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps(event) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    told = json.loads(Path(os.environ[FILE]).read_text())
    chosen = Chosen(told["tests"], told["cpu_s"], Path(told["log"]))
    config.pluginmanager.register(chosen, "mutation-chosen")
