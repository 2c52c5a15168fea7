"""What the command does: one policy or all, a plan, a search, or a run beside its prediction."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from axrt.scheduler.job import Job
from axrt.scheduler.lacks import CAUSES
from axrt.scheduler.placement import placement_by_name
from axrt.scheduler.planning.planner import World as PlannedWorld
from axrt.scheduler.plural import plural
from axrt.scheduler.policies import CAPPED, NAMES, Fixed
from axrt.scheduler.simulation.cost_table import CostTable
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.schedules import build_schedule, search
from axrt.scheduler.simulation.simulator import order_of
from axrt.scheduler.simulation.timeline import Timeline

from .checks import refuse
from .measured_costs import world_on
from .output import drawn, factor_of, print_csv, show, write
from .schedule import costs_of, figures_of, line_of, simulated


def show_policies(policy: str, form: str, options: dict[str, Any]) -> None:
    """Simulate one policy, or all of them, and print the figures."""
    files = {name: options.pop(name) for name in ("picture", "timeline", "write_order")}
    if policy == "all":
        for name in (name for name, path in files.items() if path):
            refuse(
                f"--{name.replace('_', '-')} is of one schedule; expected a --policy other than all"
            )
    found: list[dict[str, Any]] = []
    misfits: list[str] = []
    for name in (*NAMES, *options["also"]) if policy == "all" else (policy,):
        try:
            takes_the_cap = policy != "all" or name in CAPPED
            job, line = simulated(name, options if takes_the_cap else {**options, "max_held": 0})
        except ValueError as error:
            misfits.append(str(error) if name in str(error) else f"{name}: {error}")
            continue
        found.append(figures_of(job, line, options))
        write(files["picture"], lambda: drawn(line))  # noqa: B023
        write(files["timeline"], line.to_json)
        write(files["write_order"], lambda: str(order_of(job)))  # noqa: B023
    if policy != "all" and misfits:
        refuse(misfits[0])
    if not found:
        refuse(f"no policy fits: {misfits[0]}")
    show(found if policy == "all" else found[0], misfits, form, options)


def show_plan(options: dict[str, Any], memory: float, form: str) -> None:
    """Make an order for the costs, simulate it, and print its figures."""
    from axrt.scheduler.planning.planner import PLACEMENTS as PLANNED
    from axrt.scheduler.planning.planner import planned

    where = (options["placement"],) if options["placement"] else PLANNED
    ranks, microbatches = options["ranks"], options["microbatches"]
    if options["stage_costs"] and options["placement"] != "linear":
        refuse("--plan chooses the stages; expected --placement linear with --stage-costs")
    try:
        among, unit = _worlds(where, options)
        if 0 < memory < 1:
            refuse(
                f"--memory {memory:g}: a rank holds a microbatch of its layers at least; expected "
                "1 or more"
            )
        limit = (memory or ranks) * unit
        plan = planned(among, microbatches, limit, options["steps"], options["seed"])
        order = plan.order
        job = Job(order.placement, Fixed(order, order.needs), microbatches)
        line = line_of(job, costs_of(job, options), options)
    except ValueError as error:
        refuse(str(error))
    write(options["picture"], lambda: drawn(line))
    write(options["timeline"], line.to_json)
    write(options["write_order"], lambda: str(order))
    show(figures_of(job, line, options), [], form, options)


def _worlds(where: Sequence[str], options: dict[str, Any]) -> tuple[list[PlannedWorld], float]:
    """The placements that a plan may take, and what a microbatch keeps on a rank."""
    from axrt.scheduler.planning.planner import worlds

    ranks = options["ranks"]
    if not isinstance(options["costs"], CostTable):
        any_job = build_schedule("gpipe", ranks, options["microbatches"])
        return worlds(ranks, costs_of(any_job, options), where), 1.0
    placements = [placement_by_name(name, ranks, 0) for name in where]
    enough = [one for one in placements if one.stages <= options["costs"].num_layers]
    found = [world_on(one, options["costs"], options, True) for one in enough or placements]
    return found, min(world.least for world in found)


def show_found(options: dict[str, Any], memory: float, form: str) -> None:
    misfits: list[str] = []

    def run(job: Job) -> tuple[Costs, Timeline] | None:
        try:
            costs = costs_of(job, options)
            return costs, line_of(job, costs, options)
        except ValueError as error:
            misfits.append(f"{job}: {error}")
            return None

    found, least = search(
        options["ranks"], options["microbatches"], options["steps"], memory, run, options["also"]
    )
    if not found and not least:
        refuse(f"no schedule fits. {misfits[0]}")
    if not found:
        refuse(
            f"--memory {memory:g}: no schedule on {plural(options['ranks'], 'rank')} holds so "
            "little; expected more, or more ranks"
        )
    if form == "json":
        click.echo(
            json.dumps({"found": [one.as_dict() for one in found], "least": least}, indent=1)
        )
    elif form == "csv":
        print_csv([one.as_dict() for one in found])
    else:
        from .tables import show_search

        show_search(found, least, factor_of(options))
    if misfits:
        click.echo(f"axrt: left out: {len(misfits)} schedules, such as {misfits[0]}", err=True)


def show_run(path: Path | None, what_if: bool, form: str, picture: Path | None) -> None:
    """Print measured figures beside predicted ones."""
    if path is None:
        refuse("--what-if compares with a run; expected --like RUN")
    from axrt.observe.picture import draw
    from axrt.scheduler.simulation.comparison import Run, compared, with_other_schedules

    try:
        run = Run.read(path)
        found, costs, line = compared(run)
        tried = with_other_schedules(run, costs) if what_if else []
    except ValueError as error:
        refuse(str(error))
    write(picture, lambda: draw(run.line, line))
    if form == "json":
        click.echo(json.dumps({**found, "what_if": tried}, indent=1))
    elif form == "csv":
        print_csv(tried if what_if else _by_rank(found))
    else:
        from .tables import show_comparison

        show_comparison(found, tried, run)


def _by_rank(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each rank, measured and predicted."""
    return [
        {
            "figures": which,
            "rank": rank,
            "step": of["step"],
            **{key: of[key][rank] for key in ("time", "computing", "in_flight", "held")},
            **{f"idle_{cause}": of["idle_by_cause"][cause][rank] for cause in CAUSES},
        }
        for which, of in (("measured", found["measured"]), ("predicted", found["predicted"]))
        for rank in range(len(of["time"]))
    ]
