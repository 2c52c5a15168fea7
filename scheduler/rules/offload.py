"""State that is offloaded: a bucket's masters and moments come to the device for its step and go
back."""

#   head         needs                                        then
#   -----------  -------------------------------------------  -------------------------------------
#   fetch s.t/b  bucket b is whole; the stores of step t - 1  step s.t/b may start
#                of the stage; a free slot, which it takes
#   store s.t/b  step s.t/b                                   its slot is free when it has ended
#
# A slot is memory on the device for the state of one bucket. A rank has a few, so while one bucket
# steps, the next one comes and the last one leaves. Copies run on queues of their own, one a
# direction.
#
# No fetch waits for a slot for ever, even if there is only one. Say that bucket b of step t lacks
# nothing else. It is whole, so a backward of each pipe's last microbatch of step t has begun, and
# every stage of every pipe has done its forwards of step t. So every stage had stepped in t - 1
# before. The slots are held by two sorts of buckets:
#
# * Those that have stepped in t - 1. Their stores lack nothing, and end.
# * Those that are whole in step t. Their steps may lack losses, which come with forwards that are
#   done, and the end of a backward and the vote, behind which stand backwards, sums and norms of
#   step t. None of these needs a slot, a step of t or a store, but where weights are in scratch;
#   see `residencies.py`. So they step, are stored, and end as well.
#
# The gate of the stores adds no circle: the stores of step t - 1 wait for nothing of step t. A step
# that is dropped has fetched nothing, since no bucket of it was whole.

from collections.abc import Iterator

from ..counters import Gate
from ..task import Kind
from .replicas import opened, whole
from .row import Need, OnDevice, Opening, Pool, Row, StageHere, for_steps, urgent

# Buckets of a run that are on the device at a time: one comes, one steps, and one leaves.
SLOTS = 3


def offload(here: StageHere) -> Iterator[Row]:
    """The rows of each bucket of a stage whose offloaded state comes to the device."""
    for bucket in range(len(here.buckets)):
        yield Row(
            Kind.FETCH,
            (whole(here, bucket), Need(Gate.STORED)),
            urgent(2),
            bucket=bucket,
            queue=OnDevice.COPIES_IN,
            takes=Pool.SLOTS,
        )
        yield Row(
            Kind.STORE,
            (Need(Kind.STEP, bucket=bucket),),
            urgent(4),
            bucket=bucket,
            queue=OnDevice.COPIES_OUT,
            opens=stored(here),
            frees=Pool.SLOTS,
        )


def stored(here: StageHere) -> tuple[Opening, ...]:
    """The gates that open when the state of a step is in scratch, and weights where they are there,
    too."""
    of_weights = opened(here) if here.job.offloads_weights else ()
    return (*for_steps(here.job, Gate.STORED), *of_weights)
