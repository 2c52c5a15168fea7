"""Whole weights for a time (ZeRO stage 3): each copy keeps a shard of the weights, and those of a
stage are gathered for a stay.

    head           needs                                         then
    -------------  --------------------------------------------  -----------------------------------
    share s.v      the weights of the step of stay v are         the own shard's weights to each
                   stepped here; a free room, which it takes;    such copy of each bucket
                   the rank's stays before have begun
    gather s.v/b   weights from each copy of bucket b on the     F, R, B and I of stay v are open,
                   stage s of some pipe                          once all buckets of s are whole
    release s.v    all that stay v is for has started            its room is free; the steps of s,
                                                                 if v is the step's last stay

A rank has room for a few stages, and begins the next stay as soon as a room is free. All replicas
have the same stays in the same order.

Nobody waits in a circle. Let the tasks of a step be in the order of the steady run that the stays
were planned with, each stay before the first task that it is for, and each release behind the last
one. Say that the ranks of all replicas are stuck, and take the first in this order that is not
done. What it needs comes before it. If it is a share, those before it on its rank have begun, and
all but the last few of these have been released; if it is a gather, all copies have shared, since
they share at the same place of that order; if it is a release, its tasks have started. If it is a
forward or a backward its weights are whole, and the policy has admitted it there in the steady run.
Now it may refuse it only for tasks behind it in the order that have started already, in stays that
have begun:

* A rank that has room for all its stages has one stay of each a step, and nothing is kept back that
  the policy would admit. Linear placements are of this sort, and two pipes must be.
* With room for one stage, tasks behind it are of the same stage and of another kind. Backwards
  leave room for a forward, and no forward is in the way of a backward but under gpipe.
* With room between, there are three chunks or more, so the placement is looped. `interleaved-1f1b`
  and `interleaved-zb` admit forwards in one order, so none behind it has started, and refuse no
  backward. `breadth-first` refuses nothing. An order from a file may let forwards run ahead, and is
  refused.

Weights may come before their room. A replica that is ahead sends those of stays that have room
there and not yet here, so up to a room's worth of shards waits with the messages.
"""

from collections.abc import Iterator

from ..lane import Gate
from ..message import Message
from ..policies.policy import View
from ..stays import READERS
from ..task import AnyKind, Kind, Task
from .replicas import weights, weights_of_all
from .row import Need, Opening, Pool, Row, StageHere, urgent

_GATES: dict[AnyKind, Gate] = {
    Kind.FORWARD: Gate.FORWARDS,
    Kind.RECOMPUTE: Gate.RECOMPUTES,
    Kind.BACKWARD: Gate.BACKWARDS,
}


def stays(here: StageHere) -> Iterator[Row]:
    """The rows of a stage and of its buckets."""
    job, stage = here.job, here.seat.stage
    readers = [kind for kind in READERS if _has(here, kind)]

    def send(task: Task) -> list[Message]:
        buckets = range(len(here.buckets))
        return [one for bucket in buckets for one in weights(here, bucket, task.microbatch)]

    def is_over(task: Task, view: View) -> bool:
        ended = task.microbatch + 1
        return all(view.started(kind, stage) >= job.until(stage, kind, ended) for kind in readers)

    needs = (Need(Gate.STEPPED),)
    yield Row(Kind.SHARE, needs, urgent(1), send, in_order=True, takes=Pool.ROOMS)
    for bucket in range(len(here.buckets)):
        yield Row(
            Kind.GATHER,
            (weights_of_all(here, bucket),),
            urgent(1),
            bucket=bucket,
            opens=tuple(_opening(here, kind) for kind in _GATES),
        )
    yield Row(
        Kind.RELEASE,
        (Need(Kind.SHARE),),
        urgent(0),
        admitted=is_over,
        fills=True,
        frees=Pool.ROOMS,
    )


def _has(here: StageHere, kind: AnyKind) -> bool:
    """Tasks of a kind run on the stage."""
    if kind is Kind.RECOMPUTE:
        return here.recomputes
    return kind in (Kind.FORWARD, here.back)


def _opening(here: StageHere, kind: AnyKind) -> Opening:
    """The gate of a kind, which is open up to the last of its tasks that the newest stay is for."""
    job, stage = here.job, here.seat.stage
    pipes = job.placement.pipes
    return Opening(_GATES[kind], lambda stays: job.until(stage, kind, stays) * pipes)
