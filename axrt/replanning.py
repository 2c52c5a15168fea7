"""Plans made anew while training goes on (`schedule.replan`): from what tasks took in the last
steps, for the same placement and within the same cap. Links are those of `schedule.costs`, or are
measured once.

Between two steps every rank says what its stages took, and the main rank gives that to a process
that plans. When it is asked again it tells all ranks the plan, and they follow it from that step
on. No rank has begun that step then, so the orders before and behind it never mix. Bits stay: they
do not depend on the order.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from math import inf, log
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from axrt.config import AUTO, Config
from axrt.errors import ConfigError
from axrt.known_costs import measured_edge
from axrt.note import News
from axrt.observe.observer import Observer
from axrt.payload import flatten
from axrt.plan_from_costs import PLANNED, SentPlan
from axrt.rank import Rank
from axrt.scheduler.cost_table import CostTable
from axrt.scheduler.job import Job
from axrt.scheduler.longest import Graph, Kept
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.model_costs import TASK_S, kept_by, pieces_of
from axrt.scheduler.policies import AlongPlan, Policy
from axrt.scheduler.simulator import Costs
from axrt.scheduler.task import AnyKind, Kind, Task

_KINDS = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
_ALIKE = 0.05  # stages whose times differ by less have the plan that they had
_MIB = 2**20
_SHORTEST_S = 1e-9  # of a forward, whose logarithm is taken


class StageTimes(NamedTuple):
    """What a microbatch took on a stage, in the last steps.

    Args:
        forward, input, weight: median seconds of a forward and of an input gradient, and mean
            seconds of all pieces of a weight gradient.
        sent: bytes of the activation that it sends to another rank; 0 if it sends none.
        spread: standard deviation of the logarithm of the forward's duration, where all but the
            longest and the shortest sixths are looked at: the first forwards of a run are slow.
        pieces: mean number of pieces of a weight gradient.
    """

    forward: float
    input: float
    weight: float
    sent: float
    spread: float
    pieces: float


def _spread(took: Sequence[float]) -> float:
    logs = sorted(log(max(_SHORTEST_S, one)) for one in took)
    aside = len(logs) // 6  # a sixth on each side of a normal distribution is beyond its deviation
    return (logs[-1 - aside] - logs[aside]) / 2


class TaskTimes(Observer):
    """What the forwards, input gradients and weight gradients of this rank's stages take."""

    def __init__(self) -> None:
        self._counts = True
        self._free = 0.0  # when the device had ended the task before
        self._began: dict[Task, float] = {}
        self._took: dict[tuple[int, AnyKind], list[float]] = defaultdict(list)
        self._sent: dict[int, float] = {}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which nothing counts: forwards of an evaluation keep nothing, and are
        shorter."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def started(self, task: Task) -> None:
        if self._counts and task.kind in _KINDS:
            self._began[task] = time.perf_counter()

    def finished(self, task: Task) -> None:
        if task.kind.beside:
            return
        began, now = self._began.pop(task, None), time.perf_counter()
        if began is not None:  # a device has tasks queued, which begin when others end
            self._took[task.stage, task.kind].append(now - max(began, self._free))
        self._free = now

    def sent(self, rank: int, message: News, payload: Any) -> None:
        is_one = isinstance(message, Message) and message.meaning is Meaning.ACTIVATION
        if is_one and self._counts:
            assert isinstance(message, Message)
            stage = message.stage - 1
            if stage not in self._sent:
                self._sent[stage] = sum(tensor.nbytes for tensor in flatten(payload)[1])

    def take(self) -> dict[int, StageTimes]:
        """What a microbatch took on each stage since the last call."""
        found = {}
        for stage in {stage for stage, _ in self._took}:
            forward, back, pieces = (self._took[stage, kind] for kind in _KINDS)
            if forward and back:
                found[stage] = StageTimes(
                    median(forward),
                    median(back),
                    sum(pieces) / len(back),
                    self._sent.get(stage, 0.0),
                    _spread(forward),
                    len(pieces) / len(back),
                )
        self._took.clear()
        self._sent.clear()
        self._began.clear()
        return found


