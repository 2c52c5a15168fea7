"""The three routes of a bucket's step, behind one contract: where the optimizer's state lives
between steps, and where it steps."""

#   OnDevice     lives on the device, steps there
#   Offloaded    lives in scratch, comes to a slot on the device for its step, and goes back
#   OnHost       lives on the host and steps there; the gradient comes to it, and weights go back
#
# What tasks call, in their order. Each route does what it needs, and nothing for the rest.
#
#     task          OnDevice     Offloaded                    OnHost
#     FETCH                      fetch: scratch -> slot
#     UNLOAD                                                  unload: gradient -> host
#     norms, scale  now          late: see makes_total_late   now; factors wait for the host
#     STEP          step         attach, total, step          attach, show the gradient, step
#     LOAD                                                    load: masters -> layers
#     STORE                      store: slot -> scratch
#
# Promised: outside a step and `present`, offloaded tensors are hollow, so who reads one sees nan.
# A route never copies while a step runs on the same memory: the tasks of the brain are in order.
# What would break it: an optimizer that keeps the gradient as it is. So after each step its state
# is looked through, and what it has kept is either left to it, or copied out of the slot.

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from axrt.device.queues import moment_of, wait_for
from axrt.errors import AxrtError

from .flat import adopt, can_be_flat
from .gradient import Gradient
from .masters import Masters
from .matrix_optimizer import is_factor
from .norms import NO_PARTS, VirtualParts, norms_of, of_virtual
from .offloaded import OffloadedState
from .on_host import GradientOnHost


class Stepped(NamedTuple):
    """What a route steps."""

    optimizer: torch.optim.Optimizer | None  # None: there is nothing to step
    masters: Masters
    gradient: Gradient
    device: torch.device  # on which layers compute
    parts: VirtualParts = NO_PARTS

    @property
    def state_tensors(self) -> Iterator[tuple[dict[str, object], str, Tensor]]:
        """Each tensor of the optimizer's state that could be flat memory, with its place."""
        for of_one in self.optimizer.state.values() if self.optimizer else ():
            for key, value in list(of_one.items()):
                if isinstance(value, Tensor) and can_be_flat(value):
                    yield of_one, key, value


