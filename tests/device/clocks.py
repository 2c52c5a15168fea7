"""A happens-before checker: who may touch memory now, by what it knows of the others.

The host and every stream of a device have a vector clock. A stream learns what the host knows when
the host launches work on it, and what another stream had done when it waits for that one's event.
The host learns what a stream has done when it waits for it, or is told that an event has passed.
Whoever touches memory that another has touched must know that the other is done. Nothing depends on
timing, so nothing is missed by luck.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

HOST = -1
Clock = dict[int, int]  # how far each agent is known to have come


class Span(NamedTuple):
    """Bytes of a block, from the first to behind the last."""

    start: int
    stop: int

    def meets(self, other: "Span") -> bool:
        return self.start < other.stop and other.start < self.stop

    def covers(self, other: "Span") -> bool:
        return self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True, slots=True)
class Touch:
    """An access to memory: by whom, at what time of his, to which bytes, and in which words it is
    reported."""

    agent: int
    time: int
    span: Span
    what: str


@dataclass(slots=True)
class Memory:
    """What has happened to a block, as far as it still counts.

    Args:
        pool: stream that gets the block back when it is freed; None: the host.
        writes: writes, without those that a later one covers.
        reads: the last read of each agent and span, without those that a later write covers.
        recorded: streams of which the allocator knows that they use the block.
    """

    pool: int | None
    writes: list[Touch] = field(default_factory=list)
    reads: dict[tuple[int, Span], Touch] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)

    def written(self, touch: Touch) -> None:
        self.writes = [one for one in self.writes if not touch.span.covers(one.span)] + [touch]
        self.reads = {
            key: one for key, one in list(self.reads.items()) if not touch.span.covers(one.span)
        }

    def touches(self) -> Iterator[Touch]:
        yield from self.writes
        yield from list(self.reads.values())


class Clocks:
    """The clocks of one process and its device.

    Args:
        seed: seed of the lot by which an event is said to have passed.
        passes: chance that an event which the host asks about once more has passed.
    Attributes:
        faults: races and memory used again too early, each in words, with their number.
        waits: waits of the host for a stream, by place, with their number.
    """

    def __init__(self, seed: int = 0, passes: float = 0.3) -> None:
        self._clocks: dict[int, Clock] = defaultdict(lambda: defaultdict(int))
        self._events: dict[int, Clock] = {}
        self._asked: set[int] = set()
        self._memory: dict[int, Memory] = {}
        self._random, self._passes = Random(seed), passes
        self.faults: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    # Streams and events.

    def launch(self, stream: int) -> None:
        """The host puts work on a stream."""
        self._learn(stream, self._clocks[HOST])
        self._clocks[stream][stream] += 1

    def acts(self) -> None:
        """The host does something itself."""
        self._clocks[HOST][HOST] += 1

    def record(self, event: int, stream: int) -> None:
        """The host puts an event on a stream."""
        self._learn(stream, self._clocks[HOST])
        self._events[event] = dict(self._clocks[stream])
        self._asked.discard(event)

    def block(self, event: int, stream: int) -> None:
        """What is put on the stream from now on runs behind the event."""
        self._learn(stream, self._clocks[HOST])
        self._learn(stream, self._events.get(event, {}))

    def has_passed(self, event: int) -> bool:
        """The host asks whether an event has passed: never at once, and then by lot."""
        clock = self._events.get(event, {})
        if not self._knows_all(HOST, clock):
            again = event in self._asked
            self._asked.add(event)
            if not again or self._random.random() > self._passes:
                return False
            self._learn(HOST, clock)
        return True

    def is_idle(self, stream: int) -> bool:
        """The host asks whether a stream is done."""
        return self._knows_all(HOST, self._clocks[stream])

    def wait_for_event(self, event: int, where: str) -> None:
        """The host waits for an event."""
        self._wait(self._events.get(event, {}), f"an event, {where}")

    def wait_for_stream(self, stream: int, where: str) -> None:
        """The host waits for a stream; HOST means all of them."""
        for one in (
            [one for one in list(self._clocks) if one != HOST] if stream == HOST else [stream]
        ):
            self._wait(self._clocks[one], where)

    def known(self, agent: int, of: int) -> int:
        """How far an agent knows another to have come; itself: how far it has come."""
        return self._clocks[agent][of]

    # Memory.

    def allocate(self, address: int, pool: int | None) -> None:
        """A block is new at an address."""
        self._memory[address] = Memory(pool)

    def knows(self, address: int) -> bool:
        """The block at an address is of the device, or pinned."""
        return address in self._memory

    def touch(self, agent: int, address: int, span: Span, writes: bool, what: str) -> None:
        """An agent reads or writes bytes of a block, from now on."""
        if span.start == span.stop:
            return  # all tensors without elements have one address, and no memory there
        memory = self._memory[address]
        for earlier in list(memory.touches()) if writes else memory.writes:
            if earlier.span.meets(span) and not self._knows(agent, earlier):
                self.faults[
                    f"race: {_name(agent)} {'writes' if writes else 'reads'} [{what}] what "
                    f"{_name(earlier.agent)} may still be at [{earlier.what}]"
                ] += 1
        now = Touch(agent, self._clocks[agent][agent], span, what)
        if writes:
            memory.written(now)
        else:
            memory.reads[agent, span] = now

    def tell_allocator(self, address: int, stream: int) -> None:
        """The allocator hears that a stream uses a block (`record_stream`)."""
        self._memory[address].recorded.add(stream)

    def free(self, address: int, where: str) -> None:
        """A block goes back to its pool; what is put on that stream next may get it."""
        memory = self._memory.pop(address, None)
        if memory is None or memory.pool is None:
            return
        for touch in memory.touches():
            known = self._knows(memory.pool, touch) or self._knows(HOST, touch)
            if not (known or touch.agent in memory.recorded or touch.agent == HOST):
                self.faults[
                    f"reuse: {_name(memory.pool)} gets memory back, freed at [{where}], that "
                    f"{_name(touch.agent)} may still be at [{touch.what}]"
                ] += 1

    # Knowing.

    def _learn(self, agent: int, clock: Clock) -> None:
        mine = self._clocks[agent]
        for other, time in list(clock.items()):  # at once: other threads may know more meanwhile
            mine[other] = max(mine[other], time)

    def _knows(self, agent: int, touch: Touch) -> bool:
        return agent == touch.agent or self._clocks[agent][touch.agent] >= touch.time

    def _knows_all(self, agent: int, clock: Clock) -> bool:
        mine = self._clocks[agent]
        return all(mine[other] >= time for other, time in list(clock.items()))

    def _wait(self, clock: Clock, where: str) -> None:
        self.waits[where] += 1
        self._learn(HOST, clock)


def _name(agent: int) -> str:
    return "the host" if agent == HOST else f"stream {agent}"
