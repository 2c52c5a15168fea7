"""Losses that layers leave on themselves, such as the balance loss of experts, for a loss function
that reads them there. On another stage nobody does, and nothing would say so."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from axrt.errors import ModelError

from .hidden import globals_of

_OF_TORCH = frozenset(vars(nn.Module()))  # what every module has


# What a loss needs of a layer goes along the stages. A function that a layer calls for that,
# `add_loss`, was thought of: a tuple between layers is seen by policies, recomputation and plain
# PyTorch alike, and needs nothing new. What is left on a layer instead is refused.
def check_nothing_left(name: str, layer: nn.Module, roots: Sequence[GradientEdge]) -> None:
    """Check, after a forward, that a layer of a stage without a loss keeps no loss of its own.

    Args:
        name: index of the layer in the model.
        roots: where the gradients of the stage begin. What leads there counts: it is no loss that
            is left.
    Raises:
        ModelError: it has a tensor with a gradient in an attribute, a buffer, its class, or a
            global name that it uses.
    """
    for path, module in layer.named_modules(prefix=name):
        for attribute, value in _kept_by(module):
            left = [one for one in _within(value) if _is_left(one)]
            if not left:
                continue
            used = _nodes_of(roots)
            if any(one.grad_fn not in used for one in left):
                raise ModelError(
                    f"{path} ({type(module).__name__}) keeps a tensor with a gradient in "
                    f"{attribute}, as losses of layers are left for a loss function to read; on "
                    "another stage it reads none, and the gradient is lost. Expected it along the "
                    "stages: return (value, loss) from the layer, take the pair in those behind "
                    "it, and add the loss in loss_fn; docs/training.md shows it. If it is only "
                    "looked at: .detach()"
                )


def _nodes_of(roots: Sequence[GradientEdge]) -> set[Any]:
    found: set[Any] = set()
    waiting = [root.node for root in roots]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [to for to, _ in node.next_functions if to is not None]
    return found


def _within(value: Any, depth: int = 4) -> Iterator[Any]:
    """A value, and what is in it where it is a container or an object of a user's class."""
    yield value
    if not depth or isinstance(value, Tensor | nn.Module | ModuleType | type):
        return
    inside: Iterable[Any] = ()
    if isinstance(value, list | tuple | set):
        inside = value
    elif isinstance(value, dict):
        inside = value.values()
    elif hasattr(value, "__dict__") and not callable(value):
        inside = vars(value).values()
    for one in inside:
        yield from _within(one, depth - 1)


def _kept_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Where a module may have left something, by name."""
    yield from ((name, of) for name, of in vars(module).items() if name not in _OF_TORCH)
    yield from module._buffers.items()
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch."):
            yield from ((f"{kind.__name__}.{name}", of) for name, of in vars(kind).items())
    yield from globals_of(inspect.getattr_static(type(module), "forward", None))


def _is_left(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor and value.grad_fn is not None
