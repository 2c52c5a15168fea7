"""The gradient of a bucket: flat memory in which microbatches add up, and then copies."""

# Backwards add to the `.grad` of the parameters that layers compute with (gradient accumulation).
# The optimizer reads the `.grad` of the parameters that it steps. Mostly these are the same
# parameters, and the sum over microbatches is the *total* as it stands. Where layers compute with
# narrower copies and gradients accumulate in their type, the total is memory of its own in the type
# of the masters.
#
# What happens to it in a step:
#
# - backwards: It begins at -0.0, so the first sum has the bits of a copy. Autograd adds in place.
# - bucket complete: A view with an unchanged version counter was not used: it keeps no gradient.
# - parts: Shards leave from where they are, without a copy.
# - reduce: The own shard is added up in place, and its sum leaves from there.
# - sums: They land where the gradient is, and the optimizer steps on it.
#
# Nothing is overwritten while the network reads it:
#
# - Another copy's shard leaves as a part for that copy. It is written to when that copy's sum has
#   come, which needed the part.
# - The own shard leaves as a sum for the other copies. Clipping and the step write to it and do not
#   wait for them.
# - A stage's own weights, which the next stage may read as an activation, are sent as a copy.
#
# So before a whole gradient is written to, `Transport.still_reads` is asked, and waits for as long
# as a copy would take on a CPU. If the memory is still read then, or its reduce has not ended on
# the device, the bucket goes on in other memory. No optimizer is trusted to leave gradients alone.
# A dropped step gives its memory up as well.

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from axrt.runtime.balanced import balanced_sum

from .flat import FlatBuffer, Layout, by_key
from .gradient_tree import GradientTree, Kept, Node
from .late_gradients import LateGradients

Shards = tuple[Tensor, ...]  # of a copy, one a type of parameters; each shape (elements,)
Used = list[bool] | None  # which parameters of a bucket have a gradient; None: all


class Group(NamedTuple):
    """Parameters of a bucket that share flat memory."""

    places: list[int]  # their indices in the bucket
    sums: Layout  # of the memory that microbatches add up in
    total: Layout  # of the memory that is stepped

    @property
    def has_own_total(self) -> bool:
        """The total has a type of its own, and so memory of its own."""
        return self.total.dtype != self.sums.dtype


