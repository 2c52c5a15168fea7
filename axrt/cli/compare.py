"""`axrt simulate --like RUN`: what the simulator predicts for a run, beside what was measured; and what other schedules would have done."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from axrt.schedule import Scheduled, candidates, scheduled
from axrt.scheduler.fit import fitted, recut
from axrt.scheduler.job import Job
from axrt.scheduler.recompute import most_recomputed, recomputed_shares
from axrt.scheduler.simulator import Costs, Work, simulate
from axrt.scheduler.state import CAUSES
from axrt.scheduler.task import Kind
from axrt.scheduler.timeline import Timeline

_SEEDS = 5


@dataclass(frozen=True)
class Run:
    """What was measured, and under which schedule.

    Args:
        line: some whole steps.
        job: of the run.
        recompute: `memory.recompute` of the run.
    """

    line: Timeline
    job: Job
    recompute: str | int

    @classmethod
    def read(cls, path: Path) -> "Run":
        """From the directory of a run, or its timeline.

        Raises:
            ValueError: there is no timeline of a run; with what to do.
        """
        file = path / "timeline.json" if path.is_dir() else path
        try:
            line = Timeline.from_json(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}; expected a run that was traced: axrt train ... run.trace_steps=5") from None
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        if not line.schedule:
            raise ValueError(f"{file} does not say which schedule it is of; expected the timeline of a run")
        of = dict(line.schedule)
        try:
            replicas, clips, recompute = of.pop("replicas"), of.pop("clips"), of.pop("recompute")
            job = replace(scheduled(**of), replicas=replicas, votes=clips)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: its schedule is not as a run writes it ({error}); expected the timeline of a run") from None
        return cls(line, job, recompute)

    @property
    def steps(self) -> int:
        return len({self.job.step_of(span.task.microbatch)[0] for span in self.line.computing()})

    def predicted(self, job: Job, costs: Costs) -> list[Timeline]:
        """As many steps, after one that warms up, for a few seeds of what varies."""
        job = replace(job, replicas=self.job.replicas, votes=self.job.votes, recomputed=dict.fromkeys(costs.recomputed, 1))
        seeds = range(_SEEDS if costs.jitter else 1)
        lines = [simulate(job, replace(costs, seed=seed), steps=self.steps + 1) for seed in seeds]
        return [replace(line.from_step(1), unit=self.line.unit) for line in lines]


def compared(run: Run) -> tuple[dict[str, Any], Costs, Timeline]:
    """Figures measured and predicted, the fitted costs, and a predicted timeline.

    Raises:
        ValueError: the timeline is not of whole steps.
    """
    costs = fitted(run.line, run.job.placement)
    lines = run.predicted(run.job, costs)
    found = {"policy": run.job.policy.name, "placement": run.job.placement.name, "measured": _figures([run.line], 0.0, run.steps)}
    found["predicted"] = _figures(lines, costs.task, run.steps)
    found["fitted"] = {
        "task": costs.task,
        "latency": costs.edge.latency,
        "jitter": costs.jitter,
        "step": costs.step,
        "reduce": costs.reduce,
        "pieces": costs.pieces,
        "stages": [costs.of_stage(run.job.placement, stage)._asdict() for stage in range(run.job.stages)],
    }
    title = f"predicted: {lines[0].title}"
    return found, costs, replace(lines[0], title=title)


def what_if(run: Run, costs: Costs) -> list[dict[str, Any]]:
    """Every other schedule that fits the ranks and microbatches, on the same costs, the fastest first."""
    of = run.line.schedule
    now = _outcome(run, Scheduled(of["name"], of["in_flight"], run.job), costs)
    others = [_outcome(run, one, _costs_on(one, costs, run)) for one in candidates(of["ranks"], of["microbatches"])]
    fresh = [one for one in others if (one["policy"], one["in_flight"]) != (now["policy"], now["in_flight"])]
    for one in (now, *fresh):
        one["faster"] = now["step"] / one["step"]
    return sorted([now, *fresh], key=lambda one: float(one["step"]))


def _outcome(run: Run, one: Scheduled, costs: Costs) -> dict[str, Any]:
    where = one.job.placement
    lines = run.predicted(one.job, costs)
    return {
        "policy": one.name,
        "in_flight": one.in_flight,
        "placement": where.name,
        "chunks": where.chunks,
        "step": statistics.fmean(line.makespan for line in lines) / run.steps,
        "held": max(max(line.held) for line in lines) * where.share,
        "copies": where.pipes,
        "is_this_run": one.job is run.job,
    }


def _costs_on(one: Scheduled, costs: Costs, run: Run) -> Costs:
    """The costs of the run's model where it is cut as another schedule wants it; where the run recomputed, so does that."""
    assert not isinstance(costs.work, Work)
    where, share = one.job.placement, one.job.placement.share / run.job.placement.share
    again = recomputed_shares(one.job.policy, where, run.job.microbatches, most_recomputed(run.recompute))
    if isinstance(run.recompute, int):  # so many layers: what they are of a stage is known of this run only
        again = dict.fromkeys(again, max(costs.recomputed.values(), default=0.0))
    return replace(
        costs,
        work=recut(costs.work, where.stages),
        recomputed=again,
        step=costs.step * share,
        reduce=costs.reduce * share,
    )


