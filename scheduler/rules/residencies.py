"""Whole weights for a time. Each copy keeps a shard of them (ZeRO stage 3), and those of a stage
are gathered for a residency; or weights are in scratch, and come for it."""

#   head           needs                                         then
#   -------------  --------------------------------------------  -----------------------------------
#   bring s.v      the weights of the step of residency v are    F, R, B and I of residency v are
#                  in scratch; release s.v-1; a free place,      open, but where there are shards
#                  which it takes; the rank's residencies
#                  before have begun
#   share s.v      bring s.v; where weights are not in           the own shard's weights to each
#                  scratch, what that needs, of the own shard    such copy of each bucket
#   gather s.v/b   weights from each copy of bucket b on the     F, R, B and I of residency v are
#                  stage s of some pipe                          open, once all of s are whole
#   release s.v    all that residency v is for has started;      its place is free; where weights
#                  see below where v is the last of the step     are not in scratch the steps of s,
#                                                                if v is the last of the step
#
# A rank has room for a few stages, and begins the next residency as soon as a place is free. All
# replicas have the same residencies in the same order.
#
# Where weights are in scratch a stage's last residency of a step lasts until the stage has stepped,
# and the new weights are in scratch. So as many stages have a gradient at a time as there are
# places, even if state comes slowly. It does not last so long where the step waits for other
# stages: for the vote, or for a gradient of tied weights.
#
# Nobody waits in a circle. Let the tasks of a step be in the order of the steady run that the
# residencies were planned with, each residency before the first task that it is for, and each
# release behind the last one. Say that the ranks of all replicas are stuck, and take the first in
# this order that is not done. What it needs comes before it. If it is a share, those before it on
# its rank have begun, and all but the last few of these have been released; if it is a gather, all
# copies have shared, since they share at the same place of that order; if it is a release, its
# tasks have started. If it is a forward or a backward its weights are whole, and the policy has
# admitted it there in the steady run. Now it may refuse it only for tasks behind it in the order
# that have started already, in residencies that have begun:
#
# * A rank that has room for all its stages has one residency of each a step, and nothing is kept
#   back that the policy would admit. Linear placements are of this sort, and two pipes must be.
# * With room for one stage, tasks behind it are of the same stage and of another kind. Backwards
#   leave room for a forward, and no forward is in the way of a backward but under gpipe.
# * With room between, there are three chunks or more, so the placement is looped.
#   `interleaved-1f1b` and `interleaved-zb` admit forwards in one order, so none behind it has
#   started, and refuse no backward. `breadth-first` refuses nothing. An order from a file may let
#   forwards run ahead, and is refused.
#
# Pieces of a team's tasks add none: a piece needs the slices of the piece before from other
# members, which have the same residencies in the same order, and release this one when the last
# piece of its tasks has started.
#
# A residency that lasts until its stage has stepped adds no circle. All its backwards have begun,
# those of the last microbatches included, so every stage of its pipe has done its forwards of the
# step. Other pipes come to theirs before such a residency in the same order, so losses lack
# nothing. Of other copies the step needs gradients that come before it in the order. Weight
# gradients that wait need no whole weights, and are never refused. A bucket that holds a slot lacks
# nothing but these, so it steps, is stored, and gives the slot back.
#
# Weights may come before their place. A replica that is ahead sends those of residencies that have
# room there and not yet here, so up to a place's worth of shards waits with the messages.

from collections.abc import Iterator
from dataclasses import replace

from ..counters import Gate
from ..message import Message
from ..policies.policy import View
from ..residencies import READERS
from ..task import AnyKind, Counts, Kind, Task
from .replicas import weights, weights_of_all
from .row import Need, OnDevice, Opening, Pool, Row, StageHere, at_once, nothing, urgent

_GATES: dict[AnyKind, Gate] = {
    Kind.FORWARD: Gate.FORWARDS,
    Kind.RECOMPUTE: Gate.RECOMPUTES,
    Kind.BACKWARD: Gate.BACKWARDS,
}


# The place of a residency bounds gradients as well. A pool of gradients of its own was thought of:
# under policies that go back and forth between stages all of them have one at a time, and a rank
# would wait for a stage that has none yet.
def residencies(here: StageHere) -> Iterator[Row]:
    """The rows of a stage and of its buckets."""
    job, stage = here.job, here.stage_copy.stage
    readers = [kind for kind in READERS if _has(here, kind)]

    def send(task: Task) -> list[Message]:
        buckets = range(len(here.buckets))
        return [one for bucket in buckets for one in weights(here, bucket, task.microbatch)]

    lasts = _lasts_until_stepped(here)

    def is_over(task: Task, view: View) -> bool:
        ended = task.microbatch + 1
        if lasts and ended % a_step == 0 and not view.has_stepped(stage, ended):
            return False
        return all(
            view.started_whole(kind, stage) >= job.until(stage, kind, ended) for kind in readers
        )

    a_step = job.a_step(Counts.RESIDENCIES, stage)
    opens = tuple(_opening(here, kind) for kind in _GATES)
    first = Row(Kind.SHARE, (Need(Gate.STEPPED),), urgent(1), send, in_order=True, takes=Pool.WHOLE)
    if job.offloads_weights:
        yield replace(
            first,
            kind=Kind.BRING,
            needs=(Need(Gate.STEPPED), Need(Gate.LEFT)),
            then=nothing,
            queue=OnDevice.COPIES_IN,
            opens=() if job.shards else opens,
        )
        first = replace(first, needs=(Need(Kind.BRING),), in_order=False, takes=None)
    if job.shards:
        yield first
    for bucket in range(len(here.buckets)) if job.shards else ():
        needs = (weights_of_all(here, bucket),)
        yield Row(Kind.GATHER, needs, urgent(1), bucket=bucket, opens=opens)
    yield Row(
        Kind.RELEASE,
        (Need(Kind.SHARE if job.shards else Kind.BRING),),
        at_once,
        admitted=is_over,
        fills=True,
        opens=(Opening(Gate.LEFT, lambda residencies: residencies + 1),),
        frees=Pool.WHOLE,
    )


def _lasts_until_stepped(here: StageHere) -> bool:
    """The last residency of a step ends when the stage has stepped, which waits for no other
    stage."""
    stages = {copy.stage for copies in here.buckets for copy in copies}
    return here.job.offloads_weights and not here.job.votes and stages <= {here.stage_copy.stage}


def _has(here: StageHere, kind: AnyKind) -> bool:
    """Tasks of a kind run on the stage."""
    if kind is Kind.RECOMPUTE:
        return here.recomputes
    return kind in (Kind.FORWARD, here.back)


def _opening(here: StageHere, kind: AnyKind) -> Opening:
    """The gate of a kind, which is open up to the last of its tasks that the newest residency is
    for."""
    job, stage = here.job, here.stage_copy.stage
    pipes = job.placement.pipes
    return Opening(_GATES[kind], lambda residencies: job.until(stage, kind, residencies) * pipes)
