"""What `axrt train` says first and last: four lines at most that a newcomer understands, and one of
the optimizer where it steps matrices. With -v there is the rest."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

from axrt.config import AUTO, Config
from axrt.device.device import free_memory
from axrt.engine import Engine
from axrt.ledger.ledger import Unit
from axrt.ledger.prediction import Prediction
from axrt.scheduler.plural import plural
from axrt.store.owners import CostsWhole


class Size(NamedTuple):
    """How large a model is. Names of matrices are counted, however many one is fused of."""

    parameters: int  # of all, trained or not
    matrices: int  # that the optimizer steps as a whole
    of_matrices: int  # parameters of them
    of_rest: int  # parameters that it steps one by one

    @classmethod
    def of(
        cls, factory: Callable[..., object], parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> "Size":
        """Count parameters with their names in the model.

        Args:
            factory: what makes the optimizer of a bucket.
        """
        every = matrices = of_matrices = of_rest = 0
        for name, parameter in parameters:
            number = parameter.numel()
            every += number
            if not parameter.requires_grad:
                continue
            if isinstance(factory, CostsWhole) and factory.is_matrix(name, parameter):
                matrices, of_matrices = matrices + 1, of_matrices + number
            else:
                of_rest += number
        return cls(every, matrices, of_matrices, of_rest)


class Losses(NamedTuple):
    """The last losses of a run, in nats a token."""

    training: float
    held_out: float | None  # None: nothing was validated


def layout(engine: Engine, directory: object, size: Size | None) -> str:
    """The run in a line: where it runs, how large model and steps are, where its files are.

    Args:
        size: that of the model; None: its parameters could not be counted.
    """
    config, replicas = engine.config, engine.data_size
    tokens = config.global_batch * config.model.context
    parameters = "" if size is None else f"{_millions(size.parameters)} parameters, "
    team = f" x {plural(engine.team_size, 'member')}" if engine.team_size > 1 else ""
    return (
        f"{plural(engine.pipe_size, 'rank')}{team} x {plural(replicas, 'replica')} on "
        f"{engine.device}, "
        f"{parameters}{plural(tokens, 'token')} a step, "
        f"{plural(config.run.steps, 'step')}; files in {directory}"
    )


def _millions(number: int) -> str:
    """A number with the digits that a person wants."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:,}"


def optimizer(config: Config, size: Size) -> str:
    """What an optimizer of matrices steps, and what AdamW does."""
    matrices = "1 matrix" if size.matrices == 1 else f"{size.matrices:,} matrices"
    return (
        f"optimizer {config.optimizer.name} steps {matrices} of {_millions(size.of_matrices)} "
        f"parameters, and AdamW the other {_millions(size.of_rest)}"
    )


def schedule(engine: Engine) -> str:
    """The schedule, and what is expected of it where that was simulated."""
    plan = " along a plan" if engine.along_a_plan else ""
    alone = f"{engine.schedule.policy}{plan}"
    chosen = engine.candidates[0] if engine.candidates else alone
    return f"schedule  {chosen}" + ("  (-v: why)" if engine.candidates else "")


def memory(engine: Engine, prediction: Prediction) -> str:
    """What the fullest rank will hold, and what is free."""
    most, free = prediction.most, free_memory(engine.device)
    bound = "least, as some is unknown (-v: what)" if prediction.unknown else "most"
    expected = f"memory    {Unit.of(most).text(most)} of tensors a rank at {bound}"
    return f"{expected}; {Unit.of(free).text(free)} are free" if free else expected


def details(engine: Engine) -> str:
    """The schedule in full: batch, placement, and what does without MPI."""
    config, size = engine.config, engine.config.schedule
    replica = " and replica" if engine.data_size > 1 else ""
    policy = engine.schedule.policy
    if engine.along_a_plan:
        begins = ", ".join(map(str, engine.cuts[:-1]))
        policy += f" along a plan ({engine.placement} placement, stages from layers {begins} on)"
    return (
        f"policy {policy}, {plural(size.microbatches, 'microbatch')} of {size.microbatch_size} x "
        f"{config.model.context} tokens a step{replica}{_by_library(engine)}{_shared(engine)}"
    )


def why(engine: Engine) -> str:
    """How the schedule was chosen, and what was next."""
    chosen, *others = engine.candidates
    next_best = "; ".join(others[:2]) or "nothing else"
    is_auto = engine.config.schedule.policy == AUTO
    what = "auto chose" if is_auto else "by what layers take alone:"
    how = (
        "of those within 1 % of the fastest the one that holds least, or a plan that is over 1 % "
        "faster"
        if is_auto
        else "a plan is over 1 % faster, and one that holds more over 2 %"
    )
    return (
        f"{what} {chosen}; next would be {next_best} (simulated, without the optimizer and cores "
        f"that ranks share; {how})"
    )


def last(config: Config, directory: object, took_s: float, losses: Losses) -> str:
    """The end of a run that has done all its steps, and has saved them if it saves at all."""
    validation = "" if losses.held_out is None else f", validation {losses.held_out:.3f}"
    can_generate = bool(config.checkpoint.dir) and not config.model.factory
    todo = [f"axrt generate {directory}"] * can_generate + [f"axrt report {directory}"]
    found = f"loss {losses.training:.3f}{validation}"
    return f"done in {_duration(took_s)}: {found}; next: {', '.join(todo)}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _shared(engine: Engine) -> str:
    """What runs that share microbatches must know of their sums, where this is one."""
    how = "" if engine.config.run.deterministic else ": sums have the order of arrival"
    return f", replicas share{how}" if engine.config.schedule.share else ""


def _by_library(engine: Engine) -> str:
    """What torch.distributed does in this run, where it does something."""
    parallel = engine.config.parallel
    gradients = parallel.collectives == "library" and engine.data_size > 1
    activations = parallel.activations == "library" and engine.pipe_size > 1
    what = ["gradients"] * gradients + ["large activations"] * activations
    return f", {' and '.join(what)} by torch.distributed" if what else ""
