"""The nodes of a graph from one boundary to the next, as a function of a layer."""

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
from torch.utils._pytree import TreeSpec, tree_unflatten

from axrt.model.linear import addmm, linear

from .exporting import PREFIX
from .layer import CONSTANTS, Part
from .program import Program, Weight

_LINEAR = torch.ops.aten.linear.default
# Products whose weight gradient may wait, and which argument the weight is.
_PRODUCTS: dict[Any, tuple[Any, int]] = {
    _LINEAR: (linear, 1),
    torch.ops.aten.addmm.default: (addmm, 2),
}
_CALL = re.compile(r"@\d+$")  # of a module that runs several times
Held = tuple[nn.Module | Tensor, bool]  # what a layer has, and whether checkpoints save it


class Run:
    """A run of nodes.

    Args:
        begin, end: indices of its first step, and of the one behind its last.
        mode: name of the graph, for what the module has no name for.
    Attributes:
        steps: its nodes.
        state: modules, parameters and buffers that it reads, by name.
        part: the function.
    """

    def __init__(self, program: Program, begin: int, end: int, mode: str) -> None:
        self._module, self._program, self._mode = program.module, program, mode
        self.steps = program.steps[begin:end]
        self.state: dict[str, Held] = {}
        self._graph = fx.Graph()
        self._device = self._graph.placeholder("device")
        alive = program.alive(begin) if begin else program.inputs
        self._made = {node: self._graph.placeholder(node.name) for node in alive}
        is_last = end == len(program.steps)
        out: Sequence[Any] = program.outputs if is_last else program.alive(end)
        read = [node for node in out if isinstance(node, Node)]
        for node in (*program.constants_for([*self.steps, *read]), *self.steps):
            self._made[node] = self._copied(node)
        self._graph.output(tuple(map(self._value, out)))
        run = _together(self._function(), program.out_spec if is_last else None)
        self.part = Part(run, bool(program.graphs))

    @property
    def called(self) -> list[str]:
        """The names of the modules whose operations these are, in order."""
        return [path for step in self.steps if (path := _path_of(step))]

    def _function(self) -> Any:
        # fx makes the class of a graph's module, and its forward serves any module that has the
        # same attributes.
        held = {name: of for name, (of, _) in self.state.items()}
        return type(fx.GraphModule(held, self._graph)).forward

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
            name = f"contexts.{self._mode}.{node.target}"
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
        path = _path_of(node)
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


def _together(run: Callable[..., tuple[Any, ...]], spec: TreeSpec | None) -> Callable[..., Any]:
    """The function that gives what a layer returns: outputs as the module has them, or the values
    that travel on."""

    def run_together(*given: Any) -> Any:
        made = run(*given)
        if spec is not None:
            return tree_unflatten(list(made), spec)
        return made[0] if len(made) == 1 else made

    return run_together


def _tensor_of(module: nn.Module, of: Weight) -> Tensor:
    return module.get_parameter(of.name) if of.is_parameter else module.get_buffer(of.name)


def _path_of(node: Node) -> str:
    """The name of the innermost module in whose forward a node was made; "" for the outermost."""
    *_, (path, _) = node.meta.get("nn_module_stack", {"": ("", None)}).values()
    return _CALL.sub("", path.removeprefix(PREFIX.rstrip(".")).lstrip("."))


def _is_changed(module: nn.Module) -> bool:
    """It has hooks, which are in the graph already, or a forward of its own."""
    return bool("forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks)
