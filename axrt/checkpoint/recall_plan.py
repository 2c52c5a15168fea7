"""Which copies in memory a job goes on from: the parts that each rank takes, and where they are.

A part is what a rank of an earlier job kept: whole layers, or its shards of them (ZeRO). A rank of
the same layout takes its own. With another layout, a rank takes parts that have all of its layers,
or the parts of all ranks that have a shard of one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .host_memory import Part


class Offer(NamedTuple):
    """A part that is on the host of a rank.

    Args:
        part: what it is.
        places: indices of the layers of which it has something.
        is_shard: it has shards of them, and not the whole.
    """

    part: Part
    places: tuple[int, ...]
    is_shard: bool


class Taken(NamedTuple):
    """A part that a rank takes.

    Args:
        part: what it is.
        holder: a rank on whose host it is: the rank's own one where it is there.
    """

    part: Part
    holder: int


class Plan(NamedTuple):
    """What all ranks take.

    Args:
        taken: the parts of each rank; () where nothing is taken.
        are_own: each rank takes its own part, as it is.
        text: what a person should know; "": nothing.
    """

    taken: tuple[tuple[Taken, ...], ...] = ()
    are_own: bool = False
    text: str = ""


class Wanted(NamedTuple):
    """What the ranks of this job need.

    Args:
        places: indices of the layers of each rank.
        hosts: name of the host of each rank.
        newer_than: step of the newest checkpoint on the disk; older copies are left.
        own: True where ranks may take their own part as it is.
    """

    places: Sequence[Sequence[int]]
    hosts: Sequence[str]
    newer_than: int
    own: bool = True


def plan_recall(offered: Sequence[Iterable[Offer]], wanted: Wanted) -> Plan:
    """The newest step of which there is enough.

    Args:
        offered: what is on the host of each rank; ranks of a host offer different parts.
        wanted: what the ranks of this job need.
    """
    kept = _kept(offered)
    for step, size in sorted(kept, reverse=True):
        if step <= wanted.newer_than:
            break
        if plan := _from(kept[step, size], size, wanted):
            lacking = [
                rank
                for rank, of_rank in enumerate(plan.taken)
                if any(wanted.hosts[one.holder] != wanted.hosts[rank] for one in of_rank)
            ]
            who = f", those of ranks {_listed(lacking)} from their keepers" if lacking else ""
            return plan._replace(text=f"taken from memory: the copies of step {step}{who}")
    newest, size = max(kept, default=(-1, 0))
    if newest <= wanted.newer_than:
        return Plan()
    lost = sorted(set(range(size)) - {offer.part.rank for offer in kept[newest, size]})
    what = (
        f"both copies of ranks {_listed(lost)} are gone or damaged" if lost else "layers are gone"
    )
    return Plan(
        text=f"not taken from memory: of step {newest} {what}. Taken is the newest checkpoint on "
        "the disk"
    )


_Kept = dict[Offer, list[int]]  # the ranks that hold an offered part


def _kept(offered: Sequence[Iterable[Offer]]) -> dict[tuple[int, int], _Kept]:
    """What there is, by the step and the number of ranks of the job that has kept it."""
    kept: dict[tuple[int, int], _Kept] = defaultdict(dict)
    for holder, offers in enumerate(offered):
        for offer in offers:
            of_step = kept[offer.part.step, offer.part.size]
            of_step.setdefault(offer, []).append(holder)
    return kept


def _from(kept: _Kept, size: int, wanted: Wanted) -> Plan | None:
    """What ranks take of one step; None where there is not enough."""
    of_rank = {offer.part.rank: offer for offer in kept}
    is_shard = any(offer.is_shard for offer in kept)
    if is_shard and len(of_rank) < size:
        return None
    is_same = size == len(wanted.hosts) and all(
        rank in of_rank and tuple(places) == of_rank[rank].places
        for rank, places in enumerate(wanted.places)
    )
    if wanted.own and is_same:
        taken = [(_nearest(kept, of_rank[rank], rank, wanted),) for rank in range(size)]
        return Plan(tuple(taken), are_own=True)
    choose: Callable[[_Kept, int, Wanted], Iterator[Offer]] = _shards_of if is_shard else _layers_of
    found = [list(choose(kept, rank, wanted)) for rank in range(len(wanted.hosts))]
    for offers, places in zip(found, wanted.places, strict=True):
        if not set(places) <= {place for offer in offers for place in offer.places}:
            return None
    return Plan(
        tuple(
            tuple(_nearest(kept, offer, rank, wanted) for offer in offers)
            for rank, offers in enumerate(found)
        )
    )


def _shards_of(kept: _Kept, rank: int, wanted: Wanted) -> Iterator[Offer]:
    """All parts with a shard of a layer that a rank needs."""
    places = set(wanted.places[rank])
    return (offer for offer in sorted(kept) if places & set(offer.places))


def _layers_of(kept: _Kept, rank: int, wanted: Wanted) -> Iterator[Offer]:
    """Parts with the layers that a rank needs: those on its host first, and then its own."""
    missing = set(wanted.places[rank])

    def order(offer: Offer) -> tuple[bool, bool, Offer]:
        is_here = _nearest(kept, offer, rank, wanted).holder
        return wanted.hosts[is_here] != wanted.hosts[rank], offer.part.rank != rank, offer

    for offer in sorted(kept, key=order):
        if missing & set(offer.places):
            missing -= set(offer.places)
            yield offer


def _nearest(kept: Mapping[Offer, Sequence[int]], offer: Offer, rank: int, wanted: Wanted) -> Taken:
    holders = kept[offer]
    on_host = [one for one in holders if wanted.hosts[one] == wanted.hosts[rank]]
    return Taken(offer.part, (on_host or holders)[0])


def transfers(plan: Plan, hosts: Sequence[str]) -> list[tuple[Part, int, int]]:
    """The parts that must come to another host, each with the rank that sends it and one that takes
    it for its host."""
    found: dict[tuple[Part, str], tuple[int, int]] = {}
    for rank, of_rank in enumerate(plan.taken):
        for part, holder in of_rank:
            if hosts[holder] != hosts[rank]:
                found.setdefault((part, hosts[rank]), (holder, rank))
    return [(part, *between) for (part, _), between in found.items()]


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
