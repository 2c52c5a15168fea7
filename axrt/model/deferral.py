"""Weight gradients that wait: the backward of a stage gives the gradient of what came in, and notes how to make those of weights.

Walking the autograd graph twice, once for inputs and once for weights, would cost a second walk and all that layers compute for both.
So the graph is walked once. A function that takes part (`torch.nn.Linear` does, see `Linear`) gives None for its weight and leaves a
closure; the product runs when the policy has nothing better to do.

What must hold, so that gradients have the bits of a whole backward:

1. Autograd sums what several uses of a parameter give before it adds that to `.grad`, in the order of its walk. Closures of one parameter
   are kept in that order, summed, and added once.
2. A parameter may also be used by functions that do not take part (a head that shares the weight of an embedding). A hook on the parameter
   hears what autograd is about to accumulate: None where every use was deferred; else the noted products join it at once.
3. What a closure reads stays as it is until it has run. Autograd adds in place to gradients that nobody else holds, and a closure holds
   them; but a parameter's first gradient may be a view of one and is added to later, so the stage copies those (`Stage.input_gradient`).
4. Nothing is deferred outside the backward of a stage, in a graph of gradients (`create_graph`), or by a call for other gradients within a
   backward (`torch.autograd.grad(..., inputs)`): there the gradient is computed at once and autograd decides what becomes of it.

The collector hangs on the parameter, since on CUDA autograd walks the graph on a thread of its own.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

Compute = Callable[[], Tensor]
_HANGS_AT = "_axrt_deferral"


def defer_weight_gradient(parameter: Tensor, compute: Compute) -> Tensor | None:
    """To be called in the backward of an autograd function, whose gradient for `parameter` is what this returns.

    Args:
        parameter: a leaf that the function was given, as `ctx.saved_tensors` or the module has it.
        compute: makes the gradient, of the parameter's shape, from what it holds on to; called at most once, later or at once, without
            a graph. It must not change what it reads.
    Returns:
        None where the gradient will be computed later, by the `W` of this stage and microbatch; else the gradient, made now: outside
        axrt, under a policy that does not split backwards, and where the parameter has hooks that want to see its gradient.

    ```python
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient * weight, axrt.defer_weight_gradient(weight, lambda: (gradient * x).sum_to_size(weight.shape))
    ```
    """
    deferral: Deferral | None = getattr(parameter, _HANGS_AT, None)
    if deferral is None or not deferral.takes(parameter):
        return compute() if parameter.requires_grad else None
    deferral.note(parameter, compute)
    return None


class Deferral:
    """The weight gradients of a stage that have not been computed yet.

    Args:
        parameters: those that are trained; whoever defers finds this through them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._collecting: deque[tuple[nn.Parameter, list[Compute]]] | None = None
        self._noted: dict[Tensor, list[Compute]] = {}  # of the walk that runs, until autograd accumulates
        self._waiting: dict[int, deque[tuple[nn.Parameter, list[Compute]]]] = {}
        for parameter in parameters:
            setattr(parameter, _HANGS_AT, self)
            parameter.register_hook(partial(self._accumulates, parameter))  # type: ignore[no-untyped-call]

    @contextmanager
    def collecting(self, number: int) -> Iterator[None]:
        """What is deferred within belongs to microbatch `number`."""
        self._collecting = self._waiting[number] = deque()
        try:
            yield
        finally:
            self._collecting = None
            self._noted.clear()

    def takes(self, parameter: Tensor) -> bool:
        """Now and for this parameter (rule 4)."""
        if self._collecting is None or torch.is_grad_enabled() or _has_other_hooks(parameter):
            return False
        accumulates = get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(accumulates))

    def note(self, parameter: Tensor, compute: Compute) -> None:
        self._noted.setdefault(parameter, []).append(compute)

    def pieces(self, number: int) -> int:
        """How many of microbatch `number` wait, one a parameter."""
        return len(self._waiting.get(number, ()))

    def run_piece(self, number: int) -> None:
        """Compute the next gradient of microbatch `number`, in the order of its backward, and add it to the parameter's `.grad`."""
        waiting = self._waiting[number]
        if waiting:
            _add(*waiting.popleft())
        if not waiting:
            del self._waiting[number]

    def drop(self) -> None:
        """Forget all that waits."""
        self._waiting.clear()

    def _accumulates(self, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
        """Autograd has gone through all uses of the parameter (rules 1 and 2)."""
        noted = self._noted.pop(parameter, None)
        if noted is None or self._collecting is None:
            return None
        if gradient is None:
            self._collecting.append((parameter, noted))
            return None
        return gradient + _sum(noted)


@torch.no_grad()
def _add(parameter: nn.Parameter, computes: list[Compute]) -> None:
    gradient = _sum(computes)
    if gradient.shape != parameter.shape:
        raise ValueError(
            f"a deferred weight gradient has shape {tuple(gradient.shape)}; expected that of its parameter, {tuple(parameter.shape)}. "
            "Look at the function given to axrt.defer_weight_gradient"
        )
    if parameter.grad is None:
        # A copy, laid out like the parameter as autograd would: the closure may have returned what somebody else still reads.
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    else:
        parameter.grad += gradient


def _sum(computes: list[Compute]) -> Tensor:
    first, *others = computes
    total = first()
    for compute in others:
        total = total + compute()
    return total


def _has_other_hooks(parameter: Tensor) -> bool:
    """Hooks that were not set by a `Deferral` and would see None, or nothing."""
    return len(parameter._backward_hooks or ()) > 1 or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


class Linear(nn.Linear):
    """`torch.nn.Linear` whose weight gradient may be deferred; what a stage makes of those modules that are exactly that class.

    Where torch would do more than one product (autocast, compiled code, a weight that is computed from others, inputs that are not
    contiguous), or is to look into it (torch.func), it is as before.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self._is_plain(input):
            product: Tensor = _Product.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return product
        return super().forward(input)

    def _is_plain(self, x: Tensor) -> bool:
        weight = self.weight
        return (
            torch.is_grad_enabled()
            and weight.requires_grad
            and weight.is_leaf
            and x.dim() > 1
            and x.numel() > 1  # torch takes a single number for a column and multiplies in another order
            and x.is_contiguous()
            and weight.is_contiguous()
            and type(x) in (Tensor, nn.Parameter)
            and not torch.is_autocast_enabled(x.device.type)
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
        )


def with_deferral(layer: nn.Module) -> nn.Module:
    """The layer, in which every module that is exactly `torch.nn.Linear` may defer."""
    for module in layer.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
    return layer


class _Product(torch.autograd.Function):
    """x times the weight's transpose, plus the bias: the operations that torch does, in its order, and so its bits.

    With a `setup_context` of its own torch.func could look through it, but `apply` would take a tenth of a millisecond more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight  # itself: what a checkpointed layer unpacks is another tensor
        out = x.new_empty(*x.shape[:-1], weight.shape[0])  # no view, which the next layer could not change in place
        flat_out = out.view(-1, weight.shape[0])
        if bias is None:
            torch.mm(_flat(x), weight.t(), out=flat_out)
        else:
            torch.addmm(bias, _flat(x), weight.t(), out=flat_out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        flat = _flat(gradient)
        return (
            flat.mm(weight).view(x.shape) if of_x else None,
            defer_weight_gradient(ctx.parameter, partial(_of_weight, flat, x)) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """Of shape (outputs, inputs), from (rows, outputs) and (..., inputs).

    Not `weight.grad.addmm_`: it would save a pass over memory, and has other bits than a product that is added.
    """
    return gradient.t().mm(_flat(x))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
