"""DeepSpeed's JSON configuration, read as settings of axrt.

Each key is read, changes nothing here, or is refused by its name; none is passed over in silence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from axrt.errors import ConfigError
from axrt.scheduler.regular_file import json_of, read_text

from .monitors import SECTIONS

T = TypeVar("T")
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
_CLIPPING = ("gradient_clipping", 1.0)  # DeepSpeed's own default (0.19): 0 turns it off
_OFF: tuple[Any, ...] = (False, None, 0, "none", {})


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
class _Keys:
    """The keys of a JSON object, and which of them have been read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self._read = values, set[str]()

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a key, such as "fp16.loss_scale"; it counts as read."""
        *sections, key = name.split(".")
        within: Any = self._values
        for section in sections:
            within = within.get(section, {})
            if not isinstance(within, Mapping):
                raise ConfigError(f"{section} = {within!r}; expected an object")
        self._read.add(name)
        found = within.get(key)
        return default if found is None else found

    def rest(self) -> list[tuple[str, Any]]:
        """Keys that nobody has read, and their values; those of what is off are left away."""
        return [
            (name, value)
            for name, value in _flat(self._values, "")
            if value not in _OFF and not self._is_read(name)
        ]

    def known(self) -> list[str]:
        """All names that have been asked for, and those that change nothing."""
        return [*self._read, *_CHANGE_NOTHING]

    def _is_read(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:n]) in self._read for n in range(1, len(parts) + 1))


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found = []
    for key, value in values.items():
        if not isinstance(value, Mapping):
            found.append((prefix + key, value))
        elif value.get("enabled", True) not in _OFF:
            found += _flat(value, f"{prefix}{key}.")
    return found


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


def settings_of(values: Mapping[str, Any], replicas: int) -> Settings:
    """Read a JSON configuration.

    Args:
        values: keys of the configuration.
        replicas: number of replicas of the pipeline.
    Raises:
        ConfigError: keys have no counterpart, or batch sizes do not fit each other. The text has
            all such mistakes.
    """
    _check_values(values)
    keys, mistakes = _Keys(values), list[str]()

    def read_by(part: Callable[[], T], otherwise: T) -> T:
        try:
            return part()
        except ConfigError as error:
            mistakes.append(str(error))
        except (TypeError, ValueError, AttributeError) as error:  # values of other types
            mistakes.append(f"{error}; expected its types")
        return otherwise

    given = {name: keys.take(name) for name in _BATCH}
    size, microbatches = read_by(lambda: _batch(given, replicas), (1, 1))
    config: dict[str, dict[str, Any]] = {
        "schedule": {"microbatches": microbatches, "microbatch_size": size},
        "optimizer": {"clip": read_by(lambda: float(keys.take(*_CLIPPING)), 0.0)},
        "precision": read_by(lambda: _precision(keys), {}),
        "memory": read_by(lambda: _memory(keys), {}),
        "parallel": {},
        "run": {},
    }
    for section, its in keys.take("axrt", {}).items():
        config[section] = {**config.get(section, {}), **its}
    found = Settings(
        config,
        keys.take("optimizer"),
        keys.take("scheduler"),
        read_by(lambda: int(keys.take("steps_per_print", 0)), 0),
        bool(keys.take("dataloader_drop_last", False)),
        tuple(name for name, _ in keys.rest() if _changes_nothing(name)),
        read_by(lambda: _monitors(keys), {}),
        read_by(lambda: float(keys.take("zero_optimization.reduce_bucket_size", 0)), 0.0),
    )
    for name, value in keys.rest():
        if not _changes_nothing(name):
            mistakes.append(_refusal(name, value, keys.known()))
    if len(mistakes) > 1:
        raise ConfigError("\n  ".join([f"{len(mistakes)} mistakes:", *mistakes]))
    if mistakes:
        raise ConfigError(mistakes[0])
    return found


def _monitors(keys: _Keys) -> dict[str, Mapping[str, Any]]:
    """The sections of monitors that are on."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, known in SECTIONS.items():
        section = {key: value for key in known if (value := keys.take(f"{name}.{key}")) is not None}
        if section.get("enabled"):
            found[name] = section
        for key, value in section.items():
            if key != "enabled" and not isinstance(value, str):
                raise ConfigError(f"{name}.{key} = {value!r}; expected text")
    return found


