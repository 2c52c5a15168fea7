"""A process that makes one plan, and what asks it. It reads costs, and prints the plan: null where
none is faster than what is followed.

A thread would hold up the rank that asks, since Python runs one at a time.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from tempfile import TemporaryFile
from typing import Any

from axrt.exit_codes import Exit
from axrt.plan_from_costs import AT_START, BRIEF, SentPlan
from axrt.scheduler.job import Job
from axrt.scheduler.longest import Kept
from axrt.scheduler.model_costs import LEAST_JITTER
from axrt.scheduler.placement import placement_by_name
from axrt.scheduler.plan_choice import job_along_plan, takes
from axrt.scheduler.planner import World
from axrt.scheduler.schedules import build_schedule
from axrt.scheduler.simulator import Costs, Edge, Work
from axrt.step_prediction import AS_FAST


def planned(asked: dict[str, Any]) -> SentPlan | None:
    """The plan for what ranks have measured, see `replanning`; None if none is faster than what is
    followed by over 1 %."""
    where = placement_by_name(asked["placement"], asked["ranks"], 0)
    costs = Costs(
        tuple(Work(*of) for of in asked["work"]),
        edge=Edge(*asked["edge"]),
        edges={tuple(ends): Edge(*edge) for ends, edge in asked["edges"]},
        task=asked["task_s"],
        jitter=max(LEAST_JITTER, asked["jitter"]),
        lengths=asked["lengths"],
        pieces=asked["pieces"],
    )
    world = World(where, costs, tuple(Kept(*of) for of in asked["kept"]))
    of = partial(replace, votes=asked["votes"])
    job = job_along_plan([world], asked["microbatches"], 1.0, of, effort=AT_START, trial=BRIEF)
    before, after = (
        takes(one, world, BRIEF.steps, range(BRIEF.seeds)) for one in (of(_followed(asked)), job)
    )
    return SentPlan.of(job, asked["name"], asked["cuts"]) if after * AS_FAST < before else None


def _followed(asked: dict[str, Any]) -> Job:
    """The schedule of the steps that were measured."""
    if asked["followed"]:
        return SentPlan(*asked["followed"]).job()
    name, where = asked["name"], asked["placement"]
    return build_schedule(
        name, asked["ranks"], asked["microbatches"], placement=where, max_held=asked["cap"]
    )


class PlanProcess:
    """A process beside the main rank that makes one plan, and ends when this one does.

    Args:
        asked: what the plan is made from, see `planned`.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        # Files, since a pipe has no room for the order of a large schedule.
        self._plan = TemporaryFile("w+")  # noqa: SIM115
        with TemporaryFile("w+") as given:
            json.dump(asked, given)
            given.seek(0)
            command = [sys.executable, "-m", "axrt.plan_process", str(os.getpid())]
            try:  # signals to a whole group, such as Ctrl-C, are the ranks' own
                self._process = subprocess.Popen(
                    command, stdin=given, stdout=self._plan, start_new_session=True
                )
            except OSError:
                self._plan.close()
                raise

    def has_ended(self) -> bool:
        """The plan is there, or has failed."""
        return self._process.poll() is not None

    def plan(self) -> list[Any] | None:
        """The plan as `SentPlan` has it; None if none is faster than what is followed.

        Raises:
            ValueError: the process has failed.
        """
        self._plan.seek(0)
        text = self._plan.read()
        self._plan.close()
        if self._process.returncode or not text:
            code = self._process.returncode
            raise ValueError(f"the process that makes plans has ended with code {code}")
        made: list[Any] | None = json.loads(text)
        return made

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._plan.close()


def _end_with(parent: int) -> None:
    """End when another process has ended, whatever ended it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(Exit.LOST_PEER)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    os.nice(19)
    print(json.dumps(planned(json.load(sys.stdin))))
