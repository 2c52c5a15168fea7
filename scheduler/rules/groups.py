"""Sums in two levels: copies add up within a group, such as the replicas of a node, and then groups
do across (hierarchical all-reduce; with shards, hybrid sharding)."""

#   head          needs                                   then
#   ------------  --------------------------------------  -----------------------------------------
#   reduce s.t/b  a part from each copy of the group      a subtotal to the copy in each group that
#                                                         owns the same shard
#   across s.t/b  a subtotal from each such copy          a total to each such copy
#   join s.t/b    a total from each such copy; only       a sum to each copy of the group
#                 where there are no shards
#
# Within a group each copy owns a shard. The copies of the groups that own one shard cut it again,
# and each of them adds its part up. Where state is in shards, the totals of its shard are all that
# a copy needs for its step; else they are put together and sent to the group. So as much is sent as
# in one level, but by fewer messages: of N copies in groups of n each sends n + N / n a bucket and
# phase, and not N. Between groups a copy sends its shard alone.
#
# Nobody waits in a circle: an across needs reduces alone, and a join needs acrosses.

from collections.abc import Callable, Iterator

from ..message import Meaning, Message
from ..task import Kind, Task
from .replicas import column, stage_copies_of, sums, to_copies
from .row import Need, Row, StageHere, at_once


def groups(here: StageHere) -> Iterator[Row]:
    """The rows of each bucket of a stage whose copies are in several groups."""
    for bucket in range(len(here.buckets)):
        owners = stage_copies_of(column(here, bucket))
        subtotals = Need(Meaning.SUBTOTAL, owners, bucket)
        yield Row(Kind.ACROSS, (subtotals,), at_once, totals(here), bucket=bucket)
        if not here.job.shards:
            whole = Need(Meaning.TOTAL, owners, bucket)
            yield Row(Kind.JOIN, (whole,), at_once, sums(here), bucket=bucket)


def totals(here: StageHere) -> Callable[[Task], list[Message]]:
    """A message to each copy that owns the same shard: a part of it has been added up."""
    return lambda task: to_copies(
        Meaning.TOTAL, column(here, task.part), here, task.part, task.microbatch
    )
