"""The inlet of a graph: a node whose outputs are the tensors that arrived, and whose backward
catches their gradients."""

# Leaves with `.grad` would do. But torch lays a leaf's gradient out like the leaf, while in one
# process the stage before would get it as it is; strides decide which kernels run, and so the last
# bits. An inlet also lets the first layer of a stage work in place.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from axrt.errors import ModelError
from axrt.transport.payload import flatten, unflatten

Gradients = tuple[Tensor | None, ...]


@dataclass(slots=True)
class Inflow:
    """The tensors and gradients that pass the inlet of a graph.

    It must not know the graph's roots: the graph holds it, and that circle nothing would collect.
    """

    # tensors that want a gradient; () once the inlet has taken them
    arrived: tuple[Tensor, ...] = ()
    gradients: Gradients = ()  # gradients of these tensors, once the inlet has caught them
    caught: bool = False  # the inlet has caught them


class InletNode(torch.autograd.Function):
    """The node of the graph."""

    @staticmethod
    def forward(ctx: Any, inflow: Inflow, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.inflow = inflow
        ctx.set_materialize_grads(False)
        tensors, inflow.arrived = inflow.arrived, ()
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        if ctx.inflow.caught:
            raise ModelError(
                "a layer got a tensor from an earlier one aside from its input, as it did not in "
                "the first step, and its gradient came after that one's was complete; expected "
                "all that passes between layers to be inputs and outputs, or memory.bucket_mb so "
                "large that a stage has one bucket"
            )
        ctx.inflow.caught = True
        ctx.inflow.gradients = gradients
        return None, None


class Inlet:
    """Lets payloads into graphs."""

    def __init__(self) -> None:
        self._anchor = torch.empty(0, requires_grad=True)  # so that autograd makes a node

    def through(self, inputs: Any, inflow: Inflow) -> Any:
        """The payload with its tensors that want a gradient from an inlet.

        Raises:
            TypeError: it is no payload.
        """
        if isinstance(inputs, Tensor) and inputs.layout is torch.strided:  # as nearly always
            if not inputs.requires_grad:
                return inputs
            inflow.arrived, inflow.gradients = (inputs.detach(),), (None,)
            (tensor,) = InletNode.apply(inflow, self._anchor)  # type: ignore[no-untyped-call]
            return tensor
        skeleton, tensors = flatten(inputs)
        wanting = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        if not wanting:
            return inputs
        inflow.arrived = tuple(tensors[place].detach() for place in wanting)
        inflow.gradients = (None,) * len(wanting)  # as long as no gradient flows back to them
        for place, tensor in zip(wanting, InletNode.apply(inflow, self._anchor), strict=True):  # type: ignore[no-untyped-call]
            tensors[place] = tensor
        return unflatten(skeleton, tensors)
