"""A module's exported graph: what its nodes read, what is alive between two of them, and what
depends on no input."""

# What torch.export gives is no functional graph: running means are changed in place, and so is an
# activation behind `ReLU(inplace=True)`. Eager code runs the same operations in the same order, so
# a layer that is a run of nodes has the module's bits. What it must not do is part two names of one
# memory, of which one is changed afterwards: `parts_memory` says where.
#
# What depends on no input, no weight and no random number (masks, rotary tables) is computed by
# whoever reads it (`tables.py`), and never travels. What depends on a persistent buffer is no such
# constant: a checkpoint may give that buffer other values.

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx import Node
from torch.utils._pytree import TreeSpec

from axrt.errors import ModelError

from .effects import Effects, graphs_in
from .exporting import PREFIX
from .same_tensor import unify

# They look whether types are those that the sample has led to; layers look at the sample's.
_CHECKS = (torch.ops.aten._assert_tensor_metadata.default,)


class Weight(NamedTuple):
    """A parameter, buffer or constant that a graph reads."""

    name: str  # name in the module; of a constant the one that torch.export gave
    is_parameter: bool
    persistent: bool  # it is saved in checkpoints
    constant: Tensor | None = None  # value of a constant, which is no buffer of a module


class Program:
    """One graph of a module.

    Args:
        module: the module itself.
        changed: names of buffers that another graph of the module changes in place.
    Attributes:
        changed: names of buffers that this or the other graph changes in place.
        inputs: nodes of the tensors of a microbatch, in order.
        weights: what each node stands for that is a parameter, a buffer or a constant.
        graphs: graphs within a context, such as no_grad, by the node that stands for each.
        steps: nodes that compute, in order, without those that depend on no input.
        outputs: what the module returns, flat: nodes, or values that are the same each time.
        out_spec: how outputs are put together.
    """

    def __init__(
        self, exported: ExportedProgram, module: nn.Module, changed: Collection[str] = ()
    ) -> None:
        unify(exported.graph_module.graph)
        nodes = list(exported.graph_module.graph.nodes)
        signature = exported.graph_signature
        placeholders = [node for node in nodes if node.op == "placeholder"]
        given = dict(zip(placeholders, signature.input_specs, strict=True))
        self.inputs = [node for node, of in given.items() if of.kind is InputKind.USER_INPUT]
        named = (*module.named_parameters(), *module.named_buffers())
        first_names = {id(tensor): name for name, tensor in named}
        self.module, self.weights = module, dict[Node, Weight]()
        for node, of in given.items():
            if of.kind is not InputKind.USER_INPUT:
                self.weights[node] = _weight(of, exported, module, first_names)
        self.graphs = graphs_in(exported.graph_module)
        self._effects = Effects(nodes, self.graphs)
        self.changed = frozenset(changed) | {
            of.name for node, of in self.weights.items() if self._effects.is_changed(node)
        }
        for node, of in self.weights.items():
            if of.constant is not None and self._effects.is_changed(node):
                raise ModelError(
                    f"{of.name} is a tensor of the module that its forward changes in place, and "
                    "no buffer, so that nobody would save it or give it back; expected "
                    f"register_buffer({of.name!r}, ...)"
                )
        (outputs,) = next(node for node in nodes if node.op == "output").args
        self.outputs: Sequence[Any] = outputs
        self.out_spec: TreeSpec = exported.call_spec.out_spec
        other = [of for of in signature.output_specs if of.kind is not OutputKind.USER_OUTPUT]
        if other:
            raise ModelError(
                f"the exported graph hands out {other[0].arg} as a {other[0].kind.name}; expected "
                "one that changes buffers in place, as torch.export makes it"
            )
        needed = self._needed(nodes)
        self._dependent = self._depending(needed)
        self.steps = [node for node in needed if node in self._dependent]

    @cached_property
    def ends(self) -> dict[Node, int]:
        """For each step and input the index of the last step that reads it; their number for
        outputs."""
        found = {
            node: index
            for index, step in enumerate(self.steps)
            for node in step.all_input_nodes
            if node in self._dependent
        }
        return found | {node: len(self.steps) for node in self.outputs if node in self._dependent}

    def alive(self, begin: int) -> list[Node]:
        """The inputs and steps before step `begin` that it or a later one reads, in order."""
        return self._alive[begin]

    @cached_property
    def _alive(self) -> list[list[Node]]:
        found, now = [], list(self.inputs)
        for begin in range(len(self.steps) + 1):
            newest = self.steps[begin - 1 : begin] if begin else []
            now = [node for node in (*now, *newest) if self.ends.get(node, -1) >= begin]
            found.append(now)
        return found

    def weights_of(self, step: Node) -> list[Weight]:
        """The parameters and buffers that are a layer's state, of those that a step reads."""
        return [self.weights[node] for node in step.all_input_nodes if self._is_state(node)]

    def parts_memory(self, begin: int) -> bool:
        """A boundary before step `begin` would part two names of one memory, of which one is
        changed behind it."""
        memories = [self._effects.memory_of(node) for node in self.alive(begin)]
        later = [one for one in memories if self._last_changes.get(one, -1) >= begin]
        return any(one in self._held or memories.count(one) > 1 for one in later)

    @cached_property
    def _last_changes(self) -> dict[Node, int]:
        """For memory that is changed in place the last step that does."""
        memory_of, changes = self._effects.memory_of, self._effects.changes
        return {
            memory_of(node): index
            for index, step in enumerate(self.steps)
            for node in changes[step]
        }

    @cached_property
    def _held(self) -> set[Node]:
        return {self._effects.memory_of(node) for node in self.weights}

    def constants_for(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes that depend on no input and that these nodes are or read, each before those
        that read it."""
        found: set[Node] = set()
        waiting = [one for node in nodes for one in (node, *node.all_input_nodes)]
        while waiting:
            node = waiting.pop()
            if self.is_constant(node) and node not in found:
                found.add(node)
                waiting += node.all_input_nodes
        return sorted(found)

    def is_constant(self, node: Node) -> bool:
        """The node computes something that depends on no input."""
        return node.op == "call_function" and node not in self._dependent

    def _is_state(self, node: Node) -> bool:
        of = self.weights.get(node)
        return of is not None and (of.persistent or of.name in self.changed)

    def _needed(self, nodes: Sequence[Node]) -> list[Node]:
        """What outputs need, what changes something, and what draws random numbers."""
        needed = {node for node in self.outputs if isinstance(node, Node)}
        for node in reversed(nodes):
            if node.op != "call_function" or node.target in _CHECKS:
                continue
            acts = self._effects.changes[node] or self._effects.draws(node) or _asserts(node)
            if node in needed or acts:
                needed |= {node, *node.all_input_nodes}
        return [node for node in nodes if node in needed and node.op == "call_function"]

    def _depending(self, needed: Sequence[Node]) -> set[Node]:
        """What depends on a microbatch, a weight or a random number. What is changed in place is
        counted among it, since whoever computes it anew would have to change it anew."""
        found = {*self.inputs, *filter(self._is_state, self.weights)}
        for node in needed:
            reads = any(one in found for one in node.all_input_nodes) or _asserts(node)
            if reads or self._effects.draws(node) or self._effects.is_changed(node):
                found.add(node)
        return found.difference(self.weights)


def _asserts(node: Node) -> bool:
    return "assert" in str(node.target) or "sym_constrain" in str(node.target)


def has_known_size(node: Node) -> bool:
    """A node's value is a tensor whose size does not depend on values of others."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


def _weight(
    of: InputSpec, exported: ExportedProgram, module: nn.Module, first_names: Mapping[int, str]
) -> Weight:
    full = str(of.target)
    name = full.removeprefix(PREFIX)
    if of.kind is InputKind.PARAMETER:
        return Weight(first_names[id(module.get_parameter(name))], True, True)
    if of.kind is InputKind.BUFFER:
        return Weight(first_names[id(module.get_buffer(name))], False, bool(of.persistent))
    constant = exported.constants.get(full)
    if isinstance(constant, Tensor):
        return Weight(name, False, False, constant)
    raise ModelError(
        f"the module's graph needs {name}, a {of.kind.name}; expected parameters, buffers and "
        "tensors alone"
    )
