"""`axrt sweep`: the layouts that are chosen on clusters, or of runs, that differ in some keys."""

import json
import sys
from collections.abc import Container, Iterator, Sequence
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
@click.option("--json", "as_json", is_flag=True, help="an object for each combination")
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
    none beats in time, cost and memory at once, of the six fastest of each combination. Leaves
    with code 1 where nothing fits anywhere.
    """
    from axrt.errors import AxrtError
    from axrt.exit_codes import exit_code_of
    from axrt.layouts.sweep import points, swept, unbeaten, values_of

    from .sample import sample_of

    try:
        all_points = points(cluster, file, overrides, values_of(over))

        def found(index: int, outcome: "Outcome") -> None:
            *_, told = _row(outcome)
            seconds = f", {outcome.numbers[0]:.4g} s a step" if outcome.choice else ""
            click.echo(f"axrt: {index + 1} of {len(all_points)}: {told}{seconds}", err=True)

        outcomes = list(swept(all_points, costs, sample_of, found))
    except (AxrtError, ValueError) as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error) if isinstance(error, AxrtError) else 2)
    best = set(map(id, unbeaten(outcomes)))
    if as_json:
        told = [{**one.as_dict(), "unbeaten": id(one) in best} for one in outcomes]
        click.echo(json.dumps(told, indent=1))
    else:
        click.echo("\n".join(_lines(outcomes, best)))
    sys.exit(0 if best else 1)


_HEAD = ("", "s a step", "device s", "GB", "computing", "joints", "ends", "waiting", "")


def _lines(outcomes: "Sequence[Outcome]", best: "Container[int]") -> Iterator[str]:
    """A table with a row for each layout that is chosen, or that none beats.

    Args:
        best: the identity of those.
    """
    rows: list[tuple[str, ...]] = [_HEAD, *(_row(one, id(one) in best) for one in outcomes)]
    wanted = [
        row
        for row, one in zip(rows[1:], outcomes, strict=True)
        if one.is_chosen or one.choice is None or id(one) in best
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in (_HEAD, *wanted):
        aligned = (cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False))
        yield f"{'  '.join(aligned)}  {row[-1]}".rstrip()


def _row(one: "Outcome", is_best: bool = False) -> tuple[str, ...]:
    from axrt.layouts.told import name_of

    texts = " ".join(one.point.texts)
    if one.choice is None:
        return ("", *["-"] * 7, f"{texts}: {one.refused}")
    seconds, device_s, held = one.numbers
    shares = ["-"] * 4
    if one.is_chosen:
        shares = [f"{part / seconds:.1%}" for part in one.choice.time.parts.values()]
    numbers = (f"{seconds:.4g}", f"{device_s:.4g}", f"{held / 1e9:.3g}")
    return ("*" if is_best else "", *numbers, *shares, f"{texts}: {name_of(one.choice.config)}")
