"""DeepSpeed's JSON configuration, read as settings of axrt.

Each key is read, changes nothing here, or is refused by its name; none is passed over in silence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from axrt.errors import ConfigError
from axrt.scheduler.plural import plural
from axrt.scheduler.regular_file import json_of, read_text

from .keys import Keys
from .monitors import SECTIONS

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Keys of how DeepSpeed works inside, or of what it prints: without them the same is trained.
_CHANGE_NOTHING = (
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "disable_allgather",
    "disable_python_gc",
    "managed_gradient_accumulation",
    "activation_checkpointing",
    "aio",
    "flops_profiler",
    "comms_logger",
    "pipeline.seed_layers",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_scatter",
    "zero_optimization.allgather_partitions",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.sub_group_size",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_optimizer.ratio",
    "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_optimizer.fast_init",
    "zero_optimization.offload_optimizer.pipeline_read",
    "zero_optimization.offload_optimizer.pipeline_write",
    "bf16.immediate_grad_update",
    "bf16.check_grad_overflow",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
)
_INSTEAD = {
    "amp": '"bf16": {"enabled": true}',
    "zero_optimization.offload_param": (
        '"axrt": {"memory": {"offload": "stream", "offload_parameters": true}}'
    ),
    "communication_data_type": '"data_types": {"grad_accum_dtype": "bf16"}',
}
_SECTIONS = ("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "data_types", "axrt")
_TYPES = ("fp32", "bf16", "fp16")
_CLIPPING = ("gradient_clipping", 1.0)  # DeepSpeed's own default (0.19): 0 turns it off


@dataclass(frozen=True)
class Settings:
    """What a JSON configuration asks for.

    Args:
        config: sections of axrt's own configuration.
        optimizer: its section of that name; None: there is none.
        scheduler: its section of that name; None: there is none.
        prints_every: steps between lines about the loss; 0: none.
        drop_last: leave out the last samples of an epoch that fill no microbatch.
        unused: keys that change nothing here.
        monitors: sections of monitors that are on, by name.
        bucket_elements: `reduce_bucket_size`; 0: there is none.
    """

    config: Mapping[str, Mapping[str, Any]]
    optimizer: Mapping[str, Any] | None
    scheduler: Mapping[str, Any] | None
    prints_every: int
    drop_last: bool
    unused: tuple[str, ...]
    monitors: Mapping[str, Mapping[str, Any]]
    bucket_elements: float


# DeepSpeed's names are modules of their own, `axrt.deepspeed`, and not arguments of
# `axrt.initialize`. What a script meant is read in one place, each key is read, without effect or
# refused, and the defaults are DeepSpeed's: an attack that ran both found nine that were not.
def read(given: "str | Path | Mapping[str, Any]") -> dict[str, Any]:
    """The JSON configuration in a file, or as it is given.

    Raises:
        ConfigError: the file cannot be read, or is no JSON object.
    """
    if isinstance(given, Mapping):
        return dict(given)
    try:
        found = json_of(read_text(given))
    except OSError as error:
        raise ConfigError(
            f"{given}: {error.strerror}; expected DeepSpeed's JSON configuration"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{given} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{given} is {type(found).__name__}; expected a JSON object")
    return found


def settings_of(values: Mapping[str, Any], replicas: int) -> tuple[Settings, list[str]]:
    """Read a JSON configuration.

    Args:
        values: keys of the configuration.
        replicas: number of replicas of the pipeline.
    Returns:
        The settings, and all mistakes, a text each: keys without counterpart, values of another
        type or beyond their range, and batch sizes that do not fit each other. Where there is a
        mistake, the settings are those without it.
    """
    keys = Keys(values)
    size, microbatches = _batch(keys, replicas)
    config: dict[str, dict[str, Any]] = {
        "schedule": {"microbatches": microbatches, "microbatch_size": size},
        "optimizer": {"clip": keys.number(*_CLIPPING)},
        "precision": _precision(keys),
        "memory": _memory(keys),
        "parallel": {},
        "run": {},
    }
    for section in keys.section("axrt") or {}:
        its = keys.section(f"axrt.{section}") or {}
        config[section] = {**config.get(section, {}), **its}
    found = Settings(
        config,
        keys.section("optimizer"),
        keys.section("scheduler"),
        int(keys.number("steps_per_print", 0)),
        keys.flag("dataloader_drop_last"),
        tuple(name for name, _ in keys.rest() if _changes_nothing(name)),
        _monitors(keys),
        keys.number("zero_optimization.reduce_bucket_size", 0),
    )
    keys.check()
    for name, value in keys.rest():
        if not _changes_nothing(name):
            keys.mistakes.append(_refusal(name, value, [*keys.known(), *_CHANGE_NOTHING]))
    return found, keys.mistakes


def refuse(mistakes: Sequence[str]) -> None:
    """Raise `ConfigError` with all mistakes, if there are any."""
    if mistakes:
        several = len(mistakes) > 1
        told = "\n  ".join([f"{len(mistakes)} mistakes:"] * several + list(mistakes))
        raise ConfigError(f"DeepSpeed's configuration: {told}")


def _monitors(keys: Keys) -> dict[str, Mapping[str, Any]]:
    """The sections of monitors that are on."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, (_, *known) in SECTIONS.items():
        is_on = keys.flag(f"{name}.enabled")
        section = {key: keys.text(f"{name}.{key}", None) for key in known}
        if is_on:
            its = {key: value for key, value in section.items() if value is not None}
            found[name] = {"enabled": True, **its}
    return found


