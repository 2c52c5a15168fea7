"""A task is *what* a rank does: a kind of work, a stage, a microbatch.

It prints the same everywhere (logs, traces, tests, errors): ``F2.7`` is the forward of stage 2 for
microbatch 7, and ``Task.parse`` reads it back. Microbatches are numbered on over the steps of a run:
microbatch k of step t is n = t * m + k, so that a task has one name in a whole run. The optimizer's
work comes once a step: ``step2.5`` is stage 2 being stepped at the end of step 5.
"""

import re
from enum import Enum
from typing import NamedTuple, Self

_NOTATION = re.compile(r"([A-Za-z]+)(\d+)\.(\d+)")


class Kind(Enum):
    """What a task does; the value is how it prints."""

    FORWARD = "F"
    BACKWARD = "B"
    STEP = "step"

    # Members are singletons, and Enum's own hash, written in Python, is a third of the cost of a pick.
    __hash__ = object.__hash__


class Task(NamedTuple):
    """One piece of work on one stage.

    Args:
        kind: what is done.
        stage: 0 holds the first layers; numbered over the whole model.
        microbatch: the running number over all steps; for ``Kind.STEP`` the number of the step.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the short notation back; ``ValueError`` names what it could not read."""
        match = _NOTATION.fullmatch(text)
        kinds = {kind.value: kind for kind in Kind}
        if match is None or match[1] not in kinds:
            raise ValueError(f"{text!r} is not a task; expected one of {sorted(kinds)} with STAGE.MICROBATCH, as in 'F2.7'")
        return cls(kinds[match[1]], int(match[2]), int(match[3]))
