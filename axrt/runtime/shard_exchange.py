"""Layers made whole between steps, where each rank keeps a shard of their state (ZeRO): for
checkpoints, for evaluations, and for the modules that the user gets back."""

# Each copy of a layer tells all others of its group, or the one that writes, what it has. Visits to
# a layer are numbered on each rank, and ranks come to their layers in one order, so the numbers
# agree without being agreed upon. Saves have a topic of their own: one may be under way beside an
# evaluation that asks for the same layers.
#
# Only one layer at a time is whole. The writer says when it has written one, and nobody sends more
# of the next before; else the shards of a whole model could be on their way to one rank.

from collections.abc import Sequence
from typing import Any

from axrt.scheduler.job import Job
from axrt.transport.control import ControlMessage, Topic
from axrt.world.mesh import Mesh

from .coroutine import Steps
from .exchange import Collected, Exchange


class ShardExchange:
    """Brings what all copies of a layer have of it together, in each group of copies that share it
    out.

    Ranks that hold a layer go through their layers in the order of the model, one layer at a time,
    so nobody holds more than one that is not its own.

    Args:
        pipes: pipe whose copy of a stage this rank holds, by stage.
    """

    def __init__(self, exchange: Exchange, job: Job, mesh: Mesh, pipes: dict[int, int]) -> None:
        self._exchange, self._job, self._mesh, self._pipes = exchange, job, mesh, pipes
        self._visits: dict[tuple[Topic, int], int] = {}  # by topic and layer

    def writes(self, stage: int) -> bool:
        """This rank writes the files of the stage's layers."""
        return self._pipes[stage] == 0

    def is_of_writers_team(self, stage: int) -> bool:
        """This rank is a member of the team whose first member writes them."""
        return self._pipes[stage] < self._job.team

    def for_all(self, stage: int, place: int, mine: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """What each copy of the group has of a layer, by pipe, on every rank there that holds it;
        all of them call it.

        Args:
            place: index of the layer in the model, or of the first of several.
        """
        number = self._number(Topic.SHARD, place)
        for pipe in self._group(stage):
            self._tell(self._rank_of(pipe, stage), stage, Topic.SHARD, number, mine)
        parts = self._claim_parts(stage, Topic.SHARD, number)
        return self._exchange.awaited(parts, f"the shards of layer {place}")

    def to_writer(
        self, stage: int, place: int, mine: Sequence[tuple[Any, ...]]
    ) -> Steps[Sequence[Any] | None]:
        """Let the rank that writes a layer have what each copy of its group has of it; all ranks
        that hold the layer call it, and `written` then.

        Returns:
            Steps that come to what each copy has, by pipe, on that rank; to None on others.
        """
        if 0 not in self._group(stage):
            return None
        number = self._number(Topic.SHARD_TO_SAVE, place)
        self._tell(self._rank_of(0, stage), stage, Topic.SHARD_TO_SAVE, number, mine)
        if not self.writes(stage):
            return None
        parts = self._claim_parts(stage, Topic.SHARD_TO_SAVE, number)
        yield parts
        return parts.in_order()

    def written(self, stage: int, place: int) -> Steps[None]:
        """Let the others know that a layer is written. They do not tell more before: the writer has
        room for one layer.
        """
        if 0 not in self._group(stage):
            return
        number = self._last_number(Topic.SHARD_TO_SAVE, place)
        if self.writes(stage):
            for pipe in self._group(stage)[1:]:
                self._exchange.tell(
                    self._rank_of(pipe, stage), ControlMessage(Topic.TAKEN, 0, number), None
                )
        else:
            yield self._exchange.claim(Topic.TAKEN, number, [self._rank_of(0, stage)])

    def _tell(
        self, to: int, stage: int, topic: Topic, number: int, mine: Sequence[tuple[Any, ...]]
    ) -> None:
        plain = [tuple(piece) for piece in mine]
        self._exchange.tell(to, ControlMessage(topic, self._pipes[stage], number), plain)

    def _claim_parts(self, stage: int, topic: Topic, number: int) -> Collected:
        senders = [self._rank_of(pipe, stage) for pipe in self._group(stage)]
        return self._exchange.claim(topic, number, senders)

    def _group(self, stage: int) -> range:
        """The pipes that share a stage out with this rank: shards of it, or a team's parts."""
        if not self._job.shards:
            return self._job.team_of(self._pipes[stage])
        pipes = self._job.pipes_a_group
        first = self._pipes[stage] // pipes * pipes
        return range(first, first + pipes)

    def _number(self, topic: Topic, place: int) -> int:
        """The number of the next visit to a layer; saves may be under way beside others."""
        self._visits[topic, place] = self._visits.get((topic, place), -1) + 1
        return self._last_number(topic, place)

    def _last_number(self, topic: Topic, place: int) -> int:
        return self._visits[topic, place] * (self._job.cuts[-1] + 1) + place

    def _rank_of(self, pipe: int, stage: int) -> int:
        return self._mesh.rank_of(*self._job.place_of(pipe, stage))
