"""What a runtime does in the arena: train a step of a model, again and again."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Contestant(NamedTuple):
    """A runtime with a schedule, ready to train on all ranks of the job.

    Args:
        name: of the row.
        runtime: whose it is.
        step: trains one step and returns when this rank's part is done; every rank calls it.
        tasks: that a rank runs in a step.
        splits: input gradients go on before weight gradients are computed.
        layers: of this rank.
        held: chunks that a rank may keep at most, of which it has two a microbatch.
    """

    name: str
    runtime: str
    step: Callable[[], None]
    tasks: int
    splits: bool = False
    layers: Sequence[Any] = ()
    held: int = 0
