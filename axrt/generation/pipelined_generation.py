"""Texts written by a pipeline of ranks: each has some layers, and keeps keys and values of its own.

    rank 0        feeds the next tokens of a text, and hears the one that was chosen
    every rank    computes what comes, and passes it on
    the last one  chooses the next token, and tells rank 0

A text is with one rank at a time, so several are under way, and each rank computes whichever comes.
A rank alone is the first and the last one.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from axrt.transport import Parcel, Transport
from axrt.transport.control import MAIN, ControlMessage, Topic

from .generation import Choice, Stage, Text

_ALL_WRITTEN = ControlMessage(Topic.WRITES, -1)
_UNDER_WAY = 2  # texts for each rank: one to compute, and one on its way


# Texts are written by messages, too. A stage computes for whichever text comes, and keeps keys and
# values by slot. To take the loop itself was thought of: its tasks, caps and sums are those of
# training, and a text needs none of them. A rank alone is a pipeline of one.
class PipelinedGeneration:
    """One rank of a pipeline that writes texts.

    Args:
        seed: seed of the choices, the same for each text.
    """

    def __init__(self, transport: Transport, stage: Stage, choice: Choice, seed: int) -> None:
        self._transport, self._stage = transport, stage
        self._choice, self._seed = choice, seed
        self._random: dict[int, tuple[int, torch.Generator]] = {}  # by slot, and of which text
        self._own: list[tuple[ControlMessage, Any]] = []  # what a rank alone tells itself

    @torch.no_grad()
    def write(
        self,
        prompts: Iterable[Sequence[int]],
        number: int,
        context: int,
        keeps: bool,
        ends: Collection[int],
    ) -> Iterator[tuple[int, int | None]]:
        """Write texts; the first rank calls it, and the others `serve`.

        Args:
            prompts: tokens that each text begins with.
        Yields:
            The index of a text, and a token that was added to it; None once it is whole.
        """
        coming = enumerate(prompts)
        size = self._transport.size
        free = list(range(_UNDER_WAY * size if size > 1 else 1))
        under_way: dict[int, tuple[int, Text]] = {}  # by text, with its slot
        while True:
            for index, prompt in islice(coming, len(free)):
                slot, text = under_way[index] = free.pop(), Text(prompt, number, context, keeps)
                self._feed(index, slot, text)
            if not under_way:
                break
            for control, chosen in self._heard():
                token = int(chosen)
                slot, text = under_way[control.number]
                is_whole = text.add(token) or token in ends
                if token not in ends:
                    yield control.number, token
                if is_whole:
                    yield control.number, None
                    free.append(slot)
                    del under_way[control.number]
                else:
                    self._feed(control.number, slot, text)
        for rank in range(1, size):
            self._transport.send(rank, Parcel(0, _ALL_WRITTEN))

    @torch.no_grad()
    def serve(self) -> None:
        """Compute what comes, until all texts are written."""
        while True:
            for control, payload in self._heard():
                if control == _ALL_WRITTEN:
                    return
                self._compute(control, *payload)

    def _feed(self, number: int, slot: int, text: Text) -> None:
        tokens, is_fresh = text.feed()
        control = ControlMessage(Topic.WRITES, slot, number)
        self._compute(control, tokens.to(self._stage.device), is_fresh)

    def _compute(self, text: ControlMessage, value: Any, is_fresh: bool) -> None:
        """Compute what follows in a text, and pass it on."""
        computed = self._stage.forward(text.about, value, is_fresh)
        rank, size = self._transport.rank, self._transport.size
        if rank < size - 1:
            self._transport.send(rank + 1, Parcel(0, text, (computed, is_fresh)))
            return
        chosen = self._chosen(text, computed[0, -1])
        if size == 1:
            self._own.append((text, chosen))
        else:
            self._transport.send(MAIN, Parcel(0, text._replace(topic=Topic.WRITTEN), chosen))

    def _chosen(self, text: ControlMessage, logits: Tensor) -> int:
        number, random = self._random.get(text.about, (-1, None))
        if random is None or number != text.number:
            random = torch.Generator().manual_seed(self._seed)
            self._random[text.about] = text.number, random
        return self._choice.of(logits.float().cpu(), random)

    def _heard(self) -> list[tuple[ControlMessage, Any]]:
        own, self._own = self._own, []
        if own:
            return own
        parcels = [parcel for _, parcel in self._transport.poll(math.inf)]
        return [
            (of.message, of.payload) for of in parcels if isinstance(of.message, ControlMessage)
        ]
