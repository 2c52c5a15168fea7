"""The configuration: one TOML file, one frozen dataclass for each section, every key with its
meaning, unit and "off" value.

Values are checked where a section is built, whether it comes from a file, a dict or code, and
before anything is sent: every rank finds the same mistake. Each text says what was found, what was
expected, which key to set.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import ceil
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from axrt.errors import ConfigError
from axrt.former_keys import VALUES, what_became_of
from axrt.models.rope_scaling import RopeScaling
from axrt.scheduler.placement import PLACEMENTS
from axrt.scheduler.policies import FIXED, NAMES, is_own, policy_by_name
from axrt.scheduler.recompute import most_recomputed
from axrt.scheduler.regular_file import read_text, toml_of

_MOST_BYTES = 1 << 20  # of a file
_STRANGE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # the rest stand for bytes of a name
_MOST_OF_NAME, _MOST_OF_PATH = 255, 4095  # bytes that Linux takes
_WIDEST = 1 << 24  # features, with which no weight has more bytes than can be counted
AUTO = "auto"  # measured and simulated at the start, see axrt.autoschedule
# With no policy named, the first that the model can be cut for, of those on the placement that is
# asked for. Measured: docs/performance.md.
DEFAULTS = {
    "adaptive": "vee",
    "breadth-first": "looped",
    "zb-h1": "linear",
    "dualpipe": "bidirectional",
}


def _key(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    takes_own: bool = False,
    is_path: bool = False,
) -> Any:
    """A key with its range or its choices; `takes_own`: or what a user has written, by its name
    'package.module:Name'; `is_path`: it may be the path of a file or directory."""
    limits = {"least": least, "most": most, "choices": choices, "takes_own": takes_own}
    limits["is_path"] = is_path
    return field(default=default, metadata={"meaning": meaning, **limits})


class _Mistakes(ConfigError):
    """All mistakes of a configuration, one text each."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        super().__init__(_told(texts))


def _told(texts: Sequence[str]) -> str:
    return (
        texts[0]
        if len(texts) == 1
        else "\n  ".join([f"{len(texts)} mistakes in the configuration:", *texts])
    )


def _refuse(mistakes: Iterable[str]) -> None:
    texts = list(mistakes)
    if texts:
        raise _Mistakes(texts)


class _Section:
    """Checks type, range and choices of every key when built, and then keys that must go
    together."""

    def __post_init__(self) -> None:
        _refuse(self._of_values())
        _refuse(self._of_all())

    def _of_values(self) -> Iterator[str]:
        hints = get_type_hints(type(self))
        for item in fields(self):  # type: ignore[arg-type]
            key = f"{type(self).__name__.lower()}.{item.name}"
            value = getattr(self, item.name)
            if not _fits(value, hints[item.name]):
                choices = ", ".join(choice or "''" for choice in item.metadata["choices"])
                yield (
                    f"{key} = {value!r} is {_type_name(type(value))}; expected "
                    f"{f'one of {choices}' if choices else _type_name(hints[item.name])}"
                )
            else:
                yield from _out_of_range(key, value, item.metadata)
                yield from _impossible_text(key, value, item.metadata["is_path"])

    def _of_all(self) -> Iterator[str]:
        return iter(())


@dataclass(frozen=True, slots=True)
class Model(_Section):
    """The model to train: a GPT of these sizes, or a model of the user's own."""

    factory: str = _key(
        "",
        "'package.module:function' that takes the Config and returns a PipelineModule; '' = the "
        "built-in model",
    )
    layers: int = _key(4, "transformer blocks", least=1, most=100_000)
    width: int = _key(128, "features of a token", least=1, most=_WIDEST)
    heads: int = _key(4, "attention heads", least=1, most=_WIDEST)
    kv_heads: int = _key(
        0,
        "heads of keys and values, each shared by heads / kv_heads queries (grouped-query "
        "attention); 0 = as many as heads",
        least=0,
        most=_WIDEST,
    )
    head_width: int = _key(0, "features of a head, even; 0 = width / heads", least=0, most=_WIDEST)
    context: int = _key(128, "tokens in a sequence", least=1, most=2**31 - 1)
    vocab: int = _key(256, "different tokens", least=1, most=2**31 - 1)
    dropout: float = _key(0.0, "probability; 0 = off", least=0, most=0.999)
    norm: str = _key("rms", "RMSNorm, or LayerNorm with a bias", choices=("rms", "layer"))
    norm_eps: float = _key(
        0.0, "what norms add to the variance; 0 = torch's default for each", least=0
    )
    qk_norm: bool = _key(False, "RMSNorm on queries and keys, each head by itself")
    feed: str = _key(
        "relu2",
        "function of the feed-forward network: squared ReLU, ReLU, GELU, its approximation by "
        "tanh, SiLU, or SwiGLU",
        choices=("relu2", "relu", "gelu", "gelu-tanh", "silu", "swiglu"),
    )
    feed_width: int = _key(
        0,
        "features within the feed-forward network; 0 = 4 x width, for swiglu 8/3 x width, up to a "
        "multiple of 8",
        least=0,
        most=_WIDEST,
    )
    bias: str = _key(
        "none",
        "which linear layers have one: none, those of queries, keys and values, or all but the "
        "head",
        choices=("none", "qkv", "all"),
    )
    tied: bool = _key(False, "embedding and head share their weight")
    positions: str = _key("rotary", "how tokens know where they are", choices=("rotary", "learned"))
    rope_theta: float = _key(10000.0, "base of rotary frequencies", least=1)
    rope_scaling: str = _key(
        "",
        "rotary frequencies for a longer context: 'linear:FACTOR' = all divided by that; "
        "'llama3:FACTOR,LOW,HIGH,ORIGINAL' = the slow ones, by how often they turn in ORIGINAL "
        "tokens; '' = as they are",
    )

    @property
    def features_of_a_head(self) -> int:
        """Width of a head."""
        return self.head_width or self.width // self.heads

    @property
    def features_within(self) -> int:
        """Width of the feed-forward network."""
        if self.feed_width:
            return self.feed_width
        return 8 * ceil(self.width / 3) if self.feed == "swiglu" else 4 * self.width

    def misfits(self) -> Iterator[str]:
        """What does not go together in the built-in model, one text each."""
        least = 2 * self.heads
        if not self.head_width and self.width % least:
            fits = self.width // least * least + least
            yield (
                f"model.width = {self.width} is no multiple of 2 x model.heads = {least}; set it "
                f"to {fits}, or change model.heads, or set model.head_width"
            )
        if self.head_width % 2:
            yield f"model.head_width = {self.head_width}; expected an even number"
        if self.kv_heads and self.heads % self.kv_heads:
            yield (
                f"model.heads = {self.heads} is no multiple of model.kv_heads = {self.kv_heads}; "
                "expected one, such as heads itself"
            )
        if self.rope_scaling and self.positions != "rotary":
            yield (
                f"model.rope_scaling = {self.rope_scaling!r} with model.positions = "
                f"{self.positions!r}; expected positions = 'rotary'"
            )
        try:
            RopeScaling.parse(self.rope_scaling)
        except ValueError as error:
            yield f"model.rope_scaling = {self.rope_scaling!r}; {error}"