class Gradient:
    """The memory of a bucket's gradient, and the `.grad` of its parameters, which are views of it.

    Args:
        stepped: parameters whose `.grad` the optimizer reads, one for each; the same ones, or
            masters of a wider type.
        narrowest: narrowest type in which some copy adds up, so that all cut alike; None: that of
            `parameters`.
        groups: indices of the parameters that share flat memory, each of one type of each; (): as
            types ask for.
        like: tensors that have the strides of the memory; (): `parameters`.
    Attributes:
        added_to: `parameters`, to whose gradients backwards add.
        has_own_total: some of the total is not where microbatches add up.
        layouts_of_totals: the layout of each stretch of the total.
        layouts_of_own_totals: the same of those that are not where microbatches add up.
        late: what was added after the gradient was complete.
        branches: indices of copies that are added up in a tree before others are; (): none are.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        stepped: Sequence[nn.Parameter],
        device: torch.device,
        narrowest: torch.dtype | None = None,
        groups: Sequence[list[int]] = (),
        like: Sequence[Tensor] = (),
    ) -> None:
        self.added_to = self._parameters = list(parameters)
        self._stepped = list(stepped)
        self._device = device
        types = [(one.dtype, other.dtype) for one, other in zip(parameters, stepped, strict=True)]
        # Now, while parameters have their strides: masters that are elsewhere have none.
        strided = like or parameters
        self._groups = []
        for places in groups or by_key(types):
            of_group = [strided[place] for place in places]
            sums, total = (Layout(of_group, dtype, narrowest) for dtype in types[places[0]])
            self._groups.append(Group(places, sums, total))
        self.has_own_total = any(one != other for one, other in types)
        self.layouts_of_totals = [group.total for group in self._groups]
        self.layouts_of_own_totals = [of.total for of in self._groups if of.has_own_total]
        self._sums: list[FlatBuffer] = []  # over microbatches
        self._totals: list[FlatBuffer] = []  # over copies, too; the same memory where types are
        self._views: list[Tensor] = []
        self._untouched: list[int] = []
        self.late = LateGradients(self._parameters)
        self.branches: Sequence[Sequence[int]] = ()
        self._used = [True] * len(self._parameters)
        self._tree: GradientTree | None = None  # of microbatches that are kept apart
        self._used_so_far = [False] * len(self._parameters)

    # Over microbatches.

    def open(self) -> None:
        """Begin a step's gradient: the `.grad` of each parameter is a view of flat memory, and
        backwards add to it there."""
        if not self._sums:
            self._sums = [FlatBuffer.unfilled(of.sums, self._device) for of in self._groups]
            self._views = self._in_place(self._sums)
        self._tree, self._used_so_far = None, [False] * len(self._parameters)
        self._begin()

    # A gradient's memory is there before its backward, so autograd takes over no view of an
    # activation's gradient, which the network may be reading.
    def _begin(self) -> None:
        for sums in self._sums:
            sums.flat.fill_(_nothing_of(sums.dtype))
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        self._untouched = [view._version for view in self._views]

    def put_aside(self, number: int) -> None:
        """Keep what a microbatch has added apart from what others add, see `GradientTree`.

        Args:
            number: leaf of the microbatch, see `Bucket.first_leaf`.
        """
        used = self._in_views()
        self._used_so_far = [any(both) for both in zip(self._used_so_far, used, strict=True)]
        if self._tree is None:
            self._tree = GradientTree()
        self._tree.add(Node(0, number), [sums.flat.clone() for sums in self._sums])
        self._begin()

    def kept(self, copy: int, copies: int) -> Kept:
        """The shards that one of the copies owns, of all that was put aside."""
        cut = copy, copies
        return [
            (node, [of.shard_of(flat, cut) for of, flat in zip(self._sums, flats, strict=True)])
            for node, flats in (self._tree.kept() if self._tree else ())
        ]

    def keep_open(self) -> None:
        """Give memory again to gradients that a hook of the user's has dropped since `open`.

        Autograd would take over the next one as it is, and that may be a view of an activation's
        gradient, which the network reads.
        """
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                view = self._views[place]
                parameter.grad = view.fill_(_nothing_of(view.dtype))
                self._untouched[place] = view._version

    def close(self) -> None:
        """Note that the gradient is complete on this copy; a parameter that no microbatch has used
        keeps none.

        An addition in place counts up the version of a view: so autograd is heard without a call
        for each microbatch.
        """
        self._used = self._in_views() if self._tree is None else self._used_so_far
        for parameter, view, used in zip(self._parameters, self._views, self._used, strict=True):
            parameter.grad = view if used else None
        self.late.remember()

    # Version counters tell that a gradient is used. A hook costs a call each time.
    def _in_views(self) -> list[bool]:
        """See to it that all that was added is in the flat memory. Returns which parameters have a
        gradient."""
        used = []
        for place, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            gradient = parameter.grad
            if gradient is None:  # a hook of the user's may have dropped what was added up here
                view.fill_(_nothing_of(view.dtype))
            elif gradient is not view:  # a hook of the user's has put another there
                view.copy_(gradient)
            used.append(
                gradient is not None
                and (gradient is not view or view._version != self._untouched[place])
            )
        return used

    def drop(self) -> None:
        """Take the gradient away from every parameter; memory that microbatches add up in stays."""
        for parameter in (*self._parameters, *self._stepped):
            parameter.grad = None
        self._totals = []
        self.late.remember()

    def forget(self) -> None:
        """Drop the gradient and let go of all its memory, which others may still write to."""
        self.drop()
        self._sums, self._views = [], []

    # Over copies.

    @property
    def used(self) -> Used:
        """The parameters that have a gradient, on this copy or on any that was added up."""
        return None if all(self._used) else list(self._used)

    def set_used(self, used: Used) -> None:
        """Note which parameters have a gradient on some copy."""
        self._used = [True] * len(self._parameters) if used is None else used

    def part(self, copy: int, copies: int) -> Shards:
        """The shards that one of the copies owns, of the sums over microbatches."""
        return tuple([sums.shard((copy, copies)) for sums in self._sums])

    def shards(self, copy: int, copies: int) -> Shards:
        """The shards that one of the copies owns, of the total."""
        return self.cut((copy, copies))

    def cut(self, *cuts: tuple[int, int]) -> Shards:
        """A part of the total, see `FlatBuffer.shard`."""
        return tuple([total.shard(*cuts) for total in self._total_memory()])

    @property
    def totals(self) -> list[Tensor]:
        """The memory of the total, one stretch for each type of parameters."""
        return [total.flat for total in self._total_memory()]

    def show_on(self, parameters: Sequence[nn.Parameter], buffers: Sequence[FlatBuffer]) -> None:
        """Let other parameters have what is in memory of `layouts_of_totals` for their gradient."""
        views = self._in_place(buffers)
        for parameter, view, used in zip(parameters, views, self._used, strict=True):
            parameter.grad = view if used else None

    def total_within(self, buffers: Sequence[FlatBuffer]) -> None:
        """Let the total be in this memory, of `layouts_of_own_totals`, where it has not its
        own."""
        given = iter(buffers)
        self._totals = [
            next(given) if group.has_own_total else sums
            for sums, group in zip(self._sums, self._groups, strict=True)
        ]

    def copy_to(self, buffers: Sequence[FlatBuffer]) -> None:
        """Copy what has been added up so far to memory that `show_on` or `total_within` take
        later. On an accelerator the copies are only launched."""
        found = self._totals or self._sums
        if len(buffers) < len(found):
            both = zip(found, self._groups, strict=True)
            found = [of for of, group in both if of.dtype != group.total.dtype]
        for to, of in zip(buffers, found, strict=True):
            to.flat.copy_(of.flat, non_blocking=True)

    def as_stepped(self, place: int) -> Tensor | None:
        """The sum over microbatches of a parameter in the type that is stepped, in memory of its
        own; None where no copy has used it."""
        if not self._used[place]:
            return None
        return self._views[place].to(self._stepped[place].dtype, copy=True)

    @property
    def sums(self) -> list[Tensor]:
        """The memory that microbatches add up in, as far as it is allocated now."""
        return [sums.flat for sums in self._sums]

    @property
    def own_totals(self) -> list[Tensor]:
        """The memory of the total that is not also where microbatches add up, as far as it is
        allocated now."""
        return [total.flat for total in self._totals if total not in self._sums]

    def take_late(self) -> None:
        """Count what came after the gradient was complete, on the only copy."""
        for place in list(self.late):
            gradient, view = self._parameters[place].grad, self._views[place]
            if gradient is not None and gradient is not view:  # the first one of a parameter
                view.copy_(gradient)
            self._used[place] = gradient is not None

    def widen(self) -> list[Tensor]:
        """The sums over microbatches in the type in which copies are added up, float32 or wider;
        in the memory of the total where that has the type."""
        wide = []
        for sums, total in zip(self._sums, self._total_memory(), strict=True):
            if total is not sums:
                total.flat.copy_(sums.flat)
            wide.append(wide_enough(total.flat))
        return wide

    def take_widened(self, wide: Sequence[Tensor]) -> None:
        """Put what was added up in the memory that `widen` gave into the total."""
        for total, found in zip(self.totals, wide, strict=True):
            if found is not total:
                total.copy_(found)

    def add_up(self, parts: Sequence[Shards], me: int, further: bool = False) -> Shards:
        """Sum the parts of the shards that this copy owns, in the order of copies, those of a
        branch first.

        Args:
            parts: shards of each copy, in the order of copies.
            me: index of this copy.
            further: True to add them to the total that is there already.
        Returns:
            The sums, which are views of the total.
        """
        own = self.shards(me, len(parts))
        if self.branches:
            parts = [_branch([parts[copy] for copy in of]) for of in self.branches]
        sum_into(own, [own, *parts] if further else parts)
        return own

    def show_total(self) -> None:
        """Make the total the gradient that the optimizer reads; a parameter that no copy has used
        keeps none."""
        self.show_on(self._stepped, self._total_memory())
        self.late.remember()

    def move_total(self) -> None:
        """Go on in other memory, with the same total, since its memory is still read."""
        before = self._total_memory()
        self._totals = [FlatBuffer.unfilled(of.total, self._device) for of in self._groups]
        for total, of_before in zip(self._totals, before, strict=True):
            total.flat.copy_(of_before.flat)
        self._sums = [
            total if sums is of_before else sums
            for sums, of_before, total in zip(self._sums, before, self._totals, strict=True)
        ]
        self._views = self._in_place(self._sums)
        self.show_total()

    # Memory.

    # Sums had memory of their own, and were copied into the gradient: 5 of 34 ms at 64 MiB.
    def _total_memory(self) -> list[FlatBuffer]:
        if self._sums and not self._totals:
            self._totals = [
                FlatBuffer.unfilled(group.total, self._device) if group.has_own_total else sums
                for sums, group in zip(self._sums, self._groups, strict=True)
            ]
        return self._totals

    def _in_place(self, buffers: Sequence[FlatBuffer]) -> list[Tensor]:
        """The view of each parameter, in their order."""
        views = {
            place: view
            for group, buffer in zip(self._groups, buffers, strict=True)
            for place, view in zip(group.places, buffer.views, strict=True)
        }
        return [views[place] for place in range(len(self._parameters))]


def used_by_any(masks: Sequence[Used]) -> Used:
    """The parameters that have a gradient on some copy."""
    found = [mask for mask in masks if mask is not None]
    return [any(used) for used in zip(*found, strict=True)] if len(found) == len(masks) else None


def _nothing_of(dtype: torch.dtype) -> float | complex:
    """The number that changes none when it is added to it, not even the sign of a zero: so the
    first sum has the bits of a copy."""
    return complex(-0.0, -0.0) if dtype.is_complex else -0.0


def sum_into(own: Shards, parts: Sequence[Shards]) -> None:
    """Sum parts of the total in their order, and put that into one of them."""
    for total, *of_copies in zip(own, *parts, strict=True):
        _add_up(of_copies, total)


def _branch(parts: Sequence[Shards]) -> Shards:
    """The sum of parts of the total, in a balanced tree."""
    if len(parts) == 1:
        return parts[0]
    return tuple(
        balanced_sum(list(map(wide_enough, of_one))) for of_one in zip(*parts, strict=True)
    )


def wide_enough(part: Tensor) -> Tensor:
    """A part in the type in which gradients are added up; the same tensor where it has that."""
    return part.to(_wide(part.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients are added up."""
    return torch.promote_types(dtype, torch.float32)


def _add_up(parts: Sequence[Tensor], total: Tensor) -> None:
    """The sum of the parts in their order, put into `total`, which may be one of them."""
    if len(parts) == 1:
        total.copy_(parts[0])
        return
    first, second, *others = parts
    wide = _wide(total.dtype)
    if not others and wide == first.dtype == total.dtype:
        torch.add(first, second, out=total)
        return
    found = first.to(wide, copy=True).add_(second)  # the total may be a later part
    for part in others:
        found += part
    total.copy_(found)
