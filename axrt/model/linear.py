"""`torch.nn.Linear` whose weight gradient may wait; see `deferral.py`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .deferral import defer_weight_gradient
from .weight_product import RightProduct, WeightProduct, flat_rows


class Linear(nn.Linear):
    """`torch.nn.Linear` whose weight gradient may be deferred.

    A stage gives this class to modules that are exactly `torch.nn.Linear`.

    Where torch would do more than one product (autocast, compiled code, a weight that is computed
    from others, inputs that are not contiguous, types that bring their own), or is to look into it
    (torch.func, forward-mode derivatives), it is as before.
    """

    def forward(self, input: Tensor) -> Tensor:
        # As attributes they would take a search each, and this is called for every microbatch.
        own = self._parameters
        weight = own.get("weight")
        if weight is None or "bias" not in own:
            return super().forward(input)
        return linear(input, weight, own["bias"])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, whose weight gradient may wait.

    Args:
        x: input of shape (..., inputs).
        weight: matrix of shape (outputs, inputs).
        bias: vector of the outputs; None: there is none.
    """
    if _waits(x, weight):
        if torch._C._len_torch_function_stack():
            # A mode, such as that of a layer that pauses, sees functions of torch alone.
            x = x.view_as(x)
        product: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return product
    return nn.functional.linear(x, weight, bias)


def _waits(x: Tensor, weight: Tensor) -> bool:
    """The gradient of a weight may wait in a product with this input, now."""
    return (
        not torch.compiler.is_compiling()
        and _is_plain(x)
        and _may_defer(weight)
        and not _is_looked_into(x.device)
    )


def _may_defer(weight: Tensor) -> bool:
    return (
        (type(weight) is nn.Parameter or _is_fake(weight))
        and weight.requires_grad
        and weight.layout is torch.strided
        and weight.is_contiguous()
        and weight.numel() > 0
        and torch.is_grad_enabled()
    )


def _is_plain(x: Tensor) -> bool:
    return (type(x) in (Tensor, nn.Parameter) or _is_fake(x)) and may_wait(x)


def _is_fake(x: Tensor) -> bool:
    """It has no memory, and stands for a tensor of no other type: that is how stages are looked at
    before they are built."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode is not None and getattr(x, "fake_mode", None) is mode


def may_wait(x: Tensor) -> bool:
    """The input is one for which the gradient of a `Linear`'s weight may wait, if it is no tensor
    of a type that brings products of its own."""
    return (
        x.requires_grad
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_complex()
        and x.dim() > 1
        and x.numel()
        > 1  # torch takes a single number for a column and multiplies in another order
        and x.is_contiguous()
    )


def _is_looked_into(device: torch.device) -> bool:
    return (
        torch.is_autocast_enabled(device.type)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


# The class of `nn.Linear` is swapped, and `close` gives it back. A `forward` on the user's module
# was tried: it is a circle that only the garbage collector frees.
def with_deferral(layer: nn.Module) -> nn.Module:
    """The layer, in which every module that is exactly `torch.nn.Linear` may defer.

    Such a module is of another class until `without_deferral`, in place, also where it is the
    user's. Two other ways were tried. A copy would have to share hooks, attributes and parameters
    with the user's module, whatever either of them sets later. A `forward` on the module itself is
    a circle that only the garbage collector frees.
    """
    for module in layer.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
    return layer


def without_deferral(layer: nn.Module) -> None:
    """Give modules the class back that they had before `with_deferral`."""
    for module in layer.modules():
        if type(module) is Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


class _Product(torch.autograd.Function):
    """x times the weight's transpose, plus the bias: the operations that torch does, in its order,
    and so its bits.

    With a `setup_context` of its own torch.func could look through it, but `apply` would take a
    tenth of a millisecond more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.parameter = weight  # itself: what a checkpointed layer unpacks is another tensor
        # no view, which the next layer could not change in place
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        flat_out = out.view(-1, weight.shape[0])
        if bias is None:
            torch.mm(flat_rows(x), weight.t(), out=flat_out)
        else:
            torch.addmm(bias, flat_rows(x), weight.t(), out=flat_out)
        return out

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if gradient is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        flat = flat_rows(gradient)
        return (
            flat.mm(weight).view(x.shape) if of_x else None,
            defer_weight_gradient(ctx.parameter, WeightProduct(flat, x)) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`torch.addmm(bias, x, weight)`, whose weight gradient may wait as that of a `Linear` does.

    Args:
        bias: vector of the outputs.
        x: matrix of shape (rows, inputs).
        weight: matrix of shape (inputs, outputs), as GPT-2 of `transformers` has them.
    """
    if bias.dim() == 1 and _waits(x, weight):
        product: Tensor = _RightProduct.apply(bias, x, weight)  # type: ignore[no-untyped-call]
        return product
    return torch.addmm(bias, x, weight)


class _RightProduct(torch.autograd.Function):
    """The bias plus x times the weight, by the operations of `torch.addmm` and its backward."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.parameter = weight
        return torch.addmm(bias, x, weight)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if gradient is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        of_bias, of_x, of_weight = ctx.needs_input_grad
        return (
            gradient.sum(0) if of_bias else None,
            gradient.mm(weight.t()) if of_x else None,
            defer_weight_gradient(ctx.parameter, RightProduct(gradient, x)) if of_weight else None,
        )