def _batch(keys: Keys, replicas: int) -> tuple[int, int]:
    """Samples of a microbatch, and microbatches of a step and replica."""
    before = len(keys.mistakes)
    given = {name: keys.whole(name, None) for name in _BATCH}
    whole, size, number = given.values()
    if len(keys.mistakes) > before:
        return 1, 1
    if whole is None and size is None:
        keys.mistakes.append(f"{_BATCH[0]} and {_BATCH[1]} are missing; expected one of them")
        return 1, 1
    if size is None:
        number = number or 1
        size = (whole or 0) // (number * replicas)
    if number is None:
        number = (whole or size * replicas) // (size * replicas) if size else 0
    if min(size, number) < 1 or (whole is not None and size * number * replicas != whole):
        told = ", ".join(f"{name} = {value}" for name, value in given.items())
        keys.mistakes.append(
            f"{told} with {plural(replicas, 'replica')}; expected whole numbers of which the first "
            "is the product of the other two and the replicas"
        )
        return 1, 1
    return size, number


def _precision(keys: Keys) -> dict[str, Any]:
    wide = keys.text("data_types.grad_accum_dtype", "fp32", _TYPES) == "fp32"
    sums = {"gradients": "float32" if wide else "weights"}
    narrow, half = keys.flag("bf16.enabled"), keys.flag("fp16.enabled")
    scale = _loss_scale(keys) if half else {}
    if narrow and half:
        keys.mistakes.append("bf16 and fp16 are both enabled; expected one of them")
    if narrow:
        return {"weights": "bfloat16", **sums}
    if not half and not wide:
        keys.mistakes.append(
            "data_types.grad_accum_dtype is of narrow weights; expected bf16 or fp16"
        )
    return {"weights": "float16", **scale, **sums} if half else {}


def _loss_scale(keys: Keys) -> dict[str, Any]:
    fixed = keys.number("fp16.loss_scale", 0)
    first = 2.0 ** keys.whole("fp16.initial_scale_power", 16, most=100)
    interval = keys.whole("fp16.loss_scale_window", 1000)
    return {
        "loss_scale": fixed or first,
        "loss_scale_interval": 0 if fixed else interval,
        "loss_scale_floor": keys.number("fp16.min_loss_scale", 1),
    }


def _memory(keys: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if keys.whole("pipeline.activation_checkpoint_interval", 0):
        found["recompute"] = "full"  # whatever the interval, no activation is kept there, either
    if stage := keys.whole("zero_optimization.stage", 0, most=3):
        found["zero"] = stage
    if elements := keys.number("zero_optimization.reduce_bucket_size", 0):
        found["bucket_mb"] = 4 * elements / 2**20
    of = "zero_optimization.offload_optimizer"
    where = keys.text(f"{of}.device", "none", ("cpu", "nvme", "none"))
    folder = keys.text(f"{of}.nvme_path", None)
    if where == "cpu":
        found["offload"] = "cpu"
    elif where == "nvme" and folder:
        found |= {"offload": "stream", "scratch": f"disk:{folder}"}
    elif where == "nvme":
        keys.mistakes.append(f"{of}.device = 'nvme' without nvme_path; expected a directory")
    return found


def _changes_nothing(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in _CHANGE_NOTHING)


def _near_section(name: str) -> list[str]:
    """The section that the first part of a key is misspelled of."""
    section, dot, key = name.partition(".")
    near = get_close_matches(section.lower(), _SECTIONS, n=1, cutoff=0.8) if dot else []
    return [f"{near[0]}.{key}"] if near and near[0] != section else []


def _refusal(name: str, value: Any, known: Sequence[str]) -> str:
    of = [one for one in _INSTEAD if name == one or name.startswith(f"{one}.")]
    near = get_close_matches(name, known, n=1, cutoff=0.85) or _near_section(name)
    if of:
        instead = f"has no counterpart; expected {_INSTEAD[of[0]]}"
    elif near:
        instead = f"has no counterpart; did you mean {near[0]!r}? Else leave it away"
    else:
        instead = "has no counterpart; leave it away"
    return f"{name} = {value!r} {instead}"
