"""What the nodes of a graph do besides computing: which may have the same memory, which change it
in place, which draw random numbers."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from axrt.errors import ModelError

# They give what they were given where they do nothing, and neither their schema nor the tensors
# that torch.export has noted say so.
_GIVE_BACK = "dropout"
# They write to running means and variances, and their schema does not say so.
_RUNNING, _UNLESS = "running_", ("training", "train", "use_input_stats")
_CONTEXTS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


class Effects:
    """The effects of the nodes of one graph.

    Args:
        nodes: all nodes of the graph, in order.
        inner: for nodes that stand for a graph within a context, such as `torch.no_grad()`, that
            graph.
    Raises:
        ModelError: a graph is run in another way, such as one of two.
    """

    def __init__(self, nodes: Sequence[Node], inner: dict[Node, GraphModule]) -> None:
        self._inner = {node: _of(graph) for node, graph in inner.items()}
        self._placeholders = [node for node in nodes if node.op == "placeholder"]
        self._above = {node: node for node in nodes}
        first: dict[int, Node] = {}
        for node in nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()._cdata
                self._join(node, first.setdefault(storage, node))
            for one in self._given_back_by(node):
                self._join(node, one)
        self.changes = {node: self._changed_by(node) for node in nodes}
        changed = [one for found in self.changes.values() for one in found]
        self._changed = {self.memory_of(one) for one in changed}

    def memory_of(self, node: Node) -> Node:
        """A node that stands for all that may have the same memory."""
        while (above := self._above[node]) is not node:
            node = above
        return node

    def is_changed(self, node: Node) -> bool:
        """Some node changes this one's memory in place."""
        return self.memory_of(node) in self._changed

    def draws(self, node: Node) -> bool:
        """The node draws random numbers."""
        if context := self._context(node):
            return any(map(context[0].draws, context[0].changes))
        return (
            isinstance(node.target, OpOverload)
            and torch.Tag.nondeterministic_seeded in node.target.tags
        )

    def _join(self, node: Node, other: Node) -> None:
        self._above[self.memory_of(node)] = self.memory_of(other)

    def _context(self, node: Node) -> "tuple[Effects, list[Node]] | None":
        """The effects of the graph that a node runs, and what it is given."""
        graphs = [one for one in node.all_input_nodes if one in self._inner]
        if not graphs:
            return None
        name = getattr(node.target, "__name__", str(node.target))
        if name not in _CONTEXTS:
            raise ModelError(
                f"axrt.traced found {name} in the module's graph, such as torch.cond; expected a "
                "forward that runs the same operations for every microbatch"
            )
        place = node.args.index(graphs[0])
        given = [of for of in node.args[place + 1 :] if isinstance(of, Node)]
        return self._inner[graphs[0]], given

    def _given_back_by(self, node: Node) -> list[Node]:
        """The nodes whose memory a node's result may have, beside what values tell."""
        if not isinstance(node.target, OpOverload):
            return []
        if _GIVE_BACK in node.target._schema.name:
            return node.all_input_nodes
        return [one for one, of in _arguments(node) if of.alias_info]

    def _changed_by(self, node: Node) -> list[Node]:
        """The nodes whose memory a node changes in place."""
        if context := self._context(node):
            inner, given = context
            pairs = zip(given, inner._placeholders, strict=True)
            return [one for one, within in pairs if inner.is_changed(within)]
        if node.target is torch.ops.aten.detach_.default:  # which changes no value
            return []
        keeps = any(of.name in _UNLESS and value is False for value, of in _all_arguments(node))
        return [
            one
            for one, of in _arguments(node)
            if (of.alias_info and of.alias_info.is_write)
            or (of.name.startswith(_RUNNING) and not keeps)
        ]


def _of(graph: GraphModule) -> Effects:
    return Effects(list(graph.graph.nodes), graphs_in(graph))


def graphs_in(graph: GraphModule) -> dict[Node, GraphModule]:
    """The graphs within contexts that a graph runs, by the node that stands for each."""
    named = ((node, node.target) for node in graph.graph.nodes if node.op == "get_attr")
    found = {node: getattr(graph, str(target)) for node, target in named}
    return {node: one for node, one in found.items() if isinstance(one, GraphModule)}


def _arguments(node: Node) -> Iterator[tuple[Node, Any]]:
    """Each node that a node is given, with the argument that the operation's schema has for it."""
    for value, of in _all_arguments(node):
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Node):
                yield one, of


def _all_arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """Each value that a node is given, with the argument of the schema."""
    if isinstance(node.target, OpOverload):
        of_schema = node.target._schema.arguments
        named = {of.name: of for of in of_schema}
        yield from zip(node.args, of_schema, strict=False)
        yield from ((value, named[key]) for key, value in node.kwargs.items())
