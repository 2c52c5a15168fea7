"""Steps on the host, where masters and moments live (ZeRO-Offload, Ren et al. 2021): gradients go
there as they become whole, and weights come back."""

#   head            needs                                          then
#   --------------  ---------------------------------------------  ---------------------------------
#   scale s.t/b     bucket b is whole; the losses of all pipes     nothing
#   unload s.t/b    scale s.t/b; a free slot, which it takes       nothing
#   hoststep s.t/b  unload s.t/b; the backward of the stage; the   nothing: weights are not open
#                   vote where there is one; the release of
#                   whole weights
#   load s.t/b      hoststep s.t/b                                 its slot is free; as `step` in
#                                                                  `replicas.py`
#
# With a scale ends all that the device does to a gradient: it takes sums, and divides by the
# weights of losses. A copy reads the gradient then, and writes no memory of other tasks. A slot is
# memory on the host for a bucket's gradient. A rank has a few, so while one bucket steps, the next
# gradient comes and the last weights leave.
#
# Nobody waits in a circle. Say that bucket b of step t is whole and lacks a slot. So every stage
# has done its forwards of step t, as in `offload.py`, and losses lack nothing. The slots are held
# by buckets that are whole in step t, or whose loads of t - 1 are under way. The latter lack
# nothing. The steps of the former may lack the vote and the release of weights, behind which stand
# backwards, sums, scales and norms of step t. None of these needs a slot, or a step of t. So they
# step, are loaded, and give their slots back.

from collections.abc import Iterator

from ..task import Kind
from .replicas import let_go, losses_of_all, new_weights, opened, stage_is_done, voted, whole
from .row import Need, OnDevice, Pool, Row, StageHere, urgent


# A scale is a task where steps are on the host. A copy that takes sums itself was thought of: what
# has arrived belongs to the stream that computes, and norms would need another place.
def host_steps(here: StageHere) -> Iterator[Row]:
    """The rows of each bucket of a stage that steps on the host."""
    for bucket in range(len(here.buckets)):
        is_whole = (whole(here, bucket), *stage_is_done(here, bucket), losses_of_all(here))
        yield Row(Kind.SCALE, tuple(dict.fromkeys(is_whole)), urgent(1), bucket=bucket)
        yield Row(
            Kind.UNLOAD,
            (Need(Kind.SCALE, bucket=bucket),),
            urgent(2),
            bucket=bucket,
            queue=OnDevice.COPIES_OUT,
            takes=Pool.ON_HOST,
        )
        yield Row(
            Kind.HOST_STEP,
            # The whole stage's backward has ended: until then it looks at gradients of the bucket.
            (
                Need(Kind.UNLOAD, bucket=bucket),
                Need(here.completes),
                *voted(here),
                *let_go(here),
            ),
            urgent(3),
            bucket=bucket,
            queue=OnDevice.HOST,
        )
        yield Row(
            Kind.LOAD,
            (Need(Kind.HOST_STEP, bucket=bucket),),
            urgent(4),
            new_weights(here),
            bucket=bucket,
            queue=OnDevice.COPIES_IN,
            opens=opened(here),
            frees=Pool.ON_HOST,
        )
