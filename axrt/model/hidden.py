"""Modules that stand behind a plain function: a method of one, a `functools.partial`, or one that a
function refers to. What they have is listed, trained and saved by nobody."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from torch import nn

from axrt.errors import ConfigError


def check_none_hidden(what: str, function: Any, listed: Collection[int]) -> None:
    """Check that no module with weights to train stands behind a function.

    Args:
        what: name of the function, for the error.
        function: the function.
        listed: parameters of the model's layers, by id.
    Raises:
        ConfigError: there is one.
    """
    for module in _behind(function):
        hidden = [
            name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and id(parameter) not in listed
        ]
        if hidden:
            raise ConfigError(
                f"{what} is a function that uses a {type(module).__name__}, whose "
                f"{', '.join(hidden[:3])} nobody would train; expected the module itself in its "
                "place, or module.requires_grad_(False)"
            )


def _behind(function: Any) -> Iterator[nn.Module]:
    if isinstance(function, nn.Module):
        return
    found = [getattr(function, "__self__", None)]
    if isinstance(function, partial):
        found += [function.func, *function.args, *function.keywords.values()]
        yield from _behind(function.func)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # nothing is in it yet
            continue
    yield from (one for one in found if isinstance(one, nn.Module))
