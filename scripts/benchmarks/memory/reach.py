"""The tensors that an object refers to."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(root: object, *packages: str) -> Iterator[Tensor]:
    """All tensors that an object refers to, with their gradients.

    Args:
        root: a tensor, a container or an object.
        packages: packages, such as "torch.optim", to whose objects references are followed; those
            of other objects are not.
    """
    found: dict[int, object] = {}  # kept, so that no other object gets the same identity
    ahead = [root]
    while ahead:
        one = ahead.pop()
        if id(one) not in found:
            found[id(one)] = one
            if isinstance(one, Tensor):
                yield one
            ahead += _referred(one, packages)


def _referred(one: Any, packages: tuple[str, ...]) -> Iterator[object]:
    if isinstance(one, Tensor):
        yield from vars(one).values()
        if one.is_leaf:
            yield one.grad
    elif isinstance(one, Mapping):
        yield from (*one.keys(), *one.values())
    elif isinstance(one, list | tuple | set | frozenset | deque):
        yield from list(one)  # at once: another thread may add to it
    elif type(one).__module__.startswith(packages):
        yield from getattr(one, "__dict__", {}).values()
        slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from (getattr(one, name, None) for name in slots)
