"""The nodes of a graph from one boundary to the next, and what a layer needs to run them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import TreeSpec, tree_unflatten

from .function import Held, NodesAsFunction, path_of
from .layer import Part
from .program import Program
from .tables import Tables

_LOOKS_UP = (torch.ops.aten.embedding.default,)


class Run:
    """A run of nodes.

    Args:
        begin, end: indices of its first step, and of the one behind its last.
        mode: name of the graph, for what the module has no name for.
        shared: tables that the runs of a graph share.
    Attributes:
        steps: its nodes.
        state: modules, parameters and buffers that it reads, by name.
        part: how a layer runs it.
    """

    def __init__(
        self,
        program: Program,
        begin: int,
        end: int,
        mode: str,
        shared: dict[tuple[object, ...], Tensor],
    ) -> None:
        self._program, self.steps = program, program.steps[begin:end]
        is_last = end == len(program.steps)
        out: Sequence[Any] = program.outputs if is_last else program.alive(end)
        constants = program.constants_for(self.steps)
        direct = {one for step in self.steps for one in step.all_input_nodes}
        # What is handed out is computed each time: the loss may change it.
        read = [node for node in out if isinstance(node, Node) and program.is_constant(node)]
        handed_out = program.constants_for(read)
        given = [node for node in constants if node in direct and node not in handed_out]
        before = NodesAsFunction(program, mode, [])
        compute = before.compiled(constants, given)
        names = [node.name for node in given]
        tables = Tables(names, before.buffers, compute, shared) if given else None
        alive = program.alive(begin) if begin else program.inputs
        function = NodesAsFunction(program, mode, [*given, *alive])
        run = function.compiled([*handed_out, *self.steps], out)
        self.state: dict[str, Held] = before.state | function.state
        together = _together(run, program.out_spec if is_last else None)
        runs = {one for step in self.steps for one in step.all_input_nodes}
        self.part = Part(together, tables, not runs.isdisjoint(program.graphs))

    @property
    def called(self) -> list[str]:
        """The names of the modules whose operations these are, in order."""
        return [path for step in self.steps if (path := path_of(step))]

    @property
    def looked_up(self) -> set[str]:
        """The names of parameters of which rows are looked up, and which nothing else reads."""
        read: dict[bool, set[str]] = {True: set(), False: set()}
        for step in self.steps:
            names = [of.name for of in self._program.weights_of(step) if of.is_parameter]
            read[step.target in _LOOKS_UP].update(names)
        return read[True] - read[False]


def _together(run: Callable[..., tuple[Any, ...]], spec: TreeSpec | None) -> Callable[..., Any]:
    """The function that gives what a layer returns: outputs as the module has them, or the values
    that travel on."""

    def run_together(*given: Any) -> Any:
        made = run(*given)
        if spec is not None:
            return tree_unflatten(list(made), spec)
        return made[0] if len(made) == 1 else made

    return run_together
