"""Forwards without gradients."""

#   head   needs                                          then
#   -----  ---------------------------------------------  --------------------------
#   F s.n  activation n; on the last stage target n too   activation n to stage s+1
#   B s.n  F s.n has started; gradient n but on the       gradient n to stage s-1
#          last stage
#
# Where a team holds the stage F comes in pieces, as in `pipeline.py`. A B computes nothing, and a
# gradient carries nothing. They keep order, caps and bounds those of a
# training.

from collections.abc import Iterator

from ..task import Kind
from .pipeline import gradient, inputs, joints_of_forwards, sent_back, sent_on
from .row import Row, StageHere


def evaluation(here: StageHere) -> Iterator[Row]:
    """The rows of a stage."""
    yield Row(
        Kind.FORWARD,
        inputs(here),
        level=1,
        sends=sent_on(here),
        in_flight=1,
        held=1,
        joints=joints_of_forwards(here),
    )
    yield Row(Kind.BACKWARD, gradient(here), level=1, sends=sent_back(here), in_flight=-1, held=-1)
