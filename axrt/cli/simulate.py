"""`axrt simulate`: predict a schedule, before anything runs.

A study calls it a hundred times. So modules that only some calls need are imported where they need
them.
"""

import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NoReturn

import click

from axrt.cli.measured_costs import CostsOrFile, samples_of, world_on
from axrt.cli.option_types import Numbers, OwnPolicy, PolicyName, StageCosts
from axrt.cli.overrides import with_overrides
from axrt.cli.simulated import costs_of, figures_of, line_of, simulated
from axrt.cli.simulated_world import World, instead_of
from axrt.errors import ConfigError
from axrt.exit_codes import Exit
from axrt.scheduler.cost_table import CostTable
from axrt.scheduler.job import Job
from axrt.scheduler.placement import PLACEMENTS, placement_by_name
from axrt.scheduler.planner import World as PlannedWorld
from axrt.scheduler.plural import plural
from axrt.scheduler.policies import CAPPED, FIXED, NAMES, Fixed
from axrt.scheduler.recompute import most_recomputed
from axrt.scheduler.schedules import build_schedule, search
from axrt.scheduler.simulator import Costs, order_of
from axrt.scheduler.state import CAUSES
from axrt.scheduler.timeline import Timeline

# Options that a search takes: they say how long things take, and nothing of the schedule.
_COSTS = (
    *("--ranks", "--microbatches", "--memory", "--also", "--json", "--csv", "--costs", "--samples"),
    *("--stage-costs", "--latency", "--replicas", "--zero", "--jitter", "--recompute", "--steps"),
    *("--seed", "--world", "[section.key=value]..."),
)
_MODES = ("--policy", "--search", "--plan")


