"""A bucket: parameters of one stage that are reduced, stepped, saved and loaded as one."""

# Its weights, its gradient and its optimizer's state are flat buffers; parameters and moments are
# views of them. Gradients add up in place over the microbatches of a step (gradient accumulation).
#
# Several ranks, or several layers with tied weights, may hold a bucket. Then each copy cuts its
# gradient into one *shard* a copy and sends every other copy its *part* of it (reduce-scatter). The
# owner of a shard adds the parts up in the order of copies, in float32 or better, and sends the
# *sum* back (all-gather), which arrives where the gradient is. Together that is an all-reduce with
# the volume of a ring. It needs no operator of MPI, and has one order of summation whatever the
# timing, the sizes of buckets and the library.
#
# No memory is written to while the network may still read it. A shard of another copy's is written
# to when that copy's sum has come, which needed this copy's part. The own shard is added up in
# place and sent from there. Who clips or steps may write to it before every other copy has the sum:
# then the bucket has moved to other memory (`Gradient.move_total`).

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from axrt.errors import ModelError
from axrt.model.accumulator import accumulating
from axrt.model.tensor_cuts import NOTHING_CUT, Parts
from axrt.model.virtual_layers import VirtualLayers
from axrt.offload.tier import HostTier
from axrt.scheduler.bucket import BucketCopy, across, alike, branches_of, of_group

from .assign import BucketSpec
from .bucket_factors import BucketFactors
from .bucket_settings import BucketSettings
from .bucket_shard import BucketShard
from .bucket_state import BucketState
from .gradient import Gradient
from .gradient_of_runs import GradientOfRuns
from .gradient_shard import GradientShard
from .loans import Loans
from .masters import Masters
from .norms import Norms, parts_of_pieces
from .offloaded import OffloadedState
from .on_host import GradientOnHost
from .probe import check_goes_on, made_by, probed
from .routes import Offloaded, OnDevice, OnHost, Stepped
from .sharded_optimizer import give_pieces
from .shards import Cut
from .state import options_told
from .sum_across import SumAcross
from .sum_within import SumWithin
from .virtual_gradients import VirtualGradients
from .whole_weights import Check


