"""`axrt train`: the command, and what its process ends with."""

import sys
import traceback
from pathlib import Path

import click

from axrt.config import Config, described
from axrt.errors import AxrtError, ConfigError
from axrt.exit_codes import Exit, exit_code_of, leave_code
from axrt.observe.origin import commit_of
from axrt.restarts.witness import witnessed
from axrt.world.joining import join
from axrt.world.launchers import told
from axrt.world.leaving import leave_at_once
from axrt.world.survivors import SurvivingWorld

from ..overrides import with_overrides
from .going_on import Attempt, train_with_survivors
from .training import train_once


def _print_keys(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo("\n".join(described()))
        context.exit()


@click.command(short_help="Train a model, alone or on the ranks of a job.")
@click.option(
    "--keys",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_keys,
    help="Every key, its default and meaning.",
)
@click.option("-v", "--verbose", is_flag=True, help="Say why this schedule, and where memory goes.")
@click.argument("file", type=click.Path(dir_okay=False))
@with_overrides
def train(file: str, overrides: tuple[str, ...], verbose: bool) -> None:
    """Train what FILE (TOML) describes; values after it override single keys.

    \b
    alone:            axrt train examples/quickstart.toml
    on two ranks:     mpirun -n 2 axrt train examples/quickstart.toml
    something else:   axrt train examples/quickstart.toml run.steps=50 data.source=my.txt
    going on:         axrt train runs/quickstart/config.toml checkpoint.resume=auto

    Ctrl-C (or SIGUSR1) ends after the present step and saves a checkpoint; Ctrl-C once more ends at
    once. Open MPI's mpirun ends all ranks half a second after Ctrl-C: send it SIGUSR1 instead.
    """
    said = told()
    try:
        with witnessed(said.rank if said else 0):
            commit = "" if said and said.rank else commit_of(Path.cwd())
            code = _until_done(Attempt(file, overrides, commit=commit, verbose=verbose))
        sys.exit(code)
    except KeyboardInterrupt:
        click.echo("axrt: interrupted", err=True)
        leave_code(Exit.INTERRUPTED)
        sys.exit(Exit.INTERRUPTED)
    except (
        Exception
    ) as error:  # alone; in a job of several ranks a failure has ended the job already
        if isinstance(error, AxrtError):
            click.echo(f"axrt: {error}", err=True)
        else:
            traceback.print_exception(error)
        leave_code(exit_code_of(error))
        sys.exit(exit_code_of(error))


def _until_done(attempt: Attempt) -> Exit:
    """Train, and go on without ranks that are lost where that is asked for."""
    try:
        config = Config.read(attempt.file, attempt.overrides)
    except ConfigError:
        return train_once(attempt)  # which says so
    if not config.run.survive:
        return train_once(attempt)
    run = config.run
    world = join(run.transport, run.device, run.patience_s)
    code, left = train_with_survivors(config, attempt, world, train_once)
    if isinstance(left, SurvivingWorld) and left.has_lost:
        leave_at_once(code)
    return code
