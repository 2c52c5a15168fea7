"""Rows of measurements as tables."""

from collections.abc import Sequence
from textwrap import shorten
from typing import Any

from peers.report import grouped, spread

from .settings import REFERENCE

Row = dict[str, Any]
CLOSE = 1e-3  # most that a loss may be off
_MB = 1e6
_NOTES = """\
Each round trains every setting in a job of its own, one thread a rank. Sizes are in 10^6 bytes.

- predicted: weights, gradients and optimizer state of the fullest rank, as axrt's ledger says
- counted: the same in storages that live at the peak of a step, by one method for all
- process: growth of the resident memory up to the end of the second step, activations included
- sent: by a rank in a step, mean over ranks; axrt's messages, or what a ring sends for collectives
- reduced often: gradients are reduced after every microbatch; FSDP2 does so unless it says once
- loss: the most that any step's loss is off that of one process of plain torch
"""
_HEADS = ("", "predicted", "counted", "process", "sent", "tokens/s", "loss")


def tables(rows: Sequence[Row]) -> str:
    """Everything as Markdown."""
    losses = losses_by_model(rows)
    text = [_NOTES]
    for (model, ranks), each in grouped(rows, "model", "ranks").items():
        text.append(_table(model, ranks, each, losses.get(model)))
    return "\n".join([*text, verdict(rows)])


def losses_by_model(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The losses of plain torch, by model."""
    plain = [row for row in rows if row["name"] == REFERENCE.label and "losses" in row]
    return {row["model"]: row["losses"] for row in plain}


def off(row: Row, expected: Sequence[float]) -> float:
    """The most that a loss of a row is off."""
    pairs: list[tuple[float, float]] = list(zip(row["losses"], expected, strict=True))
    return max(abs(one - other) for one, other in pairs)


def disagreeing(rows: Sequence[Row]) -> list[Row]:
    """The rows that train something else than plain torch does."""
    losses = losses_by_model(rows)
    trained = [row for row in rows if "losses" in row and row["model"] in losses]
    # not "off > CLOSE": a loss that is no number disagrees as well
    return [row for row in trained if not off(row, losses[row["model"]]) <= CLOSE]


def verdict(rows: Sequence[Row]) -> str:
    """One line on losses."""
    if not losses_by_model(rows):
        return "Losses were not compared: plain torch on one rank is not among the rows."
    wrong = dict.fromkeys(f"{row['name']} on {row['ranks']}" for row in disagreeing(rows))
    if wrong:
        return f"Losses differ by more than {CLOSE:g} from plain torch: {'; '.join(wrong)}"
    return f"All losses are within {CLOSE:g} of plain torch's."


def _table(model: str, ranks: int, rows: Sequence[Row], losses: Sequence[float] | None) -> str:
    parameters = rows[0]["parameters"] / _MB
    lines = [
        f"**{model}, {parameters:.1f} M parameters, {ranks} rank{'s' * (ranks > 1)}**\n",
        f"| {' | '.join(_HEADS)} |".replace("|  |", "| |"),
        "|---" * len(_HEADS) + "|",
    ]
    by_name = grouped(rows, "name")
    lines += [_line(name, each, losses) for (name,), each in by_name.items() if _ran(each)]
    failed = [(name, each[0]) for (name,), each in by_name.items() if not _ran(each)]
    if failed:
        lines += ["", "| did not run | reason |", "|---|---|"]
        lines += [f"| {name} | {_reason(row)} |" for name, row in failed]
    return "\n".join([*lines, ""])


def _reason(row: Row) -> str:
    return shorten(row["reason"].replace("|", "/"), 70)


def _ran(rows: Sequence[Row]) -> bool:
    return any("losses" in row for row in rows)


def _line(name: str, rows: Sequence[Row], losses: Sequence[float] | None) -> str:
    rows = [row for row in rows if "losses" in row]
    keys = ("predicted_bytes", "counted_bytes", "process_bytes", "sent_bytes")
    cells = [_mb(rows, key) for key in keys]
    rates = [row["tokens_per_s"] for row in rows]
    worst = f"{max(off(row, losses) for row in rows):.0e}" if losses else ""
    return f"| {' | '.join([name, *cells, _short(rates, '{:,.0f}'), worst])} |"


def _mb(rows: Sequence[Row], key: str) -> str:
    values = [row[key] / _MB for row in rows if key in row]
    return _short(values, "{:,.1f}" if max(values) < 100 else "{:,.0f}") if values else ""


def _short(values: Sequence[float], form: str) -> str:
    """The median, and the extremes where they differ as written."""
    written = {form.format(value) for value in values}
    return written.pop() if len(written) == 1 else spread(values, form)