@dataclass(frozen=True, slots=True)
class Data(_Section):
    """The data to train on."""

    source: str | tuple[str, ...] = _key(
        "stdlib",
        "a text file, a directory of them, a token file (.bin), or 'stdlib': the "
        "source of Python's own standard library; paths are relative to where the command runs. Or "
        "a list of these",
        is_path=True,
    )
    dtype: str = _key(
        "auto",
        "type of the tokens of a .bin without an .idx beside it; 'auto' = as its first numbers and "
        "model.vocab say, uint16 where nothing speaks against it",
        choices=("auto", "uint8", "uint16", "uint32", "int32", "int64"),
    )
    weights: tuple[float, ...] = _key(
        (), "how often samples of each source come, where there are several; [] = equally", least=0
    )
    files: str = _key("**/*", "which files of a directory, a glob pattern", is_path=True)
    tokenizer: str = _key(
        "auto",
        "how text has become tokens, for axrt generate: 'auto' = text as bytes, and token files as "
        "axrt prepare says beside them; else the path of a tokenizer.json, or 'tiktoken:NAME'",
        is_path=True,
    )
    document_end: int = _key(
        -1,
        "token that ends a document: attention does not reach back across it, and what comes after "
        "it is not predicted; -1 = documents are not told apart",
        least=-1,
    )
    masked: bool = _key(
        False,
        "token files have masked tokens, which are read and not predicted (axrt prepare "
        "--prompt-field)",
    )
    held_out: float = _key(
        0.05,
        "share of the files (of one file: of its end) kept for validation; 0 = none",
        least=0,
        most=0.5,
    )
    validation: str | tuple[str, ...] = _key(
        "",
        "what to validate on, like source, instead of a share of it; '' = held_out says",
        is_path=True,
    )
    workers: int = _key(
        0,
        "processes that prepare microbatches ahead, for each rank that reads; 0 = the rank itself "
        "does",
        least=0,
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of all sources."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def validations(self) -> tuple[str, ...]:
        """The names of all there is to validate on by itself."""
        if isinstance(self.validation, str):
            return (self.validation,) if self.validation else ()
        return self.validation

    @property
    def is_of_tokens(self) -> bool:
        """The sources are token files."""
        return all(source.endswith(".bin") for source in self.sources)

    @property
    def masks(self) -> bool:
        """Some targets do not count in the loss."""
        return self.document_end >= 0 or self.masked

    @property
    def validates(self) -> bool:
        """True if there is data to validate on."""
        return bool(self.validation) or self.held_out > 0


@dataclass(frozen=True, slots=True)
class Optimizer(_Section):
    """How weights follow gradients, where no optimizer is given in code."""

    name: str = _key("adamw", "the optimizer", choices=("adamw", "adam", "sgd"))
    lr: float = _key(3e-4, "learning rate at its highest", least=0)
    betas: tuple[float, ...] = _key(
        (0.9, 0.95), "decay of the two moments (adamw, adam)", least=0, most=1
    )
    momentum: float = _key(0.9, "momentum of sgd; 0 = off", least=0, most=1)
    clip: float = _key(
        0.0,
        "most that the 2-norm of all gradients may be; 0 = off, and no step waits for the norm",
        least=0,
    )
    weight_decay: float = _key(0.1, "on parameters of two and more dimensions; 0 = off", least=0)
    schedule: str = _key(
        "constant",
        "the learning rate after the warm-up, until run.steps",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = _key(0, "steps over which the learning rate rises from 0; 0 = off", least=0)
    final_lr: float = _key(
        0.0, "where a linear or cosine schedule ends, as a share of lr", least=0, most=1
    )


@dataclass(frozen=True, slots=True)
class Parallel(_Section):
    """The layout of ranks: pipelines and replicas (data parallelism)."""

    pipe: int = _key(0, "ranks a pipeline; 0 = all ranks", least=0)
    data: int = _key(1, "replicas of the pipeline, each with its part of the data", least=1)
    collectives: str = _key(
        "parts",
        "what adds gradients of replicas up: 'parts' = messages, in one order of summation; "
        "'library' = NCCL or gloo",
        choices=("parts", "library"),
    )
    group: int = _key(
        0,
        "replicas that add gradients up among themselves, such as those of a node, before groups "
        "do; 1 = all at once; 0 = all at once up to 8 replicas, and above that groups for nodes of "
        "8 ranks. The sum has another order. With memory.zero groups are memory.shard",
        least=0,
    )
    activations: str = _key(
        "mpi",
        "what carries large activations and their gradients between stages: 'mpi'; 'library' = "
        "NCCL or gloo",
        choices=("mpi", "library"),
    )
    rank_order: str = _key(
        "pipe",
        "what consecutive ranks are: 'pipe' = one pipeline, 'data' = the replicas of a stage",
        choices=("pipe", "data"),
    )
    partition: str | tuple[int, ...] = _key(
        "",
        "'uniform', 'parameters', 'operations', 'type:REGEX' or boundaries [0, 4, 8]; '' = the "
        "model's own",
    )


@dataclass(frozen=True, slots=True)
class Schedule(_Section):
    """The order in which microbatches run, and their number (gradient accumulation)."""

    policy: str = _key(
        "",
        "what runs first, and what may start; '' = the first of "
        f"{', '.join(f'{name} ({of})' for name, of in DEFAULTS.items())} that the "
        "model has layers for, of those on schedule.placement where it is set, and 1f1b on one "
        "rank; adaptive follows a plan where there is a sample; auto = the fastest in a simulation "
        "with measured costs",
        choices=("", *NAMES, FIXED, AUTO),
        takes_own=True,
    )
    also: tuple[str, ...] = _key(
        (),
        "policies of your own, 'package.module:Class', that policy auto tries beside the others",
    )
    placement: str = _key(
        "", "which rank holds which stage; '' = the policy's own", choices=("", *PLACEMENTS)
    )
    chunks: int = _key(
        0,
        "stages a rank, where the placement leaves a choice; 0 = the placement's own, 2 for looped",
        least=0,
    )
    microbatches: int = _key(8, "microbatches of a step and replica", least=1)
    microbatch_size: int = _key(
        1, "samples in a microbatch; in code only what engine.samples counts by", least=1
    )
    global_batch: int = _key(
        0,
        "samples a step, checked: data x microbatches x microbatch_size; 0 = not checked",
        least=0,
    )
    share: bool = _key(
        False,
        "replicas share the microbatches of a step: whichever has room takes one, where others "
        "would be waited for",
    )
    max_held: int = _key(
        0,
        "cap on what a rank has begun, in chunks (a microbatch of one stage): for axonn on those "
        "in flight, until their backward begins; "
        "for adaptive, dualpipe-v and fixed on those held, until their last weight gradient "
        "begins; 0 = the policy's own",
        least=0,
    )
    order: str = _key(
        "",
        "for policy fixed: a CSV file of tasks, one line a rank, or the name of a policy whose "
        "order is the plan",
        is_path=True,
    )
    costs: str = _key(
        "",
        "file of costs that axrt profile has written: adaptive, zb-h1 and zb-h2 follow a plan "
        "made from them, and auto simulates on them and measures nothing; '' = no costs are known",
        is_path=True,
    )

    def _of_all(self) -> Iterator[str]:
        if bool(self.order) != (self.policy == FIXED):
            yield (
                f"schedule.policy = {self.policy!r} and schedule.order = {self.order!r}; expected "
                f"an order with policy {FIXED!r} "
                "and schedule.order = '' with any other"
            )
        try:
            if self.policy in NAMES:
                policy_by_name(self.policy, self.max_held)
        except ValueError as error:
            yield f"schedule.max_held: {error}"
        if self.also and self.policy != AUTO:
            yield (
                f"schedule.also = {list(self.also)} and schedule.policy = {self.policy!r}; "
                f"expected schedule.policy = {AUTO!r}, which chooses among them"
            )
        for name in self.also:
            if not is_own(name):
                yield (
                    f"schedule.also: {name!r}; expected 'package.module:Class', since all others "
                    "are tried already"
                )


@dataclass(frozen=True, slots=True)
class Precision(_Section):
    """The types of weights, activations and gradients (mixed precision)."""

    compute: str = _key(
        "float32",
        "autocast: bfloat16 = of activations and products, while weights and gradients stay "
        "float32; float32 = off",
        choices=("float32", "bfloat16"),
    )
    weights: str = _key(
        "float32",
        "the type in which weights live on the device and layers compute; a narrow one has masters "
        "in float32 beside it, which the optimizer steps",
        choices=("float32", "bfloat16", "float16"),
    )
    gradients: str = _key(
        "float32",
        "the type in which gradients of narrow weights add up over microbatches; 'weights' = their "
        "own. Replicas are always added up in float32",
        choices=("float32", "weights"),
    )
    keep: tuple[str, ...] = _key(
        (),
        "names of classes whose modules stay float32 where weights are narrow, such as "
        "['RMSNorm']; subclasses count",
    )
    loss_scale: float = _key(
        65536.0, "float16: the first factor on the loss", least=2**-24, most=2**32
    )
    loss_scale_growth: float = _key(
        2.0, "float16: the factor on the scale after good steps; 1 = never", least=1, most=2**16
    )
    loss_scale_backoff: float = _key(
        0.5, "float16: the factor on the scale after an overflow; 1 = never", least=2**-16, most=1
    )
    loss_scale_interval: int = _key(
        2000, "float16: good steps in a row before the scale grows", least=1
    )
    loss_scale_floor: float = _key(
        1.0, "float16: the least scale; an overflow there ends the run", least=2**-24, most=2**32
    )

    @property
    def scales(self) -> bool:
        """The loss is scaled."""
        return self.weights == "float16"

    def _of_all(self) -> Iterator[str]:
        if self.compute != "float32" and self.weights != "float32":
            yield (
                f"precision.compute = {self.compute!r} and precision.weights = {self.weights!r}: "
                "narrow weights are computed with as they are, without autocast; expected "
                "precision.compute = 'float32'"
            )
        if self.loss_scale < self.loss_scale_floor:
            yield (
                f"precision.loss_scale = {self.loss_scale:g} is below "
                f"precision.loss_scale_floor = {self.loss_scale_floor:g}; expected at least that"
            )


@dataclass(frozen=True, slots=True)
class Memory(_Section):
    """The cut of memory into buckets, recomputation (activation checkpointing), and offload of the
    optimizer's state and of activations."""

    activations_mb: float = _key(
        0.0, "MiB of activations that a rank may hold, for policy auto to keep to; 0 = any", least=0
    )
    bucket_mb: float = _key(
        25.0,
        "MiB of parameters that are reduced and stepped as one; 0 = each parameter by itself",
        least=0,
    )
    recompute: str | int = _key(
        "none",
        "what of a stage runs forward again before its backward instead of being kept: 'none'; "
        "'full' = all; a number = so many of its "
        "layers; 'stage-aware:SHARE' = SHARE of its layers (a half where it is left out) on the "
        "rank that holds most microbatches, less on "
        "the others. A rank that holds at most one recomputes nothing",
    )
    offload: str = _key(
        "none",
        "where the optimizer's state lives: 'none' = on the device; 'stream' = in memory.scratch "
        "(masters and moments), and each bucket comes to the device for its step; 'cpu' = in the "
        "host's memory, where the optimizer steps, too",
        choices=("none", "stream", "cpu"),
    )
    offload_activations: int = _key(
        0,
        "number of microbatches, each of one stage, whose activations a rank may have on the "
        "device at a time; what it holds beyond that is in memory.scratch until its backward; "
        "0 = all stay on the device",
        least=0,
    )
    offload_parameters: bool = _key(
        False,
        "with offload = 'stream': weights are in memory.scratch, too; those of a stage come to the "
        "device for the tasks that read them, so many stages at a time as memory.gathered says",
    )
    scratch: str = _key(
        "host",
        "what holds all that is offloaded: 'host' = CPU memory; 'disk:DIR' = one unnamed file a "
        "rank in that directory, which exists",
        is_path=True,
    )
    scratch_gb: float = _key(
        0.0, "GB of scratch that a rank may use (10^9 bytes); 0 = any number", least=0
    )
    scratch_gb_s: float = _key(
        0.0,
        "GB a second that a rank copies in each direction at most, to leave a shared disk to "
        "others; 0 = no bound",
        least=0,
    )
    zero: int = _key(
        0,
        "what the replicas of a bucket share out (ZeRO): 0 = nothing; 1 = masters and the "
        "optimizer's state; 2 = gradients, too; 3 = weights, too",
        least=0,
        most=3,
    )
    shard: int = _key(
        0,
        "with zero: number of replicas that share out among themselves, such as those of a node "
        "(hybrid sharding); groups add up across. 0 = all",
        least=0,
    )
    gathered: int = _key(
        2,
        "with zero = 3 or offload_parameters: number of stages whose weights a rank may have whole "
        "at a time; 1 brings none ahead",
        least=1,
    )
    reductions: int = _key(
        0,
        "with zero = 2 or 3: number of times that a step adds a gradient up over replicas, and "
        "lets go of it; 0 = as often as the schedule leaves a stage for another",
        least=0,
    )
    device_gb: float = _key(
        0.0,
        "GB that a rank may have on its device (10^9 bytes; without an accelerator, in its own "
        "memory): what needs more by prediction is refused before training; 0 = not checked",
        least=0,
    )

    @property
    def uses_scratch(self) -> bool:
        """Something may be offloaded."""
        return self.offload != "none" or self.offload_activations > 0

    @property
    def scratch_directory(self) -> str | None:
        """The directory of a scratch disk; None for the host's memory."""
        kind, colon, directory = self.scratch.partition(":")
        return directory if kind == "disk" and colon else None

    @property
    def comes_to_device(self) -> bool:
        """The optimizer's state is off the device, and comes there for its step."""
        return self.offload == "stream"

    @property
    def steps_on_host(self) -> bool:
        """The optimizer's state is in the host's memory, and steps there."""
        return self.offload == "cpu"

    def _of_all(self) -> Iterator[str]:
        if self.steps_on_host and (self.scratch != "host" or self.scratch_gb_s):
            key, none = ("scratch_gb_s", 0.0) if self.scratch == "host" else ("scratch", "host")
            yield (
                f"memory.{key} = {getattr(self, key)!r} and memory.offload = {self.offload!r}, "
                "which steps state where it is, in the host's memory; expected "
                f"memory.{key} = {none!r}, or memory.offload = 'stream'"
            )
        if self.offload_parameters and self.offload != "stream":
            yield (
                f"memory.offload_parameters with memory.offload = {self.offload!r}: weights leave "
                "the device along with the state that they are stepped from; expected "
                "memory.offload = 'stream'"
            )
        if self.offload_parameters and self.zero in (1, 2):
            yield (
                f"memory.offload_parameters with memory.zero = {self.zero}, which keeps whole "
                "weights on every rank; expected memory.zero = 3, or 0"
            )
        try:
            most_recomputed(self.recompute)
        except ValueError as error:
            yield f"memory.recompute = {error}; or a number of layers"
        if self.scratch != "host" and not self.scratch_directory:
            yield (
                f"memory.scratch = {self.scratch!r}; expected 'host', or 'disk:DIR' with a "
                "directory that exists"
            )


@dataclass(frozen=True, slots=True)
class Checkpoint(_Section):
    """The checkpoints that a run saves and goes on from."""

    dir: str = _key(
        "checkpoints",
        "directory, relative to that of the run; all ranks must share it; '' = nothing is saved",
        is_path=True,
    )
    every: int = _key(
        0,
        "steps between checkpoints; one at the end and when interrupted comes anyway; 0 = only "
        "those",
        least=0,
    )
    background: str = _key(
        "auto",
        "training goes on while a checkpoint is written, from a copy of the state in the host's "
        "memory; auto = unless memory.scratch is a disk; the last one is waited for",
        choices=("auto", "on", "off"),
    )
    keep: int = _key(2, "how many to keep, the newest; 0 = all", least=0)
    memory_every: int = _key(
        0,
        "steps between copies of each rank's state in the memory of its host and of another one, "
        "from which a job that is started again goes on without a disk; 0 = none",
        least=0,
    )
    memory_dir: str = _key(
        "/dev/shm", "directory in memory for these copies, on every host", is_path=True
    )
    resume: str = _key(
        "",
        "a run or checkpoint to go on from; 'auto' = this run's own, in run.out, where there is "
        "one; 'auto:PATH' = else the one at PATH; '' = begin anew",
        is_path=True,
    )

    @property
    def goes_on(self) -> bool:
        """The run goes on from its own newest checkpoint, where there is one."""
        return self.resume.partition(":")[0] == AUTO

    # A run says what it begins from, until it has saved: `checkpoint.resume = "auto:PATH"`. Starts
    # set plain `"auto"`, and a run that had lost a rank before its first checkpoint began anew with
    # random weights.
    @property
    def begins_from(self) -> str:
        """The run or checkpoint to begin from where this run has none; "" is none."""
        return self.resume.partition(":")[2] if self.goes_on else self.resume

    @property
    def going_on(self) -> str:
        """The same key for a start that goes on with this run: "auto", or "auto:PATH"."""
        return f"{AUTO}:{self.begins_from}" if self.begins_from else AUTO

    def _of_all(self) -> Iterator[str]:
        if self.memory_every and not self.dir:
            yield (
                f"checkpoint.memory_every = {self.memory_every} and checkpoint.dir = '': the "
                "folder of checkpoints says whose the copies are; expected a directory"
            )
        if self.goes_on and not self.dir:
            yield (
                f"checkpoint.resume = {self.resume!r} and checkpoint.dir = '': nothing is saved "
                "that the run could go on from; expected a directory, "
                "or checkpoint.resume = ''"
            )


@dataclass(frozen=True, slots=True)
class Run(_Section):
    """The run itself."""

    steps: int = _key(1000, "optimizer steps", least=1)
    seed: int = _key(
        0, "seed of weights, dropout and the order of samples", least=0, most=2**63 - 1
    )
    deterministic: bool = _key(
        False,
        "where replicas share microbatches: sums with the same bits in every run, since gradients "
        "are kept apart until a step is over, and added in the order of a tree; other runs have "
        "fixed sums anyway",
    )
    device: str = _key(
        "auto",
        "where to compute; auto = the accelerator where torch sees one; cpu; or the type of an "
        "accelerator, such as cuda or xpu",
    )
    compile: str = _key(
        "",
        "a backend of torch.compile, such as inductor: it compiles each layer, and the loss, "
        "before the first step; backwards then run "
        "whole, whatever the policy; '' = off",
    )
    host_of: str = _key(
        "",
        "for trials on one machine: a made-up host for each rank, such as '0,0,1,1'; '' = its own",
    )
    share_gpu: bool = _key(False, "allow several ranks on one GPU")
    transport: str = _key(
        "auto", "auto = mpi under a launcher, none alone", choices=("auto", "mpi", "local")
    )
    survive: bool = _key(
        False,
        "axrt train: ranks that are left when one is lost go on in the same job, from their newest "
        "copies or checkpoint; under Open MPI's mpirun --with-ft ulfm",
    )
    start_patience_s: float = _key(
        300.0,
        "seconds that ranks wait for each other before MPI is up; 0 = for ever",
        least=0,
        most=1e6,
    )
    cuda_aware: str = _key(
        "auto",
        "MPI may touch GPU memory; auto = ask the library",
        choices=("auto", "true", "false"),
    )
    eval_every: int = _key(
        0,
        "steps between validations; one before the first step and one at the end come anyway; 0 = "
        "only those",
        least=0,
    )
    eval_microbatches: int = _key(8, "microbatches of a validation", least=1)
    out: str = _key(
        "runs/run",
        "directory of the run's files; a number is added where it exists",
        is_path=True,
    )
    log_every: int = _key(10, "steps between lines of metrics", least=1)
    trace_steps: int = _key(
        0,
        "steps whose timeline is written and drawn, from the second on, which is warm; 0 = none",
        least=0,
    )
    patience_s: float = _key(
        600.0,
        "seconds that a rank waits for one that shows no sign of life (it neither answers nor "
        "computes) before it ends the job with code "
        "69; 0 = for ever",
        least=0,
    )
    progress: str = _key(
        "auto",
        "what the terminal shows; auto = live on a terminal",
        choices=("auto", "live", "plain", "off"),
    )
    tensorboard: bool = _key(False, "metrics for TensorBoard too, in run.out")
    wandb: str = _key("", "project of Weights & Biases that gets the metrics too; '' = none")


@dataclass(frozen=True, slots=True)
class Config:
    """All sections. Build it from a file, from a dict of the same sections, or in code.

    Raises:
        ConfigError: sections do not go together.
    """

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        _refuse(_of_sections(self))

    @property
    def global_batch(self) -> int:
        """Number of samples of a step, over all replicas."""
        return self.parallel.data * self.schedule.microbatches * self.schedule.microbatch_size

    @property
    def votes(self) -> bool:
        """Optimizer steps wait for the norm of all gradients: to clip them, or to hear of an
        overflow."""
        return self.optimizer.clip > 0 or self.precision.scales

    @property
    def saves_beside(self) -> bool:
        """Training goes on while a checkpoint is written."""
        how = self.checkpoint.background
        return how == "on" or (how == "auto" and not self.memory.scratch_directory)

    @classmethod
    def read(
        cls, source: "str | Path | Mapping[str, Any] | Config | None", overrides: Sequence[str] = ()
    ) -> Self:
        """Read a configuration.

        Args:
            source: path of a TOML file, a dict of sections, or a Config; None takes all defaults.
            overrides: texts `section.key=value` that are laid over it, in order.
        Raises:
            ConfigError: there is no such file, or it is no TOML. Else one text lists all mistakes:
                unknown sections and keys, each with the nearest name; values that do not fit;
                values that do not go together.
        """
        if isinstance(source, Config):
            tree: dict[str, Any] = asdict(source)
        elif isinstance(source, str | Path):
            tree = _parse_file(Path(source))
        else:
            tree = {
                section: dict(keys) if isinstance(keys, Mapping) else keys
                for section, keys in (source or {}).items()
            }
        mistakes = [text for override in overrides for text in _apply(override, tree)]
        mistakes += _unknown(tree)
        sections = {
            name: _built(kind, tree.get(name, {}), mistakes)
            for name, kind in get_type_hints(cls).items()
        }
        try:
            config = cls(**sections)
        except _Mistakes as error:
            mistakes += [text for text in error.texts if not _names_any(text, _in_doubt(mistakes))]
        if mistakes:
            raise ConfigError(_told(mistakes))
        return config

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Every section with every key, as TOML can write it."""
        return {
            name: {k: list(v) if isinstance(v, tuple) else v for k, v in keys.items()}
            for name, keys in asdict(self).items()
        }


def described() -> list[str]:
    """Every key with its default and meaning, one line each, under a line for each section."""
    lines = []
    for name, section in get_type_hints(Config).items():
        lines.append(f"[{name}]  {section.__doc__}")
        lines += [
            f"  {item.name} = {item.default!r}".ljust(34) + item.metadata["meaning"]
            for item in fields(section)
        ]
    return lines


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        # a name on a disk may be no UTF-8: its bytes stand in the file as they are
        return toml_of(read_text(path, _MOST_BYTES, errors="surrogateescape"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; expected a TOML file, such as examples/quickstart.toml"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _apply(override: str, tree: dict[str, Any]) -> Iterator[str]:
    """Lay an override over the sections, and give the mistakes in it."""
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if (
        "\n" in override or "\r" in override
    ):  # TOML would take the first line and a second key with it
        yield f"{override!r} has more than one line; expected section.key=value, one at a time"
        return
    if not (equals and dot and key):
        yield f"{override!r} is no override; expected section.key=value, such as run.steps=100"
        return
    try:
        value = toml_of(f"value = {text}")["value"]
    except ValueError as error:
        if text[:1] in ('"', "'", "[", "{"):
            yield f"{override!r} begins as a value of TOML and is none: {error}"
            return
        value = text  # a bare word
    keys = tree.setdefault(section, {})
    if isinstance(keys, dict):  # else it is refused as a section
        keys[key] = value


def _unknown(tree: Mapping[str, Any]) -> Iterator[str]:
    """The sections that do not exist, then the keys."""
    sections = get_type_hints(Config)
    yield from _strangers("section", tree, sections, "")
    for name, kind in sections.items():
        if isinstance(tree.get(name), Mapping):
            yield from _strangers(
                "key", tree[name], {item.name: None for item in fields(kind)}, f"{name}."
            )


def _strangers(
    what: str, found: Mapping[str, Any], known: Mapping[str, Any], prefix: str
) -> Iterator[str]:
    for name in found:
        if name in known:
            continue
        said = what_became_of(prefix + name, found[name])
        if said:
            yield said
        elif said is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {prefix}{near[0]}?"
                if near
                else f"expected one of {', '.join(known)}"
            )
            yield f"there is no {what} {prefix}{name}; {hint}"


def _built(kind: type[Any], keys: Any, mistakes: list[str]) -> Any:
    """The section, from the keys that fit; texts about the others are added to `mistakes`."""
    section = kind.__name__.lower()
    if not isinstance(keys, Mapping):
        mistakes.append(f"[{section}] is {_type_name(type(keys))}; expected a section of keys")
        return kind()
    choices = {item.name: item.metadata["choices"] for item in fields(kind)}
    fitting = {
        key: tuple(value) if isinstance(value, list) else _spelled(value, choices[key])
        for key, value in keys.items()
        if key in choices
    }
    while True:
        try:
            return kind(**fitting)
        except _Mistakes as error:
            mistakes += error.texts
            wrong = [
                key
                for key in fitting
                if any(_names_any(text, [f"{section}.{key}"]) for text in error.texts)
            ]
            fitting = {key: value for key, value in fitting.items() if wrong and key not in wrong}


def _spelled(value: Any, choices: Sequence[str]) -> Any:
    """A yes or no as the key's choices spell it: a boolean of TOML, on or off, true or false."""
    word = str(value).lower() if isinstance(value, bool) else value
    for same in (("true", "on"), ("false", "off")):
        if word in same:
            return next((choice for choice in same if choice in choices), value)
    return value


def _names_any(text: str, keys: Iterable[str]) -> bool:
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) for key in keys)


