"""Gradients of matrices that are turned into their changes before steps are voted on (K-FAC)."""

#   head           needs                                               then
#   -------------  --------------------------------------------------  ---------------------------
#   precond s.t/b  bucket b is whole; the losses of all pipes; what    the norm of the stage, once
#                  `refreshes.py` has for the step                     all its buckets have been
#                                                                      changed
#
# The vote hears the sum of change times gradient over all matrices with the norms (`clipping.py`),
# and each step is made shorter by it.
#
# Nobody waits in a circle. A change needs what a step needs but for its vote, and no step of t: the
# refreshes that it waits for follow steps before t.

from collections.abc import Iterator

from ..task import Kind
from .refreshes import refreshed
from .replicas import losses_of_all, stage_is_done, whole
from .row import Need, Row, StageHere, urgent


def precondition(here: StageHere) -> Iterator[Row]:
    """The row of each bucket of a stage."""
    for bucket in range(len(here.buckets)):
        done = whole(here, bucket), *stage_is_done(here, bucket)
        needs = dict.fromkeys((*done, losses_of_all(here), *refreshed(here)))
        yield Row(Kind.PRECONDITION, tuple(needs), urgent(1), bucket=bucket)


def changed(here: StageHere, bucket: int) -> Need:
    """The gradient of a bucket is ready for the vote."""
    if here.job.preconditions:
        return Need(Kind.PRECONDITION, bucket=bucket)
    return whole(here, bucket)
