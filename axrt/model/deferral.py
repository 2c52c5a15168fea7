"""Weight gradients that wait (zero bubble): the backward of a stage gives the gradients of its
inputs, and notes how to compute those of weights.

Walking the autograd graph twice, once for inputs and once for weights, would cost a second walk and
all that layers compute for both. So the graph is walked once. A function that takes part
(`torch.nn.Linear` does, see `Linear`) gives None for its weight and leaves a closure; the product
runs when the policy has nothing better to do.

These rules must hold, so that gradients have the bits of a whole backward:

1. Autograd sums the gradients from several uses of a parameter in the order of its walk, before it
   adds the sum to `.grad`. Closures of one parameter are kept in that order, summed, and added
   once; microbatch by microbatch.
2. A parameter may also be used by functions that do not take part (a head that shares the weight of
   an embedding). A hook on the parameter hears the gradient that autograd is about to accumulate.
   It is None where every use was deferred. Else waiting gradients are added first, the noted
   products join at once, and from then on nothing of that parameter is deferred.
3. Tensors that a closure reads stay as they are until it has run. Autograd adds in place to
   gradients that nobody else holds, and a closure holds them. Gradients of parameters have memory
   before a backward (`Bucket.open`), or autograd would take over the first one, which may be a view
   of what a closure reads. Inputs that want no gradient are the user's, who may change them: their
   product is not deferred. Any other change is noticed.
4. Nothing is deferred outside the backward of a stage, in a graph of gradients (`create_graph`), or
   by a call for other gradients within a backward (`torch.autograd.grad(..., inputs)`): there
   autograd decides what becomes of it.

The collector hangs on the parameter, as its hook: on CUDA autograd walks the graph on a thread of
its own, and hooks are not pickled.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from .accumulator import Accumulator, accumulator_of

Compute = Callable[[], Tensor]


def defer_weight_gradient(parameter: Tensor, compute: Compute) -> Tensor | None:
    """Let the gradient of a weight wait, from within the backward of an autograd function.

    The backward returns the result of this call as its gradient for `parameter`.

    Args:
        parameter: leaf tensor that the function was given, as `ctx.saved_tensors` or the module has
            it.
        compute: function without arguments that computes the gradient, of the parameter's shape. It
            is called at most once, later or at once, without a graph. It must not change the
            tensors that it reads, nor may anyone else before it has run.
    Returns:
        None where the gradient will be computed later, by the `W` of this stage and microbatch, or
        where nobody wants it. Else the gradient, computed now: outside axrt, under a policy that
        does not split backwards, where the parameter has hooks that want to see it, and with
        `memory.zero = 3`, under which weights that `compute` may read are let go before.
    Raises:
        TypeError: `compute` is not callable.

    ```python
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors

            def product():
                return (gradient * x).sum_to_size(weight.shape)

            return gradient * weight, axrt.defer_weight_gradient(weight, product)
    ```
    """
    if not callable(compute):
        raise TypeError(
            f"defer_weight_gradient got a {type(compute).__name__} to compute with; expected a "
            "function without arguments"
        )
    deferral = _deferral_of(parameter)
    if deferral is None or not (deferral.takes(parameter) and deferral.may_keep(compute)):
        return compute()
    try:
        accumulated = torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # a call for this very gradient
        return compute()
    if accumulated:
        deferral.note(parameter, compute)
    return None


class Deferral:
    """The weight gradients of a stage that have not been computed yet.

    Args:
        parameters: trained parameters of the stage; `defer_weight_gradient` finds this object
            through them.
        passing: function that gives the memory of weights, by identity of storages, where it is let
            go after an input gradient (ZeRO stage 3); None: weights stay.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        passing: Callable[[], Collection[int]] | None = None,
    ) -> None:
        self._passing = passing
        self._collecting: deque[tuple[nn.Parameter, list[Compute]]] | None = None
        # Parameters by identity here: comparing tensors means something else, and a reference would
        # keep them alive.
        self._noted: dict[
            tuple[int, int], list[Compute]
        ] = {}  # of a walk of autograd's that has not accumulated them yet
        self._waiting: dict[int, deque[tuple[nn.Parameter, list[Compute]]]] = {}
        self._owed: Counter[int] = Counter()  # how many wait, of each parameter
        self._shared: set[int] = set()  # parameters that others use too
        self._handles = [
            parameter.register_hook(_Ear(self, parameter))  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def collecting(self, number: int) -> Iterator[None]:
        """Context within which deferred gradients belong to microbatch `number`."""
        self._collecting = self._waiting[number] = deque()
        try:
            yield
            assert not self._noted, "autograd has not accumulated a gradient that was deferred"
        finally:
            self._collecting = None
            self._noted.clear()

    def takes(self, parameter: Tensor) -> bool:
        """The gradient of this parameter may be deferred now."""
        return (
            self._collecting is not None
            and not torch.is_grad_enabled()
            and id(parameter) not in self._shared
            and not _has_other_hooks(parameter)
        )

    def may_keep(self, compute: Compute) -> bool:
        """What the function reads will be there later: not weights that are let go before."""
        if self._passing is None:
            return True
        if not isinstance(compute, _WeightProduct):
            return False
        passing = self._passing()
        return not any(one.untyped_storage()._cdata in passing for one in compute.reads)

    def note(self, parameter: Tensor, compute: Compute) -> None:
        """Keep the function that computes a gradient, until autograd has gone through all uses of
        the parameter."""
        self._noted.setdefault((torch._C._current_graph_task_id(), id(parameter)), []).append(
            compute
        )

    def pieces(self, number: int) -> int:
        """Number of weight gradients of microbatch `number` that wait, one a parameter."""
        return len(self._waiting.get(number, ()))

    def parameters(self, number: int) -> list[nn.Parameter]:
        """The parameters whose gradients of microbatch `number` wait, in the order of their
        pieces."""
        return [parameter for parameter, _ in self._waiting.get(number, ())]

    def waiting_bytes(self, number: int) -> int:
        """Bytes of memory that waiting products of `Linear` read for microbatch `number`.

        Memory that the user's own functions read is not counted: it is not known.
        """
        products = [
            one
            for _, computes in self._waiting.get(number, ())
            for one in computes
            if isinstance(one, _WeightProduct)
        ]
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for one in products
            for tensor in one.reads
        }
        return sum(storages.values())

    def run_piece(self, number: int) -> None:
        """Compute the next gradient of microbatch `number`, in the order of its backward, and add
        it to the parameter's `.grad`, or by its accumulator.

        Raises:
            RuntimeError: a tensor that the product reads was changed in place.
            ValueError: the user's function gave something else than a tensor of the parameter's
                shape.
        """
        waiting = self._waiting[number]
        if waiting:
            self._add(*waiting.popleft())
        if not waiting:
            del self._waiting[number]

    def drop(self) -> None:
        """Forget all that waits."""
        self._waiting.clear()
        self._owed.clear()

    def hear(self, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
        """Take note that autograd has gone through all uses of a parameter.

        Args:
            parameter: trained parameter of the stage.
            gradient: sum of the gradients that were not deferred; None where all were.
        Returns:
            The gradient that autograd is to accumulate instead; None where it goes on with its own.
        """
        noted = (
            self._noted.pop((torch._C._current_graph_task_id(), id(parameter)), None)
            if self._noted
            else None
        )
        if gradient is None:
            if noted is not None and self._collecting is not None:
                self._collecting.append((parameter, noted))
                self._owed[id(parameter)] += 1
            return None
        if self._owed[id(parameter)]:
            self._catch_up(parameter)
        if noted is None:
            return None
        self._shared.add(id(parameter))
        return gradient + _sum(noted)

    def _catch_up(self, parameter: nn.Parameter) -> None:
        """Add a parameter's waiting gradients before autograd adds later ones."""
        for waiting in self._waiting.values():
            mine = [entry for entry in waiting if entry[0] is parameter]
            for entry in mine:
                self._add(*entry)
            if mine:  # a piece each stays, for the brain counts them
                done = [(one, [] if one is parameter else computes) for one, computes in waiting]
                waiting.clear()
                waiting.extend(done)

    def _add(self, parameter: nn.Parameter, computes: list[Compute]) -> None:
        if computes:
            self._owed[id(parameter)] -= 1
            _add(parameter, computes)


# A hook on the weight decides what may wait: only autograd knows who else used that weight.
class _Ear:
    """The hook by which a `Deferral` hangs on a parameter; it does not keep the parameter alive."""

    def __init__(self, deferral: Deferral, parameter: nn.Parameter) -> None:
        self.deferral = deferral
        self._parameter = weakref.ref(parameter)

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        parameter = self._parameter()
        return None if parameter is None else self.deferral.hear(parameter, gradient)


def _deferral_of(parameter: Tensor) -> Deferral | None:
    """The deferral of the last stage that was made with the parameter; None where there is none."""
    ears = [hook for hook in (parameter._backward_hooks or {}).values() if isinstance(hook, _Ear)]
    return ears[-1].deferral if ears else None


def _has_other_hooks(parameter: Tensor) -> bool:
    """The parameter has hooks that would see None, or nothing."""
    others = (
        hook for hook in (parameter._backward_hooks or {}).values() if not isinstance(hook, _Ear)
    )
    after = parameter._post_accumulate_grad_hooks
    return any(True for _ in others) or (
        bool(after) and any(not isinstance(hook, Accumulator) for hook in after.values())
    )


@torch.no_grad()
def _add(parameter: nn.Parameter, computes: list[Compute]) -> None:
    gradient = _sum(computes)
    if not isinstance(gradient, Tensor) or gradient.shape != parameter.shape:
        what = (
            f"has shape {tuple(gradient.shape)}"
            if isinstance(gradient, Tensor)
            else f"is a {type(gradient).__name__}"
        )
        raise ValueError(
            f"a deferred weight gradient {what}; expected that of its parameter, "
            f"{tuple(parameter.shape)}. "
            "Look at the function given to axrt.defer_weight_gradient"
        )
    if accumulator := accumulator_of(parameter):
        accumulator.add(gradient)
    elif parameter.grad is None:
        # A copy, laid out like the parameter as autograd would: the closure may have returned what
        # somebody else still reads.
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    else:
        parameter.grad += gradient


def _sum(computes: list[Compute]) -> Tensor:
    first, *others = computes
    total = first()
    for compute in others:
        total = total + compute()
    return total


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
        if (
            not torch.compiler.is_compiling()
            and _is_plain(input)
            and weight is not None
            and "bias" in own
            and _may_defer(weight)
            and not _is_looked_into(input.device)
        ):
            product: Tensor = _Product.apply(input, weight, own["bias"])  # type: ignore[no-untyped-call]
            return product
        return super().forward(input)


def _may_defer(weight: nn.Parameter) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and weight.layout is torch.strided
        and weight.is_contiguous()
        and weight.numel() > 0
        and torch.is_grad_enabled()
    )


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and may_wait(x)


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
            torch.mm(_flat(x), weight.t(), out=flat_out)
        else:
            torch.addmm(bias, _flat(x), weight.t(), out=flat_out)
        return out

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if gradient is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        flat = _flat(gradient)
        return (
            flat.mm(weight).view(x.shape) if of_x else None,
            defer_weight_gradient(ctx.parameter, _WeightProduct(flat, x)) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


class _WeightProduct:
    """The weight's gradient, of shape (outputs, inputs), from the output's (rows, outputs) and the
    input (..., inputs).

    Not `weight.grad.addmm_`: it would save a pass over memory, and has other bits than a product
    that is added.
    """

    def __init__(self, gradient: Tensor, x: Tensor) -> None:
        self._gradient, self._x = gradient, x
        self._versions = gradient._version, x._version

    @property
    def reads(self) -> tuple[Tensor, Tensor]:
        return self._gradient, self._x

    def __call__(self) -> Tensor:
        if self._versions != (self._gradient._version, self._x._version):
            raise RuntimeError(
                f"the input of a torch.nn.Linear, of shape {tuple(self._x.shape)}, or its output's "
                "gradient was changed in place after the "
                "backward, and the weight gradient that waits needs it; expected a policy that "
                "does not split backwards, such as "
                "1f1b, or a clone of what is changed"
            )
        return self._gradient.t().mm(_flat(self._x))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
