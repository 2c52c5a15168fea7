"""Tokens of all members that a member lets go behind a forward, and gathers again for the backward
(`parallel.gather_again`)."""

# A matrix that is cut by columns keeps what it was given for its weight gradient: the tokens of all
# members, t times what a member has of anything else between two layers. Behind the piece that has
# read them their memory is let go. A copy of the member's own is kept. The slices of the others
# come again with the gradients of the joint behind that piece, so that no exchange is added. They
# come of all that was gathered: a member does not know which of it others have let go.
#
# What autograd has saved of them is an alias whose memory goes and comes, as that of a stash
# (`saved.py`). Nothing is taken from anybody else: a tensor that a layer holds on to keeps its
# memory. Tokens that a layer writes to stay, and so do those behind which a stage has no joint.

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .joints import Team, slice_of
from .saved import Holder, may_be_exchanged, memory_of, unpack


class GatheredAgain:
    """What a piece has been given of all members, in its forward and before its backward.

    Args:
        wholes: tensors that were put together at the joint before it.
    Attributes:
        own: copies of this member's tokens, once the rest has been let go; one a tensor.
    """

    def __init__(self, wholes: Sequence[Tensor], team: Team) -> None:
        self._wholes, self._team = list(wholes), team
        self._memories = {memory_of(whole) for whole in wholes}
        self._types = {type(whole) for whole in wholes}
        self._before = [whole._version for whole in wholes]
        self._holders: list[weakref.ref[Holder]] = []
        self._away: list[list[Holder]] = []  # what was let go of each tensor
        self.own: list[Tensor] = []

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context of the piece."""
        try:
            with saved_tensors_hooks(self._pack, unpack):
                yield
        except RuntimeError as error:
            error.add_note("parallel.gather_again = true sets torch's hooks for saved tensors here")
            raise

    def _pack(self, tensor: Tensor) -> Holder:
        like = type(tensor) in self._types and may_be_exchanged(tensor)
        holder = Holder(tensor, like and memory_of(tensor) in self._memories)
        self._holders.append(weakref.ref(holder))
        return holder

    @property
    def _alive(self) -> list[Holder]:
        return [holder for ref in self._holders if (holder := ref()) is not None]

    def keep(self) -> None:
        """Leave to autograd what it has saved."""
        self._wholes = []

    def let_go(self) -> None:
        """Let go what autograd has saved, once the piece has run."""
        wholes, self._wholes = self._wholes, []
        self.own = [slice_of(whole.detach(), *self._team).clone() for whole in wholes]
        gone = [one for one in self._alive if one.may_leave and one.away is None]
        for whole, before in zip(wholes, self._before, strict=True):
            mine = [one for one in gone if memory_of(one.tensor) == memory_of(whole)]
            is_as_it_came = whole._version == before
            if not is_as_it_came or any(one.tensor.dtype != whole.dtype for one in mine):
                mine = []
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
        return [*self.own, *(one.tensor for one in self._alive if one.away is None)]
