"""Plans made anew while training goes on (`schedule.replan`): from what tasks took in the last
steps, for the same placement and within the same cap. Links are those of `schedule.costs`, or are
measured once.

Between two steps every rank says what its stages took, and the main rank gives that to a process
that plans. When it is asked again it tells all ranks the plan, and they follow it from that step
on. No rank has begun that step then, so the orders before and behind it never mix. Bits stay: they
do not depend on the order.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import inf
from statistics import fmean, median
from typing import Any

from axrt.config import AUTO, Config
from axrt.errors import ConfigError
from axrt.known_costs import measured_edge
from axrt.plan_from_costs import PLANNED, SentPlan
from axrt.plan_process import PlanProcess
from axrt.rank import Rank
from axrt.scheduler.job import Job
from axrt.scheduler.longest import Kept
from axrt.scheduler.model_costs import ModelCosts, kept_by, pieces_of
from axrt.scheduler.plan_room import shares_of_room
from axrt.scheduler.policies import AlongPlan, Policy
from axrt.task_times import StageTimes, TaskTimes

_ALIKE = 0.05  # stages whose times differ by less have the plan that they had
_MIB = 2**20


class Replanning:
    """The plans of a run, made anew every few steps.

    Args:
        rank: this rank.
        job: schedule of the run.
        config: settings of the run.
        times: observer of this rank's loop.
        known: costs that the run was planned for, in `schedule.costs`; None: links are measured.
    Raises:
        ConfigError: a policy that was named follows no plan, or something else rests on the order
            of tasks.
    Attributes:
        note: a line for a person where the run keeps its order; "" elsewhere.
    """

    def __init__(
        self,
        rank: Rank,
        job: Job,
        config: Config,
        times: TaskTimes,
        known: ModelCosts | None = None,
    ) -> None:
        self._rank, self._job, self._times = rank, job, times
        self._every = config.schedule.replan
        self._known = known
        self._planned_for: Sequence[StageTimes] = ()
        self._process: PlanProcess | None = None
        self._has_failed = False
        self._steps = 0
        if why := _why_not(job, config):
            raise ConfigError(
                f"schedule.replan = {self._every}: {why}. Leave it away, or set it to 0"
            )
        # A policy that nobody has named follows from the number of ranks, which may change.
        self._plans = job.ranks > 1 and job.policy.name in PLANNED
        self.note = ""
        if not self._plans:
            name = f"{job.policy.name} in a pipeline of {job.ranks} rank{'s' * (job.ranks > 1)}"
            self.note = f"schedule.replan = {self._every} does nothing: {name} follows no plan"
        # A rank may always keep what it might at first, whatever it follows meanwhile.
        sizes, limit = _sizes(job, known), config.memory.activations_mb * _MIB or inf
        self._kept = shares_of_room(job, sizes, limit) if self._plans else []

    def between_steps(self, step: int) -> Policy | None:
        """Called by every rank between two steps: the policy of the steps to come, where it
        changes.

        Args:
            step: number of the step that comes.
        """
        self._steps += 1
        if self._steps % self._every:
            return None
        mine = self._times.take()
        if not self._plans:
            return None
        took = self._rank.exchange.gathered([(stage, *of) for stage, of in mine.items()])
        if self._known is None:
            edge = measured_edge(self._rank.exchange, self._rank.device)
            self._known = ModelCosts((), edge)
        made = self._rank.exchange.agreed(self._made)
        if made:
            self._job = replace(self._job, policy=_policy(made))
            if self._rank.is_main:
                _tell(
                    f"from step {step} on a new plan is followed, 1 % faster or more by simulation"
                )
        if took:  # once the others go on
            self._ask(took)
        return self._job.policy if made else None

    def close(self) -> None:
        """End the process that plans."""
        if self._process is not None:
            self._process.close()

    def _made(self) -> tuple[Any, ...] | None:
        """The plan that is ready; None where the run goes on as it is."""
        process = self._process
        if process is None or not process.has_ended():
            return None
        self._process = None
        try:
            made = process.plan()
        except ValueError as error:
            self._give_up(str(error))
            return None
        return None if made is None else tuple(made)

    def _ask(self, took: Sequence[Sequence[tuple[int, *tuple[float, ...]]]]) -> None:
        """Have a plan made for what ranks say of their stages, if it is other than before the last
        plan."""
        by_stage: dict[int, list[StageTimes]] = defaultdict(list)
        for stage, *of in chain.from_iterable(took):
            by_stage[stage].append(StageTimes(*of))
        if self._process is not None or self._has_failed or len(by_stage) < self._job.stages:
            return  # it is still at it, cannot do it, or some stage has run nothing yet
        stages = [_mean(by_stage[stage]) for stage in range(self._job.stages)]
        if not _are_alike(stages, self._planned_for):
            self._planned_for = stages
            try:
                self._process = PlanProcess(self._asked(stages, self._known or ModelCosts(())))
            except OSError as error:
                self._give_up(f"the process that makes plans cannot start: {error.strerror}")

    def _give_up(self, why: str) -> None:
        """Make no more plans."""
        self._has_failed = True
        _tell(f"{why}. The run keeps the order that it has")

    def _asked(self, stages: Sequence[StageTimes], known: ModelCosts) -> dict[str, Any]:
        """What a plan is made from. The most that a rank may keep is 1."""
        where, policy = self._job.placement, self._job.policy
        along = isinstance(policy, AlongPlan)
        spread = median(of.spread for of in stages)
        lengths = min(known.lengths, spread)
        return {
            "name": policy.name,
            "placement": where.name,
            "ranks": where.ranks,
            "microbatches": self._job.microbatches,
            "work": [of[:4] for of in stages],
            "jitter": (spread**2 - lengths**2) ** 0.5,
            "lengths": lengths,
            "pieces": pieces_of([of.pieces for of in stages]),
            "edge": known.edge,
            "edges": [[list(ends), list(edge)] for ends, edge in known.edges.items()],
            "task_s": known.task_s,
            "kept": self._kept,
            "votes": self._job.votes,
            "cuts": list(self._job.cuts),
            "followed": SentPlan.of(self._job, policy.name, self._job.cuts) if along else None,
            "cap": getattr(policy, "cap", 0),
        }


def _why_not(job: Job, config: Config) -> str:
    """Why no plans can be made anew in such a run; "" where they can, or the policy, which nobody
    has named, follows none."""
    if job.policy.name not in PLANNED and config.schedule.policy not in ("", AUTO):
        return f"policy {job.policy.name!r} follows no plan; expected one of {', '.join(PLANNED)}"
    if job.drawn:
        return "replicas share microbatches, and take them as they come"
    if job.stays:
        return "the order of gathers rests on the order of tasks (memory.zero = 3 or offloads)"
    if config.memory.activations_mb and not config.schedule.costs:
        return "memory.activations_mb limits bytes, and only schedule.costs says those of layers"
    if job.held_on_device:
        return "which activations leave the device rests on the order (memory.offload_activations)"
    if job.recomputed:
        return "new plans leave out forwards that run again (memory.recompute)"
    return ""


def _sizes(job: Job, known: ModelCosts | None) -> Sequence[Kept]:
    """What a microbatch keeps on each stage: bytes, or 1 where no table says them."""
    if not known or not known.layers:
        return [Kept(0, 1)] * job.stages
    return [kept_by(known.layers[first:end]) for first, end in pairwise(job.cuts)]


def _tell(text: str) -> None:
    print(f"axrt: schedule.replan: {text}", file=sys.stderr, flush=True)


def _mean(of_replicas: Sequence[StageTimes]) -> StageTimes:
    return StageTimes(*(fmean(of) for of in zip(*of_replicas, strict=True)))


def _are_alike(ones: Sequence[StageTimes], others: Sequence[StageTimes]) -> bool:
    """The times of all stages are about the same."""
    return len(ones) == len(others) and all(
        abs(mine - its) <= _ALIKE * its
        for one, other in zip(ones, others, strict=True)
        for mine, its in zip(one[:3], other[:3], strict=True)
    )


def _policy(made: tuple[Any, ...]) -> Policy:
    along = SentPlan(*made).job().policy
    assert isinstance(along, AlongPlan)
    return along
