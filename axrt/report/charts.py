"""The charts of a report, each with the table that says the same in words and numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from statistics import median
from typing import Any

from axrt.ledger.ledger import Tier, Unit, readable
from axrt.scheduler.lacks import CAUSES
from axrt.scheduler.simulation.timeline import Delivery, Timeline
from axrt.scheduler.task import Kind

from .run_data import RunData, Traced

_MOST_ROWS, _MOST_SPANS = 40, 6000
# Colours that are told apart also by those who see red and green alike (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, YELLOW, SKY, RED, PURPLE, GREY = (
    *("#0072B2", "#E69F00", "#009E73", "#F0E442", "#56B4E9", "#D55E00", "#CC79A7", "#8a8a8a"),
)
WINE, OLIVE = "#882255", "#999933"  # two more, of Tol's
_OF_KIND = {
    Kind.FORWARD: BLUE,
    Kind.RECOMPUTE: PURPLE,
    Kind.BACKWARD: GREEN,
    Kind.INPUT: SKY,
    Kind.WEIGHT: ORANGE,
    Kind.REDUCE: YELLOW,
    Kind.NORM: WINE,
    Kind.VOTE: GREY,
    Kind.STEP: RED,
}
_OF_CAUSE = dict(zip(CAUSES, (RED, OLIVE, YELLOW, PURPLE, GREY), strict=True))
_OF_MEANINGS = BLUE, GREEN, ORANGE, PURPLE, SKY, RED, YELLOW, WINE, GREY, OLIVE
Rows = list[list[str]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart."""

    name: str  # name of its place on the page
    title: str  # heading
    says: str  # a sentence about what it shows
    traces: list[dict[str, Any]]  # what is drawn, as plotly takes it
    layout: dict[str, Any]  # axes, as plotly takes them
    # head, rows: the same as a table
    head: list[str]
    rows: Rows = field(default_factory=list)


def charts_of(run: RunData, against: RunData | None) -> Iterator[Chart]:
    """All charts for which a run has data.

    Args:
        against: another one that is shown beside it.
    """
    others = [run, *([against] if against else [])]
    for name, title, keys, unit in (
        ("loss", "Loss", (("loss", "training"), ("val_loss", "validation")), "nats a token"),
        ("throughput", "Throughput", (("tokens_per_s", "tokens"),), "tokens/s"),
        ("mfu", "Model FLOPs utilisation", (("mfu", "MFU"),), "share of the peak"),
        ("grad_norm", "Norm of the gradients", (("grad_norm", "norm"),), "2-norm"),
        ("lr", "Learning rate", (("lr", "learning rate"),), "learning rate"),
    ):
        if any(run.series(key)[0] for key, _ in keys):
            yield _over_steps(name, title, others, keys, unit)
    if run.traced:
        yield _timeline(run.traced)
        yield _idle(run.traced)
        if run.traced.measured.messages:
            yield _messages(run.traced.measured.messages)
    if run.memory:
        yield _memory(run.memory)


# How numbers are written, of charts whose numbers are shares or large.
_FORMS = {"mfu": "{:.1%}", "throughput": "{:,.0f}"}