def _check_values(values: Mapping[str, Any]) -> None:
    """Refuse values that somebody else is to fill in, and sections that are none."""
    for name, value in _flat(values, ""):
        if value == "auto":
            raise ConfigError(
                f"{name} = 'auto' is for a trainer that fills it in; expected a value"
            )
        if name.endswith("enabled") and value not in (True, False, None):
            raise ConfigError(f"{name} = {value!r}; expected true or false")
    for name in ("optimizer", "scheduler"):
        if not isinstance(values.get(name, {}), Mapping):
            raise ConfigError(f"{name} = {values[name]!r}; expected an object with type and params")
    for section, its in values.get("axrt", {}).items():
        if not isinstance(its, Mapping):
            raise ConfigError(f"axrt.{section} = {its!r}; expected a section of axrt's own keys")
    for name in _BATCH:
        if not isinstance(values.get(name), int | None):
            raise ConfigError(f"{name} = {values[name]!r}; expected a whole number")


def _batch(given: Mapping[str, int | None], replicas: int) -> tuple[int, int]:
    """Samples of a microbatch, and microbatches of a step and replica."""
    whole, size, number = (given[name] for name in _BATCH)
    if whole is None and size is None:
        raise ConfigError(f"{_BATCH[0]} and {_BATCH[1]} are missing; expected one of them")
    if size is None:
        number = number or 1
        size = (whole or 0) // (number * replicas)
    if number is None:
        number = (whole or size * replicas) // (size * replicas) if size else 0
    if min(size, number) < 1 or (whole is not None and size * number * replicas != whole):
        raise ConfigError(
            f"{_BATCH[0]} = {whole}, {_BATCH[1]} = {given[_BATCH[1]]}, {_BATCH[2]} = "
            f"{given[_BATCH[2]]} with {replicas} replicas; expected whole numbers of which the "
            "first is the product of the other two and the replicas"
        )
    return size, number


def _precision(keys: _Keys) -> dict[str, Any]:
    wide = keys.take("data_types.grad_accum_dtype", "fp32") == "fp32"
    sums = {"gradients": "float32" if wide else "weights"}
    narrow, half = keys.take("bf16.enabled", False), keys.take("fp16.enabled", False)
    if half:  # read before anything is refused, so that no key counts as unknown
        scale = _loss_scale(keys)
    if narrow and half:
        raise ConfigError("bf16 and fp16 are both enabled; expected one of them")
    if narrow:
        return {"weights": "bfloat16", **sums}
    if not half and not wide:
        raise ConfigError("data_types.grad_accum_dtype is of narrow weights; expected bf16 or fp16")
    return {"weights": "float16", **scale, **sums} if half else {}


def _loss_scale(keys: _Keys) -> dict[str, Any]:
    fixed = float(keys.take("fp16.loss_scale", 0))
    first = 2.0 ** float(keys.take("fp16.initial_scale_power", 16))
    moves = {"loss_scale_growth": 1.0, "loss_scale_backoff": 1.0} if fixed else {}
    return {
        "loss_scale": fixed or first,
        "loss_scale_interval": int(keys.take("fp16.loss_scale_window", 1000)),
        "loss_scale_floor": float(keys.take("fp16.min_loss_scale", 1)),
        **moves,
    }


def _memory(keys: _Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if keys.take("pipeline.activation_checkpoint_interval", 0):
        found["recompute"] = "full"  # whatever the interval, no activation is kept there, either
    if stage := keys.take("zero_optimization.stage", 0):
        found["zero"] = stage
    if elements := keys.take("zero_optimization.reduce_bucket_size", 0):
        found["bucket_mb"] = 4 * float(elements) / 2**20
    of = "zero_optimization.offload_optimizer"
    where = keys.take(f"{of}.device", "none")
    folder = keys.take(f"{of}.nvme_path")
    if where == "cpu":
        found["offload"] = "cpu"
    elif where == "nvme":
        if not folder:
            raise ConfigError(f"{of}.device = 'nvme' without nvme_path; expected a directory")
        found |= {"offload": "stream", "scratch": f"disk:{folder}"}
    elif where != "none":
        raise ConfigError(f"{of}.device = {where!r}; expected 'cpu', 'nvme' or 'none'")
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
