"""Weights that are whole for residencies alone: they come for a residency, and their memory is let
go after it (ZeRO 3, and parameters in scratch)."""

#   begin    whole weights have memory, with those of the own shard in it
#   end      what layers have done to them is looked at, and they are let go
#   let go   parameters are hollow: whoever reads one sees nan

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from axrt.device.device import CPU
from axrt.device.queues import moment_of, wait_for
from axrt.errors import ModelError

from .flat import FlatBuffer, fingerprint, is_other
from .master_group import MasterGroup, shards_of

Check = Callable[[], None]  # raises what was found

WRITTEN_TO = (
    "a weight was written to beside the optimizer, by a layer or by the user, while it was on the "
    "device for a time, and its copies elsewhere were not; expected memory.zero = 2 instead of 3, "
    "and no memory.offload_parameters"
)

_FIXED = (
    "the memory of a weight was handed out of torch while it was on the device for a time, as "
    "weight.numpy() in a hook does, and cannot be let go; expected a copy, such as "
    "weight.detach().clone().numpy(), or memory.zero = 2 instead of 3 and no "
    "memory.offload_parameters"
)


class WholeWeights:
    """The memory of a bucket's whole weights, from one residency to the next.

    Args:
        groups: the bucket's parameters, by type.
        shards: the shards of the weights of each group, in its memory; they follow it.
        in_scratch: the own shard's weights are in scratch between residencies.
        are_all: weights are whole for residencies alone; False: they always are.
    """

    def __init__(
        self,
        groups: Sequence[MasterGroup],
        shards: list[list[Tensor]],
        device: torch.device,
        in_scratch: bool,
        are_all: bool,
    ) -> None:
        self._groups, self._shards = groups, shards
        self._device = device
        cut = groups[0].cut if groups else None
        self._mine = cut.mine if cut else 0
        self._in_scratch, self.are_all = in_scratch, are_all

    def _own(self) -> tuple[Tensor, ...]:
        """The weights of the own shard as layers have them, one stretch for each type."""
        return tuple([shards[self._mine] for shards in self._shards])

    def begin(self) -> tuple[Tensor, ...]:
        """Have memory for whole weights, with those of the own shard in place.

        Returns:
            The memory of the own shard, one stretch for each type of parameters, which whoever has
            weights in scratch fills.
        """
        for group, shards in zip(self._groups, self._shards, strict=True):
            group.narrow.take_memory()
            if group.mine is not None:
                shards[self._mine].copy_(group.mine)
            for parameter, view in zip(group.parameters, group.narrow.views, strict=True):
                parameter.data = view
        return self._own()

    def note_brought(self) -> None:
        """Note which weights have come from scratch, so that a change of them is seen."""
        for group, own in zip(self._groups, self._own(), strict=True):
            group.brought = fingerprint(own)

    def end(self) -> Check:
        """Let whole weights go, after a residency.

        Returns:
            A function that waits until the device has come so far, and raises `ModelError` if a
            layer has written to a weight.
        Raises:
            ModelError: a layer has put another tensor there.
        """
        changed = []
        for group, own in zip(self._groups, self._own(), strict=True):
            if not all(share_memory(one, group.narrow.flat) for one in group.parameters):
                raise ModelError(WRITTEN_TO)
            changed.append(self._has_changed(group, own))
        self.let_go()
        found = [one.to("cpu", non_blocking=True) for one in changed]
        there = moment_of(changed)

        def check() -> None:
            wait_for(there)
            if any(found):
                raise ModelError(WRITTEN_TO)

        return check

    def _has_changed(self, group: MasterGroup, own: Tensor) -> Tensor:
        """Whether the own shard's weights are others than at the beginning of the residency."""
        if self._in_scratch:
            assert group.brought is not None
            return fingerprint(own).ne(group.brought).any()
        assert group.mine is not None
        return is_other(own, group.mine)

    def let_go(self) -> None:
        """Let whole weights go, where they are whole for residencies alone. Parameters are hollow
        then: whoever looks at one sees nan, and torch refuses to write to it. Memory that is let go
        cannot be read without a crash."""
        for group in self._groups if self.are_all else ():
            try:
                group.narrow.let_go()
            except RuntimeError as error:
                if self._device != CPU:  # numpy has nothing of a device's memory
                    raise
                raise ModelError(_FIXED) from error
            for parameter, away in zip(group.parameters, group.away, strict=True):
                parameter.data = away

    def leave_memory(self) -> None:
        """Go on in other memory, where weights are whole for residencies alone and no graph is
        left: the network may still read or write this one."""
        for number, group in enumerate(self._groups if self.are_all else ()):
            group.narrow = FlatBuffer.unfilled(group.narrow.layout, self._device)
            self._shards[number] = shards_of(group.narrow, group.cut)
            if group.wide is not None and group.mine is group.wide.flat:
                group.wide = FlatBuffer.unfilled(group.layout, self._device)
                group.wide.adopt(group.masters)
                group.mine = group.wide.flat
            elif group.mine is not None:
                group.mine = group.mine.clone()
        self.let_go()


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Two tensors are views of one memory."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
