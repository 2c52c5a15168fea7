"""`axrt simulate`: predict a schedule, before anything runs.

A study calls it a hundred times. So modules that only some calls need are imported where they need
them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from axrt.errors import ConfigError
from axrt.scheduler.placement import PLACEMENTS
from axrt.scheduler.policies import FIXED, NAMES

from ..overrides import with_overrides
from .checks import KEYS, check, check_picture, given, refuse, refuse_besides
from .cluster import check_cluster, read, split
from .measured_costs import CostsOrFile
from .modes import show_found, show_plan, show_policies, show_run
from .option_types import Numbers, PolicyName, StageCosts
from .world import World, instead_of

# Options that a search takes: they say how long things take, and nothing of the schedule.
_COSTS = (
    *("--ranks", "--microbatches", "--memory", "--json", "--csv", "--costs", "--tensor"),
    *("--joints", "--exchange"),
    *("--stage-costs", "--latency", "--replicas", "--zero", "--jitter", "--recompute", "--steps"),
    *("--world", "--cluster", KEYS),
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
    "--ranks", type=click.IntRange(1), help="of a pipeline; with --tensor each of them is a team"
)
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
    "--tensor",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="members that hold each stage together; costs are those of a member",
)
@click.option(
    "--joints",
    default=0,
    type=click.IntRange(0),
    help="with --tensor: joints in each forward, and in each backward, of a stage",
)
@click.option(
    "--exchange",
    default=0.0,
    type=click.FloatRange(0),
    help="with --joints: time that the slices of a joint take",
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
@click.option(
    "--world",
    type=click.Path(path_type=Path, dir_okay=False),
    help="a file whose section [world] has keys of what is rare",
)
@click.option(
    "--cluster",
    type=click.Path(path_type=Path, dir_okay=False),
    help="a file with the links; costs are in seconds",
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
    help="write a CSV file, for policy fixed",
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
    check_picture(options["picture"])
    if like or what_if:
        refuse_besides("--like", ("--what-if", "--picture", "--json", "--csv"), context)
        show_run(like, what_if, form, options["picture"])
        return
    of_cluster, overrides = split(options.pop("overrides"))
    options["cluster"] = read(options["cluster"], of_cluster)
    options |= _world(options.pop("world"), overrides)
    modes = [mode for mode, on in zip(_MODES, (policy, searches, plans), strict=True) if on]
    _check_modes(modes, memory, options)
    check(options)
    check_cluster(options, context)
    if options["stage_costs"] and "--costs" in given(context):
        refuse("--costs and --stage-costs both say what stages take; expected one of them")
    if options["also"] and not (searches or policy == "all"):
        refuse(
            "world.also adds policies to those that are compared; expected --policy all, or "
            "--search"
        )
    if searches:
        refuse_besides("--search", _COSTS, context)
        if options["offload_activations"] or options["held_mib"]:
            refuse("--search takes no world.offload_activations and no world.held_mib")
        show_found(options, memory, form)
    elif plans:
        for name in sorted(given(context) & {"--max-held", "--order", "--chunks"}):
            refuse(f"--plan takes no {name}; expected --memory, or --policy in place of --plan")
        show_plan(options, memory, form)
    elif policy:
        show_policies(policy, form, options)


def _world(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        return World.read(file, overrides).as_options()
    except ConfigError as error:
        refuse(str(error))


def _check_modes(modes: list[str], memory: float, options: dict[str, Any]) -> None:
    """Check that the command does one thing, and what that needs."""
    if not (modes and options["ranks"] and options["microbatches"]):
        refuse(
            "expected --policy, --search or --plan, with --ranks and --microbatches; or --like RUN"
        )
    if len(modes) > 1:
        refuse(f"{' and '.join(modes)} do not go together; expected one of them")
    if memory and modes == ["--policy"]:
        refuse("--memory narrows --search and --plan; expected one of them in place of --policy")


def _form(as_json: bool, as_csv: bool) -> str:
    if as_json and as_csv:
        refuse("--json and --csv are two forms of the figures; expected one of them")
    return "json" if as_json else "csv" if as_csv else "table"
