"""Orders that torch's own schedule classes write: `schedule._dump_csv(FILE)` of
`torch.distributed.pipelining`, or its `pipeline_order`."""

# A cell is `2F0`, the forward of stage 2 for microbatch 0; B is a whole backward, I and W its two
# halves, and `(2F1;3B0)OVERLAP_F_B` both. Empty cells are bubbles; communication is axrt's own.

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from .task import AnyKind, Kind, Task

_CELL = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_BOTH = re.compile(r"\(([^)]*)\)OVERLAP_F_B")
_COMPUTES: dict[str, tuple[Kind, ...]] = {
    "F": (Kind.FORWARD,),
    "B": (Kind.BACKWARD,),
    "I": (Kind.INPUT,),
    "W": (Kind.WEIGHT,),
}
_ELSEWHERE = re.compile(r"SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD")


def is_torch(words: Sequence[str]) -> bool:
    """Some cell is in torch's notation."""
    return any(_CELL.fullmatch(word) or _BOTH.fullmatch(word) for word in words)


# Torch's orders are put in the order of microbatches where they go backwards otherwise. Lanes that
# count up are what tables, proofs and bits rest on.
def tasks_of(rows: Sequence[tuple[int, Sequence[str]]]) -> list[tuple[Task, ...]]:
    """The tasks of each row.

    Where some backwards are split and others whole, a whole one becomes an input gradient with its
    weight gradient behind it. Where the backwards of a stage come in another order than its
    microbatches, the first one is that of the first microbatch, and so on: gradients are summed in
    the order of microbatches, as in plain PyTorch.

    Args:
        rows: number of each line, for errors, and its cells.
    Raises:
        ValueError: a cell is none of torch's.
    """
    found = [[task for word in words for task in _tasks(number, word)] for number, words in rows]
    if any(task.kind is Kind.INPUT for row in found for task in row):
        found = [[half for task in row for half in _halves(task)] for row in found]
    return [tuple(_in_order(row)) for row in found]


def _tasks(number: int, word: str) -> Iterator[Task]:
    both = _BOTH.fullmatch(word)
    for one in both[1].split(";") if both else [word]:
        cell = _CELL.fullmatch(one.strip())
        if cell and _ELSEWHERE.fullmatch(cell[2]):
            continue
        if cell is None or cell[2] not in _COMPUTES or not cell[3]:
            raise ValueError(
                f"line {number}: {word!r} is no cell of torch's; expected one such as 2F0, 2B0, "
                "2I0 or 2W0"
            )
        for kind in _COMPUTES[cell[2]]:
            yield Task(kind, int(cell[1]), int(cell[3]))


def _halves(task: Task) -> tuple[Task, ...]:
    if task.kind is not Kind.BACKWARD:
        return (task,)
    return task._replace(kind=Kind.INPUT), task._replace(kind=Kind.WEIGHT)


def _in_order(row: Sequence[Task]) -> Iterator[Task]:
    """The same kinds at the same places, each with the next microbatch of its stage."""
    numbers: dict[tuple[AnyKind, int], list[int]] = {}
    for kind, stage, number, _ in row:
        numbers.setdefault((kind, stage), []).append(number)
    done: Counter[tuple[AnyKind, int]] = Counter()
    for kind, stage, _, _ in row:
        yield Task(kind, stage, sorted(numbers[kind, stage])[done[kind, stage]])
        done[kind, stage] += 1
