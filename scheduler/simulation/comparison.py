"""A run beside what the simulator predicts for it, and beside what other schedules would have
done."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..job import Job
from ..lacks import CAUSES
from ..planning.recompute import most_recomputed, recomputed_shares
from ..planning.shards import with_shards
from ..plural import plural
from ..task import Kind
from .costs import Costs, Work
from .fit import ON_HOST, buckets_of, fit_costs, recut
from .schedules import Option, build_schedule, options
from .simulator import simulate
from .timeline import Timeline

_SEEDS = 5
# Arguments of `with_shards` that a timeline says, and what one says that is silent.
_SHARED = {"zero": 0, "reductions": 1, "gathered": 2, "group": 0, "offloads_weights": False}


@dataclass(frozen=True)
class Run:
    """A measured run and the schedule that it had."""

    line: Timeline  # timeline of some whole steps
    job: Job  # schedule of the run
    recompute: str | int  # value of `memory.recompute` in the run
    # what its replicas share out, and whether weights are in scratch: arguments of
    # `with_shards`, by name
    shared: Mapping[str, Any]
    # number of samples in a microbatch, as the run's settings say it; 0: the timeline does not
    # say it, as former versions wrote it
    microbatch_size: int = 0

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read the timeline of a run.

        Raises:
            ValueError: there is no timeline of a run; the text says what to do.
        """
        file = path / "timeline.json" if path.is_dir() else path
        try:
            line = Timeline.read(file)
        except OSError as error:
            raise ValueError(
                f"{file}: {error.strerror}; expected a run that was traced: axrt train ... "
                "run.trace_steps=5"
            ) from None
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        if not line.schedule:
            raise ValueError(
                f"{file} does not say which schedule it is of; expected the timeline of a run"
            )
        of = dict(line.schedule)
        if "in_flight" in of:  # as former versions called the cap
            line.schedule["max_held"] = of["max_held"] = of.pop("in_flight")
        if of.get("share"):
            raise ValueError(
                f"{file} is of replicas that share microbatches, where empty slots look like fast "
                "tasks; expected a run with schedule.share = false"
            )
        try:
            return cls._of(line, of, file)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file}: its schedule is not as a run writes it ({error}); expected the timeline "
                "of a run"
            ) from None

    @classmethod
    def _of(cls, line: Timeline, of: dict[str, Any], file: Path) -> "Run":
        """The run of a timeline, by what that says of its schedule."""
        replicas, clips, recompute = of.pop("replicas"), of.pop("clips"), of.pop("recompute")
        slots = of.pop("slots", 0)
        # traces of former versions say `host_rooms`
        on_host = of.pop("host_slots", 0) or of.pop("host_rooms", 0)
        if slots and on_host:
            raise ValueError(
                f"{file} is of a former version, whose steps were on the device and on the "
                "host; expected the timeline of a run of this version"
            )
        shared = {key: of.pop(key, usual) for key, usual in _SHARED.items()}
        if line.team > 1:
            raise ValueError(
                f"{file} is of a run whose stages {line.team} members hold (parallel.tensor), "
                "whose joints it does not tell; expected a run without teams"
            )
        if of["ranks"] * replicas != line.ranks:
            raise ValueError(
                f"{file}: its schedule is of {plural(of['ranks'], 'rank')} and "
                f"{plural(replicas, 'replica')}, and it has rows of "
                f"{plural(line.ranks, 'rank')}; expected the timeline of a whole run"
            )
        cuts, samples = tuple(of.pop("cuts", ())), of.pop("microbatch_size", 0)
        on_device = of.pop("held_on_device", 0)
        of.pop("host_share", None)  # of a former version
        job = replace(build_schedule(**of), replicas=replicas, votes=clips, slots=slots, cuts=cuts)
        job = replace(job, host_slots=on_host, held_on_device=on_device)
        job = with_shards(job, **shared)
        if len(line.residencies) not in (0, job.stages):
            raise ValueError(
                f"{file}: it has residencies of {plural(len(line.residencies), 'stage')}; "
                f"expected {job.stages}"
            )
        return cls(line, job, recompute, shared, samples)

    @property
    def steps(self) -> int:
        """Number of steps in the timeline."""
        return len({self.job.step_of(span.task.microbatch)[0] for span in self.line.computing()})

    @property
    def buckets(self) -> tuple[int, ...]:
        """Number of buckets of each stage, as a simulation of the run takes it."""
        return buckets_of(self.line, self.job.stages)

    def predicted(self, job: Job, costs: Costs, buckets: Sequence[int]) -> list[Timeline]:
        """Simulated timelines of a schedule, one for each of a few seeds of what varies.

        Each has as many steps as the run, after one that warms up and is left out.

        Args:
            job: schedule on as many ranks and microbatches as the run's.
            buckets: number of buckets of each of its stages.
        """
        job = replace(
            job,
            replicas=self.job.replicas,
            votes=self.job.votes,
            slots=self.job.slots,
            host_slots=self.job.host_slots,
            recomputed=dict.fromkeys(costs.recomputed, 1),
        )
        shared = dict(self.shared)
        if job.policy != self.job.policy:  # reductions as often as that leaves a stage for another
            shared["reductions"] = 0
        if job.placement.pipes > 1:
            shared["gathered"] = max(shared["gathered"], job.placement.chunks)
        job = with_shards(job, **shared)
        seeds = range(_SEEDS if costs.jitter or costs.lengths else 1)
        lines = [
            simulate(job, replace(costs, seed=seed), steps=self.steps + 1, buckets=buckets)
            for seed in seeds
        ]
        return [replace(line.from_step(1), unit=self.line.unit) for line in lines]


