"""The cost table of a run, taken from its timeline: the durations of stages, of the loop between
tasks, and of messages."""

# The simulator adds the loop's cost to every task and the latency to every message, so both are
# measured as the time that is left over: the loop's where a rank had another task to run at once, a
# message's where its receiver was waiting for it.

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import exp, inf
from statistics import fmean

from ..placement import Placement
from ..task import AnyKind, Kind
from .costs import Costs, Edge, Work
from .timeline import Span, Timeline
from .variation import durations, variation

_BACK = (Kind.BACKWARD, Kind.INPUT)
ON_HOST = (Kind.SCALE, Kind.UNLOAD, Kind.HOST_STEP, Kind.LOAD)
_OTHERS = (Kind.ACROSS, Kind.JOIN, Kind.PRECONDITION, Kind.REFRESH, *ON_HOST)


def fit_costs(line: Timeline, placement: Placement, seed: int = 0) -> Costs:
    """The costs with which a simulation should reproduce the timeline of a run.

    Returns:
        Costs in the unit of the timeline, of which `bandwidth` stays infinite. Where state is
        offloaded, `step` and `reduce` are of a bucket, as are `others`, which has steps on the host
        and the copies around them, and bringing weights, of a stage; the state of a bucket has size
        1, and `buckets_of` says how many buckets there are; else a stage is taken to have one.
    Raises:
        ValueError: some stage has no forwards or no backwards in the timeline.
    """
    took = durations(line)
    lacking = [
        stage
        for stage in range(placement.stages)
        if not took[Kind.FORWARD, stage] or not any(took[k, stage] for k in _BACK)
    ]
    if lacking:
        raise ValueError(
            f"the timeline has no forwards and backwards of stages {lacking}; expected those of "
            "whole steps"
        )
    jitter, lengths = variation(took, placement.ranks, line.microbatches)
    # the median of a lognormal with that mean
    below_mean = exp((jitter**2 + lengths**2) / 2)
    usual = {lane: fmean(of.values()) / below_mean for lane, of in took.items() if of}
    between = fmean(_between_tasks(line) or [0.0])
    offloads = is_offloaded(line)
    fetch, store = (_of_a_bucket(line, kind) for kind in (Kind.FETCH, Kind.STORE))

    def of_buckets(kind: AnyKind) -> float:
        return _of_a_bucket(line, kind) if offloads else _of_a_stage(line, kind)

    return Costs(
        tuple(_work(usual, stage) for stage in range(placement.stages)),
        reduce=of_buckets(Kind.REDUCE) + of_buckets(Kind.COLLECT),
        step=of_buckets(Kind.STEP),
        state=float(offloads),
        copies_in=1 / fetch if fetch else inf,
        copies_out=1 / store if store else inf,
        others={
            **{kind: of_buckets(kind) for kind in _OTHERS},
            Kind.BRING: _of_a_stage(line, Kind.BRING),
        },
        task=between,
        edge=Edge(max(0.0, fmean(_waited_for(line, placement) or [0.0]) - between)),
        jitter=jitter,
        lengths=lengths,
        recomputed={
            stage: usual[Kind.RECOMPUTE, stage] / usual[Kind.FORWARD, stage]
            for stage in range(placement.stages)
            if (Kind.RECOMPUTE, stage) in usual
        },
        offload=_of_a_rank(line, Kind.OFFLOAD, placement),
        reload=_of_a_rank(line, Kind.RELOAD, placement),
        pieces=_pieces(line),
        seed=seed,
    )


def _of_a_rank(line: Timeline, kind: AnyKind, placement: Placement) -> float:
    """The duration of a copy of what a microbatch keeps on a rank, over all its chunks."""
    times = [span.end - span.start for span in line.spans if span.task.kind is kind]
    return fmean(times or [0.0]) / placement.share


def is_offloaded(line: Timeline) -> bool:
    """Optimizer state was brought to the device for its steps, or stepped on the host."""
    return any(span.task.kind in (Kind.FETCH, Kind.HOST_STEP) for span in line.spans)


