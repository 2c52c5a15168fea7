"""`axrt report`: a run as one page of HTML."""

from pathlib import Path

import click

from axrt.errors import ConfigError
from axrt.report.page import page_of
from axrt.report.run_data import RunData

from .refusal import errors_as_lines


@click.command(short_help="Write a page about a run.")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--against",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="another run to compare with",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="RUN/report.html")
def report(run: Path, against: Path | None, out: Path | None) -> None:
    """Write one HTML page about RUN: loss, throughput, the timeline of traced steps, idle time,
    memory, settings. It needs no network.

    \b
    axrt train my.toml run.out=runs/mine run.trace_steps=2
    axrt report runs/mine --against runs/other
    """
    out = out or run / "report.html"
    with errors_as_lines():
        try:
            from plotly.offline import get_plotlyjs
        except ImportError:
            raise ConfigError(
                "plotly is not installed; expected it: pip install 'axrt[report]'"
            ) from None
        other = RunData.read(against) if against else None
        out.write_text(page_of(RunData.read(run), other, get_plotlyjs()), encoding="utf-8")
    click.echo(str(out))