class _Simulate(click.Command):
    """The command, which knows what its former options have become."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if instead := instead_of(error.option_name):
                raise click.UsageError(f"{error.option_name} is gone: {instead}", ctx) from None
            raise


@click.command(
    "simulate", cls=_Simulate, short_help="Show what a schedule would do, or compare all."
)
@click.option(
    "--policy",
    type=PolicyName([*NAMES, FIXED, "all"]),
    help="the rule, or one of your own; all: a table of those that fit",
)
@click.option(
    "--also",
    multiple=True,
    type=OwnPolicy(),
    help="with all or --search: a policy of your own, too, and again",
)
@click.option("--ranks", type=click.IntRange(1), help="of a pipeline")
@click.option("--microbatches", type=click.IntRange(1), help="per step")
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    help="a run with a timeline: measured beside predicted",
)
@click.option("--what-if", is_flag=True, help="with --like: every other schedule on the same costs")
@click.option(
    "--search",
    "searches",
    is_flag=True,
    help="the best schedule for these costs, and what bounds it",
)
@click.option(
    "--plan", "plans", is_flag=True, help="an order made for these costs, see --write-order"
)
@click.option(
    "--memory",
    default=None,
    type=click.FloatRange(0, min_open=True),
    help="with --search or --plan: microbatches of all its layers that a rank may hold; with a "
    "file of costs, bytes",
)
@click.option(
    "--placement",
    default="",
    type=click.Choice(["", *PLACEMENTS]),
    help="which rank holds which stage; by default the policy's",
)
@click.option(
    "--chunks", default=0, type=click.IntRange(0), help="stages a rank, of placement looped"
)
@click.option(
    "--max-held",
    default=0,
    type=click.IntRange(0),
    help="cap, for adaptive, axonn, dualpipe-v and fixed",
)
@click.option("--order", default="", help="of policy fixed: a CSV file, or a policy to follow")
@click.option(
    "--costs",
    default=(1.0, 1.0, 1.0),
    type=CostsOrFile(Numbers(3, ",")),
    help="forward, input and weight gradient of a rank; a chunk's is 1/v. Or a file of axrt "
    "profile: its layers, in seconds",
)
@click.option(
    "--samples",
    default=None,
    type=click.IntRange(1),
    help="in a microbatch, where a file of --costs has several",
)
@click.option(
    "--stage-costs", type=StageCosts(), help="the same for each stage, in place of --costs"
)
@click.option("--latency", default=0.0, type=click.FloatRange(0), help="of a message between ranks")
@click.option(
    "--jitter",
    default=None,
    type=click.FloatRange(0, 3, clamp=False),
    help="sigma of a lognormal factor on each duration",
)
@click.option(
    "--replicas", default=1, show_default=True, type=click.IntRange(1), help="of the pipeline"
)
@click.option(
    "--zero",
    default=0,
    type=click.IntRange(0, 3),
    help="as memory.zero: each copy of a bucket steps a shard",
)
@click.option(
    "--recompute",
    default="none",
    show_default=True,
    help="none, full, stage-aware or stage-aware:SHARE",
)
@click.option(
    "--steps", default=1, show_default=True, type=click.IntRange(1), help="one after the other"
)
@click.option("--seed", default=0, type=int, help="of what varies")
@click.option(
    "--world",
    type=click.Path(path_type=Path, dir_okay=False),
    help="a file whose section [world] has keys of what is rare",
)
@click.option("--json", "as_json", is_flag=True, help="figures as JSON")
@click.option(
    "--csv", "as_csv", is_flag=True, help="figures as CSV, a line a schedule, or with --like a rank"
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="draw the timeline to an SVG file",
)
@click.option(
    "--timeline",
    type=click.Path(path_type=Path, dir_okay=False),
    help="write the timeline to a JSON file, for axrt draw",
)
@click.option(
    "--write-order",
    type=click.Path(path_type=Path, dir_okay=False),
    help="write the order to a CSV file, for policy fixed",
)
@with_overrides
@click.pass_context
def simulate_command(
    context: click.Context,
    /,
    policy: str | None,
    like: Path | None,
    what_if: bool,
    searches: bool,
    plans: bool,
    **options: Any,
) -> None:
    """Simulate a schedule with the rules that the runtime itself follows.

    \b
    axrt simulate --policy 1f1b --ranks 4 --microbatches 8
    axrt simulate --policy all --ranks 8 --microbatches 16 --steps 8 --jitter 0.5
    axrt simulate --policy zb-v --ranks 4 --microbatches 8 --picture zb-v.svg
    axrt simulate --search --ranks 8 --microbatches 16 --latency 0.1 --memory 8
    axrt simulate --like runs/traced --what-if      after axrt train ... run.trace_steps=5

    What is rare is a key: world.slots=3, world.lengths=0.5, or any other of docs/command-line.md.
    """
    memory, form = (
        options.pop("memory") or 0.0,
        _form(options.pop("as_json"), options.pop("as_csv")),
    )
    _check_picture(options["picture"])
    if like or what_if:
        _refuse_besides("--like", ("--what-if", "--picture", "--json", "--csv"), context)
        _like(like, what_if, form, options["picture"])
        return
    options |= _world(options.pop("world"), options.pop("overrides"))
    modes = [mode for mode, on in zip(_MODES, (policy, searches, plans), strict=True) if on]
    _check_modes(modes, memory, options)
    _check(options)
    if options["stage_costs"] and "--costs" in _given(context):
        _refuse("--costs and --stage-costs both say what stages take; expected one of them")
    if options["also"] and not (searches or policy == "all"):
        _refuse(
            "--also adds policies to those that are compared; expected --policy all, or --search"
        )
    if searches:
        _refuse_besides("--search", _COSTS, context)
        if options["offload_activations"] or options["held_mib"]:
            _refuse("--search takes no world.offload_activations and no world.held_mib")
        _search(options, memory, form)
    elif plans:
        for name in sorted(_given(context) & {"--max-held", "--order", "--chunks"}):
            _refuse(f"--plan takes no {name}; expected --memory, or --policy in place of --plan")
        _plan(options, memory, form)
    elif policy:
        _simulate(policy, form, options)


def _world(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        return World.read(file, overrides).as_options()
    except ConfigError as error:
        _refuse(str(error))


def _check_modes(modes: list[str], memory: float, options: dict[str, Any]) -> None:
    """Check that the command does one thing, and what that needs."""
    if not (modes and options["ranks"] and options["microbatches"]):
        _refuse(
            "expected --policy, --search or --plan, with --ranks and --microbatches; or --like RUN"
        )
    if len(modes) > 1:
        _refuse(f"{' and '.join(modes)} do not go together; expected one of them")
    if memory and modes == ["--policy"]:
        _refuse("--memory narrows --search and --plan; expected one of them in place of --policy")


def _simulate(policy: str, form: str, options: dict[str, Any]) -> None:
    """Simulate one policy, or all of them, and print the figures."""
    files = {name: options.pop(name) for name in ("picture", "timeline", "write_order")}
    if policy == "all":
        for name in (name for name, path in files.items() if path):
            _refuse(
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
        _write(files["picture"], lambda: _drawn(line))  # noqa: B023
        _write(files["timeline"], line.to_json)
        _write(files["write_order"], lambda: str(order_of(job)))  # noqa: B023
    if policy != "all" and misfits:
        _refuse(misfits[0])
    if not found:
        _refuse(f"no policy fits: {misfits[0]}")
    _show(found if policy == "all" else found[0], misfits, form, options)


def _plan(options: dict[str, Any], memory: float, form: str) -> None:
    """Make an order for the costs, simulate it, and print its figures."""
    from axrt.scheduler.planner import PLACEMENTS as PLANNED
    from axrt.scheduler.planner import planned

    where = (options["placement"],) if options["placement"] else PLANNED
    ranks, microbatches = options["ranks"], options["microbatches"]
    if options["stage_costs"] and options["placement"] != "linear":
        _refuse("--plan chooses the stages; expected --placement linear with --stage-costs")
    try:
        among, unit = _worlds(where, options)
        if 0 < memory < 1:
            _refuse(
                f"--memory {memory:g}: a rank holds a microbatch of its layers at least; expected "
                "1 or more"
            )
        limit = (memory or ranks) * unit
        plan = planned(among, microbatches, limit, options["steps"], options["seed"])
        order = plan.order
        job = Job(order.placement, Fixed(order, order.needs), microbatches)
        line = line_of(job, costs_of(job, options), options)
    except ValueError as error:
        _refuse(str(error))
    _write(options["picture"], lambda: _drawn(line))
    _write(options["timeline"], line.to_json)
    _write(options["write_order"], lambda: str(order))
    _show(figures_of(job, line, options), [], form, options)


def _worlds(where: Sequence[str], options: dict[str, Any]) -> tuple[list[PlannedWorld], float]:
    """The placements that a plan may take, and what a microbatch keeps on a rank."""
    from axrt.scheduler.planner import worlds

    ranks = options["ranks"]
    if not isinstance(options["costs"], CostTable):
        any_job = build_schedule("gpipe", ranks, options["microbatches"])
        return worlds(ranks, costs_of(any_job, options), where), 1.0
    placements = [placement_by_name(name, ranks, 0) for name in where]
    enough = [one for one in placements if one.stages <= options["costs"].num_layers]
    found = [world_on(one, options["costs"], options) for one in enough or placements]
    return found, min(world.least for world in found)


def _show(
    figures: dict[str, Any] | list[dict[str, Any]],
    misfits: list[str],
    form: str,
    options: dict[str, Any],
) -> None:
    """Print figures of one schedule or of several."""
    found = figures if isinstance(figures, list) else [figures]
    if form == "table":
        from axrt.cli.tables import show_schedules

        show_schedules(found, misfits, _taken(options), _shown(options))
        return
    if form == "csv":
        _print_csv([_in_columns(one) for one in found])
    else:
        click.echo(json.dumps(figures, indent=1))
    for misfit in misfits:  # standard output has the figures alone
        click.echo(f"axrt: left out: {misfit}", err=True)


def _shown(options: dict[str, Any]) -> float:
    """The factor of times in a table for a person: ms of costs that are in seconds."""
    return 1e3 if isinstance(options["costs"], CostTable) else 1.0


def _taken(options: dict[str, Any]) -> str:
    """A line about the costs that were taken, and their unit."""
    if isinstance(options["costs"], CostTable):
        samples = samples_of(options["costs"], options)
        return (
            f"costs: those of the table's layers with {plural(samples, 'sample')} in a microbatch, "
            "cut by their times (--json says where). Times are in ms."
        )
    if options["stage_costs"]:
        work = f"costs of {plural(len(options['stage_costs']), 'stage')} by --stage-costs"
    else:
        work = "forward {:g}, input gradient {:g}, weight gradient {:g} of a rank".format(
            *options["costs"]
        )
    latency = f"latency {options['latency']:g}" if options["latency"] else "messages take no time"
    return (
        f"costs: {work}, {latency} (--costs, --stage-costs, --latency). Times are in the unit of "
        "these costs."
    )


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


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _drawn(line: Timeline) -> str:
    from axrt.observe.picture import draw

    return draw(line)


def _given(context: click.Context) -> set[str]:
    """The options that were given on the command line."""
    sources = {
        option.opts[0]: context.get_parameter_source(option.name or "")
        for option in context.command.params
    }
    return {
        name for name, source in sources.items() if source is not click.core.ParameterSource.DEFAULT
    }


def _refuse_besides(mode: str, allowed: Sequence[str], context: click.Context) -> None:
    """Refuse options that the mode would ignore."""
    others = sorted(_given(context) - {mode, *allowed})
    if others:
        _refuse(f"{mode} takes no {others[0]}; expected only {', '.join(allowed)} with it")


def _form(as_json: bool, as_csv: bool) -> str:
    if as_json and as_csv:
        _refuse("--json and --csv are two forms of the figures; expected one of them")
    return "json" if as_json else "csv" if as_csv else "table"


def _check_picture(path: Path | None) -> None:
    if path and path.suffix != ".svg":
        _refuse(f"--picture {path}: pictures are SVG; expected a name that ends in .svg")


def _like(path: Path | None, what_if: bool, form: str, picture: Path | None) -> None:
    """Print measured figures beside predicted ones."""
    if path is None:
        _refuse("--what-if compares with a run; expected --like RUN")
    from axrt.observe.picture import draw
    from axrt.scheduler.comparison import Run, compared, with_other_schedules

    try:
        run = Run.read(path)
        found, costs, line = compared(run)
        tried = with_other_schedules(run, costs) if what_if else []
    except ValueError as error:
        _refuse(str(error))
    _write(picture, lambda: draw(run.line, line))
    if form == "json":
        click.echo(json.dumps({**found, "what_if": tried}, indent=1))
    elif form == "csv":
        _print_csv(tried if what_if else _by_rank(found))
    else:
        from axrt.cli.tables import show_comparison

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


def _search(options: dict[str, Any], memory: float, form: str) -> None:
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
        _refuse(f"no schedule fits. {misfits[0]}")
    if not found:
        _refuse(
            f"--memory {memory:g}: no schedule on {plural(options['ranks'], 'rank')} holds so "
            "little; expected more, or more ranks"
        )
    if form == "json":
        click.echo(
            json.dumps({"found": [one.as_dict() for one in found], "least": least}, indent=1)
        )
    elif form == "csv":
        _print_csv([one.as_dict() for one in found])
    else:
        from axrt.cli.tables import show_search

        show_search(found, least, _shown(options))
    if misfits:
        click.echo(f"axrt: left out: {len(misfits)} schedules, such as {misfits[0]}", err=True)


def _check(options: dict[str, Any]) -> None:
    _check_ranks(options)
    if options["samples"] and not isinstance(options["costs"], CostTable):
        _refuse("--samples is of a file of costs; expected --costs FILE.json with it")
    numbers = () if isinstance(options["costs"], CostTable) else options["costs"]
    if numbers and not sum(map(sum, options["stage_costs"] or [numbers])):
        _refuse("--costs are all 0; expected something to do")
    if options["reductions"] > 1 and options["zero"] < 2:
        _refuse(
            f"world.reductions = {options['reductions']} with --zero {options['zero']}: gradients "
            "are kept for the whole step; expected --zero 2 or 3"
        )
    if options["gathered"] and options["zero"] < 3 and not options["bring_cost"]:
        _refuse(
            f"world.gathered = {options['gathered']} with --zero {options['zero']}: weights are "
            "always whole; expected --zero 3, or world.bring_cost"
        )
    if options["bring_cost"] and (not options["slots"] or options["zero"] in (1, 2)):
        _refuse(
            f"world.bring_cost = {options['bring_cost']:g} with world.slots = {options['slots']} "
            f"and --zero {options['zero']}: weights are in scratch along with state; expected "
            "world.slots=3, and --zero 0 or 3"
        )
    try:
        most_recomputed(options["recompute"])
    except ValueError as error:
        _refuse(f"--recompute = {error}")


def _check_ranks(options: dict[str, Any]) -> None:
    ranks = options["ranks"] * options["replicas"]
    if options["stragglers"] and len(options["stragglers"]) != ranks:
        _refuse(
            f"world.stragglers has {plural(len(options['stragglers']), 'factor')}; expected one "
            f"for each of {plural(ranks, 'rank')}"
        )


def _write(path: Path | None, made: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        path.write_text(made(), encoding="utf-8")
    except OSError as error:
        _refuse(f"{path}: {error.strerror}; expected a file that can be written")


def _refuse(text: str) -> NoReturn:
    click.echo(f"axrt: {text}", err=True)
    sys.exit(Exit.BAD_INPUT)
