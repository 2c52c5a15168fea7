"""Tests beside one fault: they run in one process of pytest until one fails, hangs, or time is up.

A test hangs when it takes over ten times what it took without a fault, and over half a minute. Then
all that the trial has started is ended: a mark in its environment tells it from other processes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from . import chosen

_MARK = "MUTATION_TRIAL"
_LOOK_S = 0.25
_HANG_FACTOR = 10.0
_START_S = 300.0  # until the first test: imports and collection, on a busy machine
SCRIPTS = Path(__file__).resolve().parents[1]


class Outcome(StrEnum):
    FOUND = "found"
    HUNG = "hung"
    SURVIVED = "survived"
    TIME_RAN_OUT = "time ran out"
    NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Limits:
    """How long the tests of one fault may take.

    Args:
        cpu_s: seconds of the processor, from the first test on; looked at after each test.
        wall_s: seconds of the clock.
        hang_s: seconds of the clock that every test may take, however short it is without a fault.
    """

    cpu_s: float = 60.0
    wall_s: float = 900.0
    hang_s: float = 30.0


@dataclass(frozen=True)
class Ended:
    """How a trial ended.

    Args:
        outcome: how.
        test: test that failed or hung, if one did.
        words: end of what it said.
        tests: how many tests ran.
        cpu_s: what they took.
    """

    outcome: Outcome
    test: str = ""
    words: str = ""
    tests: int = 0
    cpu_s: float = 0.0


def environment(tree: Path, **more: str) -> dict[str, str]:
    """Of tests in a copy of the project: also processes that they start import the copy."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "MUTATION_", "AXRT_TEST_"))
    }
    return {**kept, "PYTHONPATH": f"{tree}:{SCRIPTS}", "OMP_NUM_THREADS": "1", **more}


def run(tree: Path, tests: Sequence[str], usual_s: Mapping[str, float], limits: Limits) -> Ended:
    """Run tests in a copy of the project.

    Args:
        tree: the copy.
        tests: ids, in the order in which they are to run.
        usual_s: seconds that each takes without a fault.
        limits: when to stop.
    """
    mark = f"{os.getpid()}-{tree.name}-{time.monotonic_ns()}"
    beside = tree.with_name(f"{tree.name}.trial")
    beside.mkdir(exist_ok=True)
    log, order = beside / "log.jsonl", beside / "order.json"
    log.write_text("")
    order.write_text(json.dumps({"tests": tests, "cpu_s": limits.cpu_s, "log": str(log)}))
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    plugins = ("-p", "mutation.chosen", "-p", "no:cacheprovider")
    told = {chosen.FILE: str(order), _MARK: mark}
    with (beside / "said").open("w") as said:
        pytest = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", *plugins, *files],
            cwd=tree,
            env=environment(tree, **told),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            stopped = _watch(pytest, log, usual_s, limits)
        finally:
            end_all(mark)
            pytest.wait()
    return _ended(log, stopped, pytest.returncode, (beside / "said").read_text(errors="replace"))


def _watch(
    pytest: "subprocess.Popen[bytes]", log: Path, usual_s: Mapping[str, float], limits: Limits
) -> Outcome | None:
    """Wait for its end; what must end it, if something must."""
    began_s, first_s = time.time(), 0.0
    while pytest.poll() is None:
        time.sleep(_LOOK_S)
        now_s = time.time()
        last = next((event for event in reversed(_events(log)) if "began" in event), None)
        if last is None:
            if now_s - began_s > _START_S:
                return Outcome.HUNG
            continue
        first_s = first_s or now_s
        patience_s = max(limits.hang_s, _HANG_FACTOR * usual_s.get(last["began"], 0.0))
        if now_s - last["at_s"] > patience_s:
            return Outcome.HUNG
        if now_s - first_s > limits.wall_s:
            return Outcome.TIME_RAN_OUT
    return None


def _events(log: Path) -> list[dict[str, Any]]:
    whole = log.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _ended(log: Path, stopped: Outcome | None, code: int, said: str) -> Ended:
    events = _events(log)
    began = [str(event["began"]) for event in events if "began" in event]
    cpu_s = max((float(event["cpu_s"]) for event in events if "cpu_s" in event), default=0.0)
    failed = next((event for event in events if "failed" in event), None)
    if failed is not None:
        words = str(failed["words"])
        return Ended(Outcome.FOUND, str(failed["failed"]), words, len(began), cpu_s)
    last = began[-1] if began else "collection"
    if stopped is not None:
        return Ended(stopped, last if stopped is Outcome.HUNG else "", "", len(began), cpu_s)
    if any("limit" in event for event in events):
        return Ended(Outcome.TIME_RAN_OUT, "", "", len(began), cpu_s)
    if code in (0, 5):  # 5: none of the tests is there
        return Ended(Outcome.SURVIVED, "", "", len(began), cpu_s)
    return Ended(Outcome.FOUND, last, said[-chosen.WORDS :], len(began), cpu_s)


def end_all(mark: str) -> None:
    """End all processes whose environment has this mark."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}\0".encode() in (folder / "environ").read_bytes() + b"\0":
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it has ended, or is somebody else's
            continue
