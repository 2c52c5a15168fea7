"""Rows of measurements as tables, and as bars."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

WHAT = {
    "synthetic": ("utilisation", "{:.3f}"),
    "real": ("tokens_per_s", "{:,.0f}"),
    "empty": ("us_per_task", "{:,.1f}"),
}


def spread(values: Sequence[float], form: str = "{:.3f}") -> str:
    """The median, and the extremes."""
    return (
        f"{form.format(statistics.median(values))} ({form.format(min(values))} to "
        f"{form.format(max(values))})"
    )


def grouped(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return dict(groups)


def median(rows: Sequence[Row], key: str) -> float:
    return float(statistics.median([row[key] for row in rows]))


def tables(rows: Sequence[Row]) -> str:
    """Everything as Markdown."""
    text = []
    for case, of_case in grouped(
        [row for row in rows if row["part"] == "synthetic"], *_CASE
    ).items():
        text.append(_synthetic(_titled(case), of_case))
    for (ranks, microbatches, world), of_case in grouped(
        [row for row in rows if row["part"] == "varied"], "ranks", "microbatches", "world"
    ).items():
        text.append(_varied(f"p = {ranks}, m = {microbatches}, {world}", of_case))
    makers: dict[str, Callable[[list[Row]], str]] = {
        "real": _real,
        "empty": _empty,
        "messages": _messages,
        "sharing": _sharing,
    }
    for part, make in makers.items():
        of_part = [row for row in rows if row["part"] == part]
        if of_part:
            text.append(make(of_part))
    return "\n\n".join(text)


_CASE = ("ranks", "microbatches", "jitter", "steps", "clips")


def _titled(case: tuple[Any, ...]) -> str:
    ranks, microbatches, jitter, steps, clips = case
    varies = f"jitter {jitter}" if jitter else "no jitter"
    runs = "one step with a flush" if steps == 1 else f"{steps} steps in a row"
    return f"p = {ranks}, m = {microbatches}, {varies}, {runs}{', clip = 1' if clips else ''}"


def _ranked(
    rows: Sequence[Row], key: str, best: Callable[[float], float]
) -> list[tuple[tuple[Any, ...], list[Row]]]:
    return sorted(
        grouped(rows, "runtime", "name").items(), key=lambda item: best(median(item[1], key))
    )


def _synthetic(title: str, rows: list[Row]) -> str:
    best = max(
        (
            median(each, "utilisation")
            for (runtime, _), each in grouped(rows, "runtime", "name").items()
            if runtime == "torch"
        ),
        default=0.0,
    )
    lines = [
        f"**{title}**\n",
        "| | utilisation | of torch's best | simulated | with the measured costs | a task, a "
        "message | CPU of a rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for (runtime, name), each in _ranked(rows, "utilisation", lambda value: -value):
        value = median(each, "utilisation")
        ideal = f"{median(each, 'simulated'):.3f}" if "simulated" in each[0] else ""
        predicted = f"{median(each, 'predicted'):.3f}" if "predicted" in each[0] else ""
        costs = f"{median(each, 'task_us'):.0f}, {median(each, 'message_us'):.0f} us"
        share = f"{value / best:.3f}" if best else ""
        cpu = f"{100 * median(each, 'cpu'):.0f} %"
        used = spread([row["utilisation"] for row in each])
        lines.append(
            f"| {runtime} {name} | {used} | {share} | {ideal} | {predicted} | {costs} | {cpu} |"
        )
    return "\n".join(lines)


def _varied(title: str, rows: list[Row]) -> str:
    """Milliseconds a step, and the rate in that of torch's best which keeps no more chunks. Ratios
    are within a round, since rounds have other microbatches."""
    groups = grouped(rows, "runtime", "name")
    of_torch = [
        (each[0]["held"], each) for (runtime, _), each in groups.items() if runtime == "torch"
    ]
    lines = [
        f"**{title}**\n",
        "| | ms a step | chunks kept | rate, of torch's best that keeps no more |",
        "|---|---|---|---|",
    ]
    for (runtime, name), each in _ranked(rows, "step_s", lambda value: value):
        fair = [those for held, those in of_torch if held <= each[0]["held"]]
        best = min(fair, key=lambda those: median(those, "step_s"), default=None)
        rate = ""
        if best is not None:
            of_round = {row["round"]: row["step_s"] for row in best}
            rate = spread([of_round[row["round"]] / row["step_s"] for row in each])
        took = spread([1e3 * row["step_s"] for row in each], "{:.0f}")
        lines.append(f"| {runtime} {name} | {took} | {each[0]['held']} | {rate} |")
    return "\n".join(lines)


def _real(rows: list[Row]) -> str:
    alone = 2 * median([row for row in rows if row["name"] == "one process alone"], "tokens_per_s")
    both = median([row for row in rows if row["name"].startswith("two processes")], "tokens_per_s")
    lines = [
        "**A GPT, 8 blocks of width 256, two ranks of one thread**\n",
        "| | tokens/s | of twice one process | of two processes at once |",
        "|---|---|---|---|",
    ]
    for (runtime, name), each in _ranked(rows, "tokens_per_s", lambda value: -value):
        rate = median(each, "tokens_per_s")
        used = spread([row["tokens_per_s"] for row in each], "{:,.0f}")
        lines.append(f"| {runtime} {name} | {used} | {rate / alone:.3f} | {rate / both:.3f} |")
    return "\n".join(lines)


def _empty(rows: list[Row]) -> str:
    lines = ["**Layers that do nothing, p = 2, m = 256**\n", "| | us a task |", "|---|---|"]
    for (runtime, name), each in _ranked(rows, "us_per_task", lambda value: value):
        lines.append(
            f"| {runtime} {name} | {spread([row['us_per_task'] for row in each], '{:,.1f}')} |"
        )
    return "\n".join(lines)


def _messages(rows: list[Row]) -> str:
    lines = [
        "**Messages**\n",
        "| KiB | raw, us | axrt, us | above raw, us | raw, GB/s | axrt, GB/s | of raw | waits for "
        "a busy sender, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (size,), each in grouped(rows, "bytes").items():
        more = statistics.median([row["axrt_us"] - row["raw_us"] for row in each])
        share = statistics.median([row["axrt_gb_s"] / row["raw_gb_s"] for row in each])
        raw, ours = (f"{median(each, f'{side}_us'):,.1f}" for side in ("raw", "axrt"))
        raw_rate, our_rate = (f"{median(each, f'{side}_gb_s'):.2f}" for side in ("raw", "axrt"))
        waits = spread([row["waits_ms"] for row in each], "{:.2f}")
        lines.append(
            f"| {size // 1024:,} | {raw} | {ours} | {more:.1f} | {raw_rate} | {our_rate} | "
            f"{share:.2f} | {waits} |"
        )
    return "\n".join(lines)


def _sharing(rows: list[Row]) -> str:
    """Milliseconds a step, and in how many times those of the even case of the same round."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    text = [
        "## replicas of which one rank is slow, and microbatches of different lengths",
        "",
        f"| runtime | schedule | {' | '.join(cases)} |",
        "|---|---|" + "---|" * len(cases),
    ]
    for (runtime, name), of in grouped(rows, "runtime", "name").items():
        of_case = grouped(of, "case")
        even = {row["round"]: row["s"] for row in of_case[cases[0],]}
        cells = [f"{1e3 * median(of_case[cases[0],], 's'):.0f} ms"]
        for case in cases[1:]:
            times = spread([row["s"] / even[row["round"]] for row in of_case[case,]])
            cells.append(f"{1e3 * median(of_case[case,], 's'):.0f} ms, {times}")
        text.append(f"| {runtime} | {name} | {' | '.join(cells)} |")
    return "\n".join(text)


