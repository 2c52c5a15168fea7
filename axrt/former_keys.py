"""Keys and values of former versions: what is said where a user writes one, and how the settings of
an older checkpoint are read."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class FormerValue(NamedTuple):
    """A value that a key no longer takes.

    Args:
        why: what a user takes instead, and why.
        read_as: what it means where a checkpoint has it. Nothing that was trained depends on it.
    """

    why: str
    read_as: Any


# By their present names.
RENAMED = {
    "schedule.in_flight": "schedule.max_held",
    "parallel.order": "parallel.rank_order",
}
# With what a user does without them.
GONE = {
    "memory.host_share": "no case was faster with some steps on the host than with memory.offload "
    "= 'cpu' or 'stream' alone",
    "schedule.replan": "plans made while training gained nothing; schedule.costs makes one at the "
    "start",
}
VALUES = {
    ("memory.offload", "hybrid"): FormerValue(
        "steps on both sides at once were never measured to be faster; take 'cpu' or 'stream'",
        read_as="cpu",
    ),
    ("memory.recompute", "auto"): FormerValue(
        "it was never measured to be over 1 % faster than the best of 'none' and 'full'; take "
        "'full', or 'none' where copies to memory.scratch are fast",
        read_as="none",
    ),
    ("memory.offload", "auto"): FormerValue(
        "take 'cpu', and measure 'stream' where the device is far faster than the host",
        read_as="cpu",
    ),
}


def what_became_of(key: str) -> str | None:
    """A sentence about a key that there is no longer; None for any other."""
    if key in RENAMED:
        return f"{key} is now {RENAMED[key]}; expected the new name"
    if key in GONE:
        return f"{key} is gone: {GONE[key]}. Leave it away"
    return None


def with_present_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that a former version of axrt has written, with the keys and values of today."""
    return {
        section: _of_today(section, keys) if isinstance(keys, Mapping) else keys
        for section, keys in tree.items()
    }


def _of_today(section: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in keys.items():
        name = f"{section}.{key}"
        if name in GONE:
            continue
        name = RENAMED.get(name, name)
        former = VALUES.get((name, value)) if isinstance(value, str) else None
        found[name.partition(".")[2]] = former.read_as if former else value
    return found
