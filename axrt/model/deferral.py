"""Weight gradients that wait (zero bubble): the backward of a stage gives the gradients of its
inputs, and notes how to compute those of weights."""

# Walking the autograd graph twice, once for inputs and once for weights, would cost a second walk
# and all that layers compute for both. So the graph is walked once. A function that takes part
# (`torch.nn.Linear` does, see `linear.py`) gives None for its weight and leaves a closure; the
# product runs when the policy has nothing better to do.
#
# These rules must hold, so that gradients have the bits of a whole backward:
#
# 1. Autograd sums the gradients from several uses of a parameter in the order of its walk, before
#    it adds the sum to `.grad`. Closures of one parameter are kept in that order, summed, and added
#    once; microbatch by microbatch.
# 2. A parameter may also be used by functions that do not take part (a head that shares the weight
#    of an embedding). A hook on the parameter hears the gradient that autograd is about to
#    accumulate. It is None where every use was deferred. Else waiting gradients are added first,
#    the noted products join at once, and from then on nothing of that parameter is deferred.
# 3. Tensors that a closure reads stay as they are until it has run. Autograd adds in place to
#    gradients that nobody else holds, and a closure holds them. Gradients of parameters have memory
#    before a backward (`Bucket.open`), or autograd would take over the first one, which may be a
#    view of what a closure reads. Inputs that want no gradient are the user's, who may change them:
#    their product is not deferred. Any other change is noticed.
# 4. Nothing is deferred outside the backward of a stage, in a graph of gradients (`create_graph`),
#    or by a call for other gradients within a backward (`torch.autograd.grad(..., inputs)`): there
#    autograd decides what becomes of it.
#
# The collector hangs on the parameter, as its hook: on CUDA autograd walks the graph on a thread of
# its own, and hooks are not pickled.

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .accumulator import Accumulator, accumulator_of
from .weight_product import Pair

Compute = Callable[[], Tensor]


class _Waiting(NamedTuple):
    """A piece of a weight gradient that waits."""

    parameter: Tensor
    computes: list[Compute]  # gradients of its uses, to be added up
    beside: Callable[[], None] | None = None  # what else is to be done with what they read


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
        self._collecting: deque[_Waiting] | None = None
        # Parameters by identity here: comparing tensors means something else, and a reference would
        # keep them alive.
        self._noted: dict[
            tuple[int, int], list[Compute]
        ] = {}  # of a walk of autograd's that has not accumulated them yet
        self._waiting: dict[int, deque[_Waiting]] = {}
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
        """Context within which deferred gradients belong to microbatch `number`; of an input
        gradient in pieces it is entered for each."""
        if number not in self._waiting:
            self._waiting[number] = deque()
        self._collecting = self._waiting[number]
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
        if not isinstance(compute, Pair):
            return False
        passing = self._passing()
        return not any(one.untyped_storage()._cdata in passing for one in compute.reads)

    def note(self, parameter: Tensor, compute: Compute) -> None:
        """Keep the function that computes a gradient, until autograd has gone through all uses of
        the parameter."""
        self._noted.setdefault((torch._C._current_graph_task_id(), id(parameter)), []).append(
            compute
        )

    @torch.no_grad()
    def add_beside(self, parameter: Tensor, act: Callable[[], None]) -> None:
        """Do something with what a weight gradient reads: as a piece beside those that wait, or at
        once.

        Args:
            parameter: the weight.
        """
        if self._collecting is None:
            act()
        else:
            self._collecting.append(_Waiting(parameter, [], act))

    def pieces(self, number: int) -> int:
        """Number of weight gradients of microbatch `number` that wait, one a parameter, and of what
        is to be done beside them."""
        return len(self._waiting.get(number, ()))

    def waits(self, number: int) -> bool:
        """Its input gradient has run, and not yet all of its pieces."""
        return number in self._waiting

    def parameters(self, number: int) -> list[Tensor]:
        """The parameters whose gradients of microbatch `number` wait, in the order of their
        pieces."""
        return [one.parameter for one in self._waiting.get(number, ())]

    def waiting_bytes(self, number: int) -> int:
        """Bytes of memory that waiting products of `Linear` read for microbatch `number`.

        Memory that the user's own functions read is not counted: it is not known.
        """
        waiting = self._waiting.get(number, ())
        actors: list[object] = [one for of in waiting for one in (*of.computes, of.beside)]
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for one in actors
            if isinstance(one, Pair)
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
            self._add(waiting.popleft())
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
                self._collecting.append(_Waiting(parameter, noted))
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
            for place, piece in enumerate(waiting):
                if piece.parameter is parameter:
                    self._add(piece)
                    waiting[place] = _Waiting(parameter, [])  # stays, for the brain counts pieces

    def _add(self, piece: _Waiting) -> None:
        if piece.computes:
            self._owed[id(piece.parameter)] -= 1
            _add(piece.parameter, piece.computes)
        if piece.beside:
            piece.beside()


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
def _add(parameter: Tensor, computes: list[Compute]) -> None:
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