def compared(run: Run) -> tuple[dict[str, Any], Costs, Timeline]:
    """Figures measured and predicted, the fitted costs, and a predicted timeline.

    Raises:
        ValueError: some stage has no forwards or no backwards in the timeline.
    """
    costs = fit_costs(run.line, run.job.placement)
    lines = run.predicted(run.job, costs, run.buckets)
    found = {
        "policy": run.job.policy.name,
        "placement": run.job.placement.name,
        "measured": _figures([run.line], 0.0, run.steps),
    }
    found["predicted"] = _figures(lines, costs.task, run.steps)
    found["fitted"] = {
        "task": costs.task,
        "latency": costs.edge.latency,
        "jitter": costs.jitter,
        "lengths": costs.lengths,
        "step": costs.step,
        "reduce": costs.reduce,
        "slots": run.job.slots,
        "host_slots": run.job.host_slots,
        "buckets": list(run.buckets),
        "fetch": costs.state / costs.copies_in,
        "store": costs.state / costs.copies_out,
        "on_host": {kind.value: costs.others[kind] for kind in ON_HOST},
        "bring": costs.others[Kind.BRING] if run.job.offloads_weights else None,
        "pieces": costs.pieces,
        "stages": [
            costs.of_stage(run.job.placement, stage)._asdict() for stage in range(run.job.stages)
        ],
    }
    title = f"predicted: {lines[0].title}"
    return found, costs, replace(lines[0], title=title)


def with_other_schedules(run: Run, costs: Costs) -> list[dict[str, Any]]:
    """One dict of figures for the run's schedule and for every other that fits the ranks and
    microbatches, on the same costs, the fastest first."""
    of = run.line.schedule
    now = _outcome(run, Option(of["name"], of["max_held"], run.job), costs, run.buckets)
    others = [
        _outcome(run, one, *_on_other_stages(one, costs, run))
        for one in options(of["ranks"], of["microbatches"])
    ]
    fresh = [
        one
        for one in others
        if (one["policy"], one["max_held"]) != (now["policy"], now["max_held"])
    ]
    for one in (now, *fresh):
        one["faster"] = now["step"] / one["step"]
    return sorted([now, *fresh], key=lambda one: float(one["step"]))


def _outcome(run: Run, one: Option, costs: Costs, buckets: Sequence[int]) -> dict[str, Any]:
    where = one.job.placement
    lines = run.predicted(one.job, costs, buckets)
    return {
        "policy": one.name,
        "max_held": one.max_held,
        "placement": where.name,
        "chunks": where.chunks,
        "step": statistics.fmean(line.makespan for line in lines) / run.steps,
        "held": max(max(line.held) for line in lines) * where.share,
        "copies": where.pipes,
        "is_this_run": one.job is run.job,
    }


def _on_other_stages(one: Option, costs: Costs, run: Run) -> tuple[Costs, tuple[int, ...]]:
    """The costs of the run's model where another schedule cuts it, and the number of buckets of
    each stage there; a run that recomputed does so there too."""
    assert not isinstance(costs.work, Work)
    where, all_buckets = one.job.placement, sum(run.buckets)
    stages = where.stages
    a_stage = max(1, round(all_buckets / stages))
    share = all_buckets / (stages * a_stage)  # a bucket of these, in buckets of the run
    again = recomputed_shares(
        one.job.policy, where, run.job.microbatches, most_recomputed(run.recompute)
    )
    if isinstance(
        run.recompute, int
    ):  # a number of layers: their share of a stage is known for this run's cut only
        again = dict.fromkeys(again, max(costs.recomputed.values(), default=0.0))
    of_buckets = {kind: cost * share for kind, cost in costs.others.items()}
    found = replace(
        costs,
        work=recut(costs.work, stages),
        recomputed=again,
        step=costs.step * share,
        reduce=costs.reduce * share,
        state=costs.state * share,
        others=of_buckets | {Kind.BRING: costs.others[Kind.BRING] * len(run.buckets) / stages},
    )
    return found, (a_stage,) * stages


def _figures(lines: Sequence[Timeline], of_the_loop: float, steps: int) -> dict[str, Any]:
    """Means over timelines, in their unit. Predicted tasks include the loop's time, which is taken
    out."""

    def mean(of: Callable[[Timeline], list[float]]) -> list[float]:
        return [statistics.fmean(values) for values in zip(*map(of, lines), strict=True)]

    def computing(line: Timeline) -> list[float]:
        busy = [0.0] * line.ranks
        for span in line.computing():
            busy[span.rank] += span.end - span.start - of_the_loop
        return busy

    return {
        "step": statistics.fmean(line.makespan for line in lines) / steps,
        "time": mean(lambda line: line.span),
        "computing": mean(computing),
        "idle_by_cause": {cause: mean(lambda line: line.idle(cause)) for cause in CAUSES},  # noqa: B023
        "in_flight": mean(lambda line: [float(most) for most in line.in_flight]),
        "held": mean(lambda line: [float(most) for most in line.held]),
    }
