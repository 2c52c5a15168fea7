"""What an optimizer of matrices computes anew now and then, in time in which nothing else is to
do."""

#   head           needs                     then
#   -------------  ------------------------  ------------------------------------------------
#   refresh s.t/b  step s.t/b                the steps up to t + lag of s, once all buckets of
#                                            the stage have been refreshed
#
# Which step uses a refresh is a number, and no clock: `lag` steps behind the step that it follows.
# Most refreshes have nothing to do: `axrt/store/refreshed.py` says which are due.
#
# A refresh runs once the step behind its own is asked for, or a stage that ends a call last would
# compute it while its user waits (`Job.first_for`). A save computes it before.
#
# Nobody waits in a circle. A refresh needs a step of its own bucket alone, which has started, and
# is never refused. It comes last of all heads, and so when nothing else may run: then a step that
# waits for it finds it done.

from collections.abc import Iterator

from ..counters import Gate
from ..task import Kind
from .row import Need, Opening, Row, StageHere


def refreshes(here: StageHere) -> Iterator[Row]:
    """The row of each bucket of a stage."""
    job = here.job
    for bucket in range(len(here.buckets)):
        yield Row(
            Kind.REFRESH,
            (Need(Kind.STEP, bucket=bucket),),
            lambda task, view: (4, task.microbatch, task.stage, task.part),
            bucket=bucket,
            fills=True,
            opens=(Opening(Gate.REFRESHED, lambda steps: job.first_of(steps + job.lag)),),
        )


def refreshed(here: StageHere) -> tuple[Need, ...]:
    """What the step uses has been computed; needed only where there are refreshes."""
    return (Need(Gate.REFRESHED),) if here.job.lag else ()
