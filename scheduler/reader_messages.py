"""What the reader of a replica says: a microbatch has been read, or there are no more."""

from collections.abc import Iterable

from .message import Meaning, Message
from .placement import Placement


def has_read(placement: Placement, replica: int, number: int) -> tuple[Message, Message]:
    """Inputs for the first stage and targets for the last, of the pipe that the microbatch goes
    through."""
    pipe = replica * placement.pipes + number % placement.pipes
    return Message(Meaning.ACTIVATION, 0, number, pipe), Message(
        Meaning.TARGET, placement.stages - 1, number, pipe
    )


def has_ended(placement: Placement, replicas: Iterable[int], number: int) -> list[Message]:
    """After so many there are no more: for every rank of these replicas."""
    return [
        Message(Meaning.END, stage, number, replica * placement.pipes + pipe)
        for replica in replicas
        for pipe, stage in placement.seats()
    ]
