"""The gradient of a bucket of which this rank steps one shard (ZeRO)."""

# Microbatches add up as without shards, and parts leave for the copies that own them. This rank
# adds up its own shard alone: in the memory that microbatches add up in where that has the type
# which is stepped, else in memory for the shard.

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .flat import FlatBuffer, Layout
from .gradient import Gradient, Group, Shards
from .masters import Masters
from .shards import Cut


class GradientShard(Gradient):
    """The memory of such a gradient.

    Args:
        in_float32: True if backwards add to whole gradients in the type that is stepped; False: in
            that of `parameters`.
        alone: True if nobody else steps this shard. Other copies that do, of tied weights, read
            what microbatches have added up in it, so the total has memory of its own then.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        in_float32: bool,
        masters: Masters,
        device: torch.device,
        narrowest: torch.dtype | None,
        cut: Cut,
        alone: bool,
    ) -> None:
        super().__init__(
            masters.whole if in_float32 else parameters,
            masters.whole,
            device,
            narrowest,
            masters.groups,
            parameters,
        )
        self._cut, self._narrowest, self._alone = cut, narrowest, alone
        self._bounds = [cut.of_type(group.places).bounds(group.sums) for group in self._groups]
        self._pieces = list(zip(masters.pieces, masters.on_device, strict=True))
        self.layouts_of_totals = list(map(self._layout_of_shard, self._groups))

    def drop(self) -> None:
        for _, stepped in self._pieces:
            stepped.grad = None
        super().drop()

    def part(self, copy: int, copies: int) -> Shards:
        """The part of one shard, of the sums over microbatches."""
        return tuple(
            [
                sums.flat[slice(*bounds[copy : copy + 2])]
                for bounds, sums in zip(self._bounds, self._sums, strict=True)
            ]
        )

    def shards(self, copy: int, copies: int) -> Shards:
        """This rank's shard of the total; there is no other here."""
        return tuple(self.totals)

    @property
    def own_totals(self) -> list[Tensor]:
        whole = {sums.flat.untyped_storage()._cdata for sums in self._sums}
        return [
            total.flat for total in self._totals if total.flat.untyped_storage()._cdata not in whole
        ]

    def move_total(self) -> None:
        before = self._total_memory()
        self._totals = [FlatBuffer.unfilled(of, self._device) for of in self.layouts_of_totals]
        for total, of_before in zip(self._totals, before, strict=True):
            total.flat.copy_(of_before.flat)
        # Not even the next step writes there: a group may be a step behind.
        self._sums, self._views = [], []
        self.show_total()

    def show_total(self) -> None:
        for parameter in (*self._parameters, *self._stepped):
            parameter.grad = None  # those of this copy alone are nobody's to step
        self.show_on([stepped for _, stepped in self._pieces], self._total_memory())
        self.late.remember()

    def show_on(self, parameters: Sequence[nn.Parameter], buffers: Sequence[FlatBuffer]) -> None:
        views = iter([view for buffer in buffers for view in buffer.views])
        by_group = [
            (piece, parameter)
            for group in self._groups
            for (piece, _), parameter in zip(self._pieces, parameters, strict=True)
            if piece.place in group.places
        ]
        for piece, parameter in by_group:
            view = next(views)
            parameter.grad = view if self._used[piece.place] else None

    def _total_memory(self) -> list[FlatBuffer]:
        if self._sums and not self._totals:
            self._totals = list(
                map(self._total_of, self._bounds, self._sums, self.layouts_of_totals)
            )
        return self._totals

    def _layout_of_shard(self, group: Group) -> Layout:
        whole = group.sums
        memory = torch.empty(whole.elements, dtype=whole.dtype, device="meta")
        views = dict(zip(group.places, whole.views_of(memory), strict=True))
        mine: list[Tensor] = [
            piece.of(views[piece.place]) for piece, _ in self._pieces if piece.place in views
        ]
        return Layout(mine, group.total.dtype, self._narrowest)

    def _total_of(self, bounds: Sequence[int], sums: FlatBuffer, layout: Layout) -> FlatBuffer:
        if sums.dtype == layout.dtype and self._alone:
            first, end = bounds[self._cut.mine : self._cut.mine + 2]
            return FlatBuffer.within(layout, sums.flat[first:end].view(torch.uint8))
        return FlatBuffer.unfilled(layout, self._device)
