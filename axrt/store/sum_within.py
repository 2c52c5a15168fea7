"""The sum of a bucket's gradient over the copies of a group: each copy adds up one shard, and gives
it to the others. Where there are groups, `sum_across.py` adds up over them then."""

from collections.abc import Iterator, Sequence

from axrt.scheduler.bucket import BucketCopy, Copies

from .bucket_shard import Part
from .gradient import Gradient, Shards, Used, sum_into, used_by_any
from .gradient_tree import GradientTree, Kept, Node
from .sum_across import put_in_place


class SumWithin:
    """What this copy sends to the others of its group, adds up, and takes from them.

    Args:
        copies: copies of the group.
        me: the copy that this rank holds, one of them.
    """

    def __init__(self, copies: Copies, me: BucketCopy, gradient: Gradient) -> None:
        self.copies, self._gradient = copies, gradient
        self._mine = copies.index(me)

    def part_for(self, to: BucketCopy) -> Part:
        """This copy's gradient of the shards that another copy owns.

        Args:
            to: the other copy, one of `copies`.
        Returns:
            Views of the gradient, lent until the sums of copy `to` have come; and the parameters
            that have a gradient, None where all do.
        """
        return self._gradient.part(self.copies.index(to), len(self.copies)), self._gradient.used

    def kept_for(self, to: BucketCopy) -> tuple[Kept, Used]:
        """The same of what was put aside, whose memory the other copy may write to."""
        return self._gradient.kept(self.copies.index(to), len(self.copies)), self._gradient.used

    def add_up(self, parts: Sequence[Part]) -> Shards:
        """Sum the parts of the shards that this copy owns, in the order of copies.

        Args:
            parts: part of each copy, in the order of copies.
        Returns:
            The sums, in the types that are stepped: views of the gradient, lent to the other
            copies.
        """
        own = self._gradient.add_up([part for part, _ in parts], self._mine)
        self._gradient.set_used(used_by_any([used for _, used in parts]))
        return own

    def add_up_kept(self, parts: Sequence[tuple[Kept, Used]]) -> Shards:
        """The same of what copies have put aside: a tree for each layer that has copies, in the
        order of layers."""
        layers = sorted({(copy.stage, copy.bucket) for copy in self.copies})
        trees: dict[tuple[int, int], list[Kept]] = {layer: [] for layer in layers}
        for copy, (kept, _) in zip(self.copies, parts, strict=True):
            trees[copy.stage, copy.bucket].append(kept)
        own = self._gradient.shards(self._mine, len(parts))
        totals = list(map(_total_of, trees.values()))
        if len(totals) > 1:
            sum_into(own, totals)
        else:
            put_in_place(own, totals[0])
        self._gradient.set_used(used_by_any([used for _, used in parts]))
        return own

    def buffers_for_sums(self) -> Iterator[tuple[int, Shards]]:
        """For every other copy its index, and the memory of the gradient that its sums belong
        in."""
        for copy in range(len(self.copies)):
            if copy != self._mine:
                yield copy, self._gradient.shards(copy, len(self.copies))

    def take_sums(self, sums: Sequence[Shards]) -> None:
        """Make the sums of all copies the gradient; a parameter that no copy has used keeps none.

        Args:
            sums: sums of each copy, in the order of copies; those that are in the gradient's memory
                already are not copied.
        """
        for copy, of_copy in enumerate(sums):
            put_in_place(self._gradient.shards(copy, len(self.copies)), of_copy)
        self._gradient.show_total()


def _total_of(kept: Sequence[Kept]) -> Shards:
    """The sum over microbatches of what the copies of one layer have put aside."""
    tree = GradientTree()
    for node, tensors in (pair for of_copy in kept for pair in of_copy):
        tree.add(Node(*node), tensors)
    return tuple(tree.total())
