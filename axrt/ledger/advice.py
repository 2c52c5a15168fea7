"""Which key would help most where memory is short: each is tried, and the ledgers are compared."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.scheduler.plural import plural

from .ledger import Ledger, Tier, Unit
from .prediction import Prediction, Predictor

_GB = 1e9
_WORTH_IT = 0.01  # of what the fullest rank has
_MOST_CHANGES = 4
_FEWEST = "1f1b"  # the policy that holds fewest microbatches
_BY_STAGE = "breadth-first"  # the policy that takes all microbatches through a stage


class Change(NamedTuple):
    """Another value of a key."""

    text: str  # key and value, as a file has them
    config: Config  # settings with that value
    size: int  # number of ranks of the job


class Advice(NamedTuple):
    """What a change would save."""

    text: str  # key and value to set
    saves: int  # bytes by which the device of the fullest rank holds less
    then: Prediction  # prediction with the change
    unit: Unit  # what sizes are said in

    def __str__(self) -> str:
        fuller = self.then.of_rank(self.then.fullest)
        beside = [
            f"{self.unit.text(fuller.total(tier))} on the {tier.value}"
            for tier in (Tier.HOST, Tier.DISK)
            if fuller.total(tier)
        ]
        there = f" ({', '.join(beside)})" if beside else ""
        return (
            f"{self.text} would save {self.unit.text(self.saves)}: rank {self.then.fullest} would "
            f"be the fullest, with {self.unit.text(self.then.most)}{there}"
        )


def advices(predictor: Predictor, now: Prediction) -> list[Advice]:
    """What single changes would save on the fullest device, the best first; those that save less
    than 1 % are left out."""
    found = []
    for change in _changes(now, len(predictor.layers)):
        try:
            then = predictor.predict(change.config, change.size)
        except ConfigError:  # the model or the schedule does not go with it
            continue
        if set(then.unknown) - set(now.unknown):  # it would only know less
            continue
        found.append(Advice(change.text, now.most - then.most, then, now.unit))
    worth = [one for one in found if one.saves > _WORTH_IT * now.most]
    return sorted(worth, key=lambda one: -one.saves)


def check_fits(predictor: Predictor, config: Config, size: int) -> None:
    """Check that every rank has room for what is predicted.

    Args:
        config: settings of the run; `memory.device_gb` and `memory.scratch_gb` are the room.
    Raises:
        ConfigError: a rank has not; the text says what would help.
    """
    if refused := refusal(predictor, predictor.predict(config, size)):
        raise ConfigError(refused)


def fits(prediction: Prediction) -> bool:
    """The fullest device has room, as `memory.device_gb` says, or nothing is said."""
    room = prediction.config.memory.device_gb
    return not room or prediction.most <= room * _GB


def refusal(predictor: Predictor, now: Prediction) -> str:
    """A text that says what does not fit, and what would help; empty if all fits."""
    if fits(now):
        return _refused_scratch(now)
    room, fullest = now.config.memory.device_gb, now.fullest
    held = "; ".join([now.of_rank(fullest).told(now.unit), *now.unknown])
    return (
        f"memory.device_gb = {room:g}, but rank {fullest} will hold {now.unit.text(now.most)} on "
        f"its device by prediction: {held}. {_what_to_do(predictor, now)}"
    )


def _refused_scratch(now: Prediction) -> str:
    memory = now.config.memory
    needs = [now.of_rank(rank).scratch for rank in range(now.size)]
    most = max(needs, key=_scratch_bytes)
    if not memory.scratch_gb or _scratch_bytes(most) <= memory.scratch_gb * _GB:
        return ""
    return (
        f"memory.scratch_gb = {memory.scratch_gb:g}, but rank {needs.index(most)} will keep "
        f"{now.unit.text(_scratch_bytes(most))} in memory.scratch = {memory.scratch!r}: "
        f"{most.told(now.unit, Tier.HOST, Tier.DISK)}; expected at least "
        f"{_rounded_up(_scratch_bytes(most))}"
    )


def _rounded_up(num_bytes: int) -> str:
    """GB with three digits, of which no more is lost."""
    digits = 2 - math.floor(math.log10(num_bytes / _GB))
    return f"{math.ceil(num_bytes / _GB * 10**digits) / 10**digits:.{max(0, digits)}f}"


def _scratch_bytes(ledger: Ledger) -> int:
    return ledger.total(Tier.HOST) + ledger.total(Tier.DISK)


def _what_to_do(predictor: Predictor, now: Prediction) -> str:
    steps = _steps_to_fit(predictor, now, more_ranks=False)
    if not (steps and fits(steps[-1].then)):  # whoever has more ranks is told last
        steps = _steps_to_fit(predictor, now, more_ranks=True) or steps
    at = steps[-1].then if steps else now
    if not steps:
        return "No key that was tried would help: take a smaller model, or devices with more memory"
    said = "; then ".join(map(str, steps))
    if fits(at):
        return f"{said}, which fits"
    return f"{said}, which does not fit either: take a smaller model, or devices with more memory"


def _steps_to_fit(predictor: Predictor, now: Prediction, more_ranks: bool) -> list[Advice]:
    """Changes one after the other until all fits, or a few; each is the first that makes it fit, or
    the best."""
    steps: list[Advice] = []
    at = now
    while not fits(at) and len(steps) < _MOST_CHANGES:
        helpful = [one for one in advices(predictor, at) if more_ranks or one.then.size == now.size]
        if not helpful:
            break
        steps.append(next((one for one in helpful if fits(one.then)), helpful[0]))
        at = steps[-1].then
    return steps


def _changes(now: Prediction, layers: int) -> Iterator[Change]:
    config, size, parallel = now.config, now.size, now.config.parallel
    memory, precision = config.memory, config.precision
    for section, values in (
        ("memory", {"offload": "stream"} if memory.offload == "none" else {}),
        ("memory", {"recompute": "full"} if memory.recompute != "full" else {}),
        ("precision", {"weights": "bfloat16"} if precision.weights == "float32" else {}),
        ("precision", {"gradients": "weights"} if precision.weights != "float32" else {}),
        ("memory", {"bucket_mb": memory.bucket_mb / 4} if memory.bucket_mb > 1 else {}),
        ("memory", {"zero": 1} if memory.zero == 0 else {}),
        ("schedule", {"policy": _FEWEST} if now.schedule.policy != _FEWEST else {}),
    ):
        for key, value in values.items():
            changed = _with(config, section, key, value)
            if changed is not None and changed != config:
                yield Change(f"{section}.{key} = {value!r}", changed, size)
    again = _with(config, "parallel", "gather_again", True) if parallel.tensor > 1 else None
    if again is not None and again != config:
        yield Change("parallel.gather_again = true", again, size)
    yield from _weights_in_scratch(now, layers // now.mesh.pipe)
    ranks = min(2 * now.mesh.pipe, layers)
    more = _with(config, "parallel", "pipe", ranks)
    if more is not None and ranks > now.mesh.pipe:
        size = ranks * parallel.data * parallel.tensor
        yield Change(f"parallel.pipe = {ranks} on {plural(size, 'rank')}", more, size)


def _weights_in_scratch(now: Prediction, chunks: int) -> Iterator[Change]:
    """Weights in scratch, under the schedule that has most of them there: a rank's stages are as
    small as they can be, and come one after the other."""
    config = now.config
    away = config.memory.offload_parameters
    if away or config.memory.offload != "stream" or chunks < 2:
        return
    text = (
        f"memory.offload_parameters = true with schedule.policy = {_BY_STAGE!r} and "
        f"schedule.chunks = {chunks}"
    )
    with suppress(ConfigError):  # other keys do not go with it
        schedule = replace(
            config.schedule, policy=_BY_STAGE, chunks=chunks, placement="", max_held=0
        )
        memory = replace(config.memory, offload_parameters=True)
        yield Change(text, replace(config, schedule=schedule, memory=memory), now.size)


def _with(config: Config, section: str, key: str, value: Any) -> Config | None:
    """The configuration with another value; None where it does not go with the others."""
    try:
        changed = replace(getattr(config, section), **{key: value})
        return replace(config, **{section: changed})
    except ConfigError:
        return None
