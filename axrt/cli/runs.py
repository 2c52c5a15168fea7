"""`axrt runs`: what there is of the runs in a directory."""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from axrt.checkpoint.lock import holder_of
from axrt.exit_codes import Exit
from axrt.observe.json_lines import last_objects
from axrt.observe.metrics import METRICS, METRICS_LINE, is_run
from axrt.scheduler.regular_file import MALFORMED, read_text, toml_of


@click.command(short_help="List the runs in a directory.")
@click.argument("directory", default="runs", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="an object a line")
def runs(directory: Path, as_json: bool) -> None:
    """List the runs in DIRECTORY and below, the one that was written to last first.

    \b
    axrt runs runs/
    """
    if not directory.is_dir():
        click.echo(f"axrt: {directory} is no directory; expected one with runs", err=True)
        sys.exit(Exit.BAD_INPUT)
    rows = sorted(map(row_of, _found(directory)), key=lambda row: row["written"], reverse=True)
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    if not rows:
        click.echo(f"no run in {directory}")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("step", "loss", "validated", "state", "written (UTC)"):
        table.add_column(column, no_wrap=True)
    table.add_column("run", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row))
    Console().print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    """A row of the table; it is short, so that it takes one line of a terminal."""
    return [
        f"{row['step']}/{_text(row['of'])}",
        _text(row["loss"]),
        _text(row["validation"]),
        row["state"].replace("running", "runs").replace(", process ", ":"),
        row["written"][5:16],
        row["path"],
    ]


def _found(directory: Path) -> Iterator[Path]:
    """The directories of runs; what is in one is no other run."""
    if is_run(directory):
        yield directory
        return
    for inside in sorted(directory.iterdir()):
        if inside.is_dir() and not inside.is_symlink():
            yield from _found(inside)


def row_of(run: Path) -> dict[str, Any]:
    """What a run's directory says of it: its row of the table."""
    lines = list(last_objects(run / METRICS, METRICS_LINE))
    steps = _steps_of(run)
    step = max((line["step"] for line in lines), default=0)
    path = run / METRICS if (run / METRICS).exists() else run
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return {
        "step": step,
        "of": steps,
        "loss": _last(lines, "loss"),
        "validation": _last(lines, "val_loss"),
        "state": state_of(run, step, steps),
        "written": written.isoformat(" ", "seconds")[:19],
        "path": str(run),
    }


def state_of(run: Path, step: int, steps: int | None) -> str:
    """Whether a run is at work, and where; done; or ended early.

    Args:
        steps: number that it is to do; None: it is not known.
    """
    if (holder := holder_of(run)) is not None:
        return f"running on {holder}"
    return "done" if steps is not None and step >= steps else "ended early"


def _steps_of(run: Path) -> int | None:
    try:
        return int(
            toml_of(read_text(run / "config.toml", errors="surrogateescape"))["run"]["steps"]
        )
    except (OSError, *MALFORMED):
        return None


def _last(lines: list[dict[str, Any]], key: str) -> float | None:
    return next((line[key] for line in lines if line.get(key) is not None), None)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)
