"""`axrt sweep`: the layouts that are chosen on clusters, or of runs, that differ in some keys."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .overrides import with_overrides

if TYPE_CHECKING:  # --help needs no torch
    from axrt.layouts.sweep import Outcome


@click.command(short_help="Choose layouts over values of keys of a cluster, or of a run.")
@click.argument("cluster", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("file", type=click.Path(dir_okay=False))
@with_overrides
@click.option(
    "--over",
    multiple=True,
    required=True,
    metavar="KEY=VALUE,...",
    help="a key with its values, of the cluster or of the run; of several keys all combinations",
)
@click.option(
    "--costs",
    type=click.Path(path_type=Path, dir_okay=False),
    help="a table of axrt profile, in place of costs that are modelled",
)
@click.option("--json", "as_json", is_flag=True, help="layouts as JSON")
def sweep(
    cluster: Path,
    file: str,
    overrides: tuple[str, ...],
    over: tuple[str, ...],
    costs: Path | None,
    as_json: bool,
) -> None:
    """Choose the fastest layout of the run that FILE describes on CLUSTER (both TOML), once for
    each combination of the values of some keys.

    \b
    axrt sweep cluster.toml my.toml --over links.node.bandwidth=100e9,300e9
    axrt sweep cluster.toml my.toml --over cluster.nodes=1,2,4 --over parallel.tensor=1,8

    A key that is chosen otherwise, such as parallel.tensor, is pinned. A star is on layouts that
    none beats in time, cost and memory at once, of the six fastest of each combination. Only
    layouts of the same model, data and precision are compared. Leaves with code 1 where nothing
    fits anywhere.
    """
    from axrt.errors import AxrtError
    from axrt.exit_codes import exit_code_of
    from axrt.layouts.sweep import compared, sources_of, swept, without_effect
    from axrt.layouts.sweep_points import points, values_of

    from .sample import sample_of

    try:
        all_points = points(cluster, file, overrides, values_of(over), costs is not None)
        sources = sources_of(all_points, costs, sample_of)

        def found(index: int, outcome: "Outcome") -> None:
            *_, told = _row(outcome)
            seconds = f", {outcome.numbers[0]:.4g} s a step" if outcome.choice else ""
            click.echo(f"axrt: {index + 1} of {len(all_points)}: {told}{seconds}", err=True)

        outcomes = compared(list(swept(all_points, sources, sample_of, found)))
    except (AxrtError, ValueError) as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error) if isinstance(error, AxrtError) else 2)
    for key in without_effect(outcomes):
        click.echo(f"axrt: the values of {key} make no difference", err=True)
    if as_json:
        told = {"source": sources[0].name, "layouts": [one.as_dict() for one in outcomes]}
        click.echo(json.dumps(told, indent=1))
    else:
        click.echo("\n".join([f"by {sources[0].name} costs:", *_lines(outcomes)]))
    sys.exit(0 if any(one.choice for one in outcomes) else 1)


_HEAD = ("", "s a step", "device s", "GB", "computing", "joints", "ends", "waiting", "")


def _lines(outcomes: "Sequence[Outcome]") -> Iterator[str]:
    """A table with a row for each layout that is chosen, or that none beats, then notes."""
    told = [one for one in outcomes if one.is_chosen or one.choice is None or one.is_unbeaten]
    rows = [_HEAD, *map(_row, told)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        aligned = (cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False))
        yield f"{'  '.join(aligned)}  {row[-1]}".rstrip()
    for one in told:
        yield from (f"{' '.join(one.point.texts)}: {note}" for note in one.notes)


def _row(one: "Outcome") -> tuple[str, ...]:
    from axrt.layouts.told import name_of

    texts = " ".join(one.point.texts)
    if one.choice is None:
        return ("", *["-"] * 7, f"{texts}: {one.refused}")
    seconds, device_s, held = one.numbers
    shares = ["-"] * 4
    if one.is_chosen:
        shares = [f"{part / seconds:.1%}" for part in one.choice.time.parts.values()]
    numbers = (f"{seconds:.4g}", f"{device_s:.4g}", f"{held / 1e9:.3g}")
    star = "*" if one.is_unbeaten else ""
    return (star, *numbers, *shares, f"{texts}: {name_of(one.choice.config)}")
