"""The shard of a bucket that this rank steps (ZeRO): its gradient comes in parts, and its new
weights go to the other copies, as theirs come here."""

# A `Cut` (`shards.py`) says which elements of flat memory a copy owns, and so
# which *pieces* of parameters it steps: whole ones, or stretches of one dimension. The factory sees
# whole parameters, hollow where only a piece of a master is here; then its groups get the pieces.
# Elements that are stepped by themselves have the same bits in any piece (tried with eleven
# optimizers of torch, any cut, AVX-512), so such parameters are cut anywhere. For all other
# optimizers, and for clipping, whose norm of a parameter has one order of summation, shards begin
# with parameters.
#
# Who may still read memory, and when it is written to:
#
# - Another copy's shard leaves as a part for that copy. It is written to in the next step, which
#   needs that copy's weights.
# - The own shard is read by nobody. Tied weights, of which others step the same one, have their own
#   total.
# - The own shard in a group leaves as a total for the owners of the shard in other groups. The
#   bucket goes on in other memory if they still read it when it steps, also in the next step.
# - The own shard's narrow weights leave for the other copies. The next step writes to them, and
#   needs these copies' parts.
# - The own shard's other weights, which the user and layers may write to, are sent as a copy.

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from axrt.scheduler.bucket import BucketCopy, Copies, alike

from .gradient import Shards, Used, used_by_any, wide_enough
from .gradient_of_runs import GradientOfRuns
from .gradient_shard import GradientShard
from .masters import Masters
from .shards import Cut
from .sum_across import put_in_place

Part = tuple[Shards, Used]  # a copy's shards of a gradient, and which parameters have one
Weights = tuple[Tensor, ...]  # of a shard, one stretch for each type of parameters


class BucketShard:
    """One shard of a bucket."""

    def __init__(
        self,
        copies: Copies,
        me: BucketCopy,
        masters: Masters,
        gradient: GradientShard,
        cut: Cut,
    ) -> None:
        self._copies, self._me, self._masters, self._gradient = copies, me, masters, gradient
        self._cut = cut
        self._leaving: dict[BucketCopy, deque[Part]] = {to: deque() for to in copies}
        self._used: list[Used] = []  # of each part that was added up in this step
        self._scattered: list[Shards] = []  # parts that a queue beside the tasks may read

    def close(self) -> None:
        """This copy's gradient of a run is complete: where it is let go, parts are all that is
        left of it."""
        if isinstance(self._gradient, GradientOfRuns):
            for to, leaving in self._leaving.items():
                leaving.append(self._part(to))
            self._gradient.let_go()

    def forget(self) -> None:
        """Let go of the parts that have not left."""
        self._used, self._scattered = [], []
        for leaving in self._leaving.values():
            leaving.clear()

    def part_for(self, to: BucketCopy) -> Part:
        """This copy's gradient of the shard that another copy steps; of the earliest run whose part
        has not left."""
        return self._leaving[to].popleft() if self._leaving[to] else self._part(to)

    def add_up(self, parts: Sequence[Part], last: bool = True) -> None:
        """Sum the parts of the shard, in the order of copies.

        Args:
            parts: part of each copy, in the order of copies.
            last: they complete the gradient of the step, which is that of the bucket then.
        """
        self._gradient.add_up([part for part, _ in parts], 0)
        self._used += [used for _, used in parts]
        if last:
            self._gradient.set_used(used_by_any(self._used))
            self._gradient.show_total()
            self._used = []

    def scattered(self, order: Copies) -> list[tuple[Tensor, list[Tensor]]]:
        """What a library is to add up, in float32 or wider, for each type of parameters: memory for
        the sum of this shard, and the gradient of every copy's shard. `take_sum` ends that.

        Args:
            order: the copies, in the order of the library's ranks.
        """
        self._scattered = [self.part_for(copy)[0] for copy in order]
        both = zip(*self._scattered, strict=True)
        wide = [[wide_enough(shard) for shard in shards] for shards in both]
        mine = order.index(self._me)
        return [(torch.empty_like(shards[mine]), shards) for shards in wide]

    def take_sum(self, sums: Sequence[Tensor]) -> None:
        """Take the sum of this shard, which a library has put into the memory of `scattered`."""
        self._gradient.take_widened(sums)
        self._scattered = []

    def _part(self, to: BucketCopy) -> Part:
        return self._gradient.part(self._shard_of(to), len(self._copies)), self._gradient.used

    def _shard_of(self, copy: BucketCopy) -> int:
        return self._cut.shard_of(copy.pipe)

    @property
    def weights(self) -> Weights:
        """The shard's weights as layers have them, lent until it has stepped again."""
        return self._masters.weights_to_send()

    @property
    def kept_weights(self) -> Weights:
        """The shard's weights in memory of their own; () where weights are always whole, or in
        scratch."""
        is_kept = self._masters.has_residencies and not self._masters.in_scratch
        return self.weights if is_kept else ()

    def buffers_for_weights(self) -> Iterator[tuple[BucketCopy, Weights]]:
        """For each other copy of this layer the memory that its weights belong in."""
        for copy in alike(self._copies, self._me):
            if copy != self._me:
                yield copy, self._masters.weights(self._shard_of(copy))

    @property
    def pipes(self) -> list[int]:
        """The pipes that have a shard of these weights, in the order of copies."""
        return [copy.pipe for copy in alike(self._copies, self._me)]

    def take_weights(self, weights: Sequence[Weights]) -> None:
        """Put the weights of all shards in place.

        Args:
            weights: weights of each copy of this layer, in the order of copies; those that are in
                place already are not copied.
        """
        found_of = dict(zip(alike(self._copies, self._me), weights, strict=True))
        for copy, buffers in self.buffers_for_weights():
            put_in_place(buffers, found_of[copy])

    def place_of(self, whole: Tensor) -> int | None:
        """The index in the bucket of one of `Masters.whole`; None for any other tensor, such as a
        parameter without elements."""
        wholes = enumerate(self._masters.whole)
        return next((place for place, one in wholes if one is whole), None)

    def has_masters_of(self, place: int) -> bool:
        """Masters of the parameter at that index are in shards; else it is here as it is
        stepped."""
        return self._masters.has_masters_of(place)

    def take_whole(self, whole: Tensor, value: Tensor) -> None:
        """Let a parameter have a value, and its master that of the piece here, while the bucket is
        present.

        Args:
            whole: one of `Masters.whole`, or a parameter without elements.
        """
        place = self.place_of(whole)
        if place is not None:
            self._masters.take_whole(place, value)
