"""The local transport keeps the contract: everything arrives once, as it was, in any order that the
seed says."""

from math import inf

import pytest
import torch

from axrt.scheduler.message import Meaning, Message
from axrt.transport import Parcel
from axrt.transport.local import LocalTransport, LocalWorld, Stuck
from axrt.transport.payload import flatten, unflatten

from .payloads import PAYLOADS, assert_same


def numbered(number: int, payload: object = None) -> Parcel:
    return Parcel(0, Message(Meaning.ACTIVATION, 0, number), payload)


def orders(seed: int) -> list[int]:
    """The order in which rank 1 hears of twenty messages."""

    def rank_main(transport: LocalTransport) -> list[int]:
        heard: list[int] = []
        if transport.rank == 0:
            for number in range(20):
                transport.send(1, numbered(number))
        while transport.rank == 1 and len(heard) < 20:
            heard += [parcel.message.number for _, parcel in transport.poll(wait_s=inf)]
        return heard

    return LocalWorld(2, seed).run(rank_main)[1]


def test_messages_overtake_each_other_and_none_is_lost_or_doubled() -> None:
    heard = orders(seed=1)
    assert heard != sorted(heard)
    assert sorted(heard) == list(range(20))


def test_a_seed_is_a_history() -> None:
    assert orders(seed=1) == orders(seed=1)
    assert orders(seed=1) != orders(seed=2)


@pytest.mark.parametrize("name", PAYLOADS)
def test_every_kind_of_payload_arrives_as_it_was(name: str) -> None:
    transport = LocalWorld(1).alone()
    transport.send(0, numbered(0, PAYLOADS[name]))
    ((source, parcel),) = transport.poll(wait_s=inf)
    assert source == 0
    assert_same(parcel.payload, PAYLOADS[name], name)


def test_what_arrives_is_not_the_senders_memory_but_is_read_from_it_late() -> None:
    transport, sent = LocalWorld(1).alone(), torch.zeros(3)
    transport.send(0, numbered(0, sent))
    sent.fill_(1)  # against the contract, and so it shows
    ((_, parcel),) = transport.poll(wait_s=inf)
    sent.fill_(2)
    assert parcel.payload.tolist() == [1, 1, 1]


def test_ranks_that_all_wait_for_nothing_are_stuck_and_say_so() -> None:
    with pytest.raises(Stuck, match="every rank waits"):
        LocalWorld(3).run(lambda transport: [transport.poll(wait_s=inf) for _ in range(100)])


def test_a_rank_that_fails_ends_the_others() -> None:
    def rank_main(transport: LocalTransport) -> None:
        if transport.rank == 1:
            raise ValueError("rank 1 has had enough")
        while True:
            transport.poll(wait_s=0)

    with pytest.raises(ValueError, match="had enough"):
        LocalWorld(3).run(rank_main)


def test_what_cannot_travel_is_refused_by_type() -> None:
    with pytest.raises(TypeError, match="set cannot travel between stages; expected dense tensors"):
        flatten(({1, 2},))


def test_a_payload_comes_together_again() -> None:
    payload = {"x": (torch.ones(1), [None, 2])}
    skeleton, tensors = flatten(payload)
    assert unflatten(skeleton, tensors) == payload


def test_memory_is_read_until_what_was_sent_from_it_has_arrived() -> None:
    transport, memory = LocalWorld(1).alone(), torch.zeros(8)
    transport.send(0, numbered(0, memory[2:4]))
    assert transport.still_reads(memory[6:], wait_s=0.0), "all of a storage counts"
    assert not transport.still_reads(torch.zeros(8), wait_s=0.0)
    while not transport.poll(wait_s=inf):
        pass
    assert not transport.still_reads(memory, wait_s=0.0)
