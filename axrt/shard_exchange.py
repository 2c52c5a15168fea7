"""Layers made whole between steps, where each rank keeps a shard of their state (ZeRO): for
checkpoints, for evaluations, and for the modules that the user gets back."""

from collections.abc import Callable, Sequence
from typing import Any

from axrt.exchange import Exchange
from axrt.mesh import Mesh
from axrt.note import Note, Topic
from axrt.scheduler.job import Job
from axrt.store.saved_piece import SavedPiece


class ShardExchange:
    """Brings what all copies of a layer have of it together, in each group of copies that share it
    out.

    Ranks that hold a layer go through their layers in the order of the model, one layer at a time,
    so nobody holds more than one that is not its own.

    Args:
        exchange: exchange of notes with the other ranks.
        job: schedule of the training.
        mesh: coordinates of this rank.
        pipes: pipe whose copy of a stage this rank holds, by stage.
    """

    def __init__(self, exchange: Exchange, job: Job, mesh: Mesh, pipes: dict[int, int]) -> None:
        self._exchange, self._job, self._mesh, self._pipes = exchange, job, mesh, pipes
        self._visits: dict[int, int] = {}  # by layer

    def writes(self, stage: int) -> bool:
        """This rank writes the files of the stage's layers."""
        return self._pipes[stage] == 0

    def for_all(self, stage: int, place: int, mine: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """What each copy of the group has of a layer, by pipe, on every rank there that holds it;
        all of them call it.

        Args:
            stage: stage of the layer.
            place: index of the layer in the model, or of the first of several.
            mine: what this rank has.
        """
        number = self._number(place)
        for pipe in self._group(stage):
            to = self._rank_of(pipe, stage)
            self._tell(to, stage, number, mine)
        return self._parts(stage, place, number)

    def for_writer(
        self,
        stage: int,
        place: int,
        mine: Sequence[SavedPiece],
        take: Callable[[Sequence[Any]], None],
    ) -> None:
        """Let the rank that writes a layer take what each copy of its group has of it; all ranks
        that hold the layer call it.

        Args:
            stage, place, mine: those of `for_all`.
            take: function that is called there with what each copy has, by pipe; it must not raise.
        """
        if 0 not in self._group(stage):
            return
        number, writer = self._number(place), self._rank_of(0, stage)
        self._tell(writer, stage, number, mine)
        if self.writes(stage):
            take(self._parts(stage, place, number))
            for pipe in self._group(stage)[1:]:
                self._exchange.tell(self._rank_of(pipe, stage), Note(Topic.TAKEN, 0, number), None)
        else:  # not sooner: the writer has room for one layer
            taken = self._exchange.claim(Topic.TAKEN, number, [writer])
            self._exchange.awaited(taken, f"the end of writing layer {place}")

    def _tell(self, to: int, stage: int, number: int, mine: Sequence[tuple[Any, ...]]) -> None:
        plain = [tuple(piece) for piece in mine]
        self._exchange.tell(to, Note(Topic.SHARD, self._pipes[stage], number), plain)

    def _parts(self, stage: int, place: int, number: int) -> list[Any]:
        senders = [self._rank_of(pipe, stage) for pipe in self._group(stage)]
        parts = self._exchange.claim(Topic.SHARD, number, senders)
        return self._exchange.awaited(parts, f"the shards of layer {place}")

    def _group(self, stage: int) -> range:
        """The pipes that share a stage out with this rank."""
        pipes = self._job.pipes_a_group
        first = self._pipes[stage] // pipes * pipes
        return range(first, first + pipes)

    def _number(self, place: int) -> int:
        visit = self._visits[place] = self._visits.get(place, -1) + 1
        return visit * (self._job.cuts[-1] + 1) + place

    def _rank_of(self, pipe: int, stage: int) -> int:
        return self._mesh.rank_of(*self._job.placement.place_of(pipe, stage))