def picture(rows: Sequence[Row], file: Path) -> None:
    """A bar a contestant, a panel a table; whiskers are the extremes."""
    panels = [
        (_titled(case), of_case)
        for case, of_case in grouped(
            [row for row in rows if row["part"] == "synthetic"], *_CASE
        ).items()
    ]
    panels += [
        (part, of_part)
        for (part,), of_part in grouped(
            [row for row in rows if row["part"] in ("real", "empty")], "part"
        ).items()
    ]
    if not panels:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2 * len(panels)), layout="constrained")
    for axes, (title, of_panel) in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True
    ):
        key, _ = WHAT[of_panel[0]["part"]]
        ranked = _ranked(of_panel, key, lambda value: value)
        names = [f"{runtime} {name}" for (runtime, name), _ in ranked]
        values = [median(each, key) for _, each in ranked]
        lows = [
            value - min(row[key] for row in each)
            for value, (_, each) in zip(values, ranked, strict=True)
        ]
        highs = [
            max(row[key] for row in each) - value
            for value, (_, each) in zip(values, ranked, strict=True)
        ]
        colours = ["tab:blue" if name.startswith("axrt") else "tab:gray" for name in names]
        axes.barh(names, values, xerr=[lows, highs], color=colours)
        axes.set_title(title)
        axes.set_xlabel(key.replace("_", " "))
    figure.savefig(file)
