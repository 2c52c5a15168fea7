"""A message is *what became true* elsewhere; it is addressed to a stage of a pipe, and tensors
travel beside it."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from .task import Counts, Vocabulary


class Load(Enum):
    """The payload of a message, as far as it takes time on the way."""

    WORD = "a few bytes"
    SLICE = "a slice of what a joint puts together, or adds up"
    ACTIVATIONS = "what a stage sends on, or the gradient of it"
    SHARD = "a copy's shard of a bucket; the message is addressed to the bucket"
    PART_OF_SHARD = "the part of a shard that one group sums; addressed to the bucket, too"


class Meaning(Vocabulary):
    """The facts that a message may tell the stage that it is addressed to.

    Args:
        counts: what the message's number counts. A message about a microbatch has the microbatch's
            number. A message about a step, a reduction or a residency is numbered by its sender
            too: step t of sender i of n is number t * n + i (see `rules.row.Need`).
        load: payload of the message, by which its time on the way is simulated.
        for_the_host: True where the host reads the message's value. Such a message is true when its
            task has finished, also on the sender's rank; others are true there once the task has
            started.
    """

    # The stage before has finished its forward; for stage 0: the reader has read.
    ACTIVATION = "activation", Counts.MICROBATCHES, Load.ACTIVATIONS
    # The reader has read what the loss is computed against.
    TARGET = "target", Counts.MICROBATCHES
    # The stage after has finished its backward.
    GRADIENT = "gradient", Counts.MICROBATCHES, Load.ACTIVATIONS
    # A member has its slices of a joint for another one, in a forward or in a backward.
    SLICE = "slice", Counts.JOINTS, Load.SLICE
    SLICE_BACK = "slice of a gradient", Counts.BACK_JOINTS, Load.SLICE
    # A pipe's last stage knows the losses of a step.
    LOSS = "loss", Counts.STEPS, Load.WORD, True
    # A copy of the bucket has its part of this shard's gradient (reduce-scatter).
    PART = "part", Counts.REDUCTIONS, Load.SHARD
    # A copy has added up its shard (all-gather).
    SUM = "sum", Counts.STEPS, Load.SHARD
    # A copy has added up its shard over its group, and sends a copy of each group its part of that.
    SUBTOTAL = "subtotal", Counts.STEPS, Load.PART_OF_SHARD
    # A copy has added its part of a shard up over all groups.
    TOTAL = "total", Counts.STEPS, Load.PART_OF_SHARD
    # A copy has the weights of its shard for all others (all-gather).
    WEIGHTS = "weights", Counts.RESIDENCIES, Load.SHARD
    # A stage knows the norms of its gradients.
    NORM = "norm", Counts.STEPS, Load.WORD, True
    # A copy of the bucket has its own gradient, for the library to add up.
    READY = "ready", Counts.STEPS, Load.WORD, False, True
    # The number says when the bucket's collective is issued, counted over the group of ranks.
    TICKET = "ticket", Counts.STEPS, Load.WORD, False, True
    # The norm of all gradients is known.
    VOTE = "vote", Counts.STEPS
    # A reader has no more; the number says how many microbatches there are in all.
    END = "end", Counts.MICROBATCHES

    def __init__(
        self,
        notation: str,
        counts: Counts,
        load: Load = Load.WORD,
        for_the_host: bool = False,
        of_a_bucket: bool = False,
    ) -> None:
        self.counts = counts
        self.of_a_microbatch = counts is Counts.MICROBATCHES
        self.load = load
        self.of_a_bucket = of_a_bucket or load in (Load.SHARD, Load.PART_OF_SHARD)
        self.for_the_host = for_the_host


# A message has no source, which its address implies. A generation tells dropped steps apart.
class Message(NamedTuple):
    """One fact, addressed to a stage of a pipe."""

    meaning: Meaning  # what became true
    stage: int  # the stage that it is addressed to
    # number of the microbatch, or of the step, reduction or residency and the sender, as `meaning`
    # counts
    number: int
    pipe: int = 0  # pipe that the message is addressed to, numbered from 0 over all replicas
    bucket: int = 0  # index of the bucket on the stage; 0 where the message concerns no bucket

    @property
    def is_read(self) -> bool:
        """A reader sends it: inputs or targets, as the user gave them."""
        return self.meaning is Meaning.TARGET or (
            self.meaning is Meaning.ACTIVATION and self.stage == 0
        )

    def __str__(self) -> str:
        bucket = f" bucket {self.bucket}" if self.meaning.of_a_bucket else ""
        return f"{self.meaning.value} {self.number} for stage {self.stage}{bucket}" + (
            f" of pipe {self.pipe}" if self.pipe else ""
        )


def numbered(step: int, senders: Sequence[object], sender: object) -> int:
    """The number of a sender's message of a step, for meanings that count steps, reductions or
    residencies.

    Args:
        sender: one of `senders`.
    """
    return step * len(senders) + senders.index(sender)


def numbers_of(step: int, senders: int) -> range:
    """The numbers of the messages of a step that so many senders send, one of each, in order."""
    return range(step * senders, (step + 1) * senders)


def sender_of(number: int, senders: int) -> tuple[int, int]:
    """The step of a message, and the index of its sender among so many."""
    return divmod(number, senders)