class Replanning:
    """The plans of a run, made anew every few steps.

    Args:
        rank: this rank.
        job: schedule of the run.
        config: settings of the run.
        times: observer of this rank's loop.
    Raises:
        ConfigError: a policy that was named follows no plan, or something else rests on the order
            of tasks.
    Attributes:
        note: a line for a person where the run keeps its order; "" elsewhere.
    """

    def __init__(self, rank: Rank, job: Job, config: Config, times: TaskTimes) -> None:
        self._rank, self._job, self._times = rank, job, times
        self._every = config.schedule.replan
        # What is known of links and of the loop: the main rank has read the table of the run just
        # before, and may not find it later.
        costs = config.schedule.costs
        self._known: CostTable | None = None
        if costs:
            self._known = CostTable.read(Path(costs)) if rank.is_main else CostTable({})
        self._planned_for: Sequence[StageTimes] = ()
        self._process: _PlanProcess | None = None
        self._has_failed = False
        self._steps = 0
        why = ""
        # A policy that nobody has named follows from the number of ranks, which may change.
        self._plans = job.ranks > 1 and job.policy.name in PLANNED
        if job.policy.name not in PLANNED and config.schedule.policy not in ("", AUTO):
            why = (
                f"policy {job.policy.name!r} follows no plan; expected one of {', '.join(PLANNED)}"
            )
        elif job.drawn:
            why = "replicas share microbatches, and take them as they come"
        elif job.stays:
            why = "the order of gathers rests on the order of tasks (memory.zero = 3 or offloads)"
        elif config.memory.activations_mb and not costs:
            why = "memory.activations_mb limits bytes, and only schedule.costs says those of layers"
        elif job.recomputed:
            why = "new plans leave out forwards that run again (memory.recompute)"
        if why:
            raise ConfigError(
                f"schedule.replan = {self._every}: {why}. Leave it away, or set it to 0"
            )
        self.note = ""
        if not self._plans:
            name = f"{job.policy.name} on {job.ranks} ranks of a pipeline"
            self.note = f"schedule.replan = {self._every} does nothing: {name} follows no plan"
        # A rank may always keep what it might at first, whatever it follows meanwhile.
        sizes, limit = _sizes(job, self._known, config), config.memory.activations_mb * _MIB or inf
        self._kept = shares_of_room(job, sizes, limit) if self._plans else []

    def between_steps(self) -> Policy | None:
        """Called by every rank between two steps: the policy of the steps to come, where it
        changes."""
        self._steps += 1
        if self._steps % self._every:
            return None
        mine = self._times.take()
        if not self._plans:
            return None
        took = self._rank.exchange.gathered([(stage, *of) for stage, of in mine.items()])
        if self._known is None:
            edge = measured_edge(self._rank.exchange, self._rank.device)
            self._known = CostTable({}, edge, task_s=TASK_S)
        made = self._rank.exchange.agreed(self._made)
        if made:
            self._job = replace(self._job, policy=_policy(made))
            if self._rank.is_main:
                _tell("a new plan is followed from now on")
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
                self._process = _PlanProcess(self._asked(stages, self._known or CostTable({})))
            except OSError as error:
                self._give_up(f"the process that makes plans cannot start: {error.strerror}")

    def _give_up(self, why: str) -> None:
        """Make no more plans."""
        self._has_failed = True
        _tell(f"{why}. The run keeps the order that it has")

    def _asked(self, stages: Sequence[StageTimes], known: CostTable) -> dict[str, Any]:
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


def _sizes(job: Job, known: CostTable | None, config: Config) -> Sequence[Kept]:
    """What a microbatch keeps on each stage: bytes, or 1 where no table says them."""
    layers = known and known.layers.get(config.schedule.microbatch_size)
    if not layers:
        return [Kept(0, 1)] * job.stages
    return [kept_by(layers[first:end]) for first, end in pairwise(job.cuts)]


def shares_of_room(job: Job, sizes: Sequence[Kept], limit: float = inf) -> list[Kept]:
    """What a microbatch keeps on each stage, as a share of the most that the job lets its rank
    keep.

    A strict plan keeps what its order does. Otherwise a rank may hold so many chunks, the largest
    of its own.

    Args:
        job: a schedule with one pipe.
        sizes: what a microbatch keeps on each stage, in any one unit.
        limit: the most that any rank may keep, in that unit.
    """
    where, policy = job.placement, job.policy
    graph = Graph.of(where, Costs(), job.microbatches, sizes)
    rooms = [
        policy.bounds(where, rank, job.microbatches).held
        * max(sum(sizes[stage]) for stage in where.stages_of(rank))
        for rank in range(job.ranks)
    ]
    if isinstance(policy, AlongPlan) and policy.strict:
        rooms = list(map(graph.most_kept, graph.rows(policy.order)))
    return [
        Kept(*(one / (min(rooms[where.rank_of(stage)], limit) or 1) for one in of))
        for stage, of in enumerate(sizes)
    ]


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


class _PlanProcess:
    """A process beside the main rank that makes one plan, and ends when this one does.

    Args:
        asked: what the plan is made from, see `plan_process`.
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
