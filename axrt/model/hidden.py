"""Modules and weights that stand behind a plain function: in what it closes over, in its defaults,
in an object that it is a method of, in a global name. What they have is listed, trained and saved
by nobody."""

import dis
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache, partial
from inspect import getattr_static
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from axrt.errors import ConfigError

_DEEPEST = 5  # steps from a function to what it uses
_LIBRARIES = ("torch", "numpy", "axrt", "functools", "math")


def check_none_hidden(what: str, function: Any, listed: Collection[int]) -> None:
    """Check that no weights to train stand behind a function.

    Args:
        what: name of the function, for the error.
        function: the function.
        listed: parameters of the model's layers, by id.
    Raises:
        ConfigError: there are some.
    """
    if isinstance(function, nn.Module):
        return
    for found in _behind(function, _DEEPEST, set()):
        named = [("", found)] if isinstance(found, nn.Parameter) else found.named_parameters()
        hidden = [name for name, of in named if of.requires_grad and id(of) not in listed]
        if hidden:
            whose = ", ".join(filter(None, hidden[:3]))
            raise ConfigError(
                f"{what} is a function that uses a {type(found).__name__}"
                f"{', whose ' + whose if whose else ', which'} nobody would train; expected a "
                "module in place of the function, or requires_grad_(False)"
            )


def check_loss_stays_with_its_stage(loss_fn: Any, layers: Sequence[Any], first: int) -> None:
    """Check that a loss function looks at no layer of another stage than its own: there it would
    see what such a layer had before the training, or of another microbatch.

    Args:
        loss_fn: the loss function.
        first: index of the first layer of the last stage, where losses are computed.
    Raises:
        ConfigError: it refers to one.
    """
    if isinstance(loss_fn, nn.Module):
        return
    found = _behind(loss_fn, _DEEPEST, set())
    seen = set[int]()
    for one in found:
        seen |= {id(one)} if isinstance(one, nn.Parameter) else _ids_in(one)
    for place, layer in enumerate(layers[:first]):
        module = getattr(layer, "given", layer)  # of a tied layer, which trains a copy
        if isinstance(module, nn.Module) and not seen.isdisjoint(_ids_in(module)):
            raise ConfigError(
                f"loss_fn uses layer {place} ({type(module).__name__}), which is on another stage "
                "than the loss; expected what it needs of that layer along the stages: returned "
                "beside the layer's value, see docs/training.md"
            )


def _ids_in(module: nn.Module) -> set[int]:
    return {*map(id, module.modules()), *map(id, module.parameters())}


def globals_of(function: Any) -> Iterator[tuple[str, Any]]:
    """The global names that a function of Python uses, and what they stand for now."""
    if not isinstance(function, FunctionType):
        return
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


@lru_cache(maxsize=1024)  # each rank looks at each layer
def _names_in(code: CodeType) -> tuple[str, ...]:
    """The global names that stand in code."""
    steps = dis.get_instructions(code)
    return tuple(step.argval for step in steps if step.opname == "LOAD_GLOBAL")


def _behind(value: Any, depth: int, seen: set[int]) -> Iterator[nn.Module | nn.Parameter]:
    """The modules and parameters that a function reaches."""
    if isinstance(value, nn.Module | nn.Parameter):
        yield value
        return
    if not depth or id(value) in seen:
        return
    seen.add(id(value))
    for one in _used_by(value):
        yield from _behind(one, depth - 1, seen)


def _used_by(value: Any) -> Iterator[Any]:
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        if (value.__module__ or "").startswith(_LIBRARIES):
            return
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        yield from (of for _, of in globals_of(value))
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from vars(value).values()
        yield getattr_static(type(value), "__call__", None)
