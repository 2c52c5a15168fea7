"""Losses that layers leave on themselves, such as the balance loss of experts, for a loss function
that reads them there. On another stage nobody does, and nothing would say so."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from axrt.errors import ModelError


def check_nothing_left(name: str, layer: nn.Module, roots: Sequence[GradientEdge]) -> None:
    """Check, after a forward, that a layer of a stage without a loss keeps no loss of its own.

    Args:
        name: index of the layer in the model.
        layer: the layer.
        roots: where the gradients of the stage begin. What leads there counts: it is no loss that
            is left.
    Raises:
        ModelError: it has a tensor with one element and a gradient in an attribute.
    """
    for path, module in layer.named_modules(prefix=name):
        for attribute, value in vars(module).items():
            left = [one for one in _within(value) if _is_loss(one)]
            if attribute.startswith("_") or not left:
                continue
            used = _nodes_of(roots)
            if any(one.grad_fn not in used for one in left):
                raise ModelError(
                    f"{path} ({type(module).__name__}) keeps a number with a gradient in "
                    f".{attribute}, as losses of layers are left for a loss function to read; on "
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


def _within(value: Any) -> Iterator[Any]:
    """A value, and what is in it where it is a list, a tuple or a dictionary."""
    yield value
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def _is_loss(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and value.numel() == 1
        and value.grad_fn is not None
    )
