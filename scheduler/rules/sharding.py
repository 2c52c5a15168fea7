"""Optimizer state in shards (ZeRO stage 1): each copy of a bucket steps the shard that it owns, and
sends the new weights of it where it would send the sum."""

#   head          needs                               then
#   ------------  ----------------------------------  ---------------------------------------------
#   reduce s.t/b  a part from each copy               nothing: the shard's gradient is whole here
#   step s.t/b    reduce s.t/b; else as without       new weights of the shard to each copy
#                 shards
#   gather s.t/b  weights from each copy              the weights of step t+1, once all buckets of
#                                                     the stage have been gathered
#
# So as much is sent as without shards, and what is kept for a step is cut by the number of copies.
# Each stage of each pipe votes, since each knows the norms of its own shards alone.
#
# Nobody waits in a circle. A gather of step t needs steps of t of all copies, and these need what
# steps need without shards: parts of t, losses, a vote, slots. None of these needs a gather of t,
# and all gathers of t - 1 came before the forwards of t.

from collections.abc import Iterator

from ..counters import Gate
from ..task import Kind
from .replicas import weights_of_all
from .row import Row, StageHere, for_steps, urgent


def sharding(here: StageHere) -> Iterator[Row]:
    """The row of each bucket of a stage that puts weights of all copies in place."""
    for bucket in range(len(here.buckets)):
        yield Row(
            Kind.GATHER,
            (weights_of_all(here, bucket),),
            urgent(4),
            bucket=bucket,
            opens=for_steps(here.job, Gate.WEIGHTS),
        )
