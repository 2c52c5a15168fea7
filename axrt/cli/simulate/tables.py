"""The tables that `axrt simulate` prints."""

import statistics
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from axrt.scheduler.lacks import CAUSES, COPIES, END, INPUT, ROOM, SLICES
from axrt.scheduler.plural import plural
from axrt.scheduler.simulation.comparison import Run
from axrt.scheduler.simulation.schedules import Outcome
from axrt.scheduler.task import Kind

_NO_TERMINAL = 500  # columns
# By cause of an idle rank: the heading of a column, and the same in a sentence.
_CAUSES = {
    INPUT: ("no input", "nothing has come"),
    SLICES: ("no slices", "other members have not sent theirs"),
    ROOM: ("no room", "there is no room under the cap"),
    COPIES: ("copies", "state is on its way"),
    END: ("nothing left", "nothing is left"),
}


def show_schedules(
    found: list[dict[str, Any]], misfits: list[str], taken: str, times: float = 1.0
) -> None:
    """Print the figures of simulated schedules, the fastest first.

    Args:
        found: figures of each schedule.
        misfits: texts about policies that do not fit.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("policy", "placement"):
        table.add_column(column, no_wrap=True)
    causes = _causes_in(*(of["idle_by_cause"] for of in found))
    headings = [_CAUSES[cause][0] for cause in causes]
    offloads = any(of["held_on_device"] != of["held"] for of in found)
    held = ("held", *["on device"] * offloads)
    for column in ("makespan", "span", "utilisation", "in flight", *held, *headings):
        table.add_column(column, justify="right", no_wrap=True)
    in_mib = any(map(sum, (of["held_mib"] for of in found)))
    if in_mib:
        table.add_column("held, MiB", justify="right", no_wrap=True)
    for of in sorted(found, key=lambda of: float(of["makespan"])):
        idle = [statistics.mean(of["idle_by_cause"][cause]) for cause in causes]
        table.add_row(
            of["policy"],
            f"{of['placement']} x{of['chunks']}",
            f"{times * of['makespan']:.2f}",
            f"{times * max(of['span']):.2f}",
            f"{of['utilisation']:.3f}",
            str(max(of["in_flight"])),
            str(max(of["held"])),
            *[str(max(of["held_on_device"]))] * offloads,
            *[f"{times * on_average:.2f}" for on_average in idle],
            *[f"{max(of['held_mib']):.1f}"] * in_mib,
        )
    _print(table, 140)
    click.echo(taken)
    *others, last = [_CAUSES[cause][1] for cause in causes]
    click.echo(
        "utilisation: the share of the makespan in which the busiest rank computes.\n"
        "span: the largest of a rank. In flight and held: the most on a rank, in chunks of a "
        f"microbatch. From {headings[0]} to {headings[-1]}: how long a rank\n"
        f"is idle on average, since {', '.join(others)}, or {last}."
    )
    for misfit in misfits:
        click.echo(f"left out: {misfit}")


def _causes_in(*idle_by_cause: dict[str, list[float]]) -> list[str]:
    """The causes to show: copies and slices only where a rank has waited for some."""
    waited = {cause for cause in CAUSES if any(map(sum, (of[cause] for of in idle_by_cause)))}
    return [cause for cause in CAUSES if cause in waited or cause not in (COPIES, SLICES)]


def show_search(found: list[Outcome], least: float, times: float = 1.0, rows: int = 12) -> None:
    """Print the fastest schedules, and how far they are from the bound.

    Args:
        found: schedules, the fastest first, at least one.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("policy", "placement"):
        table.add_column(column, no_wrap=True)
    for column in (
        "max_held",
        "makespan",
        "utilisation",
        "held",
        "copies of the weights",
        "above the bound",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found[:rows]:
        of = one.option
        counts = (
            str(of.max_held or ""),
            f"{times * one.makespan:.2f}",
            f"{one.utilisation:.3f}",
            f"{one.held:g}",
            str(of.job.placement.pipes),
        )
        table.add_row(
            of.name,
            f"{of.job.placement.name} x{of.job.placement.chunks}",
            *counts,
            f"{100 * (one.makespan / one.least - 1):.1f} %",
        )
    _print(table, 112)
    best = found[0]
    shown = f", of which the first {rows} are shown" if len(found) > rows else ""
    click.echo(
        f"The best of {len(found)}{shown}: {best.option.name}, {times * best.makespan:.2f}.\n"
        f"On its placement no schedule can take less than {times * best.least:.2f}, and on any "
        f"placement that was tried none less than {times * least:.2f}. These bounds know no limit "
        "of memory and nothing that varies.\n"
        "utilisation: the share of the makespan in which the busiest rank computes; held: the most "
        "microbatches that a rank holds, in those of all its layers; above the "
        "bound: that of the row's own placement"
    )


def show_comparison(found: dict[str, Any], others: Sequence[dict[str, Any]], run: Run) -> None:
    """Print measured figures beside predicted ones, and other schedules on the same costs.

    Args:
        others: schedules from `comparison.with_other_schedules`; () prints none.
    """
    measured, predicted, fit = found["measured"], found["predicted"], found["fitted"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    causes = _causes_in(measured["idle_by_cause"], predicted["idle_by_cause"])
    headings = [_CAUSES[cause][0] for cause in causes]
    for column in ("rank", "time", "off", "computing", *headings, "in flight", "held"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank, (took, foretold) in enumerate(zip(measured["time"], predicted["time"], strict=True)):
        pairs = [(measured[key][rank], predicted[key][rank]) for key in ("computing",)]
        pairs += [
            (measured["idle_by_cause"][cause][rank], predicted["idle_by_cause"][cause][rank])
            for cause in causes
        ]
        counts = [
            f"{measured[key][rank]:g} / {predicted[key][rank]:g}" for key in ("in_flight", "held")
        ]
        cells = [f"{1e3 * mine:.1f} / {1e3 * its:.1f}" for mine, its in ((took, foretold), *pairs)]
        table.add_row(
            str(rank), cells[0], f"{100 * (foretold / took - 1):+.1f} %", *cells[1:], *counts
        )
    click.echo(
        f"{found['policy']} on {found['placement']} placement, {plural(run.steps, 'step')}: "
        f"measured / predicted, ms\na step took {1e3 * measured['step']:.2f} ms, predicted "
        f"{1e3 * predicted['step']:.2f} ({100 * (predicted['step'] / measured['step'] - 1):+.1f} %)"
    )
    _print(table, 120)
    click.echo(
        f"fitted: {1e6 * fit['task']:.0f} us a task for the loop, {1e6 * fit['latency']:.0f} us a "
        f"message, jitter {fit['jitter']:.2f}, lengths {fit['lengths']:.2f}, "
        f"{plural(fit['pieces'], 'piece')} of a weight gradient"
    )
    if fit["slots"]:
        click.echo(
            f"offloaded state: {1e6 * fit['fetch']:.0f} us in and {1e6 * fit['store']:.0f} us out "
            f"a bucket, {1e6 * fit['step']:.0f} us its step; {plural(fit['slots'], 'slot')}, "
            f"{plural(max(fit['buckets']), 'bucket')} at most on a stage"
        )
    if fit["bring"] is not None:
        click.echo(f"weights in scratch: {1e6 * fit['bring']:.0f} us to bring those of a stage")
    if fit["host_slots"]:
        took = ", ".join(f"{1e6 * cost:.0f} us its {kind}" for kind, cost in fit["on_host"].items())
        click.echo(
            f"steps on the host: {took} a bucket; {fit['host_slots']} slots there, "
            f"{plural(max(fit['buckets']), 'bucket')} at most on a stage"
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
            one["policy"]
            + (f" max_held {one['max_held']}" if one["max_held"] else "")
            + (" (this run)" if one["is_this_run"] else "")
        )
        step, faster = f"{1e3 * one['step']:.2f}", f"{one['faster']:.3f}"
        table.add_row(
            name,
            f"{one['placement']} x{one['chunks']}",
            step,
            faster,
            f"{one['held']:g}",
            str(one["copies"]),
        )
    _print(table, 100)
    click.echo("held: the most microbatches that a rank holds, in those of all its layers")
    if not any(span.task.kind is Kind.INPUT for span in run.line.computing()):
        click.echo(
            "The run did not split its backwards: half of each is taken to be the weight gradient, "
            "where a schedule splits them."
        )
    if run.recompute != "none":
        click.echo(
            f"All of them recompute as the run did (memory.recompute = {run.recompute!r}), which "
            "held does not show."
        )
    counted = any(span.task.kind in (Kind.REDUCE, Kind.COLLECT) for span in run.line.spans)
    if not counted and any(one["copies"] > 1 for one in others):
        click.echo(
            "What two copies of the weights cost to add up is not known from this run, and not "
            "counted."
        )
    now = next(one for one in others if one["is_this_run"])
    best = next(one for one in others if counted or one["copies"] == 1)
    if best is now:
        click.echo("No other would be faster.")
    else:
        cap = f" with max_held {best['max_held']}" if best["max_held"] else ""
        click.echo(
            f"{best['policy']}{cap} would be {best['faster']:.3f} times as fast, holding "
            f"{best['held']:g} in place of {now['held']:g}."
        )


def _print(table: Table, least: int) -> None:
    """Print a table, at least so many columns wide; what is no terminal has room for all."""
    here = Console()
    width = max(least, here.width) if here.is_terminal else _NO_TERMINAL
    Console(width=width, highlight=False).print(table)
