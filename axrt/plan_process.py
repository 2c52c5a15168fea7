"""A process that makes one plan: costs are its argument, and the plan is what it prints.

A thread would hold up the rank that asks, since Python runs one at a time.
"""

import json
import os
import sys
from dataclasses import replace
from typing import Any

from axrt.plan_from_costs import AT_START, BRIEF, SentPlan
from axrt.scheduler.longest import Kept
from axrt.scheduler.placement import placement_by_name
from axrt.scheduler.plan_choice import job_along_plan
from axrt.scheduler.planner import World
from axrt.scheduler.simulator import Costs, Edge, Work


def planned(asked: dict[str, Any]) -> SentPlan:
    """The plan for what ranks have measured, see `replanning`."""
    where = placement_by_name(asked["placement"], asked["ranks"], 0)
    costs = Costs(
        tuple(Work(*of) for of in asked["work"]), edge=Edge(*asked["edge"]), task=asked["task_s"]
    )
    job = job_along_plan(
        [World(where, costs, tuple(Kept(0.0, share) for share in asked["kept"]))],
        asked["microbatches"],
        1.0,
        lambda job: replace(job, votes=asked["votes"]),
        effort=AT_START,
        trial=BRIEF,
    )
    return SentPlan.of(job, asked["name"], asked["cuts"])


if __name__ == "__main__":
    os.nice(19)
    print(json.dumps(planned(json.loads(sys.argv[1]))))
