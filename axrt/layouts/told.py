"""A choice of layout as lines for a person, as JSON, and as a file that trains."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import tomli_w

from axrt.config import Config
from axrt.ledger.ledger import Unit
from axrt.scheduler.plural import plural

from .search import Choice
from .steps_away import StepAway


def lines_of(choices: Sequence[Choice], away: Sequence[StepAway], source: str) -> Iterator[str]:
    """The choice, those that come next, and what one step away would cost.

    Args:
        source: where the costs of layers come from, such as "modelled".
    """
    best = choices[0]
    parts = best.time.parts
    shares = ", ".join(f"{name} {part / best.time.step_s:.1%}" for name, part in parts.items())
    yield f"{name_of(best.config)}: {best.time.step_s:.4g} s a step by {source} costs"
    yield f"of it {shares}"
    yield from _ranks(best)
    if choices[1:]:
        yield "the next best:"
    for one in choices[1:]:
        slower = one.time.step_s / best.time.step_s - 1
        yield f"  {slower:+7.1%}  {name_of(one.config)}"
    if away:
        yield "one step away:"
    for step in away:
        yield f"  {step.key:32}{_slower(step)}"


def _slower(step: StepAway) -> str:
    if step.slower is None:
        return "nothing fits"
    return "as fast" if abs(step.slower) < 0.0005 else f"{step.slower:+.1%}, {step.why}"


def name_of(config: Config) -> str:
    """A layout in a few words."""
    of, schedule, memory = config.parallel, config.schedule, config.memory
    saving = [
        f"{key} {value}"
        for key, value, off in (
            ("zero", memory.zero, 0),
            ("recompute", memory.recompute, "none"),
            ("offload", memory.offload, "none"),
            ("ranks by", of.rank_order, "pipe"),
            ("fill", schedule.fill, "never" if of.tensor > 1 else schedule.fill),
        )
        if value != off
    ]
    return ", ".join(
        [
            f"pipe {of.pipe} x data {of.data} x tensor {of.tensor}",
            schedule.policy,
            f"{plural(schedule.microbatches, 'microbatch')} of {schedule.microbatch_size}",
            *saving,
        ]
    )


def _ranks(choice: Choice) -> Iterator[str]:
    """What each rank of a pipeline has."""
    found, job = choice.prediction, choice.prediction.job
    totals = [ledger.total() for ledger in found.of_ranks]
    unit = Unit.of(max(totals))
    for rank in range(job.ranks):
        stages = job.placement.stages_of(rank)
        layers = " and ".join(f"{job.cuts[of]}-{job.cuts[of + 1] - 1}" for of in stages)
        first = found.mesh.rank_of(0, rank * found.mesh.tensor)
        yield f"  rank {rank} of a pipeline: layers {layers}, {unit.text(totals[first])}"


def as_dict(choices: Sequence[Choice], away: Sequence[StepAway], source: str) -> dict[str, Any]:
    """The same, as JSON can hold it."""
    return {
        "source": source,
        "layouts": [
            {
                "set": changed_keys(one.config),
                "step_s": one.time.step_s,
                "parts_s": one.time.parts,
                "device_bytes": [ledger.total() for ledger in one.prediction.of_ranks],
            }
            for one in choices
        ],
        "one_step_away": [step._asdict() for step in away],
    }


def planned_file(config: Config, command: Sequence[str], file: Path) -> str:
    """The settings as a file that `axrt train` takes, with those keys that are not as they are by
    themselves.

    Args:
        command: what has been asked.
        file: where it is written.
    """
    of = config.parallel
    ranks = of.pipe * of.data * of.tensor
    train = ["mpirun", "-n", str(ranks), "axrt", "train", str(file)]
    head = f"# {_in_a_line(command)}\n#     {_in_a_line(train)}\n\n"
    return head + tomli_w.dumps(changed_keys(config))


def _in_a_line(words: Sequence[str]) -> str:
    return shlex.join(words).replace("\n", " ").replace("\r", " ")


def changed_keys(config: Config) -> dict[str, dict[str, Any]]:
    """The keys that have another value than by themselves, by section."""
    by_itself, found = Config().as_dict(), config.as_dict()
    sections = {
        item.name: {
            key: value
            for key, value in found[item.name].items()
            if value != by_itself[item.name][key]
        }
        for item in fields(Config)
    }
    return {name: keys for name, keys in sections.items() if keys}
