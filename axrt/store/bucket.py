"""A bucket: parameters of one stage that are reduced, stepped, saved and loaded as one.

Its weights, its gradient and its optimizer's state are flat buffers; parameters and moments are
views of them. Gradients add up in place over the microbatches of a step (gradient accumulation).

Several ranks, or several layers with tied weights, may hold a bucket. Then each copy cuts its
gradient into one *shard* a copy and sends every other copy its *part* of it (reduce-scatter). The
owner of a shard adds the parts up in the order of copies, in float32 or better, and sends the *sum*
back (all-gather), which arrives where the gradient is. Together that is an all-reduce with the
volume of a ring. It needs no operator of MPI, and has one order of summation whatever the timing,
the sizes of buckets and the library.

No memory is written to while the network may still read it. A shard of another copy's is written to
when that copy's sum has come, which needed this copy's part. The own shard is added up in place and
sent from there. Who clips or steps may write to it before every other copy has the sum: then the
bucket has moved to other memory (`move_gradient`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from axrt.errors import AxrtError, ModelError
from axrt.model.accumulator import Accumulator
from axrt.offload.tier import HostTier
from axrt.queues import Moment, go_after, moment_of, wait_for
from axrt.scheduler.bucket import BucketCopy, across, alike, of_group

from .assign import BucketSpec
from .bucket_shard import BucketShard, Part
from .flat import adopt, can_be_flat, flat_like
from .gradient import Gradient, Shards, Used, used_by_any
from .gradient_of_runs import GradientOfRuns
from .gradient_shard import GradientShard
from .gradient_tree import Kept
from .masters import Check, Masters
from .norms import Norms, norms_of
from .offloaded import OffloadedState
from .on_host import GradientOnHost
from .probe import check_goes_on, made_by, probed
from .saved_piece import SavedPiece, copied_now, cut_state
from .sharded_optimizer import give_pieces
from .shards import Cut
from .slots import Slots
from .state import ParameterState, restore_state, saved_state
from .sum_across import SumAcross, put_in_place

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
LrSchedule = Callable[[int], float]


def constant(step: int) -> float:
    """The schedule that leaves the learning rate as it is."""
    return 1.0


class Bucket:
    """Parameters with their copies, and the optimizer that the user's factory made for them.

    The bucket owns their memory: weights, gradients and moments become views of its flat buffers.

    Args:
        places: sort keys that order the parameters as the whole model does, one each, rising.
        me: the copy that this rank holds, one of `spec.copies`.
        factory: function that makes the optimizer; parameter groups may carry learning rates of
            their own.
        schedule: function whose `schedule(step)` is the factor on every group's learning rate.
        narrow: type that layers are to have each parameter in, beside a float32 master; None: the
            parameter stays as it is. () stands for None everywhere.
        in_float32: True if gradients of narrow parameters add up in float32 over microbatches;
            False: in their own type.
        narrowest: narrowest type of any copy's parameters; None: that of these.
        slots: slots into which masters and moments come from scratch for a step (offload); None:
            they stay on the device.
        cut: shards of the bucket, of which this rank steps one (ZeRO); None: it steps all of it.
        pipes_a_group: number of pipes whose copies add up among themselves before groups do; 0:
            all.
        rooms: memory on the host for gradients, where masters and moments live in the host's memory
            and step there; None: they step on the device.
        in_scratch: True if weights live in scratch as well, and come to the device for stays.
    Attributes:
        copies: all copies.
        near: copies of the same group, which add up with this one and share out with it.
        across: second level of the sum, over groups; None where there is one group.
        trained: parameters that the optimizer steps, by the names of the module's: masters where
            there are any; the module's own where this rank steps a shard alone.
        shard: the shard that this rank steps; None: it steps all.
        keeps_apart: True if what microbatches add is put aside, and summed in a tree.
    """

    def __init__(
        self,
        spec: BucketSpec,
        places: Sequence[int],
        me: BucketCopy,
        factory: OptimizerFactory,
        schedule: LrSchedule,
        device: torch.device,
        narrow: Sequence[torch.dtype | None] = (),
        in_float32: bool = True,
        narrowest: torch.dtype | None = None,
        slots: Slots | None = None,
        cut: Cut | None = None,
        pipes_a_group: int = 0,
        rooms: Slots | None = None,
        in_scratch: bool = False,
    ) -> None:
        self.named, self.called = spec.named, spec.called
        self.copies, self.me = spec.copies, me
        self.near = of_group(spec.copies, me, pipes_a_group) if pipes_a_group else spec.copies
        self._counts, self.keeps_apart = spec.counts, False
        if cut and not cut.whole:
            cut = cut._replace(whole=not probed(factory, _called(spec)).elementwise)
        self._schedule, self._device = schedule, device
        names, parameters = [name for name, _ in spec.named], [one for _, one in spec.named]
        apart = rooms is not None and device.type != "cpu"
        types = narrow or [None] * len(parameters)
        masters = Masters(parameters, types, device, cut, narrowest, apart, in_scratch)
        self._masters, self._parameters = masters, masters.parameters
        of_stepped = [piece.place for piece in masters.pieces]
        self._places = torch.tensor([places[place] for place in of_stepped], dtype=torch.int64)
        name_of_stepped = [names[place] for place in of_stepped]
        self._name_of = dict(zip(self._parameters, name_of_stepped, strict=True))
        self.trained = list(zip(names, parameters if cut else self._parameters, strict=True))
        self._handles = _accumulating(parameters, masters.whole) if in_float32 else []
        self._gradient = gradient_of(spec, masters, in_float32, device, narrowest, cut)
        self.shard = (
            BucketShard(self.near, me, masters, self._gradient, cut)
            if cut and isinstance(self._gradient, GradientShard)
            else None
        )
        self.across: SumAcross | None = None
        if len(self.near) < len(self.copies):
            owners = across(self.copies, me, pipes_a_group)
            mine = () if cut else ((self.near.index(me), len(self.near)),)
            self.across = SumAcross(owners, me, self._gradient, *mine)
        shown = list(zip(spec.called, masters.shown, strict=True))
        self.optimizer = made_by(factory, shown)
        check_goes_on(factory, shown, self.optimizer)
        if cut and self.optimizer:
            give_pieces(self.optimizer, masters)
        self.initial_groups = [dict(group, params=None) for group in self.groups]
        self._with_moments = 0
        self._factors: list[float | Tensor] = []  # on a total that is made for the step alone
        self._offloaded: OffloadedState | None = None
        self._attached = False
        self._on_host: GradientOnHost | None = None
        self._given_back: dict[str, Tensor] = {}
        self._loans: dict[object, tuple[Moment, Callable[[], None]]] = {}
        if slots and self.optimizer:
            if rooms:
                stepped = self._parameters if apart else None
                self._on_host = GradientOnHost(rooms, self._gradient, stepped, self.shared)
            self._offload(slots, factory)
        masters.let_go()  # not before: the factory has seen the weights

    def _offload(self, slots: Slots, factory: OptimizerFactory) -> None:
        """Put the state into scratch, where it lives from now on."""
        known = probed(factory, list(zip(self.called, self._masters.shown, strict=True)))
        self._offloaded = OffloadedState(
            slots,
            self._parameters,
            self._masters,
            known.moments and [known.moments[piece.place] for piece in self._masters.pieces],
            () if self.shared else self._gradient.layouts_of_own_totals,
            slots.tier if self._on_host and isinstance(slots.tier, HostTier) else None,
            [self._name_of[one] for one in self._parameters],
        )
        self._offloaded.begin()
        self._offloaded.attach({})
        self._offloaded.note_weights()
        self._detach()
        wait_for(moment_of(self._slot_memory()))
        self.store()
        self.leave_slot()

    @property
    def shared(self) -> bool:
        """Other copies exist, so that gradients are added up."""
        return len(self.copies) > 1

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups if self.optimizer else []

    @property
    def optimizer_told(self) -> str:
        """The optimizer and its plain settings, as they were made."""
        plain = [
            ", ".join(
                f"{key} = {value!r}"
                for key, value in group.items()
                if key != "param_names" and _is_plain(value)  # names are those of a shard
            )
            for group in self.initial_groups
        ]
        return f"{type(self.optimizer).__name__} with {'; '.join(plain) or 'nothing'}"

    @property
    def lr(self) -> float | None:
        """The learning rate of the first parameter group in the last step; None where there is no
        group."""
        return float(self.groups[0]["lr"]) if self.groups else None

    @property
    def first_layer(self) -> int:
        """The index in the model of the first layer with parameters in this bucket; 0 where it has
        none."""
        return min((int(name.partition(".")[0]) for name, _ in self.named), default=0)

    # The gradient of a step.

    # A stage's gradient is opened as one. Opening a bucket when the backward comes to it was tried
    # for runs of one microbatch. A later layer may use a weight that it does not list, and autograd
    # takes over what comes first as it is, which may be memory of the gradient that flows on.
    def open(self) -> None:
        """Begin a step's gradient, or that of a reduction: backwards add to the `.grad` of each
        parameter, which is a view of flat memory."""
        self._factors = []
        self._gradient.open()

    def keep_open(self) -> None:
        """Give memory again to gradients that a hook of the user's has dropped since `open`."""
        self._gradient.keep_open()

    def close(self) -> None:
        """Note that the gradient is complete on this copy; a parameter that no microbatch has used
        keeps none."""
        self._gradient.close()
        if self.shard:
            self.shard.close()

    def put_aside(self, number: int) -> None:
        """Keep what a microbatch has added apart; see `Gradient.put_aside`."""
        self._gradient.put_aside(number)

    def check_unchanged(self) -> None:
        """Check that nothing was added to the gradient after it was complete; for when the whole
        stage's is.

        Raises:
            ModelError: a weight is used by a layer that does not list it, and part of its gradient
                came too late to be added up.
        """
        for place in self._gradient.late() if self.shared else ():
            raise ModelError(
                f"{self.named[place][0]} got a gradient from an earlier layer than its own, which "
                "does not list it among its parameters; expected an "
                "axrt.TiedLayerSpec for each layer that shares it, or memory.bucket_mb so "
                "large that a stage has one bucket"
            )

    def forget(self) -> None:
        """Drop the gradient and let go of its memory, which others may still write to."""
        self._gradient.forget()
        if self.shard:
            self.shard.forget()

    def leave_memory(self) -> None:
        """Drop the gradient, and the whole weights of a stay; go on in other memory, as others may
        still read or write this."""
        self.end_loans()
        self.forget()
        self._masters.leave_memory()

    def forget_gradients(self) -> None:
        """Take the gradient away from every parameter; the bucket keeps its memory, but where
        weights are in scratch."""
        if self._masters.in_scratch:
            self._gradient.forget()
        else:
            self._gradient.drop()
        for parameter in self._parameters if self._masters.apart else ():
            parameter.grad = None

    # Adding up.

    def part_for(self, to: BucketCopy) -> Part:
        """This copy's gradient of the shards that another copy owns.

        Args:
            to: the other copy, one of `copies`.
        Returns:
            Views of the gradient, lent until the sums of copy `to` have come; and the parameters
            that have a gradient, None where all do.
        """
        if self.shard:
            return self.shard.part_for(to)
        where = self.near.index(to), len(self.near)
        return self._gradient.part(*where), self.used

    def kept_for(self, to: BucketCopy) -> tuple[Kept, Used]:
        """The same of what was put aside, whose memory the other copy may write to."""
        return self._gradient.kept(self.near.index(to), len(self.near)), self.used

    def add_up(self, parts: Sequence[Part]) -> Shards:
        """Sum the parts of the shards that this copy owns, in the order of copies.

        Args:
            parts: part of each copy of the group, in the order of copies.
        Returns:
            The sums, in the types that are stepped: views of the gradient, lent to the other
            copies.
        """
        own = self._gradient.add_up([part for part, _ in parts], self.near.index(self.me))
        self.set_used(used_by_any([used for _, used in parts]))
        return own

    def add_up_kept(self, parts: Sequence[tuple[Kept, Used]]) -> Shards:
        """The same of what copies have put aside: a tree for each layer that has copies, in the
        order of layers."""
        layers = sorted({(copy.stage, copy.bucket) for copy in self.near})
        trees: dict[tuple[int, int], list[Kept]] = {layer: [] for layer in layers}
        for copy, (kept, _) in zip(self.near, parts, strict=True):
            trees[copy.stage, copy.bucket].append(kept)
        me = self.near.index(self.me)
        own = self._gradient.add_up_kept(list(trees.values()), me, len(parts))
        self.set_used(used_by_any([used for _, used in parts]))
        return own

    @property
    def used(self) -> Used:
        """The parameters that have a gradient, on this copy or on any that was added up."""
        return self._gradient.used

    def set_used(self, used: Used) -> None:
        """Note which parameters have a gradient on some copy."""
        self._gradient.set_used(used)

    def rooms_for_sums(self) -> Iterator[tuple[int, Shards]]:
        """For every other copy of the group its index, and the memory of the gradient that its sums
        belong in."""
        mine = self.near.index(self.me)
        for copy in range(len(self.near)):
            if copy != mine:
                yield copy, self._gradient.shards(copy, len(self.near))

    def take_sums(self, sums: Sequence[Shards]) -> None:
        """Make the sums of all copies the gradient; a parameter that no copy has used keeps none.

        Args:
            sums: sums of each copy of the group, in the order of copies; those that are in the
                gradient's memory already are not copied.
        """
        for copy, of_copy in enumerate(sums):
            put_in_place(self._gradient.shards(copy, len(self.near)), of_copy)
        self.show_total()

    def take_own(self) -> None:
        """Make the gradient of this copy, the only one, that which is stepped."""
        if not (self._gradient.has_own_total or self.has_masters):
            return
        self._gradient.take_late()
        if not self._makes_total_late:
            self._gradient.widen()
            self.show_total()

    def widen(self) -> list[Tensor]:
        """The gradient in float32 or wider, for a library to add up in place: one stretch for each
        type of parameters. `take_widened` ends that."""
        return self._gradient.widen()

    def take_widened(self, totals: Sequence[Tensor]) -> None:
        """Take what a library has added up in the memory that `widen` gave."""
        self._gradient.take_widened(totals)

    def show_total(self) -> None:
        """Make what was added up the gradient; a parameter that no copy has used keeps none."""
        self._gradient.show_total()

    @property
    def gradients(self) -> list[Tensor]:
        """The memory of the gradient that is stepped, one stretch for each type of parameters."""
        return self._gradient.totals

    @property
    def gradient_memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """The memory that microbatches add up in, and that of the total where it is another; none
        of what is not allocated."""
        return self._gradient.sums, self._gradient.own_totals

    def move_gradient(self) -> None:
        """Go on in other memory, with the same gradient, since this memory is still read."""
        self._gradient.move_total()

    # Shards.

    @property
    def stepped(self) -> list[nn.Parameter]:
        """What the optimizer steps here: parameters, masters, or pieces of them."""
        return self._parameters

    @property
    def stepped_by_name(self) -> dict[str, nn.Parameter]:
        """The same by the name of the parameter; a shard has one piece of each at most."""
        return {name: one for one, name in self._name_of.items()}

    @property
    def whole(self) -> list[nn.Parameter]:
        """A parameter for each of `named`, of its shape and of the type that is stepped; it is
        hollow where this rank steps only a piece of it in other memory."""
        return self._parameters if self.has_masters and not self.shard else self._masters.whole

    def pieces_of(
        self,
        layer: nn.Module,
        with_state: bool = True,
        copied: Callable[[Tensor], Tensor] = copied_now,
    ) -> list[SavedPiece]:
        """What this rank keeps of a layer's parameters, on the CPU.

        Args:
            with_state: False to leave the optimizer's state out.
            copied: function that gives the copy of a tensor, whose values count while the bucket
                is present.
        Raises:
            DataError: some of the state is neither a tensor nor a plain value.
        """
        assert self.optimizer is not None
        wanted = set(layer.parameters())
        states = (
            dict(saved_state(self.optimizer, self.initial_groups, self._name_of))
            if with_state
            else {}
        )
        nothing = ParameterState(type(self.optimizer).__name__)
        return [
            SavedPiece.of(
                name, piece, one, self._masters.is_master(one), states.get(name, nothing), copied
            )
            for piece, (one, name) in zip(self._masters.pieces, self._name_of.items(), strict=True)
            if self.named[piece.place][1] in wanted
        ]

    def give_back_as(self, values: Mapping[str, Tensor | None]) -> None:
        """Note what parameters will be when the modules are given back, by name; None and other
        names are left out."""
        mine = {name for name, _ in self.named}
        self._given_back |= {
            name: value for name, value in values.items() if name in mine and value is not None
        }

    # Norms, factors and the step.

    def norms(self) -> Norms:
        """The norms of the gradients that exist, on their way to the CPU.

        Those of tied weights are included only with the layer that counts.
        """
        gradients = self._late_gradients() if self._makes_total_late else self._present_gradients()
        found = [(place, norm) for place, norm in gradients if self._counts]
        if not found:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        norms = torch.stack([norm for _, norm in found])
        return torch.stack([place for place, _ in found]), norms.to("cpu", non_blocking=True)

    def _present_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The place and norm of each gradient that is stepped."""
        found = [
            (place, p.grad)
            for place, p in zip(self._places, self._with_gradient, strict=True)
            if p.grad is not None
        ]
        norms = norms_of([gradient for _, gradient in found])
        return list(zip([place for place, _ in found], norms, strict=True))

    def _late_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same where the total is made for the step alone: one gradient at a time has
        memory."""
        for place, number in enumerate(self._places):
            gradient = self._gradient.as_stepped(place)
            if gradient is not None:
                for factor in self._factors:
                    gradient.mul_(factor)
                yield number, norms_of([gradient])[0]

    @property
    def _with_gradient(self) -> list[nn.Parameter]:
        """Those that have the gradient that is stepped: where masters are on the host, others until
        the step begins there. Norms may be taken when a copy is on its way."""
        is_shown = self._on_host is None or self._on_host.is_shown
        return self._parameters if is_shown else self._masters.on_device

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradient by a number, in place."""
        if self._makes_total_late or self._is_on_host:
            self._factors.append(factor)
            return
        self._scale(factor)

    def _scale(self, factor: float | Tensor) -> None:
        for parameter in self._with_gradient:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self._gradient.remember()

    def step(self, step: int) -> None:
        """Apply the gradient and forget it.

        Args:
            step: number of the step, from 0, for the learning rate.
        """
        if self.optimizer is None:
            self.forget_gradients()
            return
        self.end_loans()
        factor = self._schedule(step)
        for group, initial in zip(self.groups, self.initial_groups, strict=True):
            group["lr"] = initial["lr"] * factor
        self._attach()
        self._make_total()
        if self._parameters:  # a shard may have none
            self.optimizer.step()
        if self._is_on_host:
            self._let_moments_go()
        else:
            self.publish()
            self._detach()
        is_kept = self._is_kept()
        self._flatten_moments()
        if is_kept:
            self.forget()
        else:
            self.forget_gradients()

    # Weights that are whole for stays alone.

    @property
    def has_masters(self) -> bool:
        """No parameter is stepped as layers have it, not even those of its type: it is on the host
        or in scratch, or a shard of it is."""
        return self._masters.apart or self._masters.in_scratch

    @property
    def has_stays(self) -> bool:
        """Weights are whole for stays alone."""
        return self._masters.has_stays

    def begin_stay(self) -> None:
        """Have whole weights, of the own shard where there are shards, for a stay."""
        memory = self._masters.begin_stay()
        if self._offloaded is not None and self._masters.in_scratch:
            self._offloaded.bring(memory)
            self._masters.note_brought()

    def end_stay(self) -> Check:
        """Let whole weights go, after a stay; see `Masters.end_stay`."""
        return self._masters.end_stay()

    # A step on the host.

    @property
    def _is_on_host(self) -> bool:
        return self._on_host is not None and self._on_host.is_here

    def unload(self) -> None:
        """Copy the gradient to the host, where `step` finds it; on an accelerator the copy is only
        launched."""
        if self._on_host is not None:
            self._on_host.unload()

    def load(self) -> None:
        """Give layers the weights that a step on the host has made, if there was one; on an
        accelerator the copies are only launched."""
        if self._attached:
            self._masters.publish(launches=True)

    def leave_host(self) -> None:
        """Let go of what a step on the host was for; the copies of `load` have ended."""
        if self._on_host is not None and self._offloaded is not None:
            self._on_host.leave()
            if self._attached:
                self._offloaded.let_masters_go()
                self._offloaded.leave()
                self._attached = False

    @property
    def _makes_total_late(self) -> bool:
        """The gradient that is stepped is made in the slot, for the step alone."""
        return self._offloaded is not None and self._gradient.has_own_total and not self.shared

    def _make_total(self) -> None:
        if self._on_host and self._on_host.is_here:
            self._on_host.show()
            for factor in self._factors:
                self._scale(factor)
            return
        if self._offloaded is not None and self._makes_total_late:
            self._gradient.total_within(self._offloaded.gradient())
            self._gradient.widen()
            self.show_total()
            for factor in self._factors:
                self._scale(factor)

    def _is_kept(self) -> bool:
        """The optimizer has kept a gradient as it is, which belongs to it from now on.

        Gradients in lists and dicts within its state are not seen.
        """
        assert self.optimizer is not None
        mine = self._starts_of_gradient()
        return any(
            isinstance(value, Tensor) and can_be_flat(value) and _start(value) in mine
            for of_one in self.optimizer.state.values()
            for value in of_one.values()
        )

    def _starts_of_gradient(self) -> set[int]:
        """The addresses of the storages in which the gradient is."""
        on_host = [self._on_host.memory] if self._on_host and self._on_host.is_here else []
        return {_start(flat) for flat in (*self._gradient.allocated, *on_host)} - {0}

    def _flatten_moments(self) -> None:
        """Turn state that is shaped like parameters into views of flat memory, when there is more
        of it than before."""
        assert self.optimizer is not None
        if self._offloaded is not None or len(self.optimizer.state) == self._with_moments:
            return
        self._with_moments = len(self.optimizer.state)
        mine = self._starts_of_gradient()
        moments: dict[str, list[Tensor]] = {}
        for parameter in self._parameters:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if _is_moment(value, parameter) and _start(value) not in mine:
                    moments.setdefault(key, []).append(value)
        for tensors in moments.values():
            adopt(tensors, self._device)

    # Offload.

    def fetch(self) -> None:
        """Copy the state from scratch to a slot, in which `step` finds it."""
        if self._offloaded is not None:
            self._offloaded.fetch()

    def store(self) -> None:
        """Copy the state from the slot to scratch."""
        if self._offloaded is not None:
            self._offloaded.store()

    def leave_slot(self) -> None:
        """Give the slot back; the copy of `store` has ended."""
        if self._offloaded is not None:
            self._offloaded.leave()

    @property
    def scratch_bytes(self) -> tuple[int, int, int]:
        """Bytes in scratch: of masters, of moments, and of weights that layers compute with."""
        return self._offloaded.scratch_bytes if self._offloaded else (0, 0, 0)

    @property
    def bytes_each_way(self) -> int:
        """Bytes that a step copies from scratch, and as many back."""
        return self._offloaded.bytes_each_way if self._offloaded else 0

    @property
    def keeps_moments(self) -> bool:
        """Moments stay on the device, though the rest is offloaded, since they are not known before
        the first step."""
        return self._offloaded is not None and not self._offloaded.foreseen

    def at_rest(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors with their values between steps, on any thread: themselves, or what scratch has
        of masters and of the optimizer's state.

        Raises:
            ScratchError: the disk has not done what it was asked for.
        """
        if self._offloaded is None or self.optimizer is None:
            return tensors
        found = self._offloaded.at_rest(self.optimizer.state)
        return [found.get(id(tensor), tensor) for tensor in tensors]

    def lend(self, to: object, until: Moment, returned: Callable[[], None]) -> None:
        """Let somebody read weights and state until a moment; nobody else writes to them before.

        Args:
            returned: function that is called when that has passed, before anything is written.
        """
        self._loans[to] = (until, returned)

    def end_loans(self, to: object = None) -> None:
        """Let what follows come after the end of a loan; on an accelerator the host waits for
        nothing.

        Args:
            to: who reads; None: everybody who does.
        """
        for reader in [to] if to else list(self._loans):
            if reader in self._loans:
                until, returned = self._loans.pop(reader)
                go_after(until)
                returned()

    @contextmanager
    def present(self, changes: bool = False) -> Iterator[None]:
        """Context within which the optimizer's state and the masters are on the device. Outside it
        they are hollow where they are offloaded: they have shapes and types, and no values.

        Args:
            changes: True to keep what is changed within; False drops it.
        """
        if self._offloaded is None or self._attached:
            yield
            return
        if self._offloaded.present:
            raise AxrtError(
                "offloaded state was asked for within a step, while it is on its way; expected "
                "that between calls of the engine"
            )
        self._offloaded.fetch()
        self._attach()
        try:
            yield
        except BaseException:
            self._leave_after()
            raise
        self.publish_if_changed()
        self._leave_after(changes)

    def _leave_after(self, changes: bool = False) -> None:
        self._detach()
        if changes:
            wait_for(moment_of(self._slot_memory()))
            self.store()
        wait_for(moment_of(self._slot_memory()))
        self.leave_slot()

    def _slot_memory(self) -> list[Tensor]:
        is_copied = self._offloaded is not None and self._on_host is None
        return [self._offloaded.memory] if self._offloaded is not None and is_copied else []

    def _attach(self) -> None:
        if self._offloaded is not None and self.optimizer is not None:
            if self._is_on_host:
                self._offloaded.begin()
            self._offloaded.attach(self.optimizer.state)
            self._attached = True

    def _detach(self) -> None:
        self._let_moments_go()
        if self._offloaded is not None and self.optimizer is not None:
            self._offloaded.let_masters_go()
            self._attached = False

    def _let_moments_go(self) -> None:
        if self._offloaded is not None and self.optimizer is not None:
            self._copy_kept_gradients()
            self._offloaded.let_moments_go(self.optimizer.state)

    def _copy_kept_gradients(self) -> None:
        """Give the optimizer copies of gradients that it has kept as they are: what is in a slot
        leaves with it."""
        assert self.optimizer is not None
        mine = self._starts_of_gradient()
        for of_one in self.optimizer.state.values():
            for key, value in of_one.items():
                if isinstance(value, Tensor) and can_be_flat(value) and _start(value) in mine:
                    of_one[key] = value.clone()

    # Masters.

    def keep_memory(self) -> None:
        """Take what the user has done to weights between calls, where this rank steps a shard.

        Raises:
            ModelError: he has written to narrow weights, whose masters are elsewhere.
        """
        if self.shard or self._masters.in_scratch:
            self._masters.keep_memory()

    def publish_if_changed(self) -> None:
        """Give layers the weights that the masters have, where somebody else has written to
        those."""
        if self._masters.have_changed():
            self.publish()

    def note_given_out(self) -> None:
        """The user has been given this bucket's parameters, see `Masters.note_given_out`."""
        self._masters.note_given_out()

    def publish(self) -> None:
        """Give layers the weights that the masters have."""
        self._masters.publish()
        if self._offloaded is not None:
            self._offloaded.note_weights()

    def release(self, failed: bool = False, wanted: bool = True) -> None:
        """Give the modules' parameters the type that they had, with the weights of the masters.

        Args:
            failed: True where the masters may be out of reach if they are offloaded; then weights
                are those that layers compute with.
            wanted: False if nobody but the engine has the modules: then weights in scratch are not
                brought back.
        """
        for handle in self._handles:
            handle.remove()
        self.end_loans()
        self.forget()  # weights get wider below, in the room that gradients leave
        if self._masters.in_scratch and (failed or not wanted):
            self._masters.give_nothing_back()
            self._offloaded = None
            return
        with nullcontext() if failed else self.present():
            self._masters.give_back()
        for name, parameter in self.named:
            if name in self._given_back:
                value = self._given_back.pop(name)
                parameter.data = value.to(parameter.device, parameter.dtype)
        self._offloaded = None

    # Saving and loading.

    def saved(self) -> Iterator[tuple[str, ParameterState]]:
        """The name and the optimizer's state of each parameter: the live tensors, whose values
        count while the bucket is present.

        Raises:
            DataError: some of the state is neither a tensor nor a plain value.
        """
        if self.optimizer is not None:
            yield from saved_state(self.optimizer, self.initial_groups, self._name_of)

    def rooms_for(self, states: Mapping[str, ParameterState]) -> dict[str, ParameterState]:
        """States to be filled for `restore`. Where the optimizer has its state on the device and
        whole, moments are the flat memory in which it will have them.

        Args:
            states: states whose tensors have no values, by the name of the parameter.
        """
        found = {name: of.empty() for name, of in states.items()}
        if self._offloaded is not None or self.shard:
            return found
        moments: dict[str, dict[str, Tensor]] = {}  # parameters by name, by key of a moment of each
        for parameter, name in self._name_of.items():
            for key, value in found[name].tensors.items() if name in found else ():
                if value.shape == parameter.shape:
                    moments.setdefault(key, {})[name] = parameter
        for key, of in moments.items():
            types = [found[name].tensors[key].dtype for name in of]
            for name, view in zip(of, flat_like([*of.values()], types, self._device), strict=True):
                found[name].tensors[key] = view
        return found

    def restore(self, states: Mapping[str, ParameterState]) -> None:
        """Make saved states the optimizer's own, while the bucket is present.

        Args:
            states: states, by the name of the parameter; a parameter without one begins anew.
        """
        if self.optimizer is not None:
            pieces = zip(self._name_of.values(), self._masters.pieces, strict=True)
            mine = {
                name: cut_state(states[name], piece, self._masters.whole[piece.place].shape)
                for name, piece in pieces
                if name in states
            }
            self.restore_own(mine)

    def restore_own(self, states: Mapping[str, ParameterState]) -> None:
        """Make states of what is stepped here, of pieces where there are shards, the optimizer's
        own.

        Args:
            states: states, by the name of the parameter; one without begins anew.
        """
        if self.optimizer is not None:
            with self.present(changes=True):
                restore_state(self.optimizer, self.initial_groups, self._name_of, states)
            self._with_moments = 0
            self._flatten_moments()


