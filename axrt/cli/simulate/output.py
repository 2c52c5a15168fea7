"""Figures as a table, JSON or CSV, and files."""

import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import click

from axrt.scheduler.plural import plural
from axrt.scheduler.simulation.cost_table import CostTable
from axrt.scheduler.simulation.timeline import Timeline

from .checks import refuse
from .measured_costs import samples_of


def show(
    figures: dict[str, Any] | list[dict[str, Any]],
    misfits: list[str],
    form: str,
    options: dict[str, Any],
) -> None:
    """Print figures of one schedule or of several."""
    found = figures if isinstance(figures, list) else [figures]
    if form == "table":
        from .tables import show_schedules

        show_schedules(found, misfits, _taken(options), factor_of(options))
        return
    if form == "csv":
        print_csv([_in_columns(one) for one in found])
    else:
        click.echo(json.dumps(figures, indent=1))
    for misfit in misfits:  # standard output has the figures alone
        click.echo(f"axrt: left out: {misfit}", err=True)


def factor_of(options: dict[str, Any]) -> float:
    """The factor of times in a table for a person: ms of costs that are in seconds."""
    return 1e3 if isinstance(options["costs"], CostTable) else 1.0


def _taken(options: dict[str, Any]) -> str:
    """A line about the costs that were taken, and their unit."""
    if isinstance(options["costs"], CostTable):
        samples = samples_of(options["costs"], options)
        return (
            f"costs: those of the table's layers with {plural(samples, 'sample')} in a microbatch, "
            f"cut by their times (--json and --csv say where){_varied(options)}. Times are in ms."
        )
    if options["stage_costs"]:
        work = f"costs of {plural(len(options['stage_costs']), 'stage')} by --stage-costs"
    else:
        work = "forward {:g}, input gradient {:g}, weight gradient {:g} of a rank".format(
            *options["costs"]
        )
    links, unit = "--latency", "the unit of these costs"
    if options["cluster"]:
        links, unit = "--cluster", "s"
    return (
        f"costs: {work}, {_on_the_way(options)} (--costs, --stage-costs, {links})"
        f"{_varied(options)}. Times are in {unit}."
    )


def _on_the_way(options: dict[str, Any]) -> str:
    """What messages take."""
    parts = [f"latency {options['latency']:g}"] if options["latency"] else []
    if cluster := options["cluster"]:
        parts = [f"links of {plural(cluster.nodes, 'node')} of {cluster.devices}"]
    keys = [name for name in ("transfer", "message_cost", "node") if options[name]]
    parts += [f"world.{name} {_listed(options[name])}" for name in keys]
    return ", ".join(parts) or "messages take no time"


def _varied(options: dict[str, Any]) -> str:
    """What makes durations vary, of which a schedule meets one draw."""
    parts = [f"--jitter {options['jitter']:g}"] if options["jitter"] else []
    if options["jitter"] is None and isinstance(options["costs"], CostTable):
        parts.append("the jitter of the file (--jitter 0: none)")
    if (options["lengths"] or 0) > 0:
        parts.append(f"world.lengths {options['lengths']:g}")
    if options["hiccups"][0]:
        parts.append(f"world.hiccups {_listed(options['hiccups'])}")
    if options["stragglers"]:
        parts.append(f"world.stragglers {_listed(options['stragglers'])}")
    return f"; durations vary by {', '.join(parts)}, drawn once (world.seed)" if parts else ""


def _listed(value: float | Sequence[float]) -> str:
    return ",".join(f"{one:g}" for one in ([value] if isinstance(value, int | float) else value))


def _in_columns(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures of a schedule with one number each: of lists by rank the largest, of idle times the
    mean, and each cause by itself."""
    causes = figures["idle_by_cause"]
    plain = {
        key: max(value) if isinstance(value, list) and key != "cuts" else value
        for key, value in figures.items()
        if key not in ("idle", "idle_by_cause")
    }
    return {
        **plain,
        "idle": mean(figures["idle"]),
        **{f"idle_{cause}": mean(causes[cause]) for cause in causes},
    }


def print_csv(rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def drawn(line: Timeline) -> str:
    from axrt.observe.picture import draw

    return draw(line)


def write(path: Path | None, made: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        path.write_text(made(), encoding="utf-8")
    except OSError as error:
        refuse(f"{path}: {error.strerror}; expected a file that can be written")
