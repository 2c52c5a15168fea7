"""The messages of a replica's reader: a microbatch has been read, or there are no more."""

from collections.abc import Iterable

from ..job import Job
from ..message import Meaning, Message


def has_read(job: Job, replica: int, number: int) -> list[Message]:
    """The messages for a microbatch that has been read: inputs for the first stage, then targets
    for the last, in the pipe that it goes through; of a team the same for each member."""
    if job.team == 1:  # as most often, and a list of pipes would be three more calls
        placement = job.placement
        pipe = replica * placement.pipes + number % placement.pipes
        return [
            Message(Meaning.ACTIVATION, 0, number, pipe),
            Message(Meaning.TARGET, placement.stages - 1, number, pipe),
        ]
    return [
        message
        for pipe in job.pipes_of(replica, number)
        for message in (
            Message(Meaning.ACTIVATION, 0, number, pipe),
            Message(Meaning.TARGET, job.last_stage, number, pipe),
        )
    ]


def has_ended(job: Job, replicas: Iterable[int], number: int) -> list[Message]:
    """The messages that the data has ended, one to every rank of these replicas."""
    pipes = job.placement.pipes
    return [
        Message(Meaning.END, stage, number, (replica * pipes + pipe) * job.team + member)
        for replica in replicas
        for pipe, stage in job.placement.stage_copies()
        for member in range(job.team)
    ]