class OnDevice:
    """State lives on the device, beside the weights, and steps there.

    Attributes:
        is_offloaded: state lives elsewhere than on the device.
        keeps_moments: moments stay on the device, though the rest is offloaded, since they are not
            known before the first step.
        scratch_bytes: bytes in scratch: of masters, of moments, and of weights that layers compute
            with.
        bytes_each_way: bytes that a step copies from scratch, and as many back.
        makes_total_late: the gradient that is stepped is made for the step alone.
    """

    is_offloaded = False
    keeps_moments = False
    scratch_bytes = (0, 0, 0)
    bytes_each_way = 0
    makes_total_late = False

    def __init__(self, stepped: Stepped) -> None:
        self._stepped = stepped
        self._optimizer, self._masters = stepped.optimizer, stepped.masters
        self._gradient = stepped.gradient
        self._with_moments = 0  # parameters that had some when they were last made flat

    # Copies: of state, of the gradient to the host, of weights back.

    def fetch(self) -> None:
        """Copy the state from scratch to a slot, in which the step finds it."""

    def store(self) -> None:
        """Copy the state from the slot to scratch."""

    def leave_slot(self) -> None:
        """Give the slot back; the copy of `store` has ended."""

    def unload(self) -> None:
        """Copy the gradient to the host, where the step finds it; on an accelerator the copy is
        only launched."""

    def load(self) -> None:
        """Give layers the weights that a step on the host has made, if there was one; on an
        accelerator the copies are only launched."""

    def leave_host(self) -> None:
        """Let go of what a step on the host was for; the copies of `load` have ended."""

    def bring(self, weights: Sequence[Tensor]) -> None:
        """Copy weights that live in scratch to the device, for a residency.

        Args:
            weights: where they go, a stretch for each type of parameters.
        """

    # The gradient that is stepped.

    @property
    def with_gradient(self) -> Sequence[nn.Parameter]:
        """For each of the parameters that are stepped the one that has its gradient."""
        return self._masters.parameters

    def open(self) -> None:
        """A step's gradient begins."""

    def gradients(self) -> Iterator[tuple[int, Tensor]]:
        """The gradients that exist, each with its index among the parameters that are stepped. One
        has memory until the next is asked for where `makes_total_late`."""
        for place, parameter in enumerate(self.with_gradient):
            if parameter.grad is not None:
                yield place, parameter.grad

    def keep_changed(self) -> None:
        """Take gradients that were changed on purpose for complete."""
        self._gradient.late.remember()

    def norms(self) -> Iterator[tuple[int, Tensor]]:
        """The index among the parameters that are stepped, and the norm, of each gradient."""
        present = of_virtual(list(self.gradients()), self._stepped.parts)
        norms = norms_of([gradient for _, gradient in present])
        yield from zip([place for place, _ in present], norms, strict=True)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradient by a number, in place."""
        for parameter in self.with_gradient:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self._gradient.late.remember()

    # A step.

    def begin_step(self) -> None:
        """Have what the optimizer reads where it reads it."""

    def end_step(self) -> bool:
        """Give layers the new weights.

        Returns:
            True if the optimizer has kept the gradient as it is, so that its memory is not ours.
        """
        self.publish()
        is_kept = any(self._kept_gradients())
        self.make_moments_flat()
        return is_kept

    def publish(self) -> None:
        """Give layers the weights that the masters have."""
        self._masters.publish()

    def make_moments_flat(self, anew: bool = False) -> None:
        """Turn state that is shaped like parameters into views of flat memory, when there is more
        of it than before.

        Args:
            anew: True where other state was loaded.
        """
        assert self._optimizer is not None
        state = self._optimizer.state
        if len(state) == self._with_moments and not anew:
            return
        self._with_moments = len(state)
        mine = self._starts_of_gradient()
        moments: dict[str, list[Tensor]] = {}
        for parameter in self._masters.parameters:
            for key, value in state.get(parameter, {}).items():
                if is_factor(key):
                    continue
                if _is_moment(value, parameter) and _start(value) not in mine:
                    moments.setdefault(key, []).append(value)
        for tensors in moments.values():
            adopt(tensors, self._stepped.device)

    def _kept_gradients(self) -> Iterator[tuple[dict[str, object], str, Tensor]]:
        """What the optimizer has kept of the gradient as it is, with its place in the state;
        gradients in lists and dicts there are not seen."""
        mine = self._starts_of_gradient()
        return (one for one in self._stepped.state_tensors if _start(one[2]) in mine)

    def _starts_of_gradient(self) -> set[int]:
        """The addresses of the storages in which the gradient is."""
        gradient = self._gradient
        return {_start(flat) for flat in (*gradient.sums, *gradient.own_totals)} - {0}

    # Between steps.

    def at_rest(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors with their values between steps, on any thread: themselves, or what scratch has
        of masters and of the optimizer's state.

        Raises:
            ScratchError: the disk has not done what it was asked for.
        """
        return tensors

    def present(self, changes: bool = False) -> AbstractContextManager[None]:
        """Context within which the optimizer's state and the masters are on the device. Outside it
        they are hollow where they are offloaded: they have shapes and types, and no values.

        Args:
            changes: True to keep what is changed within; False drops it.
        """
        return nullcontext()


