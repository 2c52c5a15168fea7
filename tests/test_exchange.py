"""Notes are collected until whoever asked for them has all."""

from collections.abc import Callable, Collection
from math import inf

import pytest

from axrt.runtime.exchange import Exchange
from axrt.transport.control import ControlMessage, Topic


class Listens:
    """In place of a loop: what comes while it listens, one note after the other."""

    def __init__(self) -> None:
        self.exchange = Exchange(self, 0, 3)  # type: ignore[arg-type]
        self.coming: list[tuple[int, ControlMessage, object]] = []
        self.owing: list[set[int]] = []

    def listen(
        self, until: Callable[[], bool], what: str, owing: Callable[[], Collection[int]]
    ) -> None:
        while not until():
            self.owing.append(set(owing()))
            source, control, payload = self.coming.pop(0)
            self.exchange.hear(source, 0, control, payload)


def part(about: int) -> ControlMessage:
    return ControlMessage(Topic.EXCHANGED, about, 1)


def test_a_rank_owes_until_its_last_part_has_come() -> None:
    """Rank 1 sends two parts, and the one of rank 2 was here before anyone asked."""
    loop = Listens()
    loop.exchange.hear(2, 0, part(2), "c")
    loop.coming = [(1, part(1), "b"), (1, part(0), "a")]
    collected = loop.exchange.claim(Topic.EXCHANGED, 1, [1, 1, 2])
    assert loop.exchange.wait(collected, "parts") == ["a", "b", "c"]
    assert loop.owing == [{1}, {1}], "also after its first part"


@pytest.mark.parametrize("parts", [0, 1])
def test_what_was_here_before_is_had_without_waiting(parts: int) -> None:
    loop = Listens()
    for about in range(parts):
        loop.exchange.hear(1, 0, part(about), inf)
    collected = loop.exchange.claim(Topic.EXCHANGED, 1, [1] * parts)
    assert loop.exchange.awaited(collected, "parts") == [inf] * parts
    assert loop.owing == []
