"""What a run has found, a line for each folder: passed, failed, and skipped with the reasons."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any


def told(stats: Mapping[str, Iterable[Any]]) -> list[str]:
    """The lines.

    Args:
        stats: reports of pytest by how they ended, as its terminal has them.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for end, name in (("passed", "passed"), ("failed", "failed"), ("error", "failed")):
        for report in stats.get(end, ()):
            counts[_folder_of(report.nodeid)][name] += 1
    for report in stats.get("skipped", ()):
        folder = _folder_of(report.nodeid)
        counts[folder]["skipped"] += 1
        reasons[folder][_reason_of(report)] += 1
    return [_line(folder, counts[folder], reasons[folder]) for folder in sorted(counts)]


def _folder_of(nodeid: str) -> str:
    return str(PurePath(nodeid.partition("::")[0]).parent)


def _reason_of(report: Any) -> str:
    found = report.longrepr
    return str(found[2] if isinstance(found, tuple) else found).removeprefix("Skipped: ")


def _line(folder: str, counts: Mapping[str, int], reasons: Mapping[str, int]) -> str:
    told = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed"))
    if not reasons:
        return f"{folder}: {told}"
    why = "; ".join(f"{number} since {reason}" for reason, number in sorted(reasons.items()))
    return f"{folder}: {told}, {sum(reasons.values())} skipped: {why}"
