"""A gradient in a narrow type that adds up in a wider one, microbatch by microbatch."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


# A hook adds narrow gradients up in float32. Narrow flat memory beside it, added after each
# backward, would take two bytes a parameter more and another pass.
class Accumulator:
    """The hook on a parameter that layers compute with, which autograd calls when it has
    accumulated a gradient there.

    It adds the gradient to that of the parameter's master and lets it go, so a narrow gradient
    lives no longer than its own backward.

    Args:
        master: parameter of a wider type and the same shape.
    """

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:  # a hook of the user's may have dropped it
            self.add(parameter.grad)
            parameter.grad = None

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the parameter to that of the master."""
        if self._master.grad is None:
            self._master.grad = gradient.to(self._master.dtype, copy=True)
        else:
            self._master.grad += gradient


def accumulator_of(parameter: Tensor) -> Accumulator | None:
    """The accumulator that hangs on a parameter; None where there is none."""
    hooks = parameter._post_accumulate_grad_hooks
    if not hooks:  # most often
        return None
    return next((hook for hook in hooks.values() if isinstance(hook, Accumulator)), None)


def accumulating(
    parameters: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]
) -> list[RemovableHandle]:
    """Let gradients of narrow parameters add up in those of their masters, until the handles are
    removed; a parameter that is its own master is left as it is."""
    return [
        parameter.register_post_accumulate_grad_hook(Accumulator(master))  # type: ignore[no-untyped-call]
        for parameter, master in zip(parameters, masters, strict=True)
        if parameter is not master
    ]
