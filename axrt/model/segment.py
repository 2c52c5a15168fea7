"""A segment of a microbatch's graph, and its backward."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from axrt.transport.payload import flatten

from .inlet import Gradients, Inflow
from .joints import BackJoint

if TYPE_CHECKING:
    from .aside import Aside, Root


class Segment(NamedTuple):
    """A part of the graph of a microbatch: what consecutive layers have made of what passed one
    inlet."""

    # index of its first layer, counted from the stage's; behind a joint of a team, that of the part
    # of the stage which it belongs to
    first: int
    inflow: Inflow  # inlet at which its gradients end
    roots: list[GradientEdge]  # edges of the graph at which its gradients begin
    # the loss's own gradient, 1, where the segment ends with the loss; None elsewhere
    of_loss: Gradients | None
    joint: BackJoint | None = None  # joint of a team behind the segment; None: there is none
    goes_on: bool = False  # its backward is in one piece with that of the segment behind it
    aside: "Aside | None" = None  # what has come in aside from a joint; None: nothing may

    def backward(self, given: Gradients, inner_roots: "Sequence[Root]" = ()) -> Gradients:
        """The gradients of its inputs, from those of its outputs.

        Args:
            inner_roots: where gradients begin within it, of what it has passed on aside from a
                joint.
        """
        inflow, edges, of_loss = self.inflow, self.roots, self.of_loss
        given = given if of_loss is None else of_loss
        if len(given) == len(edges) == 1 and not inner_roots:  # as nearly always
            if given[0] is not None:
                _walk((edges[0],), (given[0],))
            return inflow.gradients
        pairs = [*zip(edges, given, strict=True), *inner_roots]
        some = [(root, gradient) for root, gradient in pairs if gradient is not None]
        if some:
            _walk(tuple([root for root, _ in some]), tuple([gradient for _, gradient in some]))
        return inflow.gradients


def are_apart(
    graphs: Sequence[tuple[int, Sequence[GradientEdge]]], first_layer: Mapping[int, int]
) -> bool:
    """No graph of a microbatch reaches into another one, but by its inlet.

    Args:
        graphs: (number of its first layer, where its gradients begin) for each, in order.
        first_layer: number of the first layer that lists a parameter, by the parameter's id.
    Returns:
        False also where a graph uses a parameter that only later graphs list.
    """
    seen: dict[Any, int] = {}
    for graph, (_, roots) in enumerate(graphs):
        ends_before = graphs[graph + 1][0] if graph + 1 < len(graphs) else math.inf
        waiting = [root.node for root in roots]
        while waiting:
            node = waiting.pop()
            parameter = getattr(node, "variable", None)
            if parameter is not None:
                if first_layer.get(id(parameter), 0) >= ends_before:
                    return False
            elif node not in seen:
                seen[node] = graph
                waiting += [to for to, _ in node.next_functions if to is not None]
            elif seen[node] != graph:
                return False
    return True


def edge_of(tensor: Tensor) -> GradientEdge:
    """The edge of the graph that a tensor comes from.

    `get_gradient_edge` costs as much as a node, so it is called only for leaves and for functions
    that are written in Python: those hold their part of the graph only with a token.
    """
    made_by = tensor.grad_fn
    if made_by is None or isinstance(made_by, torch._C._FunctionBase):
        return get_gradient_edge(tensor)
    return GradientEdge(made_by, tensor.output_nr)


def may_travel(value: Any) -> bool:
    """A value is one that a graph may end at: it could be sent."""
    try:
        flatten(value)
    except TypeError:
        return False
    return True


def _walk(roots: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...]) -> None:
    """`torch.autograd.backward` without its preparation of arguments, which costs more than the
    walk through an empty stage."""
    _engine_run_backward(
        roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )
