"""Which copies in memory a job goes on from: the parts that each rank takes, and where they are."""

# A part is what a rank of an earlier job kept: whole layers, or its shards of them (ZeRO, teams). A
# rank of the same layout takes its own. With another layout, a rank takes parts that have all of
# its layers, or the parts of all ranks that have a shard of one. All parts are of one job.

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from .host_memory import Part


class Offer(NamedTuple):
    """A part that is on the host of a rank."""

    part: Part  # what it is
    places: tuple[int, ...]  # indices of the layers of which it has something


class Taken(NamedTuple):
    """A part that a rank takes."""

    part: Part  # what it is
    holder: int  # a rank on whose host it is: one of the rank's own host where it is there


class Plan(NamedTuple):
    """What all ranks take."""

    taken: tuple[tuple[Taken, ...], ...] = ()  # the parts of each rank; () where nothing is taken
    are_own: bool = False  # each rank takes its own part, as it is
    text: str = ""  # what a person should know when that is taken, or why nothing is; "": nothing


class Wanted(NamedTuple):
    """What the ranks of this job need."""

    places: Sequence[tuple[int, ...]]  # indices of the layers of each rank
    cuts: Sequence[str]  # digest of which shards and parts each rank has of them, see `Part.cut`
    hosts: Sequence[str]  # name of the host of each rank
    newer_than: int  # step of the newest checkpoint on the disk; older copies are left


# Copies in memory suit any layout. A rank took its own part alone. But the ranks that are left have
# another layout, and must not need a disk. Layers are found in any part; shards of another cut come
# together to layers, as on their way to a checkpoint.
def plan_recall(offered: Sequence[Iterable[Offer]], wanted: Wanted) -> Plan:
    """The newest step of which there is enough.

    Args:
        offered: what is on the host of each rank; ranks of a host offer different parts.
    """
    kept: dict[int, _Kept] = defaultdict(lambda: defaultdict(list))
    for holder, offers in enumerate(offered):
        for offer in offers:
            if offer.part.step > wanted.newer_than:
                kept[offer.part.step][offer].append(holder)
    for step in sorted(kept, reverse=True):
        if plan := _from(kept[step], wanted):
            lacking = [
                rank
                for rank, of_rank in enumerate(plan.taken)
                if any(wanted.hosts[one.holder] != wanted.hosts[rank] for one in of_rank)
            ]
            who = f", those of {_ranks(lacking)} from their partners" if lacking else ""
            return plan._replace(text=f"taken from memory: the copies of step {step}{who}")
    return Plan(text=_lost(kept[max(kept)])) if kept else Plan()


_Kept = dict[Offer, list[int]]  # the ranks on whose hosts an offered part is


def _lost(kept: _Kept) -> str:
    size, step = next(iter(kept)).part.size, next(iter(kept)).part.step
    lost = sorted(set(range(size)) - {offer.part.rank for offer in kept})
    what = f"both copies of {_ranks(lost)} are" if lost else "some layers are"
    return (
        f"not taken from memory: of step {step} {what} gone or damaged. What there is on a disk is "
        "taken"
    )


def _from(kept: _Kept, wanted: Wanted) -> Plan | None:
    """What ranks take of one step; None where there is not enough."""
    of_rank = {offer.part.rank: offer for offer in kept}
    size, is_cut = next(iter(kept)).part.size, any(offer.part.cut for offer in kept)
    if size == len(wanted.hosts) and all(
        rank in of_rank
        and (of_rank[rank].places, of_rank[rank].part.cut) == (wanted.places[rank], cut)
        for rank, cut in enumerate(wanted.cuts)
    ):
        own = (_nearest(kept, of_rank[rank], rank, wanted) for rank in range(size))
        return Plan(tuple((one,) for one in own), are_own=True)
    if is_cut and len(of_rank) < size:  # a part that is gone does not say which shards it had
        return None
    choose: Callable[[_Kept, set[int]], Iterator[Offer]] = _shards_of if is_cut else _layers_of
    found = [list(choose(kept, set(places))) for places in wanted.places]
    for offers, places in zip(found, wanted.places, strict=True):
        if not set(places) <= {place for offer in offers for place in offer.places}:
            return None
    return Plan(
        tuple(
            tuple(_nearest(kept, offer, rank, wanted) for offer in offers)
            for rank, offers in enumerate(found)
        )
    )


def _shards_of(kept: _Kept, places: set[int]) -> Iterator[Offer]:
    """Parts with a shard of some layers; of those with the same shards, as replicas of a team may
    have, that of the lowest rank: their buffers may differ, and every rank is to take the same."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for offer in sorted(kept):
        shards = offer.part.cut, offer.places
        if places & set(offer.places) and shards not in seen:
            seen.add(shards)
            yield offer


def _layers_of(kept: _Kept, places: set[int]) -> Iterator[Offer]:
    """Parts with some layers: of the lowest rank that has them, as on a disk. Buffers of replicas
    may differ, and every rank is to take the same."""
    missing = set(places)
    for offer in sorted(kept):
        if missing & set(offer.places):
            missing -= set(offer.places)
            yield offer


def _nearest(kept: _Kept, offer: Offer, rank: int, wanted: Wanted) -> Taken:
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


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
