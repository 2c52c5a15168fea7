"""Weights between two calls of an engine, where the user reads and writes them."""

import sys
from typing import Any

from torch import nn

from axrt.model.elsewhere import ModulesElsewhere
from axrt.store.team_pieces import by_member, wholes_of_member

from .parts import EngineParts


class UserWeights:
    """The user's view of this rank's weights.

    Args:
        elsewhere: layers that the user has built, and whose weights other ranks train.
    """

    def __init__(self, parts: EngineParts, elsewhere: ModulesElsewhere) -> None:
        self._rank, self._job, self._model = parts.rank, parts.job, parts.model
        self._trainer, self._shards, self._elsewhere = parts.trainer, parts.shards, elsewhere
        self._are_given_out = bool(parts.model.given)  # the user has those that he built himself

    def given_out(self) -> list[tuple[str, Any]]:
        """The names and values of all that is trained here, which the user may write to."""
        self._are_given_out = True
        self._model.note_given_out()
        if self._model.scratch is None:
            return list(self._model.named_parameters())
        self._trainer.settle()
        return list(self._model.shown_parameters())

    def publish(self) -> None:
        """Let layers have what the user has written to weights between two calls."""
        computing = self._rank.loop.computing
        if self._are_given_out:
            with computing():
                self._model.reach_all_copies()
        if self._job.shards or self._job.offloads_weights:
            with computing():
                self._model.keep_memory()
        if self._model.has_masters:
            if self._model.shown:
                self._trainer.settle()
            with computing():
                self._model.publish_masters(self._are_given_out)

    def check(self) -> None:
        """Refuse what was changed in a way that no step would see; say what has no effect.

        Raises:
            ModelError: a parameter was added, replaced or unfrozen in a way that cannot be trained.
        """
        if self._model.listed:
            self._model.listed.check()
        if text := self._elsewhere.told():
            print(f"axrt: rank {self._rank.number}: {text}", file=sys.stderr, flush=True)

    def gather(self) -> None:
        """Bring masters here, where each rank keeps a shard of them: the modules will have them
        when they are given back."""
        if not (self._job.shards and (self._job.residencies or self._model.narrow is not None)):
            return
        for stage, of in sorted(self._model.stages.items()):
            for place, layer in sorted((int(place), layer) for place, layer in of.layers.items()):
                if not self._job.offloads_weights or place in self._model.given:
                    self._gather(stage, place, layer)

    def _gather(self, stage: int, place: int, layer: nn.Module) -> None:
        mine = self._model.pieces_of(layer, with_state=False)
        parts = self._shards.for_all(stage, place, mine)
        shapes = self._model.shapes_of(layer)
        cut = self._model.parts
        wholes = wholes_of_member(shapes, by_member(parts, cut), cut, self._rank.mesh.member)
        for bucket in self._model.buckets_with(layer):
            bucket.give_back_as({name: of.master for name, of in wholes.items()})
