"""A vote on the norm of all gradients, for which steps wait (gradient clipping).

    head      needs                                              then
    --------  -------------------------------------------------  ------------------------------
    norm s.t  every bucket of s is whole; the losses of all      a norm to stage 0
              pipes; in pipe 0 only
    vote 0.t  a norm from each stage of pipe 0                   a vote to every stage of every
                                                                 pipe

Pipes have the same gradient when it is whole. So one of them votes for all, and no rank can come to
another result than the others.
"""

from collections.abc import Iterator

from ..job import Seat
from ..message import Meaning, Message, numbered
from ..task import Kind, Task
from .replicas import losses_of_all, whole
from .row import Need, Row, StageHere, urgent


def clipping(here: StageHere) -> Iterator[Row]:
    """The rows of a stage of pipe 0 where steps are voted on."""
    job, (pipe, stage) = here.job, here.seat
    if not job.votes or pipe != 0:
        return
    voters = tuple(Seat(0, one) for one in range(job.stages))

    def norm(task: Task) -> list[Message]:
        return [Message(Meaning.NORM, 0, numbered(task.microbatch, voters, here.seat))]

    def vote(task: Task) -> list[Message]:
        return [Message(Meaning.VOTE, to, task.microbatch, of) for of, to in job.seats()]

    # A dict keeps each need once: buckets that are not shared are whole together.
    gradients = dict.fromkeys(whole(here, bucket) for bucket in range(len(here.buckets)))
    yield Row(Kind.NORM, (*gradients, losses_of_all(here)), urgent(1), norm)
    if stage == 0:
        yield Row(Kind.VOTE, (Need(Meaning.NORM, voters),), urgent(2), vote)
