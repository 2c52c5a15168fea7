"""Plans made anew while training goes on (`schedule.replan`): from what tasks took in the last
steps, for the same placement and within the same cap.

Between two steps every rank says what its stages took, and the main rank gives that to a process
that plans. When it is asked again it tells all ranks the plan, and they follow it from that step
on. No rank has begun that step then, so the orders before and behind it never mix. Bits stay: they
do not depend on the order.
"""

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from axrt.errors import ConfigError
from axrt.known_costs import TASK_S, measured_edge
from axrt.observe.observer import Observer
from axrt.plan_from_costs import PLANNED, SentPlan
from axrt.rank import Rank
from axrt.scheduler.job import Job
from axrt.scheduler.policies import AlongPlan, Policy
from axrt.scheduler.task import AnyKind, Kind, Task

_KINDS = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)


class TaskTimes(Observer):
    """What the forwards, input gradients and weight gradients of this rank's stages take."""

    def __init__(self) -> None:
        self._began: dict[Task, float] = {}
        self._took: dict[tuple[int, AnyKind], list[float]] = defaultdict(list)

    def started(self, task: Task) -> None:
        if task.kind in _KINDS:
            self._began[task] = time.perf_counter()

    def finished(self, task: Task) -> None:
        began = self._began.pop(task, None)
        if began is not None:
            self._took[task.stage, task.kind].append(time.perf_counter() - began)

    def taken(self) -> dict[str, list[float]]:
        """Mean seconds of a microbatch on each stage since the last call: forward, input gradient
        and weight gradient, which may come in pieces."""
        found = {}
        for stage in {stage for stage, _ in self._took}:
            forward, back, pieces = (self._took[stage, kind] for kind in _KINDS)
            if forward and back:
                found[str(stage)] = [fmean(forward), fmean(back), sum(pieces) / len(back)]
        self._took.clear()
        self._began.clear()
        return found


class Replanning:
    """The plans of a run, made anew every few steps.

    Args:
        rank: this rank.
        job: schedule of the run.
        every: number of steps from one plan to the next.
        times: observer of this rank's loop.
    Raises:
        ConfigError: the schedule follows no plan, or something else rests on its order.
    """

    def __init__(self, rank: Rank, job: Job, every: int, times: TaskTimes) -> None:
        self._rank, self._job, self._every, self._times = rank, job, every, times
        self._edge: tuple[float, float] | None = None
        self._planner: subprocess.Popen[str] | None = None
        self._steps = 0
        why = ""
        if job.policy.name not in PLANNED:
            why = (
                f"policy {job.policy.name!r} follows no plan; expected one of {', '.join(PLANNED)}"
            )
        elif job.drawn:
            why = "replicas share microbatches, and take them as they come"
        elif job.stays:
            why = "the order of gathers rests on the order of tasks (memory.zero = 3 or offloads)"
        if why:
            raise ConfigError(f"schedule.replan = {every}: {why}. Leave it away, or set it to 0")

    def next_policy(self) -> Policy | None:
        """Called by every rank between two steps: the policy of the steps to come, where it
        changes."""
        self._steps += 1
        if self._steps % self._every:
            return None
        took = self._rank.exchange.gathered(self._times.taken())
        if self._edge is None:
            edge = measured_edge(self._rank.exchange, self._rank.device)
            self._edge = (edge.latency, edge.bandwidth)
        made = self._rank.exchange.agreed(lambda: self._made_and_asked(took or []))
        return self._policy(made) if made else None

    def close(self) -> None:
        """End the process that plans."""
        if self._planner is not None:
            self._planner.kill()
            self._planner.communicate()

    def _made_and_asked(self, took: Sequence[dict[str, list[float]]]) -> tuple[Any, ...] | None:
        """The plan that is ready, and a process for the next one."""
        planner, made = self._planner, None
        if planner is not None:
            if planner.poll() is None:
                return None  # it is still at it
            text, _ = planner.communicate()
            made = tuple(json.loads(text)) if planner.returncode == 0 else None
        self._planner = None
        by_stage: dict[int, list[list[float]]] = defaultdict(list)
        for of in took:
            for stage, seconds in of.items():
                by_stage[int(stage)].append(seconds)
        if len(by_stage) == self._job.stages:  # else some have run nothing yet
            asked = json.dumps(self._asked(by_stage))
            command = [sys.executable, "-m", "axrt.plan_process", asked]
            self._planner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return made

    def _asked(self, by_stage: Mapping[int, list[list[float]]]) -> dict[str, Any]:
        """What a plan is made from. A rank may keep what it might so far: as many chunks as its
        policy's bound says, each of which counts that share of a limit of 1."""
        work = [
            [fmean(of) for of in zip(*by_stage[stage], strict=True)]
            for stage in range(self._job.stages)
        ]
        where, policy = self._job.placement, self._job.policy
        caps = [
            policy.bounds(where, rank, self._job.microbatches).held for rank in range(where.ranks)
        ]
        return {
            "name": policy.name,
            "placement": where.name,
            "ranks": where.ranks,
            "microbatches": self._job.microbatches,
            "work": work,
            "edge": self._edge,
            "task_s": TASK_S,
            "kept": [1 / caps[where.rank_of(stage)] for stage in range(where.stages)],
            "votes": self._job.votes,
            "cuts": list(self._job.cuts),
        }

    def _policy(self, made: tuple[Any, ...]) -> Policy:
        plan = SentPlan(*made)
        along = plan.job().policy
        assert isinstance(along, AlongPlan)
        return along
