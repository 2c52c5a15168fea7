"""What of several sections does not go together, one text each."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from axrt.scheduler.plural import plural

from .data import Data
from .memory import Memory
from .parallel import Parallel
from .run import Run

if TYPE_CHECKING:
    from .config import Config


def _of_data(data: Data) -> Iterator[str]:
    if not data.sources:
        yield "data.source = []; expected at least one source"
    of_tokens = [name.endswith(".bin") for name in (*data.sources, *data.validations)]
    if len(set(of_tokens)) > 1:
        yield (
            f"data.source = {_listed(data.source)} and data.validation = "
            f"{_listed(data.validation)}: one is a token file and another is text; expected the "
            "same. axrt prepare makes tokens of a text; data.validation = '' holds out some of the "
            "source"
        )
    if data.weights and (len(data.weights) != len(data.sources) or not all(data.weights)):
        yield (
            f"data.weights = {list(data.weights)} for {len(data.sources)} sources; expected a "
            "number above 0 for each"
        )


def _listed(value: str | tuple[str, ...]) -> str:
    return repr(value if isinstance(value, str) else list(value))


def _of_groups(parallel: Parallel) -> Iterator[str]:
    group = parallel.group
    if group and parallel.data % group:
        fits = [n for n in range(1, parallel.data + 1) if not parallel.data % n]
        yield (
            f"parallel.group = {group} of parallel.data = {plural(parallel.data, 'replica')}; "
            f"expected 0 for all of them, or one of {', '.join(map(str, fits))}"
        )
    if 1 < group < parallel.data and parallel.collectives == "library":
        yield (
            f"parallel.group = {group} with parallel.collectives = 'library', which adds all "
            "replicas up in its own way; expected parallel.group = 0"
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


def _of_sharing(config: "Config") -> Iterator[str]:
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


def _of_teams(config: "Config") -> Iterator[str]:
    """What is not there yet where a stage has several members, or virtual ones."""
    yield from _of_virtual_members(config)
    size = config.parallel.virtual_members
    if size == 1:
        return
    key, off = config.parallel.cut_by
    found_in = f"{key} = {size}"
    if config.run.compile:
        yield (
            f"run.compile = {config.run.compile!r} with {found_in}, which does not take it yet; "
            f"expected run.compile = '', or {key} = {off}"
        )
    if config.optimizer.steps_matrices:
        yield (
            f"optimizer.name = {config.optimizer.name!r} with {found_in}: matrices are stepped "
            f"whole, and members of a team cut them; expected 'adamw', or {key} = {off}"
        )
    yield from _of_gathering(config)


def _of_factors(config: "Config") -> Iterator[str]:
    """What does not go with an optimizer that looks at what layers are given."""
    of, memory, parallel, share = config.optimizer, config.memory, config.parallel, config.schedule
    grouped = 1 < parallel.group < parallel.data
    sharded = parallel.data == 1 or memory.zero > 0
    stays = memory.offload if memory.steps_on_host else "stream"
    rows: list[tuple[str, object, object, str]] = [
        ("run.compile", config.run.compile, "", "compiled layers do not show what they are given"),
        ("memory.offload_activations", memory.offload_activations, 0, "inputs of layers stay"),
        ("memory.offload", stays, "stream", "its factors are where layers compute"),
        ("memory.zero", memory.zero, memory.zero if sharded else 1, "replicas' factors differ"),
        ("parallel.group", parallel.group * grouped, 0, "groups' factors differ"),
        ("schedule.share", share.share, False, "its factors follow from who computes what"),
    ]
    for name, found, expected, why in rows if of.preconditions else ():
        if found != expected:
            yield (
                f"{name} = {found!r} with optimizer.name = {of.name!r}: {why}; expected {name} = "
                f"{expected!r}"
            )


def _of_virtual_members(config: "Config") -> Iterator[str]:
    """What does not go with `parallel.tensor_shards`."""
    of, memory = config.parallel, config.memory
    size, tensor = of.tensor_shards, of.tensor
    if not size:
        return
    if size & (size - 1) or size % tensor:
        fits = [2**k for k in range(11) if not 2**k % tensor]
        expected = f"one of {', '.join(map(str, fits[:3]))}, and so on, or 0" if fits else "0"
        yield (
            f"parallel.tensor_shards = {size} with parallel.tensor = {tensor}: they are a power of "
            f"two, of which each member has as many; expected {expected}"
        )
    if size <= tensor:
        return
    here = f"parallel.tensor_shards = {size} and parallel.tensor = {tensor}"
    if memory.zero > 2:
        yield (
            f"memory.zero = {memory.zero} with {here}: weights of virtual members are not let go "
            f"within a step; expected memory.zero = 2, or parallel.tensor_shards = {tensor}"
        )
    rows: list[tuple[str, object, object]] = [
        ("memory.offload_parameters", memory.offload_parameters, False),
        ("memory.offload_activations", memory.offload_activations, 0),
        ("parallel.gather_again", of.gather_again, False),
        ("parallel.collectives", of.collectives, "parts"),
        ("run.deterministic", config.run.deterministic, False),
        ("precision.gradients", config.precision.gradients, "float32"),
        ("schedule.costs", config.schedule.costs, ""),
    ]
    for name, found, off in rows:
        if found != off:
            yield (
                f"{name} = {found!r} with {here}, where a rank has several virtual members; "
                f"expected {name} = {off!r}, or parallel.tensor_shards = {tensor}"
            )
    if config.schedule.policy == "auto":
        yield (
            f"schedule.policy = 'auto' with {here}, whose layers are not measured yet; expected "
            f"the name of a policy, '', or parallel.tensor_shards = {tensor}"
        )


def _of_gathering(config: "Config") -> Iterator[str]:
    """What does not go with `parallel.gather_again`."""
    if not config.parallel.gather_again:
        return
    if config.memory.recompute == "full":
        yield (
            "parallel.gather_again = true with memory.recompute = 'full': layers that run again "
            "keep nothing that could be let go; expected one of them"
        )
    if config.memory.offload_activations:
        yield (
            "parallel.gather_again = true with memory.offload_activations = "
            f"{config.memory.offload_activations}: both exchange the memory of what autograd "
            "saves; expected one of them"
        )
    if config.precision.compute != "float32":
        yield (
            "parallel.gather_again = true with precision.compute = "
            f"{config.precision.compute!r}: narrow copies of what is gathered are kept, and "
            "nothing would be let go; expected precision.weights, or parallel.gather_again = false"
        )


def of_sections(config: "Config") -> Iterator[str]:
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
    yield from _of_groups(config.parallel)
    yield from _of_sharing(config)
    yield from _of_factors(config)
    yield from _of_teams(config)
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
