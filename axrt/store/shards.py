"""How copies of a bucket share the optimizer's work (sharded state, ZeRO): each has one shard of
the flat memory, and steps the pieces of parameters that lie in it."""

# A shard begins at any unit of the memory where the optimizer steps each element by itself, as Adam
# does. Where it looks at whole parameters, as Adafactor does, shards begin with parameters; where
# the cost of stepping one is known, `owners.py` says who has which. A piece that is a whole
# parameter has its shape, and any other piece has one dimension.

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Self

from torch import Tensor

from axrt.config import Config
from axrt.scheduler.bucket import Copies
from axrt.scheduler.job import Job

from .flat import Layout


class Piece(NamedTuple):
    """What a shard has of a parameter."""

    place: int  # index of the parameter among those of the memory
    # first, end: elements of the parameter, in the order of memory
    first: int
    end: int
    is_whole: bool  # the piece is the whole parameter

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor that has the parameter's shape and is dense."""
        if self.is_whole:
            return tensor
        return tensor.as_strided((tensor.numel(),), (1,))[self.first : self.end]


class Cut(NamedTuple):
    """The shards of a bucket."""

    shards: int  # number of shards
    pipe: int  # pipe of this rank
    # what is added to pipes, so that another one has the first shard of each bucket. Where no
    # parameter is cut, one shard may have nearly all of a bucket.
    shift: int = 0
    whole: bool = False  # True if no parameter is cut
    lets_go: bool = False  # True if gradients are let go after each reduction (ZeRO stage 2)
    has_residencies: bool = False  # True if weights are whole for residencies alone (ZeRO stage 3)
    # pipes from one copy to the next: of weights that a team has cut only those of one member are
    # copies
    stride: int = 1
    # the shard that has each parameter, rising; (): shards are of equal size, see `owners.py`
    owners: tuple[int, ...] = ()

    def of_type(self, places: Sequence[int]) -> Self:
        """The shards of memory that has some of the bucket's parameters, those of a type.

        Args:
            places: their indices in the bucket.
        """
        owners = tuple(self.owners[place] for place in places) if self.owners else ()
        return self._replace(owners=owners)

    def shard_of(self, pipe: int) -> int:
        """The index of the shard that a pipe's copy steps. Several layers of a pipe, which have
        tied weights, step the same one."""
        return (pipe // self.stride + self.shift) % self.shards

    @property
    def mine(self) -> int:
        """The index of the shard that this rank steps."""
        return self.shard_of(self.pipe)

    def bounds(self, layout: Layout) -> list[int]:
        """The element at which each shard of some memory begins, then the number of elements."""
        if self.owners:
            ends = [bisect_left(self.owners, shard) for shard in range(self.shards + 1)]
            return [[*layout.offsets, layout.elements][end] for end in ends]
        units = layout.elements // layout.unit
        equal = [units * index // self.shards * layout.unit for index in range(self.shards + 1)]
        return [self._near(layout, bound) for bound in equal]

    def pieces(self, layout: Layout) -> list[Piece]:
        """What this rank's shard of some memory has of the parameters there; those without elements
        belong to the first shard."""
        first, end = self.bounds(layout)[self.mine : self.mine + 2]
        found = []
        for place, (begins, size) in enumerate(zip(layout.offsets, layout.sizes, strict=True)):
            low, high = max(0, first - begins), min(size, end - begins)
            if low < high:
                found.append(Piece(place, low, high, high - low == size))
            elif not size and self.mine == 0:
                found.append(Piece(place, 0, 0, True))
        return found

    def _near(self, layout: Layout, bound: int) -> int:
        """That bound, or the nearest end of the parameter that it would cut and may not."""
        for place, (begins, ends) in enumerate(pairwise([*layout.offsets, layout.elements])):
            if begins < bound < ends and (self.whole or not layout.is_contiguous[place]):
                return begins if bound - begins < ends - bound else ends
        return bound


# Shards shift from bucket to bucket. Where clipping leaves parameters whole, the shard with the
# largest one was the same copy's in every bucket, so one rank of a group had nearly all.
def cut_of(config: Config, job: Job, pipe: int, copies: Copies) -> Cut | None:
    """The shards of a bucket on a pipe; None where there are none."""
    if not job.shards:
        return None
    clips, zero = config.optimizer.clip > 0, config.memory.zero
    shift = copies[0].stage + copies[0].bucket
    stride = job.pipes // len({copy.pipe for copy in copies})
    return Cut(job.pipes_a_group // stride, pipe, shift, clips, zero > 1, zero > 2, stride)
