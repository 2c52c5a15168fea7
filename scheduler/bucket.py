"""Who holds a bucket: a contiguous piece of a stage's parameters, reduced and stepped as one.

Every replica of the pipeline holds the buckets of all stages. A bucket of tied weights is held once for each layer that
uses them, in each replica. Holders are listed in the order in which their gradients are added up, which is
the same everywhere, so that bits depend on the number of replicas alone.
"""

from typing import NamedTuple

from .message import Meaning, Message


class Holder(NamedTuple):
    """One place where a bucket is held.

    Args:
        replica: of the pipeline.
        stage: of the model.
        bucket: its number on that stage.
    """

    replica: int
    stage: int
    bucket: int


Holders = tuple[Holder, ...]


def held_by_replicas(stage: int, bucket: int, replicas: int) -> Holders:
    """The holders of an ordinary bucket: its stage in every replica."""
    return tuple(Holder(replica, stage, bucket) for replica in range(replicas))


def to_holders(meaning: Meaning, holders: Holders, me: Holder, step: int) -> list[Message]:
    """The same news of a bucket for every holder, this one included, in order; each tells its own shard from it."""
    number = step * len(holders) + holders.index(me)
    return [Message(meaning, holder.stage, number, holder.replica, holder.bucket) for holder in holders]
