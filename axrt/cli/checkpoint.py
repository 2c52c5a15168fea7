"""`axrt checkpoint`: list checkpoints, show what one holds, and verify that they are as they were
saved."""

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console
from rich.table import Table

from axrt.checkpoint.folder import (
    Candidate,
    all_partial,
    all_set_aside,
    candidates_at,
    candidates_in,
    checkpoint_in,
    none_in,
)
from axrt.checkpoint.layers import fault_in
from axrt.checkpoint.manifest import Manifest
from axrt.errors import ConfigError
from axrt.exit_codes import Exit, exit_code_of

_MIB = 1024 * 1024
_DIRECTORY = click.Path(path_type=Path)


@click.group()
def checkpoint() -> None:
    """List, verify and show checkpoints of a run. Nothing is changed.

    \b
      axrt checkpoint list runs/mine
    """


@checkpoint.command("list")
@click.argument("directory", type=_DIRECTORY)
@click.option("--json", "as_json", is_flag=True, help="an object a line")
def list_command(directory: Path, as_json: bool) -> None:
    """List the checkpoints in DIRECTORY, a run or the folder of some, the newest first.

    "whole" is said of what is there as long as it was saved; `axrt checkpoint verify` reads it.

    \b
      axrt checkpoint list runs/mine
    """
    rows = [_row(one) for one in _candidates(directory)]
    folder = Path(rows[0]["path"]).parent
    aside = [
        {**_row(one), "state": "set aside"}
        for path in all_set_aside(folder)
        for one in candidates_in(path)
    ]
    rows += [*aside, *({**_empty(path), "state": "not whole"} for path in all_partial(folder))]
    if as_json:
        click.echo("\n".join(map(json.dumps, rows)))
        return
    table = Table(
        "step", "samples", "saved (UTC)", "MiB", "state", "path", box=None, pad_edge=False
    )
    for row in rows:
        table.add_row(
            *(
                str("" if row[key] is None else row[key])
                for key in ("step", "samples", "saved_at", "mib", "state", "path")
            )
        )
    Console(width=max(100, Console().width, *(len(row["path"]) + 70 for row in rows))).print(table)


@checkpoint.command()
@click.argument("directory", type=_DIRECTORY)
def verify(directory: Path) -> None:
    """Read every file of the checkpoints in DIRECTORY, a run, the folder of some, or one of them,
    and compare it with what was saved.

    Leaves with code 2 where one is damaged.

    \b
      axrt checkpoint verify runs/mine
    """
    damaged = 0
    for one in _candidates(directory):
        fault = fault_in(one.path)
        damaged += bool(fault)
        click.echo(f"{one.path}: {f'damaged: {fault}' if fault else 'as it was saved'}")
    sys.exit(Exit.BAD_INPUT if damaged else Exit.DONE)


@checkpoint.command()
@click.argument("directory", type=_DIRECTORY)
def show(directory: Path) -> None:
    """Print what a checkpoint says of itself, as JSON: DIRECTORY itself, or the newest in it.

    \b
      axrt checkpoint show runs/mine
    """
    try:
        path = checkpoint_in(directory)
        click.echo(json.dumps({"path": str(path), **asdict(Manifest.read(path))}, indent=1))
    except ConfigError as error:
        _refuse(error)


def _candidates(directory: Path) -> list[Candidate]:
    try:
        found = candidates_at(directory)
        if not found:
            raise none_in(directory)
        return found
    except ConfigError as error:
        _refuse(error)


def _refuse(error: ConfigError) -> NoReturn:
    click.echo(f"axrt: {error}", err=True)
    sys.exit(exit_code_of(error))


def _empty(path: Path) -> dict[str, str]:
    return {"step": "", "samples": "", "saved_at": "", "mib": "", "state": "", "path": str(path)}


def _row(one: Candidate) -> dict[str, str]:
    if one.manifest is None:
        return {**_empty(one.path), "state": "damaged"}
    mib = sum(record["size_bytes"] for record in one.manifest.files.values()) / _MIB
    values = {
        "step": one.step,
        "samples": one.manifest.samples,
        "saved_at": one.manifest.saved_at,
        "mib": f"{mib:.1f}",
    }
    state = (
        "whole" if all(map(partial(_has_size, one.path), one.manifest.files.items())) else "damaged"
    )
    return {
        **_empty(one.path),
        **{key: str(value) for key, value in values.items()},
        "state": state,
    }


def _has_size(path: Path, file: tuple[str, dict[str, int]]) -> bool:
    """The file exists with the size it had; that is a quick check, and says nothing of its
    contents."""
    name, record = file
    try:
        return (path / name).stat().st_size == record["size_bytes"]
    except OSError:
        return False