class Offloaded(OnDevice):
    """State lives in scratch. It comes to a slot on the device for its step, and goes back.

    Args:
        state: masters and moments in scratch.
        shared: other copies exist, so that gradients are added up before the step.
    """

    is_offloaded = True

    def __init__(self, stepped: Stepped, state: OffloadedState, shared: bool) -> None:
        super().__init__(stepped)
        self._state = state
        self._attached = False
        self._factors: list[float | Tensor] = []  # on a gradient that is made in the step
        self.makes_total_late = stepped.gradient.has_own_total and not shared
        self.keeps_moments = not state.foreseen
        self.scratch_bytes, self.bytes_each_way = state.scratch_bytes, state.bytes_each_way
        state.begin()
        state.attach({})
        state.note_weights()
        self._detach()
        wait_for(moment_of(self._slot_memory()))
        self.store()
        self.leave_slot()

    def fetch(self) -> None:
        self._state.fetch()

    def store(self) -> None:
        self._state.store()

    def leave_slot(self) -> None:
        self._state.leave()

    def bring(self, weights: Sequence[Tensor]) -> None:
        if self._masters.in_scratch:
            self._state.bring(weights)
            self._masters.whole_weights.note_brought()

    def open(self) -> None:
        self._factors = []

    def gradients(self) -> Iterator[tuple[int, Tensor]]:
        if not self.makes_total_late:
            yield from super().gradients()
            return
        for place in range(len(self._masters.parameters)):
            gradient = self._gradient.as_stepped(place)
            if gradient is not None:
                for factor in self._factors:
                    gradient.mul_(factor)
                yield place, gradient

    def norms(self) -> Iterator[tuple[int, Tensor]]:
        if not self.makes_total_late:
            yield from super().norms()
            return
        for place, gradient in self.gradients():  # one at a time
            yield place, norms_of([gradient])[0]

    def scale(self, factor: float | Tensor) -> None:
        if self.makes_total_late:
            self._factors.append(factor)
        else:
            super().scale(factor)

    def begin_step(self) -> None:
        self._attach()
        if self.makes_total_late:
            self._gradient.total_within(self._state.gradient())
            self._gradient.widen()
            self._gradient.show_total()
            self._scale_now()

    def _scale_now(self) -> None:
        for factor in self._factors:
            super().scale(factor)

    def end_step(self) -> bool:
        self.publish()
        self._detach()
        return False  # what was kept of the gradient was copied, as the slot has another's next

    def publish(self) -> None:
        super().publish()
        self._state.note_weights()

    def make_moments_flat(self, anew: bool = False) -> None:
        """Nothing: moments are flat in the slot."""

    def at_rest(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        assert self._optimizer is not None
        found = self._state.at_rest(self._optimizer.state)
        return [found.get(id(tensor), tensor) for tensor in tensors]

    @contextmanager
    def present(self, changes: bool = False) -> Iterator[None]:
        if self._attached:
            yield
            return
        if self._state.present:
            raise AxrtError(
                "offloaded state was asked for within a step, while it is on its way; expected "
                "that between calls of the engine"
            )
        self._state.fetch()
        self._attach()
        try:
            yield
        except BaseException:
            self._leave_after()
            raise
        if self._masters.have_changed():
            self.publish()
        self._leave_after(changes)

    def _leave_after(self, changes: bool = False) -> None:
        self._detach()
        if changes:
            wait_for(moment_of(self._slot_memory()))
            self.store()
        wait_for(moment_of(self._slot_memory()))
        self.leave_slot()

    def _slot_memory(self) -> list[Tensor]:
        """What a copy on another queue must wait for."""
        return [self._state.memory]

    def _attach(self) -> None:
        assert self._optimizer is not None
        self._state.attach(self._optimizer.state)
        self._attached = True

    def _detach(self) -> None:
        self._let_moments_go()
        self._state.let_masters_go()
        self._attached = False

    def _let_moments_go(self) -> None:
        """Leave moments in the slot; copy what the optimizer has kept of the gradient, which leaves
        with it."""
        assert self._optimizer is not None
        for of_one, key, value in self._kept_gradients():
            of_one[key] = value.clone()
        self._state.let_moments_go(self._optimizer.state)


class OnHost(Offloaded):
    """State lives on the host and steps there. The gradient comes to it, and weights go back.

    Args:
        gradient: the way of the gradient to the host.
    """

    def __init__(
        self, stepped: Stepped, state: OffloadedState, shared: bool, gradient: GradientOnHost
    ) -> None:
        self._here = gradient
        super().__init__(stepped, state, shared)

    @property
    def with_gradient(self) -> Sequence[nn.Parameter]:
        # Norms may be taken while a copy is on its way: others have the gradient until the step
        # begins on the host.
        return super().with_gradient if self._here.is_shown else self._masters.on_device

    def unload(self) -> None:
        self._here.unload()

    def load(self) -> None:
        if self._attached:
            self._masters.publish(launches=True)

    def leave_host(self) -> None:
        self._here.leave()
        if self._attached:
            self._state.let_masters_go()
            self._state.leave()
            self._attached = False

    def scale(self, factor: float | Tensor) -> None:
        if self._here.is_here:
            self._factors.append(factor)
        else:
            super().scale(factor)

    def begin_step(self) -> None:
        if not self._here.is_here:
            super().begin_step()
            return
        self._attach()
        self._here.show()
        self._scale_now()

    def end_step(self) -> bool:
        if not self._here.is_here:
            return super().end_step()
        self._let_moments_go()
        return False  # weights follow with `load`

    def _attach(self) -> None:
        if self._here.is_here:
            self._state.begin()
        super()._attach()

    def _slot_memory(self) -> list[Tensor]:
        return []  # state is where it lives, and nothing is copied

    def _starts_of_gradient(self) -> set[int]:
        on_host = {_start(self._here.memory)} if self._here.is_here else set()
        return super()._starts_of_gradient() | on_host


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
