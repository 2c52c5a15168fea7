"""Who owns which matrices of a run: a sentence, a table for people, and rows for programs."""

from collections.abc import Iterator, Sequence
from typing import Any

from axrt.scheduler.plural import plural
from axrt.store.owners import Owned

_MOST_ROWS = 24  # of the table for people
Stages = Sequence[Sequence[Owned]]  # what each owner of each stage steps; empty: nobody owns any


def busiest_told(stages: Stages) -> str:
    """Who steps the matrices of the stage where owners differ most; "" where nobody owns any."""
    rows = [*rows_of(stages)]
    if not rows:
        return ""
    most = max(rows, key=lambda one: one["share"] * len(stages[one["stage"]]))
    owners = len(stages[most["stage"]])
    return (
        f"each matrix has one of {owners} owners; of stage {most['stage']} owner {most['owner']} "
        f"has most to do, {most['share'] * owners:.2f} of the mean, "
        f"{most['operations'] / 1e9:.3g} billion operations a step"
    )


def rows_of(stages: Stages) -> Iterator[dict[str, Any]]:
    """Each owner of each stage that has matrices: its share of the stage's steps, in operations,
    and all its matrices by name."""
    for stage, of_stage in enumerate(stages):
        if not any(one.matrices for one in of_stage):
            continue
        every = sum(one.operations for one in of_stage)
        for owner, (operations, matrices) in enumerate(of_stage):
            yield {
                "stage": stage,
                "owner": owner,
                "share": operations / every,
                "operations": operations,
                "matrices": list(matrices),
            }


def table_of(stages: Stages) -> list[str]:
    """The same in lines, with one name for matrices of layers that are called alike."""
    rows = [
        f"{one['stage']:5}  {one['owner']:5}  {one['share']:5.1%}  {_kinds(one['matrices'])}"
        for one in rows_of(stages)
    ]
    left = [f"... {plural(len(rows) - _MOST_ROWS, 'owner')} more: --json has them all"]
    head = ["stage  owner  share  matrices"] if rows else []
    return head + rows[:_MOST_ROWS] + (left if len(rows) > _MOST_ROWS else [])


def _kinds(names: Sequence[str]) -> str:
    """Names as text, such as "*.up.weight (6 matrices)"."""
    of_kind: dict[str, list[str]] = {}
    for name in names:
        kind = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        of_kind.setdefault(kind, []).append(name)
    found = [
        of[0] if len(of) == 1 else f"{kind} ({len(of)} matrices)" for kind, of in of_kind.items()
    ]
    return ", ".join(found) or "none"