def _figures(lines: Sequence[Timeline], of_the_loop: float, steps: int) -> dict[str, Any]:
    """Means over timelines, in the timelines' unit; in predictions a task's time has the loop's in it, which is taken out."""

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


def show(found: dict[str, Any], others: Sequence[dict[str, Any]], run: Run) -> None:
    """The tables."""
    measured, predicted, fit = found["measured"], found["predicted"], found["fitted"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rank", "time", "off", "computing", "no input", "cap", "nothing left", "in flight", "held"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank, (took, foretold) in enumerate(zip(measured["time"], predicted["time"], strict=True)):
        pairs = [(measured[key][rank], predicted[key][rank]) for key in ("computing",)]
        pairs += [(measured["idle_by_cause"][cause][rank], predicted["idle_by_cause"][cause][rank]) for cause in CAUSES]
        counts = [f"{measured[key][rank]:g} / {predicted[key][rank]:g}" for key in ("in_flight", "held")]
        cells = [f"{1e3 * mine:.1f} / {1e3 * its:.1f}" for mine, its in ((took, foretold), *pairs)]
        table.add_row(str(rank), cells[0], f"{100 * (foretold / took - 1):+.1f} %", *cells[1:], *counts)
    click.echo(
        f"{found['policy']} on {found['placement']} placement, {run.steps} steps: measured / predicted, ms\n"
        f"a step took {1e3 * measured['step']:.2f} ms, predicted {1e3 * predicted['step']:.2f} "
        f"({100 * (predicted['step'] / measured['step'] - 1):+.1f} %)"
    )
    Console(width=max(120, Console().width), highlight=False).print(table)
    click.echo(
        f"fitted: {1e6 * fit['task']:.0f} us a task for the loop, {1e6 * fit['latency']:.0f} us a message, jitter {fit['jitter']:.2f}, "
        f"{fit['pieces']} pieces of a weight gradient"
    )
    click.echo("in flight, held: the most on a rank, in microbatches of a stage")
    if others:
        _show_others(others, run)


def _show_others(others: Sequence[dict[str, Any]], run: Run) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what if", no_wrap=True)
    for column in ("placement", "a step, ms", "times as fast", "held", "copies of the weights"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in others:
        name = (
            one["policy"] + (f" in_flight {one['in_flight']}" if one["in_flight"] else "") + (" (this run)" if one["is_this_run"] else "")
        )
        step, faster = f"{1e3 * one['step']:.2f}", f"{one['faster']:.3f}"
        table.add_row(name, f"{one['placement']} x{one['chunks']}", step, faster, f"{one['held']:g}", str(one["copies"]))
    Console(width=max(100, Console().width), highlight=False).print(table)
    click.echo("held: the most microbatches that a rank holds, in those of all its layers")
    if not any(span.task.kind is Kind.INPUT for span in run.line.computing()):
        click.echo("The run did not split its backwards: half of each is taken to be the weight gradient, where a schedule splits them.")
    if run.recompute != "none":
        click.echo(f"All of them recompute as the run did (memory.recompute = {run.recompute!r}), which held does not show.")
    counted = any(span.task.kind is Kind.REDUCE for span in run.line.spans)
    if not counted and any(one["copies"] > 1 for one in others):
        click.echo("What two copies of the weights cost to add up is not known from this run, and not counted.")
    now = next(one for one in others if one["is_this_run"])
    best = next(one for one in others if counted or one["copies"] == 1)
    if best is now:
        click.echo("No other would be faster.")
    else:
        cap = f" with in_flight {best['in_flight']}" if best["in_flight"] else ""
        click.echo(
            f"{best['policy']}{cap} would be {best['faster']:.3f} times as fast, holding {best['held']:g} in place of {now['held']:g}."
        )