def _over_steps(
    name: str, title: str, runs: Sequence[RunData], keys: Sequence[tuple[str, str]], unit: str
) -> Chart:
    traces, columns = list[dict[str, Any]](), dict[str, dict[int, float]]()
    for number, run in enumerate(runs):
        for at, (key, what) in enumerate(keys):
            steps, values = run.series(key)
            label = what if len(runs) == 1 else f"{what}, {run.path.name}"
            dash = "dash" if number else "solid"
            line = {"color": (BLUE, ORANGE)[at], "dash": dash, "width": 2}
            mode = "lines" if len(steps) > 1 else "markers"
            traces.append(
                {"type": "scatter", "mode": mode, "x": steps, "y": values, "name": label}
                | {"line": line}
            )
            columns[label] = dict(zip(steps, values, strict=True))
    every = sorted({step for of in columns.values() for step in of})
    shown = every[:: max(1, len(every) // _MOST_ROWS)] + every[-1:]
    form = _FORMS.get(name, "{:.5g}").format
    rows = [
        [str(step), *(form(of[step]) if step in of else "" for of in columns.values())]
        for step in dict.fromkeys(shown)
    ]
    from_zero = {} if name == "loss" else {"rangemode": "tozero"}
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": unit}, **from_zero},
    }
    last = [f"{label} {form(list(of.values())[-1])}" for label, of in columns.items() if of]
    says = f"At the end: {', '.join(last)}."
    return Chart(name, title, says, traces, layout, ["step", *columns], rows)


def _timeline(traced: Traced) -> Chart:
    """The tasks of each rank, measured above simulated, on one axis of time."""
    lines = [traced.measured, *([traced.simulated] if traced.simulated else [])]
    traces = [trace for number, line in enumerate(lines) for trace in _bars(line, number)]
    ms = {"title": {"text": "milliseconds"}}
    layout: dict[str, Any] = {"barmode": "overlay", "xaxis": ms, "height": 160 + 70 * len(lines)}
    ranks: dict[str, Any] = {"autorange": "reversed", "dtick": 1}
    of_all = range(traced.measured.ranks)
    if any(map(traced.measured.member, of_all)):
        ranks["tickvals"] = list(of_all)
        ranks["ticktext"] = [f"{rank}, {traced.measured.member(rank)}" for rank in of_all]
    layout["yaxis"] = {**ranks, "title": {"text": "measured: rank"}, "domain": [0.54, 1]}
    if traced.simulated:
        layout["xaxis"] = {**ms, "anchor": "y2"}
        layout["yaxis2"] = {**ranks, "title": {"text": "simulated: rank"}, "domain": [0, 0.46]}
        layout["height"] += 40 * sum(line.ranks for line in lines)
    else:
        layout["yaxis"]["domain"] = [0, 1]
    measured, predicted = (traced.figures.get(of, {}) for of in ("measured", "predicted"))
    rows = [
        [key, _figure(measured.get(key)), _figure(predicted.get(key))]
        for key in measured
        if isinstance(measured.get(key), float)
    ]
    says = (
        "Tasks by rank. Drag to zoom in, double-click to see all again. "
        "F is a forward, B a backward, I an input gradient, W a weight gradient, R a recomputation;"
        " step, precond and refresh are the optimizer's."
    )
    if traced.fault:
        says += f" There is no simulation beside it: {traced.fault}"
    return Chart(
        "timeline", "Timeline", says, traces, layout, ["figure", "measured", "simulated"], rows
    )


def _figure(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)


def _bars(line: Timeline, number: int) -> Iterator[dict[str, Any]]:
    spans = [span for span in line.spans if not span.task.kind.beside][:_MOST_SPANS]
    for kind in dict.fromkeys(span.task.kind for span in spans):
        mine = [span for span in spans if span.task.kind is kind]
        yield {
            "type": "bar",
            "orientation": "h",
            "name": kind.label,
            "legendgroup": kind.label,
            "showlegend": number == 0,
            "y": [span.rank for span in mine],
            "base": [1e3 * span.start for span in mine],
            "x": [1e3 * (span.end - span.start) for span in mine],
            "hovertext": [f"{span.task}, {1e3 * (span.end - span.start):.3g} ms" for span in mine],
            "hoverinfo": "text",
            "yaxis": f"y{number + 1}" if number else "y",
            "marker": {"color": _OF_KIND.get(kind, OLIVE), "line": {"width": 0.3}},  # type: ignore[call-overload]
        }


def _idle(traced: Traced) -> Chart:
    line = traced.measured
    whole = line.makespan or 1.0
    of_causes = {cause: [one / whole for one in line.idle(cause)] for cause in CAUSES}
    ranks = list(range(line.ranks))
    traces = [
        {"type": "bar", "name": cause, "x": ranks, "y": shares}
        | {"marker": {"color": _OF_CAUSE[cause]}}
        for cause, shares in of_causes.items()
        if any(shares)
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "rank"}, "dtick": 1},
        "yaxis": {"title": {"text": "share of the time"}, "tickformat": ".0%"},
    }
    every = [one / whole for one in line.idle()]
    rows = [
        [str(rank), f"{every[rank]:.1%}", *(f"{of[rank]:.1%}" for of in of_causes.values())]
        for rank in ranks
    ]
    says = (
        "Why each rank ran nothing in the traced steps: it lacked an input, or slices of other "
        "members of its team; there was no room under its cap; it waited for copies of state; or "
        "it had come to its end. The loop's own time has none."
    )
    return Chart("idle", "Idle time", says, traces, layout, ["rank", "all", *CAUSES], rows)


