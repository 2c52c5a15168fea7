"""Memory that waits for what comes."""

import pytest
import torch
from torch import Tensor

from axrt.scheduler.message import Meaning, Message
from axrt.transport.control import ControlMessage, Topic
from axrt.transport.landing import Landings, fits
from axrt.transport.local import LocalWorld
from axrt.transport.transport import Parcel, Transport
from axrt.transport.wire import Layout, Spec

SUM = Message(Meaning.SUM, 0, 3)
LARGE = 20_000  # elements, more than an envelope takes


def test_a_large_tensor_lands_where_it_is_expected_and_a_small_one_is_copied() -> None:
    sent = [torch.arange(float(LARGE)), torch.arange(3.0)]
    buffers = [torch.zeros(LARGE), torch.zeros(3)]

    def rank_main(transport: Transport) -> None:
        if transport.rank == 0:
            transport.send(1, Parcel(0, SUM, tuple(sent)))
            return
        transport.expect(0, SUM, buffers)
        arrived: list[tuple[int, Parcel]] = []
        while not arrived:
            arrived = transport.poll(float("inf"))
        ((_, parcel),) = arrived
        large, small = parcel.payload
        assert large.data_ptr() == buffers[0].data_ptr()
        assert torch.equal(large, sent[0])
        assert small.data_ptr() != buffers[1].data_ptr()
        assert torch.equal(small, sent[1])

    LocalWorld(2).run(rank_main)


def test_what_is_expected_may_be_taken_back_and_ends_with_its_generation() -> None:
    landings, buffer = Landings(), torch.zeros(3)
    landings.expect(0, SUM, [buffer])
    landings.expect(0, SUM, ())
    assert landings.take(0, SUM) == ()
    landings.expect(0, SUM, [buffer])
    landings.expect(1, SUM, [buffer])
    assert landings.take(0, SUM) == ()
    assert landings.take(1, SUM) == (buffer,)


def test_only_its_own_message_lands_and_only_once() -> None:
    landings, buffer = Landings(), torch.zeros(2)
    landings.expect(1, SUM, [buffer])
    assert landings.take(1, SUM._replace(number=4)) == ()
    assert landings.take(0, SUM) == ()
    assert landings.take(1, ControlMessage(Topic.EXCHANGED)) == ()
    assert landings.take(1, SUM) == (buffer,)
    assert landings.take(1, SUM) == ()


def test_what_an_older_generation_expected_is_forgotten() -> None:
    landings = Landings()
    landings.expect(1, SUM, [torch.zeros(2)])
    landings.expect(2, SUM, [torch.zeros(2)])
    assert landings.take(1, SUM) == ()


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(3),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(4)[::2],
        torch.zeros(1, 2),
    ],
)
def test_memory_of_another_form_is_left_alone(buffer: Tensor) -> None:
    layout = Layout(Spec.of(torch.zeros(2)))
    assert fits(torch.zeros(2), layout)
    assert not fits(buffer, layout)