def buckets_of(line: Timeline, stages: int) -> tuple[int, ...]:
    """The number of buckets of each stage, as a simulation on the costs of `fit_costs` takes it."""
    counts = [1] * stages
    for _, (kind, stage, _, bucket), _, _ in line.spans if is_offloaded(line) else ():
        if kind in (Kind.STEP, Kind.HOST_STEP):
            counts[stage] = max(counts[stage], bucket + 1)
    return tuple(counts)


def recut(work: Sequence[Work], stages: int) -> tuple[Work, ...]:
    """The same model in another number of stages, as if each stage's layers could be cut anywhere.

    Args:
        work: cost of each stage of the model as it was run.
    """
    have = len(work)
    found = []
    for stage in range(stages):
        first, end = stage * have / stages, (stage + 1) * have / stages
        parts = [(max(0.0, min(end, one + 1) - max(first, one)), work[one]) for one in range(have)]
        forward, back, weight = (sum(share * of[kind] for share, of in parts) for kind in range(3))
        found.append(Work(forward, back, weight, work[-1].sent))
    return tuple(found)


def _work(usual: dict[tuple[AnyKind, int], float], stage: int) -> Work:
    """The cost of a stage. Of whole backwards half is taken to be the input's gradient: nothing in
    them tells the two apart."""
    whole = usual.get((Kind.BACKWARD, stage), 0.0)
    back, weight = (
        usual.get((Kind.INPUT, stage), whole / 2),
        usual.get((Kind.WEIGHT, stage), whole / 2),
    )
    return Work(usual[Kind.FORWARD, stage], back, weight)


def _by_rank(spans: Iterable[Span], ranks: int) -> Iterator[list[Span]]:
    of_rank: list[list[Span]] = [[] for _ in range(ranks)]
    for span in sorted(spans, key=lambda span: span.start):
        of_rank[span.rank].append(span)
    yield from of_rank


def _between_tasks(line: Timeline) -> list[float]:
    """The times from the end of a task to the start of the next within a step, where the rank did
    not wait."""
    waits = defaultdict(list)
    for rank, _, start, _ in line.pauses:
        waits[rank].append(start)
    found = []
    for rank, spans in enumerate(_by_rank(line.on_device(), line.ranks)):
        for one, after in pairwise(spans):
            same_step = line.step_of(one.task) == line.step_of(after.task)
            if same_step and not any(one.end <= start <= after.start for start in waits[rank]):
                found.append(after.start - one.end)
    return found


def _waited_for(line: Timeline, placement: Placement) -> list[float]:
    """The times from the end of a task to the start of the task on another rank that waited for
    it."""
    ended = {(span.task.kind, span.task.stage, span.task.microbatch): span for span in line.spans}
    found = []
    # A task may have waited for weights from the host or from scratch instead.
    loads = (span for span in line.spans if span.task.kind in (Kind.LOAD, Kind.BRING))
    for spans in _by_rank((*line.on_device(), *loads), line.ranks):
        for one, after in pairwise(spans):
            kind, stage, number, _ = after.task
            source = (
                ended.get((kind, stage - 1 if kind is Kind.FORWARD else stage + 1, number))
                if kind in (Kind.FORWARD, *_BACK)
                else None
            )
            if (
                source is not None
                and source.rank != after.rank
                and one.end < source.end <= after.start
            ):
                found.append(after.start - source.end)
    return found


def _of_a_stage(line: Timeline, kind: AnyKind) -> float:
    """The mean duration of a stage's tasks of a kind and number, all its buckets together."""
    whole: dict[tuple[int, int, int], float] = defaultdict(float)
    for rank, task, start, end in line.spans:
        if task.kind is kind:
            whole[rank, task.stage, task.microbatch] += end - start
    return fmean(whole.values()) if whole else 0.0


def _of_a_bucket(line: Timeline, kind: AnyKind) -> float:
    """The mean duration of a kind of task."""
    times = [end - start for _, task, start, end in line.spans if task.kind is kind]
    return fmean(times) if times else 0.0


def _pieces(line: Timeline) -> int:
    counts = Counter(
        (rank, task.stage, task.microbatch)
        for rank, task, _, _ in line.spans
        if task.kind is Kind.WEIGHT
    )
    return round(fmean(counts.values())) if counts else Costs().pieces
