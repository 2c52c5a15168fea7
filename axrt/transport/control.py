"""Control messages pass between ranks beside the messages that tasks wait for; the brain does not
hear of them."""

from typing import NamedTuple

from axrt.scheduler.message import Message
from axrt.scheduler.task import Vocabulary

MAIN = 0  # the rank that prints, writes files and decides for all


class Topic(Vocabulary):
    """The topic of a message. The comment at each says what `about` and `number` mean there."""

    VALUES = "values"  # the first values of a layer's weights; about 0, number: the layer
    # a replica has no microbatch left, and asks for one; about: the replica, number: the step
    ASKS = "asks"
    GIVES = "gives"  # the answer; about: the replica that was asked, number: the step
    READ = "read"  # a reader has read its first microbatch; about: the replica, number 0
    # a stage has stepped, its gradients had these norms; about: the stage, number: the step
    STEPPED = "stepped"
    EVALUATED = "evaluated"  # the losses of an evaluation; about: the replica, number 0
    # what a rank gives in an exchange; about: the rank, number: the exchange
    EXCHANGED = "exchanged"
    # the sender has written its part of a checkpoint; about: the rank, number: the save
    SAVED = "saved"
    # what a copy keeps of a layer; about: the pipe, number: the visit and the layer
    SHARD = "shard"
    SHARD_TO_SAVE = "shard to save"  # the same, for a checkpoint
    TAKEN = "taken"  # the writer has taken that; about 0, number: the same
    # a file of a rank's state, for memory; about: the rank, number: the keep, the rank and the file
    PART = "part"
    # the receiver has written that; about: the receiver, number: the same
    PART_TAKEN = "part taken"
    KEPT = "kept"  # the sender's state is on two hosts; about: the rank, number: the keep
    ALL_KEPT = "all kept"  # that of every rank is; about: the main rank, number: the same
    # the sender has waited long for something that this rank owes it; about 0, number: of the
    # sessions that the sender has entered
    WAITS = "waits"
    # what the next tokens of a text come to, for the next stage; about: the slot, number: the text.
    # About -1: all texts are written
    WRITES = "writes"
    WRITTEN = "written"  # the next token of a text; about: the slot, number: the text
    # somebody has asked the sender to end the run after a step; about: the sender, number 0
    STOPS = "stops"
    # the sender has closed its engine and sends nothing more; about 0, number: of its calls
    LEAVES = "leaves"


class ControlMessage(NamedTuple):
    """One control message to a rank."""

    topic: Topic
    about: int = 0  # index of a stage, pipe, replica or rank, as the topic says
    number: int = 0  # number of a layer, step, exchange or save, as the topic says

    def __str__(self) -> str:
        return f"{self.topic.value} {self.number} about {self.about}"


News = Message | ControlMessage  # what a parcel carries to a rank
