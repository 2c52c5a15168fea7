"""One node for each tensor of a graph, where several would stand for it."""

# Eager code adds a tensor's gradient up in one place. Where two nodes stand for one tensor, such as
# a tensor and what dropout gives back of it in evaluation, both might travel. Their gradients would
# be added up apart, and sums in another order have other bits.
#
# Behind a change in place, and behind most of what gives a tensor back, torch.export itself has one
# node for both.

from typing import Any

from torch import no_grad
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

# Of all operations that are none of others autograd gives a new tensor.
_OF_OTHERS = DispatchKey.CompositeImplicitAutograd


def unify(graph: Graph) -> None:
    """Leave out the nodes of an exported graph that give a tensor back as it is, in the types that
    it was exported in. What is read of weights and inputs stays."""
    for node in list(graph.nodes):
        if same := _given_back(node):
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _given_back(node: Node) -> Node | None:
    """The node whose tensor an operation gives back; None: it gives another one."""
    of = node.target
    if not isinstance(of, OpOverload) or of._schema.is_mutable:
        return None
    if not of.has_kernel_for_dispatch_key(_OF_OTHERS):
        return None
    given: Any = (node.args, node.kwargs)
    args, kwargs = map_arg(given, lambda read: read.meta.get("val"))
    try:
        with no_grad():
            found = of(*args, **kwargs)
    except Exception:  # what cannot be tried stays a node of its own
        return None
    read = (one for one in node.all_input_nodes if one.op != "placeholder")
    return next((one for one in read if one.meta.get("val") is found), None)
