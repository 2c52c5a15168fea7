"""Nodes of a graph as a function of a layer."""

# A node that is the product of a `torch.nn.Linear` becomes a call of that very module: its weight
# gradient may wait, and whatever looks for linear modules finds it. Other nodes stay the operations
# that they are. The device that a node names becomes the one that the layer runs on.

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.fx.node import map_aggregate

from axrt.model.linear import addmm, linear

from .exporting import PREFIX
from .layer import CONSTANTS, CONTEXTS
from .program import Program, Weight

_LINEAR = torch.ops.aten.linear.default
# Products whose weight gradient may wait, and which argument the weight is.
_PRODUCTS: dict[Any, tuple[Any, int]] = {
    _LINEAR: (linear, 1),
    torch.ops.aten.addmm.default: (addmm, 2),
}
_CALL = re.compile(r"@\d+$")  # of a module that runs several times
Held = tuple[nn.Module | Tensor, bool]  # what a layer has, and whether checkpoints save it


class NodesAsFunction:
    """Some nodes, as a function of a layer, a device and values.

    Args:
        mode: name of the graph, for what the module has no name for.
        given: nodes whose values the function is given, in order.
    Attributes:
        state: modules, parameters and buffers that they read, by name.
    """

    def __init__(self, program: Program, mode: str, given: Sequence[Node]) -> None:
        self._program, self._module, self._mode = program, program.module, mode
        self.state: dict[str, Held] = {}
        self._graph = fx.Graph()
        self._device = self._graph.placeholder("device")
        self._made = {node: self._graph.placeholder(node.name) for node in given}

    @property
    def buffers(self) -> list[str]:
        """The names of the buffers that they read."""
        named = ((name, of) for name, (of, _) in self.state.items() if isinstance(of, Tensor))
        return [name for name, _ in named if not name.startswith(CONSTANTS)]

    def compiled(self, nodes: Sequence[Node], out: Sequence[Any]) -> Callable[..., Any]:
        """The function that runs these nodes in order and gives the values of others."""
        for node in nodes:
            self._made[node] = self._copied(node)
        self._graph.output(tuple(map(self._value, out)))
        held = {name: of for name, (of, _) in self.state.items()}
        # fx makes a class for a graph, and its forward serves any module with the same attributes.
        function: Callable[..., Any] = type(fx.GraphModule(held, self._graph)).forward
        return function

    def _copied(self, node: Node) -> Node:
        if (path := self._path_of_linear(node)) is not None:
            self.state[path] = self._module.get_submodule(path), True
            return self._graph.call_module(path, (self._value(node.args[0]),))
        target: Any = node.target
        args, keys = map_aggregate((node.args, node.kwargs), self._value)
        if target in _PRODUCTS and not keys:
            product, place = _PRODUCTS[target]
            target = product if self._is_parameter(node.args[place]) else target
        return self._graph.call_function(target, args, keys)

    def _value(self, one: Any) -> Any:
        """What stands for an argument here."""
        if isinstance(one, torch.device):
            return self._device
        if not isinstance(one, Node):
            return one
        if one not in self._made:
            self._made[one] = self._attribute(one)
        return self._made[one]

    def _attribute(self, node: Node) -> Node:
        if node in self._program.graphs:
            name = f"{CONTEXTS}{self._mode}.{node.target}"
            self.state[name] = self._program.graphs[node], False
            return self._graph.get_attr(name)
        of = self._program.weights[node]
        if of.constant is not None:
            name = f"{CONSTANTS}{self._mode}.{of.name}"
            self.state[name] = of.constant, False
            return self._graph.call_method("to", (self._graph.get_attr(name), self._device))
        self.state[of.name] = _tensor_of(self._module, of), of.persistent
        return self._graph.get_attr(of.name)

    def _is_parameter(self, node: object) -> bool:
        of = self._program.weights.get(node) if isinstance(node, Node) else None
        return of is not None and of.is_parameter

    def _path_of_linear(self, node: Node) -> str | None:
        """The name of the linear module whose forward a node is; None where it is another one's,
        or where hooks of that module are in the graph."""
        path = path_of(node)
        if node.target is not _LINEAR or not path:
            return None
        one = self._module.get_submodule(path)
        if type(one) is not nn.Linear or _is_changed(one):
            return None
        weight, bias = (*map(self._tensor, node.args[1:]), None)[:2]
        return path if weight is one.weight and bias is one.bias else None

    def _tensor(self, node: Any) -> Tensor | None:
        of = self._program.weights.get(node)
        return None if of is None or of.constant is not None else _tensor_of(self._module, of)


def _tensor_of(module: nn.Module, of: Weight) -> Tensor:
    return module.get_parameter(of.name) if of.is_parameter else module.get_buffer(of.name)


def path_of(node: Node) -> str:
    """The name of the innermost module in whose forward a node was made; "" for the outermost."""
    *_, (path, _) = node.meta.get("nn_module_stack", {"": ("", None)}).values()
    return _CALL.sub("", path.removeprefix(PREFIX.rstrip(".")).lstrip("."))


def _is_changed(module: nn.Module) -> bool:
    """It has hooks, which are in the graph already, or a forward of its own."""
    of_all = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    hooks = (module._forward_hooks, module._forward_pre_hooks, *of_all)
    return "forward" in module.__dict__ or any(hooks)
