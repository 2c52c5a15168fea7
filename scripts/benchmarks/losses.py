"""Validation loss by step and by second of the quickstart's model and text under several
optimizers; see scripts/study_optimizers.

Each optimizer is tried with three values of its rate on one seed; the one with which it ends best
is then run on the other seeds. K-FAC makes its changes shorter until they fit `kl_clip`, so it is
that which is tried. Runs are one after the other, and seconds are those of training steps alone,
evaluations left out.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click

HERE = Path(__file__).resolve().parents[2]
EVERY = 20  # steps from one evaluation to the next
REST = ("rest_lr=4e-3",)


class Method(NamedTuple):
    """An optimizer and what it is tried with."""

    name: str
    keys: tuple[str, ...]  # of `[optimizer]`
    tried: str  # key that is tried
    values: tuple[float, ...]  # its values
    colour: str


_KFAC = ("name=kfac", "lr=0.1", "weight_decay=0", "damping=0.01", "sample=5", *REST)
METHODS = (
    Method("AdamW", ("name=adamw",), "lr", (2e-3, 4e-3, 8e-3), "#0072B2"),
    Method("Muon", ("name=muon", "momentum=0.95", *REST), "lr", (0.01, 0.02, 0.04), "#D55E00"),
    Method("SOAP", ("name=soap", *REST), "lr", (1e-3, 2e-3, 4e-3), "#009E73"),
    Method("K-FAC", _KFAC, "kl_clip", (3e-5, 1e-4, 3e-4), "#CC79A7"),
)


class Curve(NamedTuple):
    """What a run has shown."""

    losses: list[float]  # validation losses, nats a token, every `EVERY` steps
    seconds: list[float]  # training time up to each of them


def run(method: Method, value: float, seed: int, steps: int, mpirun: str) -> Curve:
    """Train, and read what the run has recorded."""
    with tempfile.TemporaryDirectory() as out:
        keys = [f"optimizer.{key}" for key in (*method.keys, f"{method.tried}={value:g}")]
        of_run = [f"run.steps={steps}", f"run.eval_every={EVERY}", f"run.seed={seed}"]
        rest = [*of_run, "run.log_every=1", f"run.out={out}/run"]
        command = [mpirun, "-n", "2", sys.executable, "-m", "axrt", "train"]
        done = subprocess.run(
            [*command, "examples/quickstart.toml", *keys, *rest],
            cwd=HERE,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise click.ClickException(f"{method.name} at {value:g}: {done.stderr[-2000:]}")
        rows = [*map(json.loads, (Path(out) / "run" / "metrics.jsonl").read_text().splitlines())]
    taken_s, curve = 0.0, Curve([], [])
    for row in rows:
        taken_s += row.get("step_s") or 0.0
        if "val_loss" in row and row["step"] > 0:
            curve.losses.append(row["val_loss"])
            curve.seconds.append(taken_s)
    return curve


def tuned(method: Method, seeds: int, steps: int, mpirun: str) -> list[Curve]:
    """A run on each seed, with the value that ends best on the first one."""
    first: dict[float, Curve] = {}
    for value in method.values:
        try:
            first[value] = run(method, value, 1, steps, mpirun)
        except click.ClickException as error:  # such as one that diverges
            print(f"left out: {error}", flush=True)
    told = ", ".join(f"{value:g}: {curve.losses[-1]:.3f}" for value, curve in first.items())
    print(f"{method.name} after {steps} steps, by {method.tried}: {told}", flush=True)
    best = min(first, key=lambda value: first[value].losses[-1])
    others = [run(method, best, seed, steps, mpirun) for seed in range(2, seeds + 1)]
    return [first[best], *others]


def show(curves: dict[str, list[Curve]], steps: int) -> None:
    """Medians over seeds, with the extremes of the last column."""
    *at, last = range(EVERY, steps + 1, EVERY)
    print(f"\n| validation loss after steps | {' | '.join(map(str, at))} | {last} |")
    print(f"|{'---|' * (len(at) + 2)}")
    for name, of in curves.items():
        medians = [f"{statistics.median(one.losses[k] for one in of):.3f}" for k in range(len(at))]
        print(f"| {name} | {' | '.join(medians)} | {_spread([one.losses[-1] for one in of])} |")
    until_s = min(one.seconds[-1] for of in curves.values() for one in of)
    print(f"\n| validation loss after seconds | seconds a step | {until_s:.0f} |")
    print("|---|---|---|")
    for name, of in curves.items():
        a_step = statistics.median(one.seconds[-1] / steps for one in of)
        print(f"| {name} | {a_step:.2f} | {_spread([_loss_at(one, until_s) for one in of])} |")


def _spread(found: list[float]) -> str:
    return f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"


def _loss_at(curve: Curve, seconds: float) -> float:
    """The loss between two evaluations, on a line; before the first one that of the first."""
    points = list(zip(curve.seconds, curve.losses, strict=True))
    for (before_s, before), (after_s, after) in pairwise(points):
        if before_s <= seconds <= after_s:
            return before + (after - before) * (seconds - before_s) / (after_s - before_s)
    return points[0][1] if seconds < points[0][0] else points[-1][1]


def picture(curves: dict[str, list[Curve]], steps: int) -> str:
    """Losses by step and by second as SVG, a line a seed."""
    losses = [loss for of in curves.values() for curve in of for loss in curve.losses]
    low, high = min(losses), max(losses)
    last_s = max(curve.seconds[-1] for of in curves.values() for curve in of)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" width="760" height="300" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="760" height="300" fill="#fff"/>',
    ]
    for left, most, unit in ((50, float(steps), "steps"), (420, last_s, "seconds")):
        parts.append(f'<path d="M{left} 20V250H{left + 300}" fill="none" stroke="#888"/>')
        parts.append(f'<text x="{left + 300}" y="270" text-anchor="end">{most:.0f} {unit}</text>')
        for value in (low, high):
            y = _down(value, low, high)
            parts.append(
                f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{value:.2f}</text>'
            )
    for place, method in enumerate(METHODS):
        parts.append(
            f'<text x="{60 + 90 * place}" y="290" fill="{method.colour}">{method.name}</text>'
        )
        for curve in curves.get(method.name, ()):
            at = range(EVERY, steps + 1, EVERY)
            for left, across in (
                (50, [300 * step / steps for step in at]),
                (420, [300 * s / last_s for s in curve.seconds]),
            ):
                points = " ".join(
                    f"{left + x:.1f},{_down(loss, low, high):.1f}"
                    for x, loss in zip(across, curve.losses, strict=True)
                )
                parts.append(f'<polyline points="{points}" fill="none" stroke="{method.colour}"/>')
    return "\n".join([*parts, "</svg>\n"])


def _down(loss: float, low: float, high: float) -> float:
    return 20 + 230 * (high - loss) / (high - low)


@click.command()
@click.option("--steps", default=100, show_default=True, help="a multiple of 20")
@click.option("--seeds", default=3, show_default=True)
@click.option("--svg", help="a file for the picture")
@click.option("--mpirun", required=True, hidden=True)
def main(steps: int, seeds: int, svg: str | None, mpirun: str) -> None:
    """Tune each optimizer, and show its losses."""
    curves = {method.name: tuned(method, seeds, steps, mpirun) for method in METHODS}
    show(curves, steps)
    if svg:
        Path(svg).write_text(picture(curves, steps))


if __name__ == "__main__":
    main()