def _in_doubt(mistakes: Iterable[str]) -> set[str]:
    """The keys and sections that mistakes are about: no text about their values together with
    others is sure."""
    known = {f"{section}.{key}" for section, keys in Config().as_dict().items() for key in keys}
    return {
        key
        for text in mistakes
        for key in known
        if _names_any(text, [key]) or text.startswith(f"[{key.partition('.')[0]}]")
    }


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is UnionType:
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(one, get_args(kind)[0]) for one in value)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _type_name(kind: Any) -> str:
    names = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "a boolean (true or false)",
        tuple: "a list",
        list: "a list",
        dict: "a section",
    }
    if get_origin(kind) is UnionType:
        return " or ".join(_type_name(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {_type_name(get_args(kind)[0])}"
    return names.get(kind, str(kind))


def _out_of_range(key: str, value: Any, limits: Mapping[str, Any]) -> Iterator[str]:
    is_own = limits["takes_own"] and ":" in str(value)
    if (key, value) in VALUES:
        yield f"{key} = {value!r} is gone: {VALUES[key, value].why}"
    elif limits["choices"] and value not in limits["choices"] and not is_own:
        near = difflib.get_close_matches(str(value).lower(), limits["choices"], n=1, cutoff=0.75)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(choice or "''" for choice in limits["choices"])
        yield f"{key} = {value!r}; expected one of {known} ({limits['meaning']}){hint}"
    for one in value if isinstance(value, tuple) else (value,):
        too_small = limits["least"] is not None and not one >= limits["least"]
        too_large = (limits["most"] is not None and not one <= limits["most"]) or one == float(
            "inf"
        )
        if too_small or too_large:
            bounds = [f"at least {limits['least']}"] * (limits["least"] is not None)
            bounds += (
                [f"at most {limits['most']}"]
                if limits["most"] is not None
                else ["finite"] * too_large
            )
            yield f"{key} = {value!r}; expected {' and '.join(bounds)} ({limits['meaning']})"
            return


def _impossible_text(key: str, value: Any, is_path: bool) -> Iterator[str]:
    """What no path, and no other text, can have."""
    for one in value if isinstance(value, tuple) else (value,):
        if not isinstance(one, str):
            continue
        if strange := _STRANGE.search(one):
            yield f"{key} = {one[:60]!r} has {strange[0]!r}, which is no character; expected text"
        elif is_path and "\n" not in one and _is_overlong(one):
            yield (
                f"{key} = {one[:40] + '...'!r} has a name of {max(_lengths(one))} bytes in a path "
                f"of {len(os.fsencode(one))}; expected names of at most {_MOST_OF_NAME} bytes, and "
                f"{_MOST_OF_PATH} in all"
            )


def _is_overlong(path: str) -> bool:
    return max(_lengths(path)) > _MOST_OF_NAME or len(os.fsencode(path)) > _MOST_OF_PATH


def _lengths(path: str) -> list[int]:
    """The number of bytes of each name in a path."""
    return [len(os.fsencode(name)) for name in path.split("/")]


def _of_data(data: Data) -> Iterator[str]:
    if not data.sources:
        yield "data.source = []; expected at least one source"
    of_tokens = [name.endswith(".bin") for name in (*data.sources, *data.validations)]
    if len(set(of_tokens)) > 1:
        yield (
            f"data.source = {_listed(data.source)} and data.validation = "
            f"{_listed(data.validation)}: one is a token file and another is text; expected the "
            "same"
        )
    if data.weights and (len(data.weights) != len(data.sources) or not all(data.weights)):
        yield (
            f"data.weights = {list(data.weights)} for {len(data.sources)} sources; expected a "
            "number above 0 for each"
        )


def _listed(value: str | tuple[str, ...]) -> str:
    return repr(value if isinstance(value, str) else list(value))


def _of_groups(memory: Memory, parallel: Parallel) -> Iterator[str]:
    for key, replicas, least in (
        ("memory.shard", memory.shard, 2),
        ("parallel.group", parallel.group, 1),
    ):
        if replicas and parallel.data % replicas:
            fits = [n for n in range(least, parallel.data + 1) if not parallel.data % n]
            yield (
                f"{key} = {replicas} of parallel.data = {parallel.data} replicas; expected 0 for "
                f"all of them{', or one of ' * bool(fits)}{', '.join(map(str, fits))}"
            )
        if 1 < replicas < parallel.data and parallel.collectives == "library":
            yield (
                f"{key} = {replicas} with parallel.collectives = 'library', which adds all "
                f"replicas up in its own way; expected {key} = 0"
            )
    if memory.shard and not memory.zero:
        yield f"memory.shard = {memory.shard} with memory.zero = 0; expected memory.zero > 0"
    if memory.shard == 1 < parallel.data:
        yield "memory.shard = 1: nothing is shared out; expected memory.zero = 0"
    if memory.zero and parallel.group not in (0, 1, memory.shard):
        yield (
            f"parallel.group = {parallel.group} with memory.zero = {memory.zero}: what shares out "
            f"adds up; expected parallel.group = 0, or memory.shard = {parallel.group}"
        )


def _of_shards(memory: Memory, run: Run, collectives: str) -> Iterator[str]:
    if memory.zero > 1 and memory.reductions > 1 and collectives == "library":
        yield (
            f"memory.reductions = {memory.reductions} with parallel.collectives = 'library': it "
            "adds up once a step; expected memory.reductions = 1, or parallel.collectives = 'parts'"
        )
    if memory.zero > 2 and run.compile:
        yield (
            f"memory.zero = {memory.zero} with run.compile = {run.compile!r}: compiled layers need "
            "weights that are always there; expected memory.zero = 2, or run.compile = ''"
        )
    if memory.offload_parameters and run.compile:
        yield (
            f"memory.offload_parameters with run.compile = {run.compile!r}: compiled layers need "
            "weights that are always there; expected run.compile = ''"
        )
    if memory.offload_activations and run.compile:
        yield (
            f"memory.offload_activations = {memory.offload_activations} with run.compile = "
            f"{run.compile!r}: what compiled layers save stays on the device; expected "
            "memory.offload_activations = 0, or run.compile = ''"
        )
    if memory.reductions > 1 and memory.zero < 2:
        yield (
            f"memory.reductions = {memory.reductions} with memory.zero = {memory.zero}: gradients "
            "are kept for the whole step; expected memory.zero = 2 or 3"
        )


def _of_sharing(config: Config) -> Iterator[str]:
    if not (config.schedule.share and config.run.deterministic):
        return
    of, parallel = "run.deterministic with schedule.share", config.parallel
    if config.memory.zero:
        yield (
            f"{of} and memory.zero = {config.memory.zero}: gradients are kept apart whole; "
            "expected memory.zero = 0, or run.deterministic = false"
        )
    if parallel.collectives == "library":
        yield (
            f"{of} and parallel.collectives = 'library', which adds up in its own way; expected "
            "parallel.collectives = 'parts', or run.deterministic = false"
        )
    if parallel.group > 1:
        yield (
            f"{of} and parallel.group = {parallel.group}: one tree adds all replicas up; expected "
            "parallel.group = 0, or run.deterministic = false"
        )


def _of_sections(config: Config) -> Iterator[str]:
    """The mistakes of values that do not go together, over all sections."""
    model, schedule, data = config.model, config.schedule, config.parallel.data
    batch = config.global_batch
    if schedule.global_batch not in (0, batch):
        yield (
            f"schedule.global_batch = {schedule.global_batch}, but parallel.data x "
            "schedule.microbatches x schedule.microbatch_size = "
            f"{data} x {schedule.microbatches} x {schedule.microbatch_size} = {batch}; set "
            f"schedule.global_batch = {batch} or 0"
        )
    yield from _of_data(config.data)
    yield from _of_groups(config.memory, config.parallel)
    yield from _of_sharing(config)
    yield from _of_shards(config.memory, config.run, config.parallel.collectives)
    if len(config.optimizer.betas) != 2:
        yield (
            f"optimizer.betas = {list(config.optimizer.betas)}; expected two numbers, such as "
            "[0.9, 0.95]"
        )
    if (
        config.optimizer.schedule != "constant"
        and config.optimizer.warmup_steps >= config.run.steps
    ):
        yield (
            f"optimizer.warmup_steps = {config.optimizer.warmup_steps} of run.steps = "
            f"{config.run.steps}; expected fewer, so that the "
            f"{config.optimizer.schedule} schedule has steps to fall"
        )
    if config.run.trace_steps >= config.run.steps:
        yield (
            f"run.trace_steps = {config.run.trace_steps} of run.steps = {config.run.steps}: the "
            "first step is not traced; expected at most "
            f"{config.run.steps - 1}"
        )
    if model.factory:
        return
    yield from model.misfits()
    if config.data.document_end >= model.vocab:
        yield (
            f"data.document_end = {config.data.document_end}; expected a token that the model "
            f"knows, less than model.vocab = {model.vocab}, or -1"
        )
    if not config.data.is_of_tokens and config.data.tokenizer not in ("auto", "bytes"):
        yield (
            f"data.tokenizer = {config.data.tokenizer!r} with text as data.source: text is read as "
            "bytes; expected a token file, which axrt prepare --tokenizer makes of it"
        )
