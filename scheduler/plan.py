"""Due orders: which task of a rank is to come first, second, and so on within a step."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache

from .task import AnyKind, Kind, Task


def zb_v(ranks: int, rank: int, microbatches: int) -> list[Task]:
    """The order of zb-v on a rank.

    For m < 2p it is the order for 2p, without the microbatches that do not exist and without weight
    gradients: it does not say where those are then best.

    Args:
        rank: index of the rank.
    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (ZB-V).
    """
    order = _zb_v(ranks, rank, max(microbatches, 2 * ranks))
    if microbatches >= 2 * ranks:
        return list(order)
    return [
        task for task in order if task.microbatch < microbatches and task.kind is not Kind.WEIGHT
    ]


def _zb_v(p: int, r: int, m: int) -> Iterator[Task]:
    done: Counter[tuple[AnyKind, int]] = Counter()

    def times(count: int, *lanes: tuple[AnyKind, int]) -> Iterator[Task]:
        for kind, stage in lanes * count:
            if done[kind, stage] < m:
                yield Task(kind, stage, done[kind, stage])
                done[kind, stage] += 1

    down, up = (
        [(kind, stage) for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)]
        for stage in (r, 2 * p - 1 - r)
    )
    yield from times(2 * (p - r) - 1, down[0])
    yield from times(r, up[0], down[0])
    yield from times(p - r, *up)
    yield from times(m - p, *down, *up)
    # from here on others wait for every input gradient, and weight gradients for the end
    yield from times(r, down[1], up[1])
    yield from times(p - r, *down[1:])
    yield from times(m, up[2])
    yield from times(m, down[2])


def v_min(ranks: int, rank: int, microbatches: int) -> list[Task]:
    """The order of v-min on a rank: each microbatch repeats the one before, six slots later. Weight
    gradients are left out.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (V-Min).
    """
    p = ranks
    slots = [
        (slot + 6 * number, Task(kind, stage, number))
        for stage in (rank, 2 * p - 1 - rank)
        for kind, slot in ((Kind.FORWARD, stage), (Kind.INPUT, 4 * p - 1 - stage))
        for number in range(microbatches)
    ]
    return [task for _, task in sorted(slots, key=lambda one: one[0])]


class Plan:
    """A due order of one rank, looked up both ways. Kinds that it does not name go wherever there
    is time.

    A place is an index into the order of all steps, from 0.

    Args:
        order: the tasks of a step, each once.
        floating: kinds whose place says only when a task is early, and never that it is due.
    Attributes:
        lanes: places of the microbatches within a step, in order, by (stage, kind).
        due_lanes: the lanes of kinds that do not float.
        length: number of tasks of a step.
    """

    def __init__(self, order: Sequence[Task], floating: Collection[AnyKind] = ()) -> None:
        self.lanes: dict[tuple[int, AnyKind], list[int]] = {}
        for place, task in sorted(enumerate(order), key=lambda item: item[1].microbatch):
            self.lanes.setdefault((task.stage, task.kind), []).append(place)
        self.due_lanes = {
            (stage, kind): places
            for (stage, kind), places in self.lanes.items()
            if kind not in floating
        }
        forwards = dict.fromkeys([task.stage for task in order], 0)
        self._before: list[dict[int, int]] = []
        for task in order:
            self._before.append(dict(forwards))
            if task.kind is Kind.FORWARD:
                forwards[task.stage] += 1
        self.length = len(order)
        self._order = order
        self._per_step = {lane: len(places) for lane, places in self.lanes.items()}
        self._index_at = {
            place: index for places in self.lanes.values() for index, place in enumerate(places)
        }

    def place(self, kind: AnyKind, stage: int, before: int) -> int:
        """The place of the task of a kind and stage that has `before` such tasks before it.

        All pieces of a weight gradient have one place.
        """
        places = self.lanes[stage, kind]
        step, within = divmod(before, len(places))
        return step * self.length + places[within]

    def kind_at(self, place: int) -> AnyKind:
        """The kind of the task at a place."""
        return self._order[place % self.length].kind

    def first_due(self, place: int, started: Callable[[AnyKind, int], int]) -> int:
        """The first place, from one on, whose task is due and has not started; all that is due
        before has.

        Args:
            started: function that gives the number of tasks of a kind that have started on a stage.
        """
        while True:
            step, within = divmod(place, self.length)
            kind, stage, *_ = self._order[within]
            if (stage, kind) in self.due_lanes:
                number = step * self._per_step[stage, kind] + self._index_at[within]
                if started(kind, stage) <= number:
                    return place
            place += 1

    def forwards_before(self, place: int, stage: int) -> int:
        """Number of forwards of a stage that stand before a place."""
        step, within = divmod(place, self.length)
        return step * len(self.lanes[stage, Kind.FORWARD]) + self._before[within][stage]


@lru_cache(maxsize=4096)
def zb_v_plan(ranks: int, rank: int, microbatches: int) -> Plan:
    """The due order of zb-v; the same object for the same arguments."""
    return Plan(zb_v(ranks, rank, microbatches), floating=(Kind.WEIGHT,))


@lru_cache(maxsize=4096)
def v_min_plan(ranks: int, rank: int, microbatches: int) -> Plan:
    """The due order of v-min; the same object for the same arguments."""
    return Plan(v_min(ranks, rank, microbatches))
