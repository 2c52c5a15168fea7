"""The shard of a bucket that this rank steps (ZeRO): its gradient comes in parts, and its new
weights go to the other copies, as theirs come here."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from axrt.scheduler.bucket import BucketCopy, Copies

from .gradient import Gradient, Shards, Used, used_by_any
from .masters import Masters

Weights = tuple[Tensor, ...]  # of a shard, one stretch for each type of parameters


def shard_of_copy(copy: BucketCopy) -> int:
    """The index of the shard that a copy steps; several layers of a pipe, which have tied weights,
    step the same one."""
    return copy.pipe


class BucketShard:
    """One shard of a bucket.

    Args:
        copies: copies of the bucket.
        me: the copy that this rank holds.
        masters: weights of the bucket.
        gradient: gradient of the bucket.
    """

    def __init__(
        self, copies: Copies, me: BucketCopy, masters: Masters, gradient: Gradient
    ) -> None:
        self._copies, self._me, self._masters, self._gradient = copies, me, masters, gradient

    def add_up(self, parts: Sequence[tuple[Shards, Used]]) -> None:
        """Sum the parts of the shard, in the order of copies, and make that the gradient."""
        self._gradient.add_up([part for part, _ in parts], 0)
        self._gradient.set_used(used_by_any([used for _, used in parts]))
        self._gradient.show_total()

    def new_weights(self) -> Callable[[BucketCopy], Weights]:
        """After a step, a function that gives for each copy the shard's weights as layers have
        them, lent until it has stepped again; none for the copy of another layer, which has them
        from its own."""
        weights = self._masters.weights_to_send()
        return lambda to: weights if self._is_alike(to) else ()

    def rooms_for_weights(self) -> Iterator[tuple[int, Weights]]:
        """For each other copy of this layer its index, and the memory that its weights belong
        in."""
        for number, copy in enumerate(self._copies):
            if self._is_alike(copy) and copy != self._me:
                yield number, self._masters.weights(shard_of_copy(copy))

    def take_weights(self, weights: Sequence[Weights]) -> None:
        """Put the weights of all shards in place.

        Args:
            weights: weights of each copy, in the order of copies; those that are in place already
                are not copied.
        """
        for copy, rooms in self.rooms_for_weights():
            for room, found in zip(rooms, weights[copy], strict=True):
                if room.data_ptr() != found.data_ptr():  # else it has arrived where it belongs
                    room.copy_(found)

    def place_of(self, whole: Tensor) -> int | None:
        """The index in the bucket of one of `Masters.whole`; None for any other tensor, such as a
        parameter without elements."""
        wholes = enumerate(self._masters.whole)
        return next((place for place, one in wholes if one is whole), None)

    def take_whole(self, whole: Tensor, value: Tensor) -> None:
        """Let a parameter have a value, and its master that of the piece here, while the bucket is
        present.

        Args:
            whole: one of `Masters.whole`, or a parameter without elements.
            value: its value, in the same type.
        """
        place = self.place_of(whole)
        if place is not None:
            self._masters.take_whole(place, value)

    def _is_alike(self, copy: BucketCopy) -> bool:
        """The copy is of this layer, in some pipe."""
        return (copy.stage, copy.bucket) == (self._me.stage, self._me.bucket)
