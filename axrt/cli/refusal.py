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
        of = config.parallel
        key = "tensor" if of.tensor > 1 else "tensor_shards"
        raise ConfigError(
            f"parallel.{key} = {getattr(of, key)}: this command does not take it yet, and axrt "
            f"train does; expected parallel.{key} = 1"
        )
