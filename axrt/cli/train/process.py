"""`axrt train` as a process, and what it ends with."""

import sys
import traceback
from pathlib import Path

import click

from axrt.config import Config
from axrt.errors import AxrtError, ConfigError
from axrt.exit_codes import Exit, exit_code_of, leave_code
from axrt.observe.origin import commit_of
from axrt.restarts.witness import witnessed
from axrt.world.joining import join
from axrt.world.launchers import told
from axrt.world.leaving import leave_at_once
from axrt.world.survivors import SurvivingWorld

from .going_on import Attempt, train_with_survivors
from .training import train_once


def run(file: str, overrides: tuple[str, ...], verbose: bool) -> None:
    """Train what a file describes, and leave with a code.

    Args:
        file, overrides, verbose: those of the command line.
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
