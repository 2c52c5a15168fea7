"""Keys and values of former versions: what is said where a user writes one, and how the settings of
an older checkpoint are read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from axrt.models.rope_scaling import RopeScaling

_OF_SCALING = ("factor", "low", "high", "original")


class GoneKey(NamedTuple):
    """A key that there is no longer."""

    why: str  # what a user does without it, and why
    # the values that mean what is done now; files that say one of them are taken
    as_now: tuple[Any, ...]


class FormerValue(NamedTuple):
    """A value that a key no longer takes."""

    why: str  # what a user takes instead, and why
    read_as: Any  # what it means where a checkpoint has it. Nothing that was trained depends on it.


# By their present names.
RENAMED = {
    "schedule.in_flight": "schedule.max_held",
    "parallel.order": "parallel.rank_order",
    "memory.shard": "parallel.group",
}
GONE = {
    "memory.check_scratch": GoneKey(
        "what comes back from a disk is always compared with a checksum", (True,)
    ),
    "memory.host_share": GoneKey(
        "no case was faster with some steps on the host than with memory.offload = 'cpu' or "
        "'stream' alone",
        (0.5,),
    ),
    "memory.slots": GoneKey("there are three: one comes, one steps, and one leaves", (3,)),
    "model.name": GoneKey("there is one built-in model, and model.factory names others", ("gpt",)),
    **{
        f"model.rope_{part}": GoneKey(
            "model.rope_scaling says it, such as 'linear:2' or 'llama3:8,1,4,8192'", (value,)
        )
        for part, value in (("factor", 1.0), ("low", 1.0), ("high", 4.0), ("original", 8192))
    },
    "optimizer.speculate": GoneKey(
        "steps that were tried before the norm of all gradients was known made no step shorter, "
        "and with a disk longer by a seventh",
        ("auto", "never"),
    ),
    "precision.loss_scale_growth": GoneKey(
        "the scale doubles after precision.loss_scale_interval good steps, and with 0 stays", (2.0,)
    ),
    "precision.loss_scale_backoff": GoneKey(
        "the scale is halved after an overflow, and with precision.loss_scale_interval = 0 stays",
        (0.5,),
    ),
    "run.start_patience_s": GoneKey(
        "run.patience_s is how long ranks wait, before MPI is up and afterwards", (300.0,)
    ),
    "schedule.replan": GoneKey(
        "plans made while training gained nothing; schedule.costs makes one at the start", (0,)
    ),
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


def what_became_of(key: str, value: Any) -> str | None:
    """A sentence about a key that there is no longer; "" if its value says what is done now; None
    for any other key."""
    if key in RENAMED:
        return f"{key} is now {RENAMED[key]}; expected the new name"
    if key not in GONE:
        return None
    gone = GONE[key]
    return "" if value in gone.as_now else f"{key} is gone: {gone.why}. Leave it away"


def with_present_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that a former version of axrt has written, with the keys and values of today."""
    found = {
        section: _of_today(section, keys) if isinstance(keys, Mapping) else keys
        for section, keys in tree.items()
    }
    memory, parallel = tree.get("memory"), found.get("parallel", {})
    if isinstance(memory, Mapping) and isinstance(parallel, Mapping) and memory.get("shard"):
        # It has gone to another section, where 0 stands for what 0 stood for.
        found["parallel"] = {**parallel, "group": memory["shard"]}
    return found


def with_present_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same of settings by "section.key", as tables of costs have them."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value
    return {
        f"{section}.{key}": value
        for section, keys in with_present_names(tree).items()
        for key, value in keys.items()
    }


def _of_today(section: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    if section == "model":
        keys = _with_one_scaling(keys)
    found = {}
    for key, value in keys.items():
        name = f"{section}.{key}"
        if name in GONE:
            continue
        name = RENAMED.get(name, name)
        if not name.startswith(f"{section}."):
            continue
        former = VALUES.get((name, value)) if isinstance(value, str) else None
        found[name.partition(".")[2]] = former.read_as if former else value
    return found


def _with_one_scaling(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The model with its scaling in one key, where it has the kind in one and numbers in others."""
    kind = keys.get("rope_scaling")
    if kind not in ("linear", "llama3"):
        return dict(keys)
    parts = {part: keys[f"rope_{part}"] for part in _OF_SCALING if f"rope_{part}" in keys}
    try:
        scaling = str(RopeScaling(kind, **{"factor": 1.0, **parts}))
    except (OverflowError, TypeError, ValueError):  # of a damaged file: refused as it stands
        return dict(keys)
    return {**keys, "rope_scaling": scaling}