class Bucket:
    """Parameters with their copies, and the optimizer that the user's factory made for them.

    The bucket owns their memory: weights, gradients and moments become views of its flat buffers.

    Args:
        places: sort keys that order the parameters as the whole model does, one each.
        me: the copy that this rank holds, one of `spec.copies`.
        narrow: type that layers are to have each parameter in, beside a float32 master; None: the
            parameter stays as it is. () stands for None everywhere.
        cut: shards of the bucket, of which this rank steps one (ZeRO); None: it steps all of it.
    Attributes:
        copies: all copies.
        gradient: the gradient of a step.
        within: its sum over the copies of the same group, which share it out.
        across: second level of the sum, over groups; None where there is one group.
        shard: the shard that this rank steps; None: it steps all.
        keeps_apart: what microbatches add is put aside, and summed in a tree.
        first_leaf: the leaf of the first microbatch in that tree.
        route: where the optimizer's state lives, and how a step comes to it.
        state: the optimizer's state, to be saved and loaded.
        factors: what matrices are given in a step, where the optimizer wants to know.
        loans: who reads weights and state beside the steps.
        trained: parameters that the optimizer steps, by the names of the module's: masters where
            there are any; the module's own where this rank steps a shard alone.
        initial_groups: the optimizer's parameter groups as they were made, without parameters.
    """

    def __init__(
        self,
        spec: BucketSpec,
        places: Sequence[int],
        me: BucketCopy,
        settings: BucketSettings,
        narrow: Sequence[torch.dtype | None] = (),
        cut: Cut | None = None,
        virtual_parts: Parts = NOTHING_CUT,
    ) -> None:
        self.named, self.called = spec.named, spec.called
        self.copies, self.me = spec.copies, me
        self.keeps_apart = settings.keeps_apart
        self._counts, self._schedule = spec.counts, settings.schedule
        factory, parameters = settings.factory, [one for _, one in spec.named]
        if cut and not cut.whole:
            cut = cut._replace(whole=not probed(factory, _called(spec)).elementwise)
        device, narrowest = settings.device, settings.narrowest
        masters = self._masters = Masters(
            parameters,
            narrow or [None] * len(parameters),
            device,
            cut,
            narrowest,
            settings.has_masters_apart,
            settings.in_scratch,
        )
        self._places = torch.tensor(
            [places[piece.place] for piece in masters.pieces], dtype=torch.int64
        )
        names = [name for name, _ in spec.named]
        self.trained = list(zip(names, parameters if cut else masters.parameters, strict=True))
        self._handles = accumulating(parameters, masters.whole) if settings.in_float32 else []
        self.gradient = gradient_of(spec, masters, settings.in_float32, device, narrowest, cut)
        self._set_up_sums(cut, settings)
        shown = list(zip(spec.called, masters.shown, strict=True))
        self.optimizer = made_by(factory, shown)
        check_goes_on(factory, shown, self.optimizer)
        if cut and self.optimizer:
            give_pieces(self.optimizer, masters)
        self.initial_groups = [dict(group, params=None) for group in self.groups]
        self.factors = BucketFactors(
            self.optimizer, self.stepped, self._places, len(self.copies), settings.microbatches
        )
        self.loans = Loans()
        self._given_back: dict[str, Tensor] = {}
        self.virtual: VirtualGradients | None = None
        of_pieces = parts_of_pieces(masters.pieces, names, virtual_parts)
        self._stepped = Stepped(self.optimizer, masters, self.gradient, device, of_pieces)
        self.route = self._route(settings)
        self.state = BucketState(
            self.optimizer,
            self.initial_groups,
            self.named,
            masters,
            self.route,
            device,
            self.shard is not None,
        )
        masters.whole_weights.let_go()  # not before: the factory has seen the weights

    def _set_up_sums(self, cut: Cut | None, settings: BucketSettings) -> None:
        """Say which copies add the gradient up, and in which order."""
        pipes_a_group = settings.pipes_a_group
        copies, me, gradient = self.copies, self.me, self.gradient
        near = of_group(copies, me, pipes_a_group) if pipes_a_group else copies
        self.within = SumWithin(near, me, gradient)
        self.shard = (
            BucketShard(near, me, self._masters, gradient, cut)
            if cut and isinstance(gradient, GradientShard)
            else None
        )
        self.across: SumAcross | None = None
        if len(near) < len(copies):
            owners = across(copies, me, pipes_a_group)
            mine = () if cut else ((near.index(me), len(near)),)
            self.across = SumAcross(owners, me, gradient, *mine)
        gradient.branches = branches_of(near, settings.team)
        # Of what each member has whole, its microbatches are a branch of the tree.
        each = 1 << settings.microbatches.bit_length()
        self.first_leaf = me.pipe % settings.team * each if gradient.branches else 0

    def _route(self, settings: BucketSettings) -> OnDevice:
        """Put the state where it lives from now on."""
        slots, host_slots, masters, gradient = (
            settings.slots,
            settings.host_slots,
            self._masters,
            self.gradient,
        )
        if slots is None or self.optimizer is None:
            return OnDevice(self._stepped)
        known = probed(settings.factory, list(zip(self.called, masters.shown, strict=True)))
        on_host = None
        if host_slots:
            stepped = masters.parameters if masters.apart else None
            on_host = GradientOnHost(host_slots, gradient, stepped, self.shared)
        state = OffloadedState(
            slots,
            masters.parameters,
            masters,
            known.moments and [known.moments[piece.place] for piece in masters.pieces],
            () if self.shared else gradient.layouts_of_own_totals,
            slots.tier if on_host and isinstance(slots.tier, HostTier) else None,
            [self.named[piece.place][0] for piece in masters.pieces],
        )
        if on_host:
            return OnHost(self._stepped, state, self.shared, on_host)
        return Offloaded(self._stepped, state, self.shared)

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
        return f"{type(self.optimizer).__name__} with {options_told(self.initial_groups)}"

    @property
    def lr(self) -> float | None:
        """The learning rate of the first group in the last step; None where there is no group."""
        return float(self.groups[0]["lr"]) if self.groups else None

    @property
    def first_layer(self) -> int:
        """The index in the model of the first layer with parameters in this bucket; 0 where it has
        none."""
        return min((int(name.partition(".")[0]) for name, _ in self.named), default=0)

    # The gradient of a step.

    def keep_open(self) -> None:
        """Give memory again to gradients that a hook has dropped since `open`."""
        self.gradient.keep_open()
        if self.virtual:
            self.virtual.keep_open()

    def take_from(self, layers: VirtualLayers) -> None:
        """Have the gradients that virtual members add up."""
        self.virtual = VirtualGradients(self.named, self.gradient.added_to, layers)

    # A stage's gradient is opened as one. Opening a bucket when the backward comes to it was tried
    # for runs of one microbatch. A later layer may use a weight that it does not list, and autograd
    # takes over what comes first as it is, which may be memory of the gradient that flows on.
    def open(self) -> None:
        """Begin a step's gradient, or that of a reduction: backwards add to the `.grad` of each
        parameter, which is a view of flat memory."""
        self.route.open()
        self.gradient.open()
        self.factors.open()
        if self.virtual:
            self.virtual.open()

    def close(self) -> None:
        """Note that the gradient is complete on this copy; a parameter that no microbatch has used
        keeps none."""
        if self.virtual:
            self.virtual.add_up()
        self.gradient.close()
        self.factors.close(self.named, self.gradient.added_to)
        if self.shard:
            self.shard.close()

    def check_unchanged(self) -> None:
        """Check that nothing was added to the gradient after it was complete; for when the whole
        stage's is.

        Raises:
            ModelError: a weight is used by a layer that does not list it, and part of its gradient
                came too late to be added up.
        """
        for place in self.gradient.late if self.shared else ():
            raise ModelError(
                f"{self.named[place][0]} got a gradient from an earlier layer than its own, which "
                "does not list it among its parameters; expected an "
                "axrt.TiedLayerSpec for each layer that shares it, or memory.bucket_mb so "
                "large that a stage has one bucket"
            )

    def forget(self) -> None:
        """Drop the gradient and let go of its memory, which others may still write to."""
        self.factors.forget()
        self.gradient.forget()
        if self.shard:
            self.shard.forget()

    def leave_memory(self) -> None:
        """Drop the gradient, and the whole weights of a residency; go on in other memory, as others
        may still read or write this."""
        self.loans.end()
        self.forget()
        self._masters.whole_weights.leave_memory()

    def forget_gradients(self) -> None:
        """Take the gradient away from every parameter; the bucket keeps its memory, but where
        weights are in scratch."""
        if self._masters.in_scratch:
            self.gradient.forget()
        else:
            self.gradient.drop()
        for parameter in self.stepped if self._masters.apart else ():
            parameter.grad = None
        self.factors.forget()

    def take_own(self) -> None:
        """Make the gradient of this copy, the only one, that which is stepped."""
        if not (self.gradient.has_own_total or self.has_masters):
            return
        self.gradient.take_late()
        if not self.route.makes_total_late:
            self.gradient.widen()
            self.gradient.show_total()

    # Norms, factors and the step.

    def norms(self) -> Norms:
        """The norms of the gradients that exist, on their way to the CPU.

        Those of tied weights are included only with the layer that counts.
        """
        found = list(self.route.norms()) if self._counts else []
        if not found:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        norms = torch.stack([norm for _, norm in found])
        return self._places[[place for place, _ in found]], norms.to("cpu", non_blocking=True)

    def step(self, step: int) -> None:
        """Apply the gradient and forget it.

        Args:
            step: number of the step, from 0, for the learning rate.
        """
        if self.optimizer is None:
            self.forget_gradients()
            return
        self.loans.end()
        factor = self._schedule(step)
        for group, initial in zip(self.groups, self.initial_groups, strict=True):
            group["lr"] = initial["lr"] * factor
        self.route.begin_step()
        if self.stepped:  # a shard may have none
            self.optimizer.step()
        if self.route.end_step():
            self.forget()
        else:
            self.forget_gradients()

    # Weights.

    @property
    def stepped(self) -> list[nn.Parameter]:
        """What the optimizer steps here: parameters, masters, or pieces of them."""
        return self._masters.parameters

    @property
    def whole(self) -> list[nn.Parameter]:
        """A parameter for each of `named`, of its shape and of the type that is stepped; it is
        hollow where this rank steps only a piece of it in other memory."""
        return self.stepped if self.has_masters and not self.shard else self._masters.whole

    @property
    def has_masters(self) -> bool:
        """No parameter is stepped as layers have it, not even those of its type: it is on the host
        or in scratch, or a shard of it is."""
        return self._masters.apart or self._masters.in_scratch

    @property
    def has_residencies(self) -> bool:
        """Weights are whole for residencies alone."""
        return self._masters.has_residencies

    def begin_residency(self) -> None:
        """Have whole weights, of the own shard where there are shards, for a residency."""
        self.route.bring(self._masters.whole_weights.begin())

    def end_residency(self) -> Check:
        """Let whole weights go, after a residency; see `WholeWeights.end`."""
        return self._masters.whole_weights.end()

    def keep_memory(self) -> None:
        """Take what the user has done to weights between calls, where this rank steps a shard.

        Raises:
            ModelError: he has written to narrow weights, whose masters are elsewhere.
        """
        if self.shard or self._masters.in_scratch:
            self._masters.keep_memory()

    def publish_if_changed(self) -> None:
        """Give layers what somebody else has written to masters."""
        if self._masters.have_changed():
            self.route.publish()

    def note_given_out(self) -> None:
        """The user has been given this bucket's parameters, see `Masters.note_given_out`."""
        self._masters.note_given_out()

    def give_back_as(self, values: Mapping[str, Tensor | None]) -> None:
        """Note what parameters will be when the modules are given back, by name; None and other
        names are left out."""
        mine = {name for name, _ in self.named}
        self._given_back |= {
            name: value for name, value in values.items() if name in mine and value is not None
        }

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
        self.factors.release()
        if self.virtual:
            self.virtual.release()
        self.loans.end()
        self.forget()  # weights get wider below, in the room that gradients leave
        if self._masters.in_scratch and (failed or not wanted):
            self._masters.give_nothing_back()
            self.route = self.state.route = OnDevice(self._stepped)
            return
        with nullcontext() if failed else self.route.present():
            self._masters.give_back()
        for name, parameter in self.named:
            if name in self._given_back:
                value = self._given_back.pop(name)
                parameter.data = value.to(parameter.device, parameter.dtype)
        self.route = self.state.route = OnDevice(self._stepped)


def gradient_of(
    spec: BucketSpec,
    masters: Masters,
    in_float32: bool,
    device: torch.device,
    narrowest: torch.dtype | None,
    cut: Cut | None,
) -> Gradient:
    """The gradient of a bucket; arguments are those of `Bucket` and of `BucketSettings`."""
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
