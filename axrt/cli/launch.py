"""`axrt launch`: a job that is started again when it is lost."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from axrt.errors import AxrtError
from axrt.exit_codes import Exit
from axrt.restarts.launcher import Command
from axrt.restarts.supervisor import Supervisor


@click.command(
    short_help="Start a job, and start it again when it is lost.",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--restarts", default=100, show_default=True, type=click.IntRange(0))
@click.option("--hosts", type=click.Path(dir_okay=False, path_type=Path), help="a host a line")
@click.option(
    "--spares", default=0, show_default=True, type=click.IntRange(0), help="hosts kept back"
)
@click.option(
    "--run", "directory", type=click.Path(path_type=Path), help="its directory, for own scripts"
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def launch(
    restarts: int, hosts: Path | None, spares: int, directory: Path | None, command: Sequence[str]
) -> None:
    """Start COMMAND, a launcher with `axrt train`, and start it again when a rank is lost.

    \b
    axrt launch -- mpirun -n 8 axrt train FILE.toml
    axrt launch --hosts hosts.txt --spares 1 -- mpirun -n 8 axrt train FILE.toml
    axrt launch -- srun -n 8 axrt train FILE.toml        in an allocation of Slurm

    Each start goes on from the newest undamaged checkpoint. Pauses grow while nothing is gained.
    A bad configuration is never tried again. A signal ends the job, which saves, and this command.
    """
    try:
        sys.exit(Supervisor(Command.of(command), restarts, hosts, spares, directory).until_done())
    except AxrtError as error:
        click.echo(f"axrt launch: {error}", err=True)
        sys.exit(Exit.BAD_INPUT)
