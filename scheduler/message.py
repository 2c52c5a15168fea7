"""A message is *what became true* elsewhere; it is addressed to a stage, and tensors travel beside it."""

from enum import Enum
from typing import NamedTuple


class Meaning(Enum):
    """What a message says of its microbatch, to the stage that it is addressed to."""

    ACTIVATION = "activation"  # the stage before has finished its forward (for stage 0: the reader has read)
    TARGET = "target"  # the reader has read what the loss is computed against
    GRADIENT = "gradient"  # the stage after has finished its backward
    END = "end"  # the reader has no more: `microbatch` is how many there are in all

    # To a rank, not to a stage of it: nothing waits for these to run, so the brain does not hear of them.
    LOSS = "loss"  # the losses of a step, from the last stage to everyone; `microbatch` is the step
    NORM = "norm"  # the norms of a stage's gradients, to the main rank; `stage` is the sender's, `microbatch` the step
    LEAVE = "leave"  # the sender has closed its engine and sends nothing more

    __hash__ = object.__hash__


class Message(NamedTuple):
    """One fact.

    Args:
        meaning: what became true.
        stage: the stage that it is addressed to, where `meaning` says nothing else.
        microbatch: the running number, as in `Task`, where `meaning` says nothing else.
    """

    meaning: Meaning
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.meaning.value} {self.microbatch} for stage {self.stage}"
