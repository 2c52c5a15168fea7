"""The copies of a bucket: a contiguous piece of a stage's parameters, reduced and stepped as
one."""

# Every pipe holds the buckets of all stages. A bucket of tied weights is held once for each layer
# that uses them, in each pipe. Copies are listed in the order in which their gradients are added
# up, which is the same everywhere, so that bits depend on the number of pipes alone.

from typing import NamedTuple


class BucketCopy(NamedTuple):
    """One place where a bucket is held."""

    pipe: int  # pipe index over all replicas, from 0
    stage: int  # stage index over the whole model, from 0
    bucket: int  # index of the bucket on that stage, from 0


Copies = tuple[BucketCopy, ...]


def copies_by_pipe(stage: int, bucket: int, pipes: int, team: int = 1, member: int = 0) -> Copies:
    """The copies of an ordinary bucket: its stage in every pipe; of weights that are cut over a
    team, in those of one member."""
    return tuple(BucketCopy(pipe, stage, bucket) for pipe in range(member, pipes, team))


def of_group(copies: Copies, one: BucketCopy, pipes: int) -> Copies:
    """The copies in the group of one of them, which add up among themselves first.

    Args:
        one: one of them.
    """
    return tuple(copy for copy in copies if copy.pipe // pipes == one.pipe // pipes)


def branches_of(copies: Copies, team: int) -> list[list[int]]:
    """The indices of the copies that the members of each team hold of the same layers, which are
    added up in a tree before others are; [] where no team has several.

    Args:
        team: number of members that hold a stage together.
    """
    found: dict[tuple[int, int, int], list[int]] = {}
    for place, (pipe, stage, bucket) in enumerate(copies):
        found.setdefault((pipe // team, stage, bucket), []).append(place)
    return list(found.values()) if len(found) < len(copies) else []


def across(copies: Copies, one: BucketCopy, pipes: int) -> Copies:
    """The copies of the same layers at the same place of each group, one a group; arguments are
    those of `of_group`. They own the same shard."""
    return tuple(copy for copy in alike(copies, one) if (copy.pipe - one.pipe) % pipes == 0)


def alike(copies: Copies, one: BucketCopy) -> Copies:
    """The copies of the same layers as one of them, in all pipes: of tied weights, which several
    layers hold, those of one layer. They send each other the weights of their shards."""
    return tuple(copy for copy in copies if copy[1:] == one[1:])
