"""`axrt plan`: which layout of the ranks is the fastest that fits a cluster."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .overrides import with_overrides

if TYPE_CHECKING:  # --help needs no torch
    from axrt.config import Config
    from axrt.layouts.search import Choice, Search
    from axrt.layouts.step_time import LayersOf
    from axrt.model.module import PipelineModule
    from axrt.scheduler.cluster.cluster import Cluster

# Keys of a cluster begin with these, and all others are of the run.
_OF_CLUSTERS = ("cluster.", "device.", "links.")


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
    from axrt.config import Config
    from axrt.errors import AxrtError
    from axrt.exit_codes import exit_code_of
    from axrt.layouts.search import Search
    from axrt.layouts.steps_away import steps_away
    from axrt.layouts.told import as_dict, lines_of, planned_file
    from axrt.models.registry import model_of
    from axrt.planning.cluster_file import read_cluster

    from .refusal import errors_as_lines
    from .sample import sample_of

    ours = [one for one in overrides if not one.startswith(_OF_CLUSTERS)]
    try:
        if out.is_dir() or not out.absolute().parent.is_dir():
            raise ValueError(f"--out {out}: expected a file in a directory that is there")
        config = Config.read(file, ours)
        of = read_cluster(cluster, [one for one in overrides if one not in ours])
        model = model_of(config)
        source, layers_of, task_s = _costs(config, model, of, costs)
        search = Search(config, model, of, sample_of, layers_of, task_s)
        choices = _checked(search, search.best())
        if not choices:
            click.echo(f"axrt: {_nothing_fits(search, of)}", err=True)
            sys.exit(1)
        choices = [search.with_parts(choices[0]), *choices[1:]]
        away = [] if brief else list(steps_away(search, choices[0]))
    except (AxrtError, ValueError) as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error) if isinstance(error, AxrtError) else 2)
    said = " ".join(["axrt plan", file, *overrides, "--cluster", str(cluster)])
    with errors_as_lines():
        write_durably(out, planned_file(choices[0].config, said).encode())
    if as_json:
        click.echo(json.dumps(as_dict(choices, away, source), indent=1))
        return
    click.echo("\n".join(lines_of(choices, away, source)))
    click.echo(f"the layout is in {out}")


def _costs(
    config: "Config", model: "PipelineModule", cluster: "Cluster", file: Path | None
) -> "tuple[str, LayersOf, float]":
    """Where costs come from, a function that gives those of layers, and that of a task."""
    from axrt.layouts.modelled_table import ModelledTable
    from axrt.model.costs import kinds_of
    from axrt.planning.known_costs import settings_of
    from axrt.scheduler.simulation.cost_table import CostTable
    from axrt.scheduler.simulation.model_costs import TASK_S

    from .sample import sample_of

    if file is None:
        return "modelled", ModelledTable(config, model, cluster, sample_of).of, TASK_S
    table, kinds = CostTable.read(file), kinds_of(model)
    table.check_cluster(cluster.digest)
    settings = settings_of(config)
    if text := table.differs_from(settings):
        raise ValueError(f"--costs {file}: {text}")
    return table.source, lambda degree, samples: table.of(samples, kinds, degree), table.task_s


def _checked(search: "Search", choices: "Sequence[Choice]") -> "list[Choice]":
    """The choices that fit also by the ledger, which runs their stages; of the first one alone
    where it does."""
    found = list(choices)
    while found:
        exact = search.predicted(found[0].config, exactly=True)
        if search.fits(exact):
            return [found[0]._replace(prediction=exact), *found[1:]]
        del found[0]
    return []


def _nothing_fits(search: "Search", cluster: "Cluster") -> str:
    """The fullest rank of the layout that lacks least, and the key that would help most."""
    from axrt.ledger.ledger import Unit

    tightest = search.tightest
    if tightest is None:
        return (
            "no layout can be: expected a model that can be cut, and samples of a step "
            "(schedule.global_batch) that replicas can share out"
        )
    from axrt.layouts.told import name_of

    unit, room = Unit.of(tightest.most), cluster.device.memory
    helpful = search.advice(tightest)
    return (
        f"nothing fits: of all layouts, {name_of(tightest.config)} holds least, and its rank "
        f"{tightest.fullest} has {unit.text(tightest.most)} on a device of {unit.text(room)}: "
        f"{tightest.of_rank(tightest.fullest).told(unit)}. {helpful}"
    )
