"""Due orders: which forward or input gradient of a rank is to come first, second, and so on within a step."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from .task import Kind, Task


def zb_v(ranks: int, rank: int, microbatches: int) -> list[Task]:
    """The critical order of zb-v on a rank: its forwards and input gradients; weight gradients go where there is time.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (ZB-V); for m < 2p the order for 2p, without
    the microbatches that there are not.
    """
    return [task for task in _zb_v(ranks, rank, max(microbatches, 2 * ranks)) if task.microbatch < microbatches]


def _zb_v(p: int, r: int, m: int) -> Iterator[Task]:
    done = {(kind, stage): 0 for kind in (Kind.FORWARD, Kind.INPUT) for stage in (r, 2 * p - 1 - r)}

    def following(kind: Kind, stage: int) -> Iterator[Task]:
        if done[kind, stage] < m:
            yield Task(kind, stage, done[kind, stage])
            done[kind, stage] += 1

    down, up = r, 2 * p - 1 - r
    for _ in range(2 * (p - r) - 1):
        yield from following(Kind.FORWARD, down)
    for _ in range(r):
        yield from following(Kind.FORWARD, up)
        yield from following(Kind.FORWARD, down)
    for _ in range(p - r):
        yield from following(Kind.FORWARD, up)
        yield from following(Kind.INPUT, up)
    while done[Kind.FORWARD, up] < m:
        yield from following(Kind.FORWARD, down)
        yield from following(Kind.INPUT, down)
        yield from following(Kind.FORWARD, up)
        yield from following(Kind.INPUT, up)
    while done[Kind.INPUT, up] < m:
        yield from following(Kind.INPUT, down)
        yield from following(Kind.INPUT, up)
    while done[Kind.INPUT, down] < m:
        yield from following(Kind.INPUT, down)


class Plan:
    """A due order of one rank, looked up both ways. Kinds that it does not name go wherever there is time.

    Args:
        order: the tasks of a step, each once.
    Attributes:
        lanes: the (stage, kind) that it orders, each with the places of its microbatches.
        length: how many tasks it has.
    """

    def __init__(self, order: Sequence[Task]) -> None:
        self.lanes: dict[tuple[int, Kind], list[int]] = {}
        for place, task in sorted(enumerate(order), key=lambda item: item[1].microbatch):
            self.lanes.setdefault((task.stage, task.kind), []).append(place)
        forwards = dict.fromkeys([task.stage for task in order], 0)
        self._before: list[dict[int, int]] = []
        for task in order:
            self._before.append(dict(forwards))
            if task.kind is Kind.FORWARD:
                forwards[task.stage] += 1
        self.length = len(order)

    def place(self, kind: Kind, stage: int, number: int, microbatches: int) -> int:
        """Of a task in the order of all steps; pieces of a weight gradient have one."""
        step, microbatch = divmod(number, microbatches)
        return step * self.length + self.lanes[stage, kind][microbatch]

    def forwards_before(self, place: int, stage: int, microbatches: int) -> int:
        """How many forwards of a stage stand before a place in the order of all steps."""
        step, within = divmod(place, self.length)
        return step * microbatches + self._before[within][stage]


@lru_cache(maxsize=4096)
def zb_v_plan(ranks: int, rank: int, microbatches: int) -> Plan:
    """The due order of zb-v; the same object for the same numbers."""
    return Plan(zb_v(ranks, rank, microbatches))
