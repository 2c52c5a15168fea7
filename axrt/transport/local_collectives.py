"""Collectives of ranks in one process, for tests: they end when all ranks have joined, and who
joins in another order than the others is found out."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from axrt.device.queues import Moment

from .collectives import Group

Ranks = tuple[int, ...]


class Meeting:
    """One collective: what each rank has brought, and whether it has ended."""

    def __init__(self, what: str) -> None:
        self.what, self.brought, self.ended = what, dict[int, list[Tensor]](), False

    def passed(self) -> bool:
        return self.ended


class LocalCollectives:
    """The groups of one rank of a `LocalWorld`.

    Args:
        meetings: all collectives of the world, by group and number.
    """

    def __init__(self, rank: int, meetings: dict[tuple[Ranks, int], Meeting]) -> None:
        self._rank, self._meetings = rank, meetings

    def group(self, ranks: Sequence[int]) -> Group:
        return _LocalGroup(self._rank, tuple(ranks), self._meetings)


class _LocalGroup:
    def __init__(self, rank: int, ranks: Ranks, meetings: dict[tuple[Ranks, int], Meeting]) -> None:
        self._rank, self._ranks, self._meetings = rank, ranks, meetings
        self._number: dict[Ranks, int] = defaultdict(int)

    def all_reduce(self, flat: Tensor, what: str) -> Moment:
        def end(brought: Sequence[list[Tensor]]) -> None:
            total = _sum([of[0] for of in brought])
            for of in brought:
                of[0].copy_(total)

        return self._join(f"all_reduce of {what}", [flat], end)

    def reduce_scatter(self, mine: Tensor, shards: Sequence[Tensor], what: str) -> Moment:
        def end(brought: Sequence[list[Tensor]]) -> None:
            for place, (of, *_) in enumerate(brought):
                of.copy_(_sum([shards[place] for _, *shards in brought]))

        return self._join(f"reduce_scatter of {what}", [mine, *shards], end, alike=shards)

    def _join(
        self,
        name: str,
        tensors: list[Tensor],
        end: Callable[[Sequence[list[Tensor]]], None],
        alike: Sequence[Tensor] = (),
    ) -> Moment:
        """Join a collective; all ranks must bring the same types and shapes, of `alike` or of all
        tensors."""
        number = self._number[self._ranks]
        self._number[self._ranks] += 1
        what = f"{name}: {[(tuple(one.shape), one.dtype) for one in alike or tensors]}"
        meeting = self._meetings.setdefault((self._ranks, number), Meeting(what))
        assert meeting.what == what, (
            f"rank {self._rank} issues {what} as number {number} of ranks {self._ranks}, where "
            f"{sorted(meeting.brought)} have issued {meeting.what}"
        )
        meeting.brought[self._rank] = tensors
        if len(meeting.brought) == len(self._ranks):
            end([meeting.brought[rank] for rank in self._ranks])
            meeting.ended = True
            del self._meetings[self._ranks, number]
        return meeting


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total
