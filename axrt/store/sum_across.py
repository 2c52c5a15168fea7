"""The sum of a bucket's shard over groups of copies: the second level of a reduction."""

# When a copy has added up its shard over its group, the copies of all groups that own the same
# shard cut it once more. Each of them adds up one part, the *subtotals* of all, and sends the
# *total* back. It is the reduction of a bucket again, of a shard in place of the whole.

from collections.abc import Iterator, Sequence

from torch import Tensor

from axrt.scheduler.bucket import BucketCopy, Copies

from .gradient import Gradient, Shards, Used, sum_into, used_by_any

Subtotal = tuple[Shards, Used]  # over a group: a part of the shard, and who has a gradient


class SumAcross:
    """A shard whose parts are added up by the copies that own it, one of each group.

    Args:
        shard: index of the shard, and the number of shards, within the total of the gradient; ()
            where the total is that of the shard alone.
    """

    def __init__(
        self, copies: Copies, me: BucketCopy, gradient: Gradient, *shard: tuple[int, int]
    ) -> None:
        self.copies, self._gradient, self._shard = copies, gradient, shard
        self._mine = copies.index(me)

    def subtotal_for(self, to: BucketCopy) -> Subtotal:
        """The part of the shard that another copy adds up; lent until its total has come."""
        return self._part(self.copies.index(to)), self._gradient.used

    def add_up(self, subtotals: Sequence[Subtotal]) -> Shards:
        """Sum one part, in the order of groups.

        Args:
            subtotals: subtotal of each copy, in the order of `copies`.
        Returns:
            The sums, in place: views of the gradient, lent to the other copies.
        """
        own = self._part(self._mine)
        sum_into(own, [part for part, _ in subtotals])
        self._gradient.set_used(used_by_any([used for _, used in subtotals]))
        return own

    def buffers_for_totals(self) -> Iterator[tuple[int, Shards]]:
        """For every other copy its index, and the memory of the gradient that its totals belong
        in."""
        for place in range(len(self.copies)):
            if place != self._mine:
                yield place, self._part(place)

    def take_totals(self, totals: Sequence[Shards]) -> Shards:
        """Put the totals of all copies in place, and give the whole shard.

        Args:
            totals: totals of each copy, in the order of `copies`; those that are in place already
                are not copied.
        """
        for place, of_copy in enumerate(totals):
            put_in_place(self._part(place), of_copy)
        return self._gradient.cut(*self._shard)

    def _part(self, place: int) -> Shards:
        return self._gradient.cut(*self._shard, (place, len(self.copies)))


def put_in_place(buffers: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Copy what has come into its memory, unless it has arrived there."""
    for buffer, value in zip(buffers, found, strict=True):
        if buffer.data_ptr() != value.data_ptr():
            buffer.copy_(value)
