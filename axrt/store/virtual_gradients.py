"""The gradients of virtual members, which come together in that of their rank's bucket."""

# Each virtual member adds up its microbatches in memory of its own, as it would on a rank of its
# own. When the gradient of a bucket is complete, what is cut is put together, and what each has
# whole is added up: a branch of the tree in which all virtual members are.

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from axrt.errors import ConfigError
from axrt.model.accumulator import accumulating
from axrt.model.tensor_cuts import Part
from axrt.model.virtual_layers import VirtualLayers
from axrt.runtime.balanced import balanced_sum

from .flat import FlatBuffer, by_key, hollow


class _Row(NamedTuple):
    """One parameter of the bucket."""

    total: nn.Parameter  # has the gradient of the bucket
    mine: list[nn.Parameter | None]  # have those of the virtual members; the first may be `total`
    part: Part | None  # what each of them has; None: all of it


class VirtualGradients:
    """The gradients of the virtual members of a rank, of one bucket.

    Args:
        named: parameters of the bucket, each with its name.
        totals: for each the parameter whose `.grad` is the bucket's, in which backwards add up.
        layers: layers of the virtual members.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        totals: Sequence[nn.Parameter],
        layers: VirtualLayers,
    ) -> None:
        self._layers = layers
        self._handles: list[RemovableHandle] = []
        self._apart: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._rows = [
            self._row(name, own, total) for (name, own), total in zip(named, totals, strict=True)
        ]
        self._buffers: list[FlatBuffer] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        for places in by_key(has.dtype for has, _ in self._apart):
            of_type = [self._apart[place] for place in places]
            has, like = of_type[0][0], [parameter for _, parameter in of_type]
            self._buffers.append(FlatBuffer(like, like[0].device, has.dtype))
            views = self._buffers[-1].views
            self._views |= {one: view for (one, _), view in zip(of_type, views, strict=True)}
        self._untouched: dict[nn.Parameter, int] = {}

    def _row(self, name: str, own: nn.Parameter, total: nn.Parameter) -> _Row:
        if torch.promote_types(total.dtype, torch.float32) != total.dtype:
            raise ConfigError(
                f"{name} is {total.dtype}, and a rank has several virtual members "
                "(parallel.tensor_shards), whose gradients are added up in float32; expected "
                "float32 weights, which precision.weights narrows, or parallel.tensor_shards = 0"
            )
        mine = [
            None if one is None else total if one is own else self._with_memory(one, total.dtype)
            for one in self._layers.parameters(name)
        ]
        return _Row(total, mine, self._layers.part_of(name))

    def _with_memory(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        """What has the gradient of a parameter in a type, in memory beside the bucket's."""
        has = parameter
        if parameter.dtype != dtype:
            has = nn.Parameter(hollow(parameter.detach(), dtype))
            self._handles += accumulating([parameter], [has])
        self._apart.append((has, parameter))
        return has

    @property
    def num_bytes(self) -> int:
        """Size of the memory beside the bucket's."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def open(self) -> None:
        """Begin the gradients of a run."""
        self._untouched.clear()
        for has, view in self._views.items():
            self._begin(has, view)

    def keep_open(self) -> None:
        """Give memory again to gradients that a hook of the user's has dropped since `open`; see
        `Gradient.keep_open`."""
        for has, view in self._views.items():
            if has.grad is None:
                self._begin(has, view)

    def _begin(self, has: nn.Parameter, view: Tensor) -> None:
        has.grad = view.fill_(-0.0)  # which changes nothing that it is added to
        self._untouched[has] = view._version

    @torch.no_grad()
    def add_up(self) -> None:
        """Put all into the bucket's gradient, which is complete; weights may step then."""
        self._layers.let_change()
        self.keep_open()
        for total, mine, part in self._rows:
            if total.grad is None or not any(map(self._is_used, mine)):
                continue
            every = [None if one is None else one.grad for one in mine]
            if part is None:
                found = balanced_sum(every)
            else:
                found = part.whole([one for one in every if one is not None])
            if found is not total.grad:
                total.grad.copy_(found)

    def _is_used(self, has: nn.Parameter | None) -> bool:
        """A gradient was added to what is not the bucket's own."""
        if has is None or has not in self._views:
            return False
        view = self._views[has]
        return has.grad is not view or view._version != self._untouched[has]

    def release(self) -> None:
        """Take hooks off the layers."""
        for handle in self._handles:
            handle.remove()