def _messages(messages: Sequence[Delivery]) -> Chart:
    """Sizes of messages, and how long they were under way, by what they carry."""
    by_meaning: dict[str, list[Delivery]] = {}
    for one in messages:
        by_meaning.setdefault(one.meaning, []).append(one)
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "markers", "name": meaning}
        | {"x": [one.num_bytes for one in of], "y": [1e3 * one.took for one in of]}
        | {"text": [f"{one.what}, rank {one.source} to {one.to}" for one in of]}
        | {"marker": {"color": colour, "size": 6, "opacity": 0.7}}
        for (meaning, of), colour in zip(by_meaning.items(), cycle(_OF_MEANINGS), strict=False)
    ]
    layout = {
        "xaxis": {"title": {"text": "bytes"}, "tickformat": ".2s"},
        "yaxis": {"title": {"text": "ms under way"}},
    }
    rows = []
    for meaning, of in by_meaning.items():
        took, sizes = sorted(1e3 * one.took for one in of), [one.num_bytes for one in of]
        rows.append(
            [
                meaning,
                str(len(of)),
                readable(int(median(sizes))),
                readable(sum(sizes)),
                f"{median(took):.2f}",
                f"{took[int(0.95 * (len(took) - 1))]:.2f}",
            ]
        )
    says = (
        "From the call that sent each message of the traced steps to the moment at which the "
        "receiver's loop took it: a rank takes messages between tasks, so that includes the task "
        "that it was in. Clocks of different hosts are taken as they are."
    )
    head = ["message", "number", "bytes each", "bytes in all", "ms, median", "ms, 95 %"]
    return Chart("messages", "Messages", says, traces, layout, head, rows)


def _memory(memory: Mapping[str, Any]) -> Chart:
    """Bytes of each rank: predicted by purpose, beside what was measured."""
    predicted: list[list[list[Any]]] = memory["predicted"]
    measured = [
        one if isinstance(one, dict) else {Tier.DEVICE.value: one}  # of a run of before, a number
        for one in memory.get("measured") or ()
    ]
    ranks = list(range(len(predicted)))
    sizes: dict[tuple[str, str], list[int]] = {}
    for rank, entries in enumerate(predicted):
        for purpose, tier, size in entries:
            sizes.setdefault((tier, purpose), [0] * len(ranks))[rank] += size
    tiers = list(dict.fromkeys(tier for tier, _ in sizes))
    names = {of: ": ".join(of) if len(tiers) > 1 else of[1] for of in sizes}
    colours = (BLUE, ORANGE, GREEN, YELLOW, SKY, RED, PURPLE, GREY)
    traces = [
        {"type": "bar", "name": names[tier, purpose], "x": ranks, "y": of, "offsetgroup": tier}
        | {"marker": {"color": colours[number % len(colours)]}}
        for number, ((tier, purpose), of) in enumerate(sizes.items())
    ]
    found = list(dict.fromkeys(tier for of in measured for tier in of))
    for tier, symbol in zip(found, ("diamond", "square", "cross"), strict=False):
        points: dict[str, Any] = {"x": ranks, "y": [of.get(tier) for of in measured[: len(ranks)]]}
        marker: dict[str, Any] = {"color": RED, "symbol": symbol, "size": 10}
        of_all = {"type": "scatter", "mode": "markers", "name": f"measured, {tier}"}
        traces.append({**of_all, **points, "marker": marker})
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "rank"}, "dtick": 1},
        "yaxis": {"title": {"text": "bytes"}, "tickformat": ".2s"},
    }
    in_bytes = [
        [
            *(sum(of[rank] for (one, _), of in sizes.items() if one == tier) for tier in tiers),
            *(measured[rank].get(tier, 0) for tier in found if rank < len(measured)),
        ]
        for rank in ranks
    ]
    unit = Unit.of(max(chain(*in_bytes), default=0))
    rows = [[str(rank), *map(unit.text, of)] for rank, of in zip(ranks, in_bytes, strict=True)]
    says = (
        f"What ranks hold by prediction, and the most that was measured ({memory.get('of', '')})."
    )
    if memory.get("owners"):
        says += f" {memory['owners'].capitalize()}."
    head = ["rank", *(f"{tier}, predicted" for tier in tiers)]
    head += [f"{tier}, measured" for tier in found]
    return Chart("memory", "Memory", says, traces, layout, head, rows)
