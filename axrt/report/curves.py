"""Loss, throughput and learning rate of runs over their steps: one picture, and one table."""

import csv
from collections.abc import Sequence
from pathlib import Path

from axrt.errors import ConfigError

from .run_data import RunData

_WIDTH_IN, _HEIGHT_IN = 8.0, 9.0
# What each field of the picture shows, and the unit of its axis.
_FIELDS = (
    ((("loss", "training", "-"), ("val_loss", "validation", "--")), "loss, nats a token"),
    ((("tokens_per_s", "", "-"),), "tokens a second"),
    ((("lr", "", "-"),), "learning rate"),
)
_COLUMNS = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "mfu", "time_s")


def write_picture(runs: Sequence[RunData], path: Path) -> None:
    """Draw runs, each in a colour of its own, above one axis of steps.

    Args:
        path: path of the file; its ending says the form, .svg or .png.
    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed; expected it: pip install 'axrt[report]'"
        ) from None
    # The same runs give the same bytes, and text stays text.
    names = _names(runs)
    with rc_context({"svg.hashsalt": "axrt", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
        for axes, (keys, unit) in zip(
            figure.subplots(len(_FIELDS), 1, sharex=True), _FIELDS, strict=True
        ):
            for number, run in enumerate(runs):
                for key, what, style in keys:
                    steps, values = run.series(key)
                    label = ", ".join(filter(None, [names[number], what]))
                    marker = "" if len(steps) > 1 else "o"
                    axes.plot(steps, values, style, color=f"C{number}", label=label, marker=marker)
            axes.set_ylabel(unit)
            axes.grid(alpha=0.3)
            axes.legend()
        axes.set_xlabel("step")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def write_table(runs: Sequence[RunData], path: Path) -> None:
    """Write the metrics of runs as CSV: a line for each run and step, empty where there is no
    value.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.writer(file)
        rows.writerow(("run", "step", *_COLUMNS))
        for name, run in zip(_names(runs), runs, strict=True):
            of_key = [dict(zip(*run.series(key), strict=True)) for key in _COLUMNS]
            for step in sorted(set().union(*of_key)):
                values = [of.get(step, "") for of in of_key]
                rows.writerow((name, step, *values))


def _names(runs: Sequence[RunData]) -> list[str]:
    """A name for each run: that of its directory, or the path where two have the same."""
    paths = [run.path.absolute() for run in runs]
    short = [path.name.encode(errors="replace").decode() for path in paths]
    full = [str(path).encode(errors="replace").decode() for path in paths]
    return [
        # matplotlib leaves names that begin with an underscore out of legends
        f"run {name}" if name.startswith("_") else name
        for name in (short if len(set(short)) == len(short) else full)
    ]
