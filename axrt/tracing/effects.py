"""What the nodes of a graph do besides computing: which may have the same memory, which change it
in place, which draw random numbers."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

# They give what they were given where they do nothing, and their schema does not say so.
_MAY_GIVE_BACK = (torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default)


class Effects:
    """The effects of the nodes of one graph.

    Args:
        nodes: all nodes of the graph, in order.
        inner: for nodes that stand for a graph within a context, such as `torch.no_grad()`, that
            graph.
    """

    def __init__(self, nodes: Sequence[Node], inner: dict[Node, GraphModule]) -> None:
        self._inner = {node: _of(graph) for node, graph in inner.items()}
        self._placeholders = [node for node in nodes if node.op == "placeholder"]
        (self._outputs,) = [node.all_input_nodes for node in nodes if node.op == "output"]
        self._above = {node: node for node in nodes}
        for node in nodes:
            for one in self._shared_by(node):
                self._above[self.memory_of(node)] = self.memory_of(one)
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

    def _context(self, node: Node) -> "tuple[Effects, list[Node]] | None":
        """The effects of the graph that a node runs, and what it is given."""
        for place, one in enumerate(node.args):
            if isinstance(one, Node) and one in self._inner:
                given = [of for of in node.args[place + 1 :] if isinstance(of, Node)]
                return self._inner[one], given
        return None

    def _shared_by(self, node: Node) -> list[Node]:
        """The nodes whose memory a node's result may have."""
        if context := self._context(node):
            inner, given = context
            out = {inner.memory_of(one) for one in inner._outputs}
            pairs = zip(given, inner._placeholders, strict=True)
            return [one for one, within in pairs if inner.memory_of(within) in out]
        if node.op != "call_function":
            return []
        if not isinstance(node.target, OpOverload) or node.target in _MAY_GIVE_BACK:
            return node.all_input_nodes  # part of a list
        return [one for one, of in _arguments(node) if of.alias_info]

    def _changed_by(self, node: Node) -> list[Node]:
        """The nodes whose memory a node changes in place."""
        if context := self._context(node):
            inner, given = context
            pairs = zip(given, inner._placeholders, strict=True)
            return [one for one, within in pairs if inner.is_changed(within)]
        return [one for one, of in _arguments(node) if of.alias_info and of.alias_info.is_write]


def _of(graph: GraphModule) -> Effects:
    return Effects(list(graph.graph.nodes), graphs_in(graph))


def graphs_in(graph: GraphModule) -> dict[Node, GraphModule]:
    """The graphs within contexts that a graph runs, by the node that stands for each."""
    named = ((node, node.target) for node in graph.graph.nodes if node.op == "get_attr")
    found = {node: getattr(graph, str(target)) for node, target in named}
    return {node: one for node, one in found.items() if isinstance(one, GraphModule)}


def _arguments(node: Node) -> Iterator[tuple[Node, Any]]:
    """Each node that a node is given, with the argument that the operation's schema has for it."""
    if not isinstance(node.target, OpOverload):
        return
    of_schema = node.target._schema.arguments
    named = {of.name: of for of in of_schema}
    given = [*zip(node.args, of_schema, strict=False)]
    given += [(value, named[key]) for key, value in node.kwargs.items()]
    for value, of in given:
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Node):
                yield one, of
