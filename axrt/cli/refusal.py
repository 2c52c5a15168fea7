"""Errors of a command, as one line for a person and an exit code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from axrt.errors import AxrtError
from axrt.exit_codes import Exit, exit_code_of


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
