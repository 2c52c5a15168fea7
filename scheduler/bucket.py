"""Who holds a bucket: a contiguous piece of a stage's parameters, reduced and stepped as one.

Every pipe holds the buckets of all stages. A bucket of tied weights is held once for each layer
that uses them, in each pipe. Holders are listed in the order in which their gradients are added up,
which is the same everywhere, so that bits depend on the number of pipes alone.
"""

from typing import NamedTuple

from .message import Meaning, Message


class Holder(NamedTuple):
    """One place where a bucket is held.

    Args:
        pipe: numbered over all replicas.
        stage: of the model.
        bucket: its number on that stage.
    """

    pipe: int
    stage: int
    bucket: int


Holders = tuple[Holder, ...]


def held_by_pipes(stage: int, bucket: int, pipes: int) -> Holders:
    """The holders of an ordinary bucket: its stage in every pipe."""
    return tuple(Holder(pipe, stage, bucket) for pipe in range(pipes))


def to_holders(meaning: Meaning, holders: Holders, me: Holder, step: int) -> list[Message]:
    """The same news of a bucket for every holder, this one included, in order; each tells its own
    shard from it."""
    number = step * len(holders) + holders.index(me)
    return [
        Message(meaning, holder.stage, number, holder.pipe, holder.bucket) for holder in holders
    ]
