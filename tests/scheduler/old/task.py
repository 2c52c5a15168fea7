"""A task is *what* a rank does: a kind of work, a stage, a microbatch.

It prints the same everywhere (logs, traces, tests, errors): ``F2.7`` is the forward of stage 2 for
microbatch 7, and ``Task.parse`` reads it back. Microbatches are numbered on over the steps of a run:
microbatch k of step t is n = t * m + k, so that a task has one name in a whole run. What comes once a step
counts steps instead. Some tasks are done part by part: ``step2.5`` is the first bucket of stage 2 being stepped at the
end of step 5, ``step2.5/1`` the next bucket; ``W2.7`` is the first piece of a weight gradient, ``W2.7/1`` the next.
"""

import re
from enum import Enum
from typing import NamedTuple, Self

_NOTATION = re.compile(r"([A-Za-z]+)(\d+)\.(\d+)(?:/(\d+))?")


class Kind(Enum):
    """What a task does; the value is how it prints."""

    FORWARD = "F"
    RECOMPUTE = "R"  # the forward again, where only its input was kept; before the backward
    BACKWARD = "B"  # whole, or
    INPUT = "I"  # the gradient of what came in, which the stage before waits for, and
    WEIGHT = "W"  # that of the weights, which nobody waits for until the step ends
    REDUCE = "reduce"  # add up this holder's shard of a bucket's gradient
    NORM = "norm"  # the norms of a stage's gradients
    VOTE = "vote"  # the norm of all gradients, from those of the stages
    STEP = "step"  # the optimizer's, of a bucket

    # Members are singletons, and Enum's own hash, written in Python, is a third of the cost of a pick.
    __hash__ = object.__hash__


ONCE_A_STEP = frozenset({Kind.REDUCE, Kind.NORM, Kind.VOTE, Kind.STEP})
OF_A_BUCKET = frozenset({Kind.REDUCE, Kind.STEP})


class Task(NamedTuple):
    """One piece of work on one stage.

    Args:
        kind: what is done.
        stage: 0 holds the first layers; numbered over the whole model.
        microbatch: the running number over all steps; for what comes once a step the number of the step.
        part: which bucket of the stage, for work on a bucket; which piece, of a weight gradient.
    """

    kind: Kind
    stage: int
    microbatch: int
    part: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}" + (f"/{self.part}" if self.part else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the short notation back; ``ValueError`` names what it could not read."""
        match = _NOTATION.fullmatch(text)
        kinds = {kind.value: kind for kind in Kind}
        if match is None or match[1] not in kinds:
            raise ValueError(f"{text!r} is not a task; expected one of {sorted(kinds)} with STAGE.MICROBATCH, as in 'F2.7'")
        return cls(kinds[match[1]], int(match[2]), int(match[3]), int(match[4] or 0))
