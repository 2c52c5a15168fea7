"""`axrt watch`: a run that is under way, from its files alone."""

import sys
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import click

from axrt.checkpoint.lock import holder_of
from axrt.config import Config
from axrt.exit_codes import Exit
from axrt.observe.json_lines import Says, object_of, whole_lines
from axrt.observe.metrics import METRICS, METRICS_LINE, is_run
from axrt.observe.progress import Progress, Shown, progress_for
from axrt.observe.rate import TimeLeft
from axrt.scheduler.regular_file import opened

from .refusal import errors_as_lines
from .runs import state_of

_LOOK_S = 0.5
_LONG_S = 30.0


@click.command(short_help="Follow a run that is under way.")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--once", is_flag=True, help="say how far it is, and end")
def watch(run: Path, once: bool) -> None:
    """Follow RUN from another terminal, or over ssh: it reads the files of its directory and asks
    nobody. It ends with the run; Ctrl-C leaves the run alone.

    \b
    axrt watch runs/mine
    """
    if not is_run(run):
        click.echo(f"axrt: {run} has no config.toml; expected the directory of a run", err=True)
        sys.exit(Exit.BAD_INPUT)
    with errors_as_lines():
        steps = Config.of_run(run).run.steps
    kind = "plain" if once else "auto"
    seen, left = Shown(0, 0.0), TimeLeft(steps)
    try:
        with progress_for(kind, steps) as show:
            lines = _Lines(run / METRICS, show.say)
            while True:
                is_under_way = holder_of(run) is not None
                for line in lines.new():
                    seen = _shown(line, seen)._replace(left_s=_left_s(line, left))
                    if not once:
                        _show(line, seen, show)
                if once or not is_under_way:
                    break
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        return
    click.echo(_end(run, seen, steps) + (_silent(run) if is_under_way else ""))


def _silent(run: Path) -> str:
    """How long nothing has been written, where that is long."""
    try:
        age_s = time.time() - (run / METRICS).stat().st_mtime
    except OSError:
        return ""
    if age_s < _LONG_S:
        return ""
    return f". The last line is {age_s:.0f} s old: axrt inspect {run} asks the ranks what they do"


def _show(line: dict[str, Any], seen: Shown, show: Progress) -> None:
    if "loss" in line:
        show.step(seen)
    if line.get("val_loss") is not None:
        show.say(f"step {line['step']}: validation loss {line['val_loss']:.4f} nats a token")
    if "resumed_from" in line:
        show.say(f"going on from {line['resumed_from']} at step {line['step']}")


def _shown(line: dict[str, Any], before: Shown) -> Shown:
    """What a line of metrics says, beside what is known from before."""
    if line.get("loss") is None:
        return before
    device = line.get("tokens_per_s_device") or 0.0
    rate = line.get("tokens_per_s") or 0.0
    return Shown(
        line["step"],
        line["loss"],
        line.get("lr") or 0.0,
        rate,
        round(rate / device) if device else 1,
        line.get("grad_norm"),
        line.get("mfu"),
        line.get("idle") or {},
        line.get("memory_bytes") or {},
    )


def _left_s(line: dict[str, Any], left: TimeLeft) -> float | None:
    """Seconds that the run will still take, by the times in its own lines."""
    done, at_s = line["step"], line.get("time_s") or 0.0
    if "resumed_from" in line:
        left.begin(done, at_s)
    return left.at(done, at_s)


def _end(run: Path, seen: Shown, steps: int) -> str:
    state, figures = state_of(run, seen.done, steps), seen.text() if seen.done else ""
    return ". ".join(filter(None, [f"{run}: step {seen.done} of {steps}, {state}", figures]))


class _Lines:
    """The lines of a file as they come; one that is not whole yet is waited for."""

    def __init__(self, path: Path, says: Says) -> None:
        self._path, self._says, self._place = path, says, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Those since the last call."""
        if not self._path.is_file():
            return
        try:
            with opened(self._path) as file:
                if file.seek(0, 2) < self._place:  # a run that goes on has cut half a line off
                    self._place = 0
                file.seek(self._place)
                yield from self._of(file)
        except OSError as error:
            self._says(f"{self._path}: {error.strerror}; left out")

    def _of(self, file: BufferedReader) -> Iterator[dict[str, Any]]:
        for line, end in whole_lines(file):
            begin, self._place = self._place, end
            try:
                yield object_of(line, METRICS_LINE)
            except ValueError as error:
                self._says(f"{self._path}, the line at byte {begin}: {error}; left out")
