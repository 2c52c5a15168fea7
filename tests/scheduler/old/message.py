"""A message is *what became true* elsewhere; it is addressed to a stage of a pipe, and tensors travel beside it."""

from enum import Enum
from typing import NamedTuple


class Meaning(Enum):
    """What a message says to the stage that it is addressed to, and what its `number` counts."""

    ACTIVATION = "activation"  # the stage before has finished its forward (for stage 0: the reader has read); microbatches
    TARGET = "target"  # the reader has read what the loss is computed against; microbatches
    GRADIENT = "gradient"  # the stage after has finished its backward; microbatches
    LOSS = "loss"  # a pipe's last stage knows the losses of a step; step x pipes + pipe
    PART = "part"  # a holder of the bucket has its part of this shard's gradient; step x holders + holder
    SUM = "sum"  # a holder has added up its shard; step x holders + holder
    NORM = "norm"  # a stage knows the norms of its gradients; step x stages + stage
    VOTE = "vote"  # the norm of all gradients is known; steps
    END = "end"  # a reader has no more; how many microbatches there are in all

    # To a rank, not to a stage of it: nothing waits for these to run, so the brain does not hear of them.
    VALUES = "values"  # what the weights of a layer are to begin with; the layer
    READ = "read"  # a reader has read its first microbatch
    STEPPED = "stepped"  # a stage has stepped, its gradients had these norms; the step
    EVALUATED = "evaluated"  # a replica has evaluated, with these losses
    TOLD = "told"  # the main rank has something for every rank
    SAVED = "saved"  # the sender has written its part of a checkpoint
    WAITS = "waits"  # the sender has waited long for something that this rank owes it
    LEAVE = "leave"  # the sender has closed its engine and sends nothing more

    __hash__ = object.__hash__


OF_A_BUCKET = frozenset({Meaning.PART, Meaning.SUM})
TO_A_RANK = frozenset(
    {
        Meaning.VALUES,
        Meaning.READ,
        Meaning.STEPPED,
        Meaning.EVALUATED,
        Meaning.TOLD,
        Meaning.SAVED,
        Meaning.WAITS,
        Meaning.LEAVE,
    }
)


class Message(NamedTuple):
    """One fact.

    Args:
        meaning: what became true.
        stage: the stage that it is addressed to; of what goes to a rank, the stage that it is about.
        number: which one, as `meaning` counts.
        pipe: that it is addressed to, numbered over all replicas; of what goes to a rank, the replica that it is about.
        bucket: of the stage, where it concerns one.
    """

    meaning: Meaning
    stage: int
    number: int
    pipe: int = 0
    bucket: int = 0

    def __str__(self) -> str:
        bucket = f" bucket {self.bucket}" if self.meaning in OF_A_BUCKET else ""
        return f"{self.meaning.value} {self.number} for stage {self.stage}{bucket}" + (f" of pipe {self.pipe}" if self.pipe else "")
