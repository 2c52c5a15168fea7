"""Tokens of all members that a member lets go behind a forward, and gathers again for the backward
(`parallel.gather_again`)."""

# A matrix that is cut by columns keeps what it was given for its weight gradient: the tokens of all
# members, t times what a member has of anything else between two layers. Behind the piece that has
# read them their memory is let go. A copy of the member's own is kept. The slices of the others
# come again with the gradients of the joint behind that piece, so that no exchange is added.
#
# What autograd has saved of them is an alias whose memory goes and comes, as that of a stash
# (`saved.py`). Nothing is taken from anybody else: a tensor that a layer holds on to keeps its
# memory. Tokens that a layer writes to stay, and so do those behind which a stage has no joint.

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .joints import Team, slice_of
from .saved import Holder, memory_of, unpack


class GatheredAgain:
    """What a piece has been given of all members, in its forward and before its backward.

    Args:
        wholes: tensors that were put together at the joint before it.
    Attributes:
        own: copies of this member's tokens, once the rest has been let go; one a tensor.
    """

    def __init__(self, wholes: Sequence[Tensor], team: Team) -> None:
        self._wholes = {memory_of(whole): whole for whole in wholes}
        self._before = {memory: whole._version for memory, whole in self._wholes.items()}
        self._team = team
        self._holders: list[weakref.ref[Holder]] = []
        self._away: list[list[Holder]] = []  # those of each tensor that was let go
        self.own: list[Tensor] = []

    def saving(self) -> AbstractContextManager[object]:
        """Context of the piece."""
        return saved_tensors_hooks(self._pack, unpack)

    def _pack(self, tensor: Tensor) -> Holder:
        holder = Holder(tensor, memory_of(tensor) in self._wholes)
        self._holders.append(weakref.ref(holder))
        return holder

    def keep(self) -> None:
        """Leave to autograd what it has saved."""
        self._wholes = {}

    def let_go(self) -> None:
        """Let go what autograd has saved, once the piece has run."""
        wholes, self._wholes = self._wholes, {}
        alive = [holder for ref in self._holders if (holder := ref()) is not None]
        for memory, whole in wholes.items():
            mine = [one for one in alive if one.may_leave and memory_of(one.tensor) == memory]
            is_as_it_came = whole._version == self._before[memory]
            if mine and is_as_it_came and all(one.tensor.dtype == whole.dtype for one in mine):
                self.own.append(slice_of(whole.detach(), *self._team).clone())
                self._away.append(mine)
                for holder in mine:
                    holder.let_go()

    def take_back(self, wholes: Sequence[Tensor]) -> None:
        """Have what was let go again.

        Args:
            wholes: the tokens of all members, of each tensor in `own`.
        """
        for whole, holders in zip(wholes, self._away, strict=True):
            for holder in holders:
                holder.take_back(whole)
        self._away, self.own = [], []

    def kept(self) -> list[Tensor]:
        """What is kept for the backward."""
        alive = [holder for ref in self._holders if (holder := ref()) is not None]
        return [*self.own, *(one.tensor for one in alive if one.away is None)]
