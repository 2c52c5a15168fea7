"""A policy of the user's own, by the name of its class: `package.module:Lifo`."""

from collections.abc import Sequence
from importlib import import_module

from ..placement import PLACEMENTS
from .policy import Policy

_NEEDED = ("name", "splits", "placements", "key", "admits", "bounds")


def is_own(name: str) -> bool:
    """The name is that of a policy of the user's own."""
    return ":" in name


def own_policy(name: str, max_held: int = 0) -> Policy:
    """The policy of that name, made anew.

    Args:
        max_held: cap in chunks, which the class is called with if it is not 0.
    Raises:
        ValueError: it cannot be imported, takes no cap, or lacks what a policy has; the text says
            which.
    """
    module, _, kind = name.partition(":")
    try:
        made = getattr(import_module(module), kind)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"policy {name!r}: {error}; expected 'package.module:Class' that can be imported from "
            "where the command runs"
        ) from None
    try:
        policy = made(max_held) if max_held else made()
    except TypeError as error:
        raise ValueError(
            f"policy {name!r}: {error}; expected a class that is called with nothing, or with "
            "max_held where that is set"
        ) from None
    missing = [attribute for attribute in _NEEDED if not hasattr(policy, attribute)]
    if missing:
        raise ValueError(
            f"policy {name!r} has no {', '.join(missing)}; expected what "
            "axrt.scheduler.policies.Policy lists"
        )
    _check_placements(name, policy.placements)
    return policy  # type: ignore[no-any-return]


def _check_placements(name: str, placements: Sequence[str]) -> None:
    unknown = [one for one in placements if one not in PLACEMENTS]
    if unknown or not placements or isinstance(placements, str):
        raise ValueError(
            f"policy {name!r} has placements {placements!r}; expected a tuple of some of "
            f"{', '.join(PLACEMENTS)}"
        )
