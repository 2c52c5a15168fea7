"""Control messages between ranks (broadcast, gather, agreement). They are collected under a key
until the caller who asked for them has all."""

# Ranks come to an exchange at different times, so a part may come before anyone here has asked. It
# is kept under its key until then. Waiting for parts runs the loop: messages of tasks are heard
# meanwhile, signs of life are given, and the diagnosis knows whom this rank waits for. A barrier of
# MPI would do none of that, and could hang without a word.

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from axrt.errors import ConfigError, PeerLeftError, SaveError
from axrt.transport.control import MAIN, ControlMessage, Topic

from .coroutine import Coroutine, Steps
from .loop import Loop
from .one_call import Call, OneCall

Key = tuple[Topic, int, int]  # topic, generation, number
Made = TypeVar("Made")


@dataclass(slots=True)
class Collected:
    """The parts that have come under one key."""

    wanted: int | None = None  # number of parts there will be; None while no caller has asked
    due: Counter[int] = field(default_factory=Counter)  # how many parts each rank sends
    parts: dict[int, Any] = field(default_factory=dict)  # payloads that have come, by `about`
    heard: Counter[int] = field(default_factory=Counter)  # how many parts have come from each rank

    @property
    def whole(self) -> bool:
        return self.wanted is not None and len(self.parts) >= self.wanted

    def passed(self) -> bool:
        """All parts have come; for a coroutine that waits for them."""
        return self.whole

    @property
    def owing(self) -> frozenset[int]:
        """Ranks of which a part has not come yet."""
        return frozenset(rank for rank, parts in self.due.items() if self.heard[rank] < parts)

    def in_order(self) -> list[Any]:
        return [self.parts[part] for part in sorted(self.parts)]


