"""What the checker of the simulated accelerator finds, and what it lets pass."""

import pytest

from .clocks import HOST, Clocks, Span

BLOCK, ALL = 1000, Span(0, 8)
ONE, OTHER = 1, 2


@pytest.fixture
def clocks() -> Clocks:
    """A block that stream ONE has just written."""
    clocks = Clocks()
    clocks.allocate(BLOCK, ONE)
    clocks.launch(ONE)
    clocks.touch(ONE, BLOCK, ALL, writes=True, what="first")
    return clocks


def reads(clocks: Clocks, agent: int, span: Span = ALL) -> None:
    clocks.acts() if agent == HOST else clocks.launch(agent)
    clocks.touch(agent, BLOCK, span, writes=False, what="second")


@pytest.mark.parametrize("agent", [OTHER, HOST])
def test_who_reads_without_having_waited_races(clocks: Clocks, agent: int) -> None:
    reads(clocks, agent)
    (fault,) = clocks.faults
    assert fault.startswith("race:")
    assert "[second] what stream 1 may still be at [first]" in fault


def test_a_stream_that_waits_for_an_event_may_read(clocks: Clocks) -> None:
    clocks.record(7, ONE)
    clocks.block(7, OTHER)
    reads(clocks, OTHER)
    assert not clocks.faults


def test_an_event_before_the_write_says_nothing_of_it() -> None:
    clocks = Clocks()
    clocks.allocate(BLOCK, ONE)
    clocks.record(7, ONE)
    clocks.launch(ONE)
    clocks.touch(ONE, BLOCK, ALL, writes=True, what="first")
    clocks.block(7, OTHER)
    reads(clocks, OTHER)
    assert clocks.faults


def test_the_host_may_read_when_an_event_has_passed_and_never_at_the_first_question(
    clocks: Clocks,
) -> None:
    clocks.record(7, ONE)
    assert not clocks.has_passed(7)
    while not clocks.has_passed(7):
        pass
    reads(clocks, HOST)
    assert not clocks.faults


def test_what_the_host_knows_a_launch_knows(clocks: Clocks) -> None:
    clocks.wait_for_stream(ONE, "here")
    reads(clocks, OTHER)
    assert not clocks.faults
    assert clocks.waits == {"here": 1}


def test_other_bytes_of_a_block_are_no_race(clocks: Clocks) -> None:
    reads(clocks, OTHER, Span(8, 16))
    assert not clocks.faults


def test_a_write_races_with_what_is_still_read(clocks: Clocks) -> None:
    clocks.record(7, ONE)
    clocks.block(7, OTHER)
    reads(clocks, OTHER)
    clocks.launch(ONE)
    clocks.touch(ONE, BLOCK, Span(4, 6), writes=True, what="third")
    assert [fault.split(":")[0] for fault in clocks.faults] == ["race"]


@pytest.mark.parametrize(("recorded", "faults"), [(False, 1), (True, 0)])
def test_memory_that_another_stream_uses_is_not_given_back_unrecorded(
    clocks: Clocks, recorded: bool, faults: int
) -> None:
    clocks.record(7, ONE)
    clocks.block(7, OTHER)
    reads(clocks, OTHER)
    if recorded:
        clocks.tell_allocator(BLOCK, OTHER)
    clocks.free(BLOCK, "here")
    assert len(clocks.faults) == faults
    assert all(fault.startswith("reuse:") for fault in clocks.faults)


def test_memory_is_given_back_when_the_other_stream_is_known_to_be_done(clocks: Clocks) -> None:
    clocks.record(7, ONE)
    clocks.block(7, OTHER)
    reads(clocks, OTHER)
    clocks.record(8, OTHER)
    clocks.block(8, ONE)
    clocks.free(BLOCK, "here")
    assert not clocks.faults
