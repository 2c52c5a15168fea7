"""What a layout would cost with one key changed, and why."""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from axrt.config import Config

from .candidates import Shape
from .search import Choice, Search, rank_of
from .step_time import StepTime


class StepAway(NamedTuple):
    """Another value of one key."""

    key: str  # the key and its value, such as "parallel.tensor = 4"
    slower: float | None  # how much longer a step takes, as a share; None: nothing fits
    why: str  # what takes longer; "" where nothing fits


def shape_of(config: Config) -> Shape:
    """How a layout shares out ranks and samples."""
    of, schedule = config.parallel, config.schedule
    counts = schedule.microbatch_size, schedule.microbatches
    return Shape(of.tensor, of.pipe, of.data, *counts)


def steps_away(search: Search, chosen: Choice) -> Iterator[StepAway]:
    """Each key with its next values, and what a step takes with them: in the fastest layout that
    has this value, and the others of its keys as the shape of ranks allows.

    Args:
        chosen: the layout, with what is due to joints and to ends of steps.
    """
    for key, shapes in _other_shapes(search, shape_of(chosen.config)):
        choices = filter(None, map(search.in_shape, shapes))
        yield _compared(key, chosen, min(choices, key=rank_of, default=None), search)
    now, shape = chosen.config, shape_of(chosen.config)
    for key, value in _other_keys(search, now):
        name = key.partition(".")[2]
        other = search.in_shape(shape, **{name: value})
        yield _compared(f"{key} = {value!r}", chosen, other, search)


def _other_shapes(search: Search, of: Shape) -> Iterator[tuple[str, list[Shape]]]:
    """Other values of the keys that say how ranks and samples are shared out, each with the shapes
    that have it: another number makes up for it."""
    known = set(search.shapes)
    ranks, samples = of.tensor * of.pipe * of.data, of.data * of.samples * of.microbatches
    for name in ("tensor", "pipe", "samples"):
        for value in (getattr(of, name) * 2, getattr(of, name) // 2):
            found = [
                shape
                for shape in _made_up_for(of._replace(**{name: value}), name, ranks, samples)
                if shape in known
            ]
            section = "schedule.microbatch_size" if name == "samples" else f"parallel.{name}"
            if found:
                yield f"{section} = {value}", found


def _made_up_for(changed: Shape, name: str, ranks: int, samples: int) -> Iterator[Shape]:
    """Shapes with all ranks and samples, of which one more number is another one."""
    for other in ("data", "pipe", "tensor"):
        rest = [getattr(changed, one) for one in ("data", "pipe", "tensor") if one != other]
        a_group = prod(rest)
        if other == name or not a_group or ranks % a_group:
            continue
        shape = changed._replace(**{other: ranks // a_group})
        a_microbatch = shape.data * shape.samples
        if a_microbatch and samples % a_microbatch == 0:
            yield shape._replace(microbatches=samples // a_microbatch)


def _other_keys(search: Search, now: Config) -> Iterator[tuple[str, Any]]:
    memory = now.memory
    if now.parallel.data > 1:
        yield from (("memory.zero", zero) for zero in (0, 1, 2) if zero != memory.zero)
    for name in search.savings[0]._fields:
        values = dict.fromkeys(getattr(one, name) for one in search.savings)
        yield from ((f"memory.{name}", value) for value in values if value != getattr(memory, name))
    if now.parallel.pipe > 1:
        plain = "1f1b"
        if now.schedule.policy != plain:
            yield "schedule.policy", plain
    if now.parallel.rank_order in search.rank_orders(shape_of(now)):
        yield from (
            ("parallel.rank_order", order)
            for order in search.rank_orders(shape_of(now))
            if order != now.parallel.rank_order
        )


def _compared(key: str, chosen: Choice, other: Choice | None, search: Search) -> StepAway:
    if other is None:
        return StepAway(key, None, "")
    then = search.with_parts(other).time
    return StepAway(key, then.step_s / chosen.time.step_s - 1, _why(chosen.time, then))


def _why(now: StepTime, then: StepTime) -> str:
    """What of a step takes longer by most."""
    grown = {name: then.parts[name] - seconds for name, seconds in now.parts.items()}
    return max(grown, key=lambda name: grown[name])
