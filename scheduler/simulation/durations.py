"""How long each task of a simulation takes, with what varies."""

# Jitter and hiccups are drawn for each stage and kind in the order of microbatches, so that every
# policy meets the same durations.

from math import exp
from random import Random

from ..job import Job
from ..task import AnyKind, Kind, Task
from .costs import Costs, of_stage, ring


class Durations:
    """Durations of tasks of one of several pipes, with factors drawn once for each stage, kind and
    microbatch."""

    def __init__(self, costs: Costs, job: Job, pipe: int) -> None:
        placement = job.placement
        self._costs, self._job = costs, job
        self._pipe = pipe
        self._streams: dict[tuple[AnyKind, int], Random] = {}
        self._factors: dict[tuple[AnyKind, int], float] = {}
        self._varies = costs.jitter > 0 or costs.hiccups[0] > 0
        self._base: dict[tuple[AnyKind, int], float] = {}
        self.numbers: dict[int, int | None] = {}
        self._pieces: dict[tuple[AnyKind, int], int] = {}
        # What a task takes where nothing varies.
        self._steady: dict[tuple[AnyKind, int], float] | None = None
        if not (self._varies or costs.lengths):
            self._steady = {}
        self._on_buckets = {
            Kind.REDUCE: costs.reduce,
            Kind.ACROSS: costs.reduce / job.pipes_a_group,
            Kind.COLLECT: costs.reduce + ring(costs, job.pipes),
            Kind.FETCH: costs.state / costs.copies_in,
            Kind.STORE: costs.state / costs.copies_out,
            Kind.UNLOAD: costs.bucket / costs.copies_out,
            Kind.LOAD: costs.bucket / costs.copies_in,
            **costs.others,
        }
        for stage in range(placement.stages):
            replica, place = job.place_of(pipe, stage)
            slow = costs.stragglers.get(replica * placement.ranks * job.team + place, 1.0)
            forward, back, weight, _ = costs.of_stage(placement, stage)
            self._base[Kind.FORWARD, stage] = slow * forward
            self._base[Kind.RECOMPUTE, stage] = slow * forward * costs.recomputed.get(stage, 1.0)
            self._base[Kind.INPUT, stage] = slow * back
            self._base[Kind.WEIGHT, stage] = slow * weight
            self._base[Kind.OFFLOAD, stage] = of_stage(costs.offload, placement, stage)
            self._base[Kind.RELOAD, stage] = of_stage(costs.reload, placement, stage)
            self._base[Kind.STEP, stage] = costs.step_of[stage] if costs.step_of else costs.step

    def of(self, task: Task) -> float:
        kind, stage, *_ = task
        if self._steady is None or (kind.of_a_microbatch and self.numbers[task.microbatch] is None):
            return self._of(task)
        known = self._steady.get((kind, stage))
        if known is None:
            known = self._steady[kind, stage] = self._of(task)
        return known

    def _of(self, task: Task) -> float:
        kind, stage, *_ = task
        if kind is Kind.STEP:
            return self._base[kind, stage]
        if not kind.of_a_microbatch:
            return self._on_buckets.get(kind, 0.0)
        size = self._length(task.microbatch)
        if size == 0.0:
            return 0.0
        if kind in (Kind.OFFLOAD, Kind.RELOAD):
            return self._base[kind, stage] * size
        return self._costs.task + size * self._computing(task)

    def _length(self, slot: int) -> float:
        """The factor on what the microbatch of a slot takes; 0 where the slot is empty."""
        number = self.numbers[slot]
        if number is None:
            return 0.0
        if not self._costs.lengths:
            return 1.0
        return exp(self._costs.lengths * Random(f"{self._costs.seed} length {number}").gauss(0, 1))

    def _computing(self, task: Task) -> float:
        kind, stage, _, part = task
        if kind is Kind.BACKWARD:
            both = self._drawn(Kind.INPUT, stage, part) + self._drawn(Kind.WEIGHT, stage, part)
            return both / self.pieces_of(kind, stage)
        return self._drawn(kind, stage, part) / self.pieces_of(kind, stage)

    def _drawn(self, kind: AnyKind, stage: int, part: int) -> float:
        """The duration of a whole task; its pieces share what the first has drawn."""
        if part and self._varies:
            return self._base[kind, stage] * self._factors[kind, stage]
        return self._base[kind, stage] * self._factor(kind, stage)

    def pieces_of(self, kind: AnyKind, stage: int) -> int:
        """The number of pieces that a task comes in; they take equally long."""
        known = self._pieces.get((kind, stage))
        if known is None:
            known = self._pieces[kind, stage] = self._counted_pieces(kind, stage)
        return known

    def _counted_pieces(self, kind: AnyKind, stage: int) -> int:
        joints = self._job.joints_of(stage)
        if kind is Kind.FORWARD:
            return 1 + joints.forward
        if kind in (Kind.BACKWARD, Kind.INPUT):
            return 1 + joints.back
        return self._costs.pieces if kind is Kind.WEIGHT else 1

    def usual(self, piece: Task) -> float:
        """The duration of a piece of a weight gradient where nothing varies."""
        return self._costs.task + self._base[piece.kind, piece.stage] / self._costs.pieces

    def _factor(self, kind: AnyKind, stage: int) -> float:
        if not self._varies:
            return 1.0
        lane = (kind, stage)
        stream = self._streams.get(lane)
        if stream is None:
            of_pipe = f" {self._pipe}" if self._pipe else ""
            stream = self._streams[lane] = Random(
                f"{self._costs.seed} {kind.value} {stage}{of_pipe}"
            )
        share, slow = self._costs.hiccups
        factor = exp(self._costs.jitter * stream.gauss(0, 1))
        self._factors[lane] = factor * slow if stream.random() < share else factor
        return self._factors[lane]