# Exchanges carry the call in which they are made. Ranks that made different calls took each other's
# values for their own.
class Exchange:
    """Sends, collects and waits for control messages; parts that nobody has asked for yet are
    kept.

    Attributes:
        calls: calls of the engine that every rank makes.
    """

    def __init__(self, loop: Loop, rank: int, size: int) -> None:
        self._loop, self._rank, self._size = loop, rank, size
        self.calls = OneCall()
        self._open: dict[Key, Collected] = {}
        self._exchanges = 0

    def tell(self, rank: int, control: ControlMessage, payload: Any, generation: int = 0) -> None:
        """Send a control message to a rank, which may be this one.

        Args:
            generation: number of the session that it belongs to; 0 for what outlives sessions.
        """
        self._loop.tell(rank, control, payload, generation)

    def hear(self, source: int, generation: int, control: ControlMessage, payload: Any) -> None:
        """Keep a part that has come from rank `source`, under its key."""
        key = (control.topic, generation, control.number)
        collected = self._open.setdefault(key, Collected())
        collected.parts[control.about] = payload
        collected.heard[source] += 1
        self._let_go(key)

    def claim(
        self,
        topic: Topic,
        number: int,
        from_ranks: Iterable[int],
        generation: int = 0,
    ) -> Collected:
        """Ask for the parts under a key.

        Args:
            from_ranks: rank that sends it, for each part.
        Returns:
            The collection, which fills as control messages come.
        """
        key = (topic, generation, number)
        collected = self._open.setdefault(key, Collected())
        collected.due = Counter(from_ranks)
        collected.wanted = collected.due.total()
        self._let_go(key)
        return collected

    def awaited(self, collected: Collected, what: str) -> list[Any]:
        """All parts in order; waits only where some have not come."""
        return collected.in_order() if collected.whole else self.wait(collected, what)

    def wait(self, collected: Collected, what: str) -> list[Any]:
        """Wait for all parts.

        Returns:
            The parts, in the order of what they are about.
        """
        self._loop.listen(lambda: collected.whole, what, lambda: collected.owing)
        return collected.in_order()

    def begin(self, steps: Steps[Made]) -> Coroutine[Made]:
        """Begin a coroutine, which goes on in this call and in those that come."""
        coroutine = Coroutine(steps)
        self._loop.begin(coroutine)
        return coroutine

    def finish(self, coroutine: Coroutine[Made], what: str) -> Made:
        """Wait for the end of a coroutine."""
        self._loop.listen(lambda: coroutine.done, what, lambda: coroutine.owing)
        return coroutine.result

    def broadcast(self, value: Any) -> Any:
        """The main rank's value, on every rank; every rank calls it."""
        self._exchanges += 1
        if self._rank == MAIN:
            for rank in range(self._size):
                self._give(rank, value)
        return self._given([MAIN], "a value")[0]

    def gathered(self, value: Any) -> list[Any] | None:
        """The values of all ranks in their order, on the main rank; None on the others. Every rank
        calls it."""
        self._exchanges += 1
        self._give(MAIN, value)
        return self._given(range(self._size), "values") if self._rank == MAIN else None

    def _give(self, rank: int, value: Any) -> None:
        """Send a value, and the call in which it is given."""
        control = ControlMessage(Topic.EXCHANGED, self._rank, self._exchanges)
        self.tell(rank, control, (tuple(self.calls.last), value))

    def _given(self, ranks: Sequence[int], what: str) -> list[Any]:
        """The values that ranks give in this call.

        Raises:
            PeerLeftError: one of them has given it in another call.
        """
        here = self.calls.last
        given = self.wait(self.claim(Topic.EXCHANGED, self._exchanges, ranks), what)
        for rank, (call, _) in zip(ranks, given, strict=True):
            if Call(*call) != here:
                raise PeerLeftError(
                    f"rank {rank} is in {Call(*call)}, and rank {self._rank} in {here}. Every rank "
                    "must make the same calls of the engine"
                )
        return [value for _, value in given]

    def round_trip_s(self, payload: Any, times: int = 20, to: int = 1) -> float:
        """Median time that a message takes from rank 0 to another one and back, in seconds.

        Every rank calls it, and only rank 0's result counts.
        """
        taken = []
        for _ in range(times):
            self._exchanges += 1
            began = time.perf_counter()
            if self._rank == MAIN:
                self.tell(to, ControlMessage(Topic.EXCHANGED, self._rank, self._exchanges), payload)
            if self._rank in (MAIN, to):
                sender = to if self._rank == MAIN else MAIN
                self.wait(
                    self.claim(Topic.EXCHANGED, self._exchanges, [sender]),
                    "a message that is timed",
                )
            if self._rank == to:
                self.tell(
                    MAIN, ControlMessage(Topic.EXCHANGED, self._rank, self._exchanges), payload
                )
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def agreed(self, find: Callable[[], Any]) -> Any:
        """The value that `find` returns on the main rank, on every rank; every rank calls it.

        Raises:
            ConfigError, SaveError: `find` has raised it on the main rank; raised on every rank.
        """
        found, refusal = None, None
        if self._rank == MAIN:
            try:
                found = find()
            except (ConfigError, SaveError) as error:
                refusal = (isinstance(error, SaveError), str(error))
        found, refusal = self.broadcast((found, refusal))
        if refusal is not None:
            not_saved, text = refusal
            raise SaveError(text) if not_saved else ConfigError(text)
        return found

    def made_by_all(self, make: Callable[[], Made]) -> Made:
        """What `make` returns on this rank; every rank calls it, and may find another mistake of
        the settings, such as a directory that its host does not have.

        Raises:
            ConfigError: `make` has raised it on some rank; raised on every rank, with the text of
                the first one.
        """
        made: list[Made] = []
        refusal = ""
        try:
            made = [make()]
        except ConfigError as error:
            refusal = f"rank {self._rank}: {error}"
        refusals = self.gathered(refusal) or []
        first = self.broadcast(next(filter(None, refusals), ""))
        if first:
            raise ConfigError(first)
        return made[0]

    def _let_go(self, key: Key) -> None:
        if self._open[key].whole:
            del self._open[key]
