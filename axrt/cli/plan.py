"""`axrt plan`: which layout of the ranks is the fastest that fits a cluster."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from .overrides import with_overrides

if TYPE_CHECKING:  # --help needs no torch
    from axrt.config import Config
    from axrt.layouts.search import Choice, Search
    from axrt.layouts.step_time import LayersOf
    from axrt.layouts.steps_away import StepAway
    from axrt.model.module import PipelineModule
    from axrt.scheduler.cluster.cluster import Cluster
    from axrt.scheduler.simulation.cost_table import CostTable


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
        found = _planned(file, overrides, cluster, costs, brief)
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
    told = (found.choices, found.away, found.source)
    if as_json:
        click.echo(json.dumps(as_dict(*told), indent=1))
        return
    click.echo("\n".join([*lines_of(*told), *found.notes, f"the layout is in {out}"]))


class _Planned(NamedTuple):
    """What a plan has come to."""

    source: str  # where the costs of layers come from
    choices: "Sequence[Choice]" = ()  # the fastest layouts, the choice first
    away: "Sequence[StepAway]" = ()  # what one step away from the choice would cost
    refused: str = ""  # why there is no choice; "": there is one
    notes: Sequence[str] = ()  # what else the user should know


def _planned(
    file: str, overrides: Sequence[str], cluster: Path, costs: Path | None, brief: bool
) -> _Planned:
    """Choose a layout.

    Raises:
        ConfigError, ValueError: the files cannot be, or have what is not taken.
    """
    from axrt.config import Config
    from axrt.layouts.search import Search
    from axrt.layouts.steps_away import steps_away
    from axrt.models.registry import model_of
    from axrt.planning.cluster_file import is_of_cluster, read_cluster

    from .sample import sample_of

    of_cluster = [one for one in overrides if is_of_cluster(one)]
    config = Config.read(file, [one for one in overrides if one not in of_cluster])
    of = read_cluster(cluster, of_cluster)
    model = model_of(config)
    source, layers_of, task_s = _costs(config, model, of, costs)
    search = Search(config, model, of, sample_of, layers_of, task_s)
    found = search.best()
    choices = _checked(search, found)
    if not choices:
        why = _only_nearly(len(found)) if found else _nothing_fits(search, of)
        return _Planned(source, refused=why)
    choices = [search.with_parts(choices[0]), *choices[1:]]
    away = [] if brief else list(steps_away(search, choices[0]))
    return _Planned(source, choices, away, notes=_notes(config, choices[0].config))


def _notes(config: "Config", chosen: "Config") -> list[str]:
    size, before = chosen.schedule.microbatch_size, config.schedule.microbatch_size
    if not config.run.eval_every or size == before:
        return []
    return [
        f"run.eval_microbatches = {config.run.eval_microbatches} counts microbatches, and these "
        f"have {size} samples in place of {before}: evaluations have other samples"
    ]


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
    table.check_cluster(cluster.device.digest)
    settings = settings_of(config)
    if text := table.differs_from(settings):
        raise ValueError(f"--costs {file}: {text}")
    if any(one.parameters and not one.held_parameters for one in next(iter(table.layers.values()))):
        raise ValueError(
            f"--costs {file} is of format 2, which does not say how many parameters a member has; "
            "expected one of format 3: measure again, with axrt profile"
        )
    _check_all_there(config, model, cluster, table, file)
    return table.source, lambda degree, samples: table.of(samples, kinds, degree), table.task_s


def _check_all_there(
    config: "Config", model: "PipelineModule", cluster: "Cluster", table: "CostTable", file: Path
) -> None:
    """Check that a table has every degree and size that is to be tried.

    Raises:
        ValueError: it lacks some.
    """
    from axrt.layouts.candidates import shapes

    wanted = sorted({(of.tensor, of.samples) for of in shapes(config, model, cluster)})
    lacking = [(t, size) for t, size in wanted if size not in table.degrees.get(t, {})]
    if lacking:
        degrees = ",".join(str(t) for t in dict.fromkeys(t for t, _ in wanted))
        sizes = " ".join(f"--samples {size}" for size in sorted({size for _, size in wanted}))
        raise ValueError(
            f"--costs {file} has no costs of {lacking[0][1]} samples on teams of {lacking[0][0]}; "
            f"expected those of all that are tried: axrt profile FILE --tensor {degrees} {sizes}"
        )


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


def _only_nearly(number: int) -> str:
    return (
        f"the {number} fastest layouts fit by what their layers keep, and none does by the ledger, "
        "which runs their stages; expected a little less in device.memory of the cluster, so that "
        "others are looked at"
    )


def _nothing_fits(search: "Search", cluster: "Cluster") -> str:
    """The fullest rank of the layout that lacks least, and the key that would help most."""
    from axrt.ledger.ledger import Unit

    tightest = search.tightest
    if tightest is None:
        why = search.refused or "no number of replicas shares out the samples of a step"
        return (
            f"no layout can be: {why}; samples of a step are parallel.data x "
            "schedule.microbatches x schedule.microbatch_size of the file"
        )
    from axrt.layouts.told import name_of

    unit, room = Unit.of(tightest.most), cluster.device.memory
    helpful = search.advice(tightest)
    return (
        f"nothing fits: of all layouts, {name_of(tightest.config)} holds least, and its rank "
        f"{tightest.fullest} has {unit.text(tightest.most)} on a device of {unit.text(room)}: "
        f"{tightest.of_rank(tightest.fullest).told(unit)}. {helpful}"
    )
