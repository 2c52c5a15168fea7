"""`axrt profile`: what each layer costs, as a file."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from axrt.scheduler.plural import plural

from .degrees import Degrees
from .overrides import with_overrides

if TYPE_CHECKING:  # --help needs no torch
    from axrt.config import Config
    from axrt.model.module import PipelineModule
    from axrt.scheduler.simulation.comparison import Run
    from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts


_SLOW = 1.5  # ranks of small layers differ by less on a busy machine


@click.command(short_help="Measure what each layer costs, for plans and simulations.")
@click.argument("file", type=click.Path(dir_okay=False))
@with_overrides
@click.option(
    "--out", default="costs.json", show_default=True, type=click.Path(path_type=Path), help="file"
)
@click.option(
    "--samples",
    multiple=True,
    type=click.IntRange(1),
    help="in a microbatch; may be given again; by default schedule.microbatch_size; not with "
    "--like, whose run says it",
)
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    help="a run of FILE with a timeline: costs fitted from it, and shared out over layers by what "
    "they take alone",
)
@click.option(
    "--tensor",
    "degrees",
    type=Degrees(),
    help="members that hold each layer, such as 1,2,4; by default parallel.tensor",
)
@click.option(
    "--cluster",
    type=click.Path(path_type=Path, dir_okay=False),
    help="the file of a cluster: costs are modelled for it, and nothing is measured",
)
def profile(
    file: str,
    overrides: tuple[str, ...],
    out: Path,
    samples: tuple[int, ...],
    like: Path | None,
    degrees: tuple[int, ...] | None,
    cluster: Path | None,
) -> None:
    """Measure the model that FILE (TOML) describes, layer by layer, and write a table of costs.

    \b
    axrt profile my.toml --out costs.json
    mpirun -n 2 axrt profile my.toml --out costs.json       the link between two ranks, too
    axrt profile my.toml --like runs/quickstart             as in a run with run.trace_steps
    axrt profile my.toml --tensor 1,2                       of a member of a team, too
    axrt profile my.toml --cluster examples/cluster.toml    modelled: by its rates and links
    axrt simulate --costs costs.json --ranks 4 --microbatches 8 --policy all
    mpirun -n 4 axrt train my.toml schedule.costs=costs.json
    """
    from axrt.checkpoint.durable import write_durably
    from axrt.config import Config
    from axrt.errors import AxrtError
    from axrt.exit_codes import exit_code_of

    from .refusal import errors_as_lines

    try:
        if out.is_dir() or not out.absolute().parent.is_dir():
            raise ValueError(f"--out {out}: expected a file in a directory that is there")
        _check_like(like, samples, degrees, cluster)
        config = Config.read(file, overrides)
        if config.parallel.tensor_shards:
            config.parallel.check_one_member("axrt profile")
        if like:
            config.parallel.check_one_member("axrt profile --like")
        if config.parallel.gather_again:
            raise ValueError(
                "axrt profile does not take parallel.gather_again = True; expected False"
            )
        asked = _Asked(
            samples or (config.schedule.microbatch_size,), degrees or (config.parallel.tensor,)
        )
        table = _modelled(config, asked, cluster) if cluster else _measured(config, asked, like)
    except (AxrtError, ValueError) as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error) if isinstance(error, AxrtError) else 2)
    if table is not None:
        with errors_as_lines():
            write_durably(out, (table.to_json() + "\n").encode())
        click.echo(_told(table, out))


class _Asked(NamedTuple):
    """What costs are to be of."""

    sizes: tuple[int, ...]  # numbers of samples in a microbatch
    degrees: tuple[int, ...]  # numbers of members that hold a layer


def _check_like(
    like: Path | None,
    samples: tuple[int, ...],
    degrees: tuple[int, ...] | None,
    cluster: Path | None,
) -> None:
    """Check that costs that a run says are asked of nothing else."""
    if not like:
        return
    if samples:
        raise ValueError(
            f"--samples {samples[0]}: costs like a run's are of its microbatches; expected "
            "--like alone"
        )
    if degrees or cluster:
        name = "--tensor" if degrees else "--cluster"
        raise ValueError(f"{name}: costs like a run's are of its ranks; expected --like alone")


def _modelled(config: "Config", asked: _Asked, cluster: Path) -> "CostTable":
    from axrt.layouts.modelled_table import ModelledTable
    from axrt.models.registry import model_of
    from axrt.planning.cluster_file import read_cluster

    from .sample import sample_of

    table = ModelledTable(config, model_of(config), read_cluster(cluster), sample_of)
    return table.written(asked.degrees, asked.sizes)


def _measured(config: "Config", asked: _Asked, like: Path | None) -> "CostTable | None":
    """The table, on the first rank; None on all others."""
    from axrt.cli.task_cost import measured_task_s
    from axrt.config import Parallel
    from axrt.errors import ConfigError
    from axrt.layouts.modelled_table import with_degree
    from axrt.models.registry import model_of
    from axrt.planning.known_costs import measured_edge, measured_layers, settings_of
    from axrt.runtime.rank import Rank
    from axrt.scheduler.simulation.cost_table import CostTable
    from axrt.scheduler.simulation.costs import Edge
    from axrt.world.joining import join

    from .sample import sample_of

    run = _run_like(config, like) if like else None
    model = model_of(config)
    for degree in asked.degrees:
        with_degree(config, model, degree)
    world = join(config.run.transport, config.run.device)
    # The layout of the run is of other ranks than these.
    rank = Rank(replace(config, parallel=Parallel()), world, None, ())
    several = rank.size > 1
    layers: dict[int, dict[int, tuple[LayerCosts, ...]]] = {}
    edge = measured_edge(rank.exchange, rank.device) if several else Edge()
    for degree, size in product(asked.degrees, asked.sizes):
        of = replace(config, schedule=replace(config.schedule, microbatch_size=size))
        try:
            found = measured_layers(of, model, rank, sample_of(of), None, "axrt profile", degree)
        except ConfigError as error:
            world.fail(error)
        layers.setdefault(degree, {})[size] = tuple(found)
    rank.leave(0)
    if not rank.is_main:
        return None
    if run:
        table = _fitted(config, model, CostTable(layers[1], edge), run)
    else:
        alone = layers.pop(1, {})
        table = CostTable(alone, edge, task_s=measured_task_s(), teams=layers)
    return replace(table, settings=settings_of(config))


def _run_like(config: "Config", like: Path) -> "Run":
    """The run that costs are to be fitted to.

    Raises:
        ValueError: it has no timeline, or is of other settings.
    """
    from axrt.config import Config
    from axrt.scheduler.simulation.comparison import Run

    run, samples = Run.read(like), config.schedule.microbatch_size
    if run.microbatch_size not in (0, samples):
        raise ValueError(
            f"{like}: its microbatches are of {plural(run.microbatch_size, 'sample')}, and "
            f"schedule.microbatch_size is {samples}; expected a run of these settings"
        )
    has_settings = (like / "config.toml").is_file()
    if has_settings and Config.of_run(like).model != config.model:
        raise ValueError(f"{like} is of another model; expected one of [model] in this file")
    return run


def _fitted(
    config: "Config", model: "PipelineModule", table: "CostTable", run: "Run"
) -> "CostTable":
    from axrt.scheduler.simulation.cost_table import CostTable
    from axrt.scheduler.simulation.fit import fit_costs
    from axrt.scheduler.simulation.fit_layers import fitted, slowness

    samples, where = config.schedule.microbatch_size, run.job.placement
    cuts = run.job.cuts or model.boundaries(where.stages, config.parallel.partition, where.held)
    costs = fit_costs(run.line, where)
    like = fitted(table, samples, costs, cuts)
    try:
        CostTable.from_json(like.to_json())
    except ValueError as error:
        raise ValueError(f"the timeline is damaged: {error} in the costs that fit it") from None
    slow = slowness(table, samples, costs, cuts, where.held)
    if max(slow) > _SLOW:
        click.echo(_told_slow(slow.index(max(slow)), max(slow), cuts), err=True)
    return like


def _told_slow(rank: int, times: float, cuts: Sequence[int]) -> str:
    return (
        f"axrt: beside the other ranks, rank {rank} took {times:.1f} times what its layers take "
        "alone, and the table has that as costs of these layers. If the rank is slow, keep its "
        f"layers where they are: parallel.partition={list(cuts)} with schedule.costs"
    )


def _told(table: "CostTable", out: Path) -> str:
    lines = []
    for degree, size, layers in _all_costs(table):
        seconds = [
            sum(part) * 1e3
            for part in zip(
                *((one.forward_s, one.input_s, one.weight_s) for one in layers), strict=True
            )
        ]
        members = f", {degree} members" if degree > 1 else ""
        lines.append(
            f"{plural(len(layers), 'layer')}, {plural(size, 'sample')}{members}: forward "
            f"{seconds[0]:.2f} ms, input gradient {seconds[1]:.2f} ms, weight gradient "
            f"{seconds[2]:.2f} ms"
        )
    return "\n".join([*lines, f"the table is {table.source}, and in {out}"])


def _all_costs(table: "CostTable") -> "Iterator[tuple[int, int, Sequence[LayerCosts]]]":
    """Degree, samples and costs of layers."""
    for degree, sizes in table.degrees.items():
        for size, layers in sizes.items():
            yield degree, size, layers
