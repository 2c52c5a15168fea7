"""The gradient of a bucket on the host, where its state is, for a step there."""

#   unload    the gradient is copied to a slot
#   show      the optimizer reads it there
#   leave     the slot is free
#
# Where layers compute on the CPU, and a gradient has the type that is stepped, it stays where it
# is.
#
# The state stays in the host's tier, and is attached there.
# The optimizer's parameters are masters on the host beside an accelerator, also of float32 weights;
# else they are as they were. Others on the device have the gradient until the step begins, since
# norms may be taken while a copy is on its way. The device's part of a gradient ends with the
# scale: sums are taken, divided and, for the vote, measured where the device's tasks are in order.
# So a copy only reads. The factor that clips is applied on the host, and buffers of a step that is
# skipped are put back where the device's tasks are. Each of the four tasks waits for the end of the
# one before, on another queue.

from collections.abc import Sequence

from torch import Tensor, nn

from .gradient import Gradient
from .offloaded import buffers_within, pages_of
from .slots import Slots


class GradientOnHost:
    """The way of a bucket's gradient to the host.

    Args:
        stepped: parameters that are stepped, if layers compute on an accelerator; None: layers
            compute on the CPU.
    Attributes:
        is_shown: the gradient on the host is that of the parameters that are stepped.
    """

    def __init__(
        self,
        slots: Slots,
        gradient: Gradient,
        stepped: Sequence[nn.Parameter] | None,
        shared: bool,
    ) -> None:
        self._slots, self._gradient, self._stepped = slots, gradient, stepped
        own = [] if shared else gradient.layouts_of_own_totals
        self._layouts = own if stepped is None else gradient.layouts_of_totals
        slots.reserve(pages_of(self._layouts))
        self._slot: Tensor | None = None
        self.is_shown = False

    @property
    def is_here(self) -> bool:
        """The gradient is on the host."""
        return self._slot is not None

    def unload(self) -> None:
        """Take a slot and copy the gradient there; on an accelerator the copy is only launched."""
        self._slot = self._slots.take()
        self._gradient.copy_to(buffers_within(self._layouts, self._slot))

    def show(self) -> None:
        """Make what is in the slot the gradient that the optimizer reads."""
        buffers = buffers_within(self._layouts, self.memory)
        self.is_shown = True
        if self._stepped is not None:
            self._gradient.show_on(self._stepped, buffers)
        elif buffers:
            self._gradient.total_within(buffers)
            self._gradient.show_total()

    @property
    def memory(self) -> Tensor:
        """The slot that the bucket has, uint8."""
        assert self._slot is not None, "a gradient is used on the host while it is elsewhere"
        return self._slot

    def leave(self) -> None:
        """Give the slot back."""
        self._slots.give(self.memory)
        self._slot, self.is_shown = None, False
