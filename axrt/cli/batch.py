"""`axrt slurm` and `axrt pbs`: the batch script of a training, written and submitted."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from axrt.clusters.batch import Order, mpi_of_environment, pbs, seconds_of, slurm
from axrt.config import AUTO, Config
from axrt.errors import AxrtError, ConfigError
from axrt.exit_codes import Exit, exit_code_of
from axrt.scheduler.plural import plural
from axrt.scheduler.policies import is_own

from .overrides import with_overrides

_OPTIONS = (
    click.argument("file", type=click.Path(exists=True, dir_okay=False)),
    with_overrides,
    click.option("--nodes", default=1, show_default=True, type=click.IntRange(1)),
    click.option("--gpus-per-node", default=0, show_default=True, type=click.IntRange(0)),
    click.option(
        "--ranks-per-node", type=click.IntRange(1), help="one for each GPU, or one, by default"
    ),
    click.option("--cores-per-rank", default=0, type=click.IntRange(0), help="0: the site's"),
    click.option("--time", default="24:00:00", show_default=True, help="limit, as Slurm takes it"),
    click.option("--partition", default="", help="partition or queue"),
    click.option("--account", default="", help="account that pays"),
    click.option("--module", "modules", multiple=True, help="to load first; may be repeated"),
    click.option("--python", default=sys.executable, help="of the environment on the nodes"),
    click.option("--script", type=click.Path(path_type=Path), help="where it is written"),
    click.option("--dry-run", is_flag=True, help="print the script, and do nothing"),
)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command("slurm", short_help="Write and submit a batch script for Slurm.")
@_with_options
@click.option(
    "--mpi",
    type=click.Choice(["pmi2", "pmix"]),
    help="what the MPI library speaks; Open MPI pmix, others pmi2, by default",
)
def slurm_command(mpi: str | None, **options: Any) -> None:
    """Write RUN.sbatch, which trains what FILE describes until it is done, through time limits,
    preemptions and lost ranks, and submit it. Its first step is `axrt doctor`, on all ranks.

    \b
    axrt slurm my.toml --nodes 4 --gpus-per-node 4 --time 12:00:00 --dry-run
    """
    _submit(slurm, "sbatch", {**options, "mpi": mpi or mpi_of_environment()})


@click.command("pbs", short_help="Write and submit a batch script for PBS.")
@_with_options
def pbs_command(**options: Any) -> None:
    """Write RUN.pbs, in which `axrt launch` trains what FILE describes, and submit it. Its first
    step is `axrt doctor`, on all ranks.

    \b
    axrt pbs my.toml --nodes 4 --gpus-per-node 4 --time 12:00:00 --dry-run
    """
    _submit(pbs, "qsub", {**options, "mpi": ""})


def _submit(make: Callable[[Order, str], str], submit: str, options: dict[str, Any]) -> None:
    try:
        order = _order(options)
    except AxrtError as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error))
    script = make(order, f"axrt {shlex.join(sys.argv[1:])}".replace("\n", " "))
    if options["dry_run"]:
        click.echo(script, nl=False)
        return
    path = options["script"] or Path(f"{order.run}.{'sbatch' if make is slurm else 'pbs'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script, encoding="utf-8")
    except OSError as error:
        click.echo(f"axrt: {path}: {error.strerror}", err=True)
        sys.exit(Exit.FAILED)
    if shutil.which(submit) is None:
        click.echo(f"{path} is written; there is no {submit} here to submit it with")
        return
    sys.exit(subprocess.run([submit, str(path)]).returncode)


def _order(options: dict[str, Any]) -> Order:
    """The order of a command, whose configuration must be one.

    Raises:
        ConfigError: it is none, sets what the script sets, or does not fit the ranks; or the time
            limit is none.
    """
    overrides = options["overrides"]
    if any(one.startswith("checkpoint.resume=") for one in overrides):
        raise ConfigError("checkpoint.resume is set by the script; go back by hand, once")
    seconds_of(options["time"])
    config = Config.read(options["file"], overrides)
    gpus = options["gpus_per_node"]
    ranks = options["ranks_per_node"] or gpus or 1
    _check_ranks(config, options["nodes"] * ranks)
    return Order(
        options["file"],
        config.run.out,
        tuple(one for one in overrides if not one.startswith("run.out=")),
        options["nodes"],
        ranks,
        gpus,
        options["cores_per_rank"],
        options["time"],
        options["partition"],
        options["account"],
        options["modules"],
        options["python"],
        options["mpi"],
        config.checkpoint.begins_from,
    )


def _check_ranks(config: Config, ranks: int) -> None:
    """Check that the model and the schedule fit the ranks of the job, which else would wait in the
    queue to say so. Modules of the user's may be there on the nodes alone, and a job that survives
    losses has spares."""
    from axrt.models.registry import model_of
    from axrt.planning.default_schedule import settled  # needs torch, and --help does not
    from axrt.world.mesh import Mesh

    of = config.parallel
    of_the_user = config.model.factory or is_own(config.schedule.policy)
    if of_the_user or config.run.survive:
        return
    try:
        mesh = Mesh.of(0, ranks, of.pipe, of.data, of.rank_order, of.tensor)
        model = model_of(config)
        model.check_settings(config)
        if config.schedule.policy != AUTO:
            settled(config, model, mesh)
    except ConfigError as error:
        raise ConfigError(f"on {plural(ranks, 'rank')}: {error}") from None
