"""Errors of a command, as one line for a person and an exit code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from axrt.errors import AxrtError, ConfigError
from axrt.exit_codes import Exit, exit_code_of

if TYPE_CHECKING:
    from axrt.config import Config


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Context whose errors of axrt, and of files, end the process with a line."""
    try:
        yield
    except OSError as error:
        click.echo(f"axrt: {error.filename}: {error.strerror}", err=True)
        sys.exit(Exit.FAILED)
    except AxrtError as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error))


def check_one_member(config: "Config") -> None:
    """Check that a rank holds its stages alone, as commands take them so far.

    Raises:
        ConfigError: members of a team do, or virtual ones.
    """
    if config.parallel.virtual_members > 1:
        key, off = config.parallel.cut_by
        raise ConfigError(
            f"{key} = {config.parallel.virtual_members}: this command does not take it yet, and "
            f"axrt train does; expected {key} = {off}"
        )
