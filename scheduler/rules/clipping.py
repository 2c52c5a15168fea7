"""A vote on the norm of all gradients, for which steps wait (gradient clipping)."""

#   head      needs                                              then
#   --------  -------------------------------------------------  ------------------------------
#   norm s.t  every bucket of s is whole, or its changes are     a norm to stage 0 of pipe 0
#             there (`precondition.py`); the losses of all
#             pipes; in pipe 0 only; where there are shards, in
#             the first group
#   vote 0.t  a norm from each such stage                        a vote to every stage of every
#                                                                pipe
#
# Pipes have the same gradient when it is whole. So one of them votes for all, and no rank can come
# to another result than the others. Where there are shards each pipe has the norms of its own ones,
# and groups have the same ones.

from collections.abc import Iterator

from ..job import Job, StageCopy
from ..message import Meaning, Message, numbered
from ..task import Kind, Task
from .precondition import changed
from .replicas import losses_of_all
from .row import Need, Row, StageHere, urgent


# No step of offloaded state is taken before its vote. It was, on the expectation that nothing is
# clipped, with as much scratch again to take it back. On two ranks with clipping, a GPT of 101 M
# parameters took 0.984 of the time without it where state came from memory, and 0.863 from a disk
# (medians of seven rounds in one run, 256 tokens a step; 0.993 and 0.960 with 1,024): what it hid
# behind backwards it paid in bytes.
def clipping(here: StageHere) -> Iterator[Row]:
    """The rows of a stage whose norms count, where steps are voted on."""
    job = here.job
    voters = voters_of(job)
    if not job.votes or here.stage_copy not in voters:
        return

    def norm(task: Task) -> list[Message]:
        return [Message(Meaning.NORM, 0, numbered(task.microbatch, voters, here.stage_copy))]

    def vote(task: Task) -> list[Message]:
        return [Message(Meaning.VOTE, to, task.microbatch, of) for of, to in job.stage_copies()]

    # A dict keeps each need once: buckets that are not shared are whole together.
    gradients = dict.fromkeys(changed(here, bucket) for bucket in range(len(here.buckets)))
    yield Row(Kind.NORM, (*gradients, losses_of_all(here)), urgent(1), norm)
    if here.stage_copy == StageCopy(0, 0):
        yield Row(Kind.VOTE, (Need(Meaning.NORM, voters),), urgent(2), vote)


def voters_of(job: Job) -> tuple[StageCopy, ...]:
    """The stages whose norms make that of all gradients, in the order of their messages."""
    pipes = job.pipes_a_group if job.shards else job.team
    return tuple(stage_copy for stage_copy in job.stage_copies() if stage_copy.pipe < pipes)
