"""A layer that is a run of a module's graph."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from axrt.errors import DataError, ModelError
from axrt.transport.payload import flatten

from .tables import Tables

# Begins the names of tensors that are no buffers of the module, and of graphs within contexts.
CONSTANTS, CONTEXTS = "_axrt_constants.", "_axrt_contexts."


class Shapes(NamedTuple):
    """What a microbatch's inputs have to be like: all that is the same in each."""

    told: str  # what is no tensor, and where tensors are; as text, since 1 == True == 1.0
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, inputs: Any) -> "Shapes":
        skeleton, tensors = flatten(inputs)
        return cls(repr(skeleton), tuple((one.shape, one.dtype) for one in tensors))

    def __str__(self) -> str:
        text = self.told
        for place, (shape, dtype) in enumerate(self.tensors):
            told = f"{dtype} of shape {tuple(shape)}".removeprefix("torch.")
            text = text.replace(f"Slot(index={place})", told)
        return text


class Part(NamedTuple):
    """A run of one graph, for training or for evaluation."""

    # is given the layer, a device, tables and the values alive before, and gives what the layer
    # returns
    run: Callable[..., Any]
    tables: Tables | None  # what it reads that depends on no input; None: nothing
    has_contexts: bool  # parts of it run within a context, such as autocast


class TracedLayer(nn.Module):
    """Consecutive operations of a module, with its parameters, buffers and linear modules under
    their own names.

    It is given the values that are alive before it and returns those alive behind it: one tensor,
    or a tuple of several.

    Args:
        training, evaluation: what runs in each mode.
        sample: what the first layer's microbatches have to be like; None: it is not the first.
        called: names of the modules whose operations these are, in order.
        operations: floating-point operations of its forward.
        looked_up: names of parameters that are tables of embeddings.
        exported_on: type of device that the graphs were made on.
    Attributes:
        axrt_operations: operations, by which stages are balanced.
        axrt_looked_up: looked_up, which are no matrices of an optimizer.
    """

    def __init__(
        self,
        training: Part,
        evaluation: Part,
        sample: Shapes | None,
        called: Sequence[str],
        operations: int,
        looked_up: Collection[str],
        exported_on: str,
    ) -> None:
        super().__init__()
        self._parts = {True: training, False: evaluation}
        self._sample, self._called, self._exported_on = sample, called, exported_on
        self.axrt_operations, self.axrt_looked_up = operations, looked_up

    def forward(self, value: Any) -> Any:
        if self._sample is not None:
            values = self._of_microbatch(value)
        else:
            values = [value] if isinstance(value, Tensor) else list(value)
        part, device = self._parts[self.training], values[0].device
        if part.has_contexts and device.type not in (self._exported_on, "meta"):
            raise ModelError(
                f"the module was traced on {self._exported_on} and runs on {device.type}, and "
                "contexts in it, such as autocast, name the device; expected axrt.traced of a "
                "module and a sample that are on the device that it is trained on"
            )
        tables = part.tables.of(self, device) if part.tables else ()
        return part.run(self, device, *tables, *values)

    def extra_repr(self) -> str:
        first, last = self._called[:1], self._called[-1:]
        return " to ".join(first if first == last else (*first, *last))

    def _of_microbatch(self, inputs: Any) -> Sequence[Tensor]:
        found = Shapes.of(inputs)
        if found != self._sample:
            raise DataError(
                f"a microbatch of other inputs than the sample that axrt.traced was given: "
                f"{found}, and the sample has {self._sample}; expected the same shapes, types and "
                "values beside tensors in every microbatch, since the graph was made for these. "
                "Pad or drop the last one"
            )
        return flatten(inputs)[1]


def place_in(layer: nn.Module, name: str, one: nn.Module | Tensor, persistent: bool) -> None:
    """Put a module, parameter or buffer into a layer under its own name, dots included."""
    *path, last = name.split(".")
    for step in path:
        if step not in layer._modules:
            layer.add_module(step, nn.Module())
        layer = layer.get_submodule(step)
    if isinstance(one, nn.Module):
        layer.add_module(last, one)
    elif isinstance(one, nn.Parameter):
        layer.register_parameter(last, one)
    elif name.startswith(CONSTANTS):
        setattr(layer, last, one)  # no buffer, which would become narrow with the weights
    else:
        layer.register_buffer(last, one, persistent)
