"""Notes between ranks (broadcast, gather, agreement): collected under a key until whoever asked has
all of them."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from axrt.errors import ConfigError, SaveError
from axrt.loop import Loop
from axrt.note import Note, Topic

Key = tuple[Topic, int, int]  # generation, number
_MAIN = 0


@dataclass(slots=True)
class Collected:
    """What has come under one key.

    Args:
        wanted: how many parts there will be; None while nobody has asked.
        from_ranks: who sends them.
    """

    wanted: int | None = None
    from_ranks: frozenset[int] = frozenset()
    parts: dict[int, Any] = field(default_factory=dict)
    heard_from: set[int] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        return self.wanted is not None and len(self.parts) >= self.wanted

    @property
    def owing(self) -> frozenset[int]:
        """The ranks that have sent nothing yet."""
        return self.from_ranks - self.heard_from

    def in_order(self) -> list[Any]:
        return [self.parts[part] for part in sorted(self.parts)]


class Exchange:
    """Tells, hears and waits for notes; what nobody has asked for yet, or is not whole, is kept.

    Args:
        loop: carries them.
        rank, size: of this rank in the job.
    """

    def __init__(self, loop: Loop, rank: int, size: int) -> None:
        self._loop, self._rank, self._size = loop, rank, size
        self._open: dict[Key, Collected] = {}
        self._exchanges = 0

    def tell(self, rank: int, note: Note, payload: Any, generation: int = 0) -> None:
        """Send a note to a rank, this one included."""
        self._loop.tell(rank, note, payload, generation)

    def hear(self, source: int, generation: int, note: Note, payload: Any) -> None:
        """Part of what is collected under a key has come."""
        key = (note.topic, generation, note.number)
        collected = self._open.setdefault(key, Collected())
        collected.parts[note.about] = payload
        collected.heard_from.add(source)
        self._let_go(key)

    def claim(
        self,
        topic: Topic,
        number: int,
        from_ranks: Iterable[int],
        wanted: int | None = None,
        generation: int = 0,
    ) -> Collected:
        """What is collected under a key, to be filled as notes come.

        Args:
            topic, number, generation: the key.
            from_ranks: who sends them.
            wanted: how many parts there will be; None: one from each rank.
        """
        key, ranks = (topic, generation, number), frozenset(from_ranks)
        collected = self._open.setdefault(key, Collected())
        collected.from_ranks, collected.wanted = ranks, len(ranks) if wanted is None else wanted
        self._let_go(key)
        return collected

    def awaited(self, collected: Collected, what: str) -> list[Any]:
        """All parts, waited for where some have not come."""
        return collected.in_order() if collected.whole else self.wait(collected, what)

    def wait(self, collected: Collected, what: str) -> list[Any]:
        """All parts, in the order of what they are about; `what` is waited for."""
        self._loop.listen(lambda: collected.whole, what, lambda: collected.owing)
        return collected.in_order()

    def broadcast(self, value: Any) -> Any:
        """What the main rank gives, on every rank; every rank calls it."""
        self._exchanges += 1
        if self._rank == _MAIN:
            for rank in range(self._size):
                self.tell(rank, Note(Topic.EXCHANGED, _MAIN, self._exchanges), value)
        return self.wait(self.claim(Topic.EXCHANGED, self._exchanges, [_MAIN]), "a value")[0]

    def gathered(self, value: Any) -> list[Any] | None:
        """What every rank gives, by ranks, on the main rank; every rank calls it."""
        self._exchanges += 1
        self.tell(_MAIN, Note(Topic.EXCHANGED, self._rank, self._exchanges), value)
        if self._rank != _MAIN:
            return None
        return self.wait(self.claim(Topic.EXCHANGED, self._exchanges, range(self._size)), "values")

    def round_trip_s(self, payload: Any, times: int = 20) -> float:
        """Seconds that a message like this takes from rank 0 to rank 1 and back, the median; every
        rank calls it, rank 0 knows."""
        taken = []
        for _ in range(times):
            self._exchanges += 1
            began = time.perf_counter()
            if self._rank == _MAIN:
                self.tell(1, Note(Topic.EXCHANGED, self._rank, self._exchanges), payload)
            if self._rank <= 1:
                self.wait(
                    self.claim(Topic.EXCHANGED, self._exchanges, [1 - self._rank]),
                    "a message that is timed",
                )
            if self._rank == 1:
                self.tell(_MAIN, Note(Topic.EXCHANGED, self._rank, self._exchanges), payload)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def agreed(self, find: Callable[[], Any]) -> Any:
        """What the main rank finds, on every rank; the `ConfigError` or `SaveError` that it finds
        instead is raised on every rank."""
        found, refusal = None, None
        if self._rank == _MAIN:
            try:
                found = find()
            except (ConfigError, SaveError) as error:
                refusal = (isinstance(error, SaveError), str(error))
        found, refusal = self.broadcast((found, refusal))
        if refusal is not None:
            not_saved, text = refusal
            raise SaveError(text) if not_saved else ConfigError(text)
        return found

    def _let_go(self, key: Key) -> None:
        if self._open[key].whole:
            del self._open[key]
