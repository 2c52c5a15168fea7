"""`axrt report`: a run as one page of HTML, as a picture, and as a table."""

from pathlib import Path

import click

from axrt.errors import ConfigError
from axrt.report.curves import write_picture, write_table
from axrt.report.page import page_of
from axrt.report.run_data import RunData

from .refusal import errors_as_lines

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(short_help="Write a page about a run.")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--against",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="another run to compare with; pictures and tables take several",
)
@click.option("--out", type=_FILE, help="the page; RUN/report.html")
@click.option("--svg", type=_FILE, help="draw loss, throughput and learning rate, and no page")
@click.option("--png", type=_FILE, help="the same as a bitmap")
@click.option("--csv", type=_FILE, help="write the metrics as a table, and no page")
def report(
    run: Path,
    against: tuple[Path, ...],
    out: Path | None,
    svg: Path | None,
    png: Path | None,
    csv: Path | None,
) -> None:
    """Write one HTML page about RUN: loss, throughput, the timeline of traced steps, idle time,
    memory, settings. It needs no network.

    \b
    axrt train my.toml run.out=runs/mine run.trace_steps=2
    axrt report runs/mine --against runs/other
    axrt report runs/mine --against runs/other --svg loss.svg --csv loss.csv
    """
    with errors_as_lines():
        for path, ending in ((svg, ".svg"), (png, ".png")):
            if path and path.suffix != ending:
                raise ConfigError(f"{path}: expected a name that ends in {ending}")
        is_page = bool(out) or not (svg or png or csv)
        if is_page and len(against) > 1:
            raise ConfigError(
                f"a page compares two runs, and there are {1 + len(against)}; expected one "
                "--against, or --svg or --csv, which take them all"
            )
        runs = [RunData.read(path, _say) for path in (run, *against)]
        try:
            for path in filter(None, (svg, png)):
                write_picture(runs, path)
            if csv:
                write_table(runs, csv)
            if is_page:
                out = out or run / "report.html"
                page = _page(runs)
                out.write_text(page, encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(
                f"{error.filename or 'a file'}: {error.strerror}; expected a place to write to"
            ) from None
    for path in filter(None, (svg, png, csv, out)):
        click.echo(str(path))


def _page(runs: list[RunData]) -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "plotly is not installed; expected it: pip install 'axrt[report]'"
        ) from None
    return page_of(runs[0], runs[1] if len(runs) > 1 else None, get_plotlyjs())


def _say(text: str) -> None:
    click.echo(f"axrt: {text}", err=True)