def gradient_of(
    spec: BucketSpec,
    masters: Masters,
    in_float32: bool,
    device: torch.device,
    narrowest: torch.dtype | None,
    cut: Cut | None,
) -> Gradient:
    """The gradient of a bucket; arguments are those of `Bucket`."""
    parameters = [parameter for _, parameter in spec.named]
    if cut is None:
        to = masters.whole if in_float32 else parameters
        stepped = masters.parameters if masters.in_scratch else masters.whole
        return Gradient(to, stepped, device, narrowest)
    of = GradientOfRuns if cut.lets_go else GradientShard
    is_tied = len(alike(spec.copies, spec.copies[0])) < len(spec.copies)
    return of(parameters, in_float32, masters, device, narrowest, cut, not is_tied)


def _called(spec: BucketSpec) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, (_, parameter) in zip(spec.called, spec.named, strict=True)]


def _accumulating(
    parameters: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]
) -> list[RemovableHandle]:
    """Let gradients of narrow parameters add up in those of their masters."""
    return [
        parameter.register_post_accumulate_grad_hook(Accumulator(master))  # type: ignore[no-untyped-call]
        for parameter, master in zip(parameters, masters, strict=True)
        if parameter is not master
    ]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is not None and isinstance(value, bool | int | float | str)


def _start(tensor: Tensor) -> int:
    """The address of the tensor's storage; 0 where there is none."""
    return tensor.untyped_storage().data_ptr()


def _is_moment(value: object, parameter: nn.Parameter) -> bool:
    if (
        not isinstance(value, Tensor)
        or value.shape != parameter.shape
        or value.device != parameter.device
    ):
        return False
    return can_be_flat(value)
