"""`axrt plan`: which layout of the ranks is the fastest that fits a cluster."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .overrides import with_overrides

if TYPE_CHECKING:  # --help needs no torch
    from axrt.layouts.plan import Plan


@click.command(short_help="Choose the layout of a run on a cluster.")
@click.argument("file", type=click.Path(dir_okay=False))
@with_overrides
@click.option(
    "--cluster",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="the file of a cluster",
)
@click.option(
    "--costs",
    type=click.Path(path_type=Path, dir_okay=False),
    help="a table of axrt profile, in place of costs that are modelled; it has all degrees and "
    "sizes of microbatches that are to be tried",
)
@click.option(
    "--out",
    default="planned.toml",
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="file that is written, for axrt train",
)
@click.option("--brief", is_flag=True, help="leave out what one step away would cost")
@click.option("--json", "as_json", is_flag=True, help="layouts as JSON")
def plan(
    file: str,
    overrides: tuple[str, ...],
    cluster: Path,
    costs: Path | None,
    out: Path,
    brief: bool,
    as_json: bool,
) -> None:
    """Choose the fastest layout of the run that FILE (TOML) describes, on all devices of a cluster.

    \b
    axrt plan big.toml --cluster examples/cluster.toml
    axrt plan big.toml --cluster examples/cluster.toml cluster.nodes=8
    mpirun -n 64 axrt train planned.toml

    Chosen are the degrees of parallelism, cuts, microbatches, policy, ZeRO, recomputation and
    offloading; the samples of a step stay. Nothing is computed or allocated. Leaves with code 1
    where nothing fits.
    """
    from axrt.checkpoint.durable import write_durably
    from axrt.errors import AxrtError
    from axrt.exit_codes import exit_code_of
    from axrt.layouts.told import as_dict, lines_of, planned_file

    from .refusal import errors_as_lines

    try:
        if out.is_dir() or not out.absolute().parent.is_dir():
            raise ValueError(f"--out {out}: expected a file in a directory that is there")
        source, found, dropped = _planned(file, overrides, cluster, costs, brief)
    except (AxrtError, ValueError) as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error) if isinstance(error, AxrtError) else 2)
    if found.refused:
        click.echo(f"axrt: {found.refused}", err=True)
        sys.exit(1)
    asked = ["axrt", "plan", file, *overrides, "--cluster", str(cluster)]
    asked += ["--costs", str(costs)] if costs else []
    with errors_as_lines():
        write_durably(out, planned_file(found.choices[0].config, asked, out).encode())
    for line in dropped:
        click.echo(f"axrt: {line}", err=True)
    told = (found.choices, found.away, source)
    if as_json:
        click.echo(json.dumps(as_dict(*told), indent=1))
        return
    click.echo("\n".join([*lines_of(*told), *found.notes, f"the layout is in {out}"]))


def _planned(
    file: str, overrides: tuple[str, ...], cluster: Path, costs: Path | None, brief: bool
) -> "tuple[str, Plan, list[str]]":
    """Where costs come from, the choice, and which keys of the run it does not keep.

    Raises:
        ConfigError, ValueError: the files cannot be, or have what is not taken.
    """
    from axrt.config import Config
    from axrt.layouts.plan import chosen, measured, modelled, not_kept
    from axrt.layouts.search import Search
    from axrt.models.registry import model_of
    from axrt.planning.cluster_file import is_of_cluster, read_cluster

    from .sample import sample_of

    of_cluster = [one for one in overrides if is_of_cluster(one)]
    config = Config.read(file, [one for one in overrides if one not in of_cluster])
    of = read_cluster(cluster, of_cluster)
    model = model_of(config)
    source = measured(config, model, of, costs) if costs else modelled(config, model, of, sample_of)
    search = Search(config, model, of, sample_of, source.layers_of, source.task_s)
    found = chosen(search, config, of, with_steps_away=not brief)
    dropped = list(not_kept(config, found.choices[0].config)) if found.choices else []
    return source.name, found, dropped
