"""Layers run by `torch.compile`, each by itself."""

# Stages are cut between layers, so the compiled code, and with it every bit, is the same wherever a
# layer is held.

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .module import LossFunction

_VARIANTS = 64  # of a kind of layer: of shapes, of training and evaluation


class Compiler:
    """Compiles layers, one kind of layer once; compiled code computes a backward whole.

    Torch keeps compiled code with the code object that it was compiled from, up to a limit of
    variants beyond which it compiles no more, and the `torch.nn.Linear`s of all sizes share one. So
    a kind, layers of one class that print alike, gets a code object of its own, and the limit is
    raised for differences that printing does not show. Torch's guards see to it that layers of one
    kind which yet differ are compiled apart.

    Shapes are compiled as they are. Else torch would treat sizes as variable that have varied
    before, in whatever layers the process holds, and other code has other bits.

    Args:
        backend: name of a backend of `torch.compile`, such as "inductor".
    """

    def __init__(self, backend: str) -> None:
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, _VARIANTS)
        self._backend = backend
        self._of_kind: dict[tuple[type, str], Callable[[nn.Module, Any], Any]] = {}

    def layer(self, layer: nn.Module) -> Callable[[Any], Any]:
        """A function that runs the layer's compiled code; the layer itself stays as it is, its
        names too."""
        kind = (type(layer), repr(layer))
        if kind not in self._of_kind:
            self._of_kind[kind] = torch.compile(
                _with_code_of_its_own(_run), backend=self._backend, dynamic=False
            )
        run = self._of_kind[kind]
        return lambda value: run(layer, value)

    def loss(self, loss_fn: LossFunction) -> LossFunction:
        """The loss function, compiled."""

        def compute(outputs: Any, targets: Any) -> Any:
            return loss_fn(outputs, targets)

        compiled: LossFunction = torch.compile(
            _with_code_of_its_own(compute), backend=self._backend, dynamic=False
        )
        return compiled


def _run(layer: nn.Module, value: Any) -> Any:
    return layer(value)


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        None,
        function.__closure__,
    )
