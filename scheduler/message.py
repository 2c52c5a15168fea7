"""A message is *what became true* elsewhere; it is addressed to a stage of a pipe, and tensors
travel beside it."""

from enum import Enum
from typing import NamedTuple

from .task import Counts, Vocabulary


class Load(Enum):
    """What travels with a message, as far as it takes time on the way."""

    WORD = "a few bytes"
    ACTIVATIONS = "what a stage sends on, or the gradient of it"
    SHARD = "a copy's shard of a bucket; the message is addressed to the bucket"


class Meaning(Vocabulary):
    """What a message says to the stage that it is addressed to.

    Args:
        notation: how the meaning prints.
        counts: what its numbers count. Of microbatches each has one. Of steps each sender has one:
            step t of sender i of n is number t * n + i (see `rules.row.Need`).
        load: what travels with it.
        for_the_host: the host reads its value. It is true when its task has finished, also on the
            rank of the sender, where other news are true as soon as the task has started.
    """

    # The stage before has finished its forward; for stage 0: the reader has read.
    ACTIVATION = "activation", Counts.MICROBATCHES, Load.ACTIVATIONS
    # The reader has read what the loss is computed against.
    TARGET = "target", Counts.MICROBATCHES
    # The stage after has finished its backward.
    GRADIENT = "gradient", Counts.MICROBATCHES, Load.ACTIVATIONS
    # A pipe's last stage knows the losses of a step.
    LOSS = "loss", Counts.STEPS, Load.WORD, True
    # A copy of the bucket has its part of this shard's gradient.
    PART = "part", Counts.STEPS, Load.SHARD
    # A copy has added up its shard.
    SUM = "sum", Counts.STEPS, Load.SHARD
    # A stage knows the norms of its gradients.
    NORM = "norm", Counts.STEPS, Load.WORD, True
    # The norm of all gradients is known.
    VOTE = "vote", Counts.STEPS
    # A reader has no more; the number says how many microbatches there are in all.
    END = "end", Counts.MICROBATCHES

    def __init__(
        self, notation: str, counts: Counts, load: Load = Load.WORD, for_the_host: bool = False
    ) -> None:
        self.counts_steps = counts is Counts.STEPS
        self.load = load
        self.of_a_bucket = load is Load.SHARD
        self.for_the_host = for_the_host


class Message(NamedTuple):
    """One fact.

    Args:
        meaning: what became true.
        stage: the stage that it is addressed to.
        number: which one, as `meaning` counts.
        pipe: that it is addressed to, numbered over all replicas.
        bucket: of the stage, where it concerns one.
    """

    meaning: Meaning
    stage: int
    number: int
    pipe: int = 0
    bucket: int = 0

    def __str__(self) -> str:
        bucket = f" bucket {self.bucket}" if self.meaning.of_a_bucket else ""
        return f"{self.meaning.value} {self.number} for stage {self.stage}{bucket}" + (
            f" of pipe {self.pipe}" if self.pipe else ""
        )
