"""A process that makes one plan: costs are its argument, and the plan is what it prints.

A thread would hold up the rank that asks, since Python runs one at a time.
"""

import json
import os
import sys
from dataclasses import replace
from typing import Any

from axrt.along_plan import AT_START, BRIEF, Plan
from axrt.scheduler.placement import placement_by_name
from axrt.scheduler.plan_choice import along_plan
from axrt.scheduler.planner import World
from axrt.scheduler.simulator import Costs, Edge, Work


def planned(asked: dict[str, Any]) -> Plan:
    """The plan for what ranks have measured, see `replanning`."""
    where = placement_by_name(asked["placement"], asked["ranks"], 0)
    costs = Costs(
        tuple(Work(*of) for of in asked["work"]), edge=Edge(*asked["edge"]), task=asked["task_s"]
    )
    job = along_plan(
        [World(where, costs)],
        asked["microbatches"],
        asked["limit"],
        lambda job: replace(job, votes=asked["votes"]),
        effort=AT_START,
        trial=BRIEF,
    )
    return Plan.of(job, asked["name"], asked["cuts"])


if __name__ == "__main__":
    os.nice(19)
    print(json.dumps(planned(json.loads(sys.argv[1]))))
