"""`axrt draw`: a timeline as a picture."""

import sys
from pathlib import Path

import click

from axrt.errors import ConfigError
from axrt.exit_codes import Exit
from axrt.observe.perfetto import ENDING, perfetto
from axrt.observe.picture import draw
from axrt.scheduler.simulation.timeline import Timeline


@click.command("draw", short_help="Draw the timeline of a run, or of a simulation.")
@click.argument("timeline", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("picture", required=False, type=click.Path(path_type=Path, dir_okay=False))
def draw_command(timeline: Path, picture: Path | None) -> None:
    """Draw TIMELINE, a JSON file, to PICTURE, by default the same name with .svg. A name that ends
    in .perfetto-trace gets a trace for ui.perfetto.dev.

    \b
    of a run:         axrt train examples/quickstart.toml run.trace_steps=2 run.out=runs/traced
                      axrt draw runs/traced/timeline.json
    of a simulation:  axrt simulate --policy zb-v --ranks 4 --microbatches 8 --timeline zb-v.json
                      axrt draw zb-v.json
    """
    picture = picture or timeline.with_suffix(".svg")
    if picture.suffix not in (".svg", ENDING):
        _refuse(f"{picture}: expected a name that ends in .svg or {ENDING}")
    try:
        line = Timeline.read(timeline)
        if picture.suffix == ENDING:
            picture.write_bytes(perfetto(line))
        else:
            picture.write_text(draw(line), encoding="utf-8")
    except ConfigError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(
            f"{error.filename}: {error.strerror}; expected a timeline to read, and a place to "
            "write its picture"
        )
    except ValueError as error:
        _refuse(f"{timeline}: {error}")
    click.echo(f"{picture}")


def _refuse(text: str) -> None:
    click.echo(f"axrt: {text}", err=True)
    sys.exit(Exit.BAD_INPUT)
