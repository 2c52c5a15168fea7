"""What options and keys must have together."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from axrt.exit_codes import Exit
from axrt.scheduler.planning.recompute import most_recomputed
from axrt.scheduler.plural import plural
from axrt.scheduler.simulation.cost_table import CostTable

KEYS = "keys of [world]"  # what the command line has behind its options


def check(options: dict[str, Any]) -> None:
    """Refuse options and keys that do not go together."""
    _check_ranks(options)
    if options["samples"] and not isinstance(options["costs"], CostTable):
        refuse("world.samples is of a file of costs; expected --costs FILE.json with it")
    if options["joints"] and options["tensor"] == 1:
        refuse("--joints are between members of a team; expected --tensor 2 or more with it")
    if options["exchange"] and not options["joints"]:
        refuse("--exchange is what slices take at a joint; expected --joints with it")
    numbers = () if isinstance(options["costs"], CostTable) else options["costs"]
    if numbers and not sum(map(sum, options["stage_costs"] or [numbers])):
        refuse("--costs are all 0; expected something to do")
    if options["reductions"] > 1 and options["zero"] < 2:
        refuse(
            f"world.reductions = {options['reductions']} with --zero {options['zero']}: gradients "
            "are kept for the whole step; expected --zero 2 or 3"
        )
    if options["gathered"] and options["zero"] < 3 and not options["bring_cost"]:
        refuse(
            f"world.gathered = {options['gathered']} with --zero {options['zero']}: weights are "
            "always whole; expected --zero 3, or world.bring_cost"
        )
    if options["bring_cost"] and (not options["slots"] or options["zero"] in (1, 2)):
        refuse(
            f"world.bring_cost = {options['bring_cost']:g} with world.slots = {options['slots']} "
            f"and --zero {options['zero']}: weights are in scratch along with state; expected "
            "world.slots=3, and --zero 0 or 3"
        )
    try:
        most_recomputed(options["recompute"])
    except ValueError as error:
        refuse(f"--recompute = {error}")


def _check_ranks(options: dict[str, Any]) -> None:
    ranks = options["ranks"] * options["replicas"] * options["tensor"]
    if options["stragglers"] and len(options["stragglers"]) != ranks:
        refuse(
            f"world.stragglers has {plural(len(options['stragglers']), 'factor')}; expected one "
            f"for each of {plural(ranks, 'rank')}"
        )


def check_picture(path: Path | None) -> None:
    """Refuse a file of --picture that is no SVG."""
    if path and path.suffix != ".svg":
        refuse(f"--picture {path}: pictures are SVG; expected a name that ends in .svg")


def given(context: click.Context) -> set[str]:
    """The options that were given on the command line."""
    sources = {
        _named(option): context.get_parameter_source(option.name or "")
        for option in context.command.params
    }
    return {
        name for name, source in sources.items() if source is not click.core.ParameterSource.DEFAULT
    }


def _named(option: click.Parameter) -> str:
    return KEYS if isinstance(option, click.Argument) else option.opts[0]


def refuse_besides(mode: str, allowed: Sequence[str], context: click.Context) -> None:
    """Refuse options that the mode would ignore."""
    others = sorted(given(context) - {mode, *allowed})
    if others:
        refuse(f"{mode} takes no {others[0]}; expected only {', '.join(allowed)} with it")


def refuse(text: str) -> NoReturn:
    """Leave with a line, and the code of bad input."""
    click.echo(f"axrt: {text}", err=True)
    sys.exit(Exit.BAD_INPUT)
