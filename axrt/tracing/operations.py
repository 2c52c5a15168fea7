"""Floating-point operations of a graph's nodes, counted without computing them."""

# torch's counter runs on the shapes that torch.export has noted. Models of transformers cannot be
# counted on the meta device as they are, since they ask for values there.

from typing import Any

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from .program import Program, has_known_size

# Products of groups of rows, each with a matrix of its own, as layers of experts have them.
_OF_GROUPS = "grouped_mm"


def counted_operations(program: Program) -> dict[Node, int]:
    """Operations of each step's forward, where it has some."""
    found: dict[Node, int] = {}
    for step in program.steps:
        if operations := _operations_of(program, step):
            found[step] = operations
    return found


def _operations_of(program: Program, step: Node) -> int:
    inner = [program.graphs[one] for one in step.all_input_nodes if one in program.graphs]
    if inner:
        return sum(_counted(node) for node in inner[0].graph.nodes)
    return _counted(step)


def _counted(node: Node) -> int:
    if not isinstance(node.target, OpOverload) or not isinstance(node.meta.get("val"), FakeTensor):
        return 0
    if not all(map(has_known_size, (node, *node.all_input_nodes))):
        return 0
    args: Any = map_arg(node.args, lambda one: one.meta["val"])
    keys: Any = map_arg(node.kwargs, lambda one: one.meta["val"])
    if _OF_GROUPS in str(node.target):
        rows, matrices = args[:2]
        return 2 * int(rows.shape[-2]) * int(matrices.shape[-2]) * int(matrices.shape[-1])
    if not _multiplies(args):
        return 0
    counter = FlopCounterMode(display=False)
    with counter:
        node.target(*args, **keys)
    return int(counter.get_total_flops())


def _multiplies(args: Any) -> bool:
    """At least two of its arguments are tensors of two dimensions or more, as of a product."""
    tensors = [one for one in args if isinstance(one, FakeTensor) and one.dim() > 1]
    return len(tensors) > 1
