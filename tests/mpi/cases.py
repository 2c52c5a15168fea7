"""What holds under mpirun; each case runs on every rank of the job with a communicator of its
own."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import axrt
from axrt.device.queues import Moment, wait_for
from axrt.device.threads import usable_cores
from axrt.scheduler.message import Meaning, Message
from axrt.store.bucket_settings import OptimizerFactory
from axrt.transport import Parcel, Transport, single_copy
from axrt.transport.envelope import is_large, pack, seal
from axrt.transport.lines import Lines
from axrt.transport.local import LocalWorld
from axrt.transport.mpi import MpiTransport
from axrt.transport.payload import flatten
from axrt.transport.single_copy import single_copy_peers
from axrt.transport.staging import InPlace, Leaving
from axrt.transport.wire import Layout
from axrt.world.heartbeat import Heartbeat
from axrt.world.mpi_world import MpiWorld
from tests.contracts.odd import ODD
from tests.contracts.test_contracts import Run, is_that_of_plain_torch, on_ranks
from tests.engine.calls import KINDS, counted
from tests.engine.matrices import batches as for_matrices
from tests.engine.models import masked, masked_batches, motley, small_gpt
from tests.engine.models import perceptron as perceptron_of
from tests.engine.reference import (
    ONE_PIPE,
    TWO_PIPES,
    Outcome,
    adamw,
    configured,
    momentum,
    random_batches,
    spoiling,
    together,
    token_batches,
    train_in_plain_torch,
    train_on_a_rank,
)
from tests.engine.test_forward_pieces import planted as in_pieces
from tests.engine.test_loss_module import model as scored
from tests.engine.test_owned_matrices import model as with_matrices
from tests.engine.test_pausing import model_of as as_they_are
from tests.engine.test_tensor import few_sentences, sentences
from tests.engine.test_tensor import language as of_teams
from tests.engine.test_ties import batches as tied_batches
from tests.engine.test_ties import tied
from tests.engine.test_vocabulary import masked as masked_words
from tests.engine.test_vocabulary import means as of_words
from tests.sweeps import fewer, some
from tests.transport.payloads import PAYLOADS, assert_same

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
MICROBATCHES, STEPS = fewer(12, 4), fewer(3, 2)
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
ZERO_BUBBLE = {"policy": "zb-h1", "microbatches": 4}
HALF = 6  # microbatches of a replica, where two share them
TOKEN_BATCHES = token_batches(vocab=256, context=8, microbatches=MICROBATCHES)
MOTLEY_BATCHES = random_batches((6, 12), classes=4, microbatches=MICROBATCHES)
_SIZES: dict[str, tuple[int, ...]] = {
    "bits_of_every_policy": (1, 2, 3, 4),
    "replicas_have_the_bits_of_a_world_in_one_process": (2, 3, 4),
    "two_pipes_have_the_bits_of_a_world_in_one_process": (2, 4),
    "a_task_takes_few_calls": (2,),
}


def names(size: int) -> list[str]:
    """The cases for a job of so many ranks."""
    return [
        name
        for name in globals()
        if name.startswith("case_") and size in _SIZES.get(name.removeprefix("case_"), (2, 3))
    ]


def perceptron() -> axrt.PipelineModule:
    """Layers enough for two chunks of each of two ranks, and in the full run of four."""
    return perceptron_of(layers=fewer(8, 4))


def parcel(number: int, payload: object = None) -> Parcel:
    return Parcel(0, Message(Meaning.ACTIVATION, 0, number), payload)


def receive(transport: MpiTransport, count: int) -> dict[int, Any]:
    """So many payloads by their numbers."""
    got: dict[int, Any] = {}
    while len(got) < count:
        for _, (_, message, payload) in transport.poll(wait_s=inf):
            assert message.number not in got
            got[message.number] = payload
    return got


def exchange(comm: "MPI.Comm", transport: MpiTransport, payloads: list[Any]) -> dict[int, Any]:
    """Send all payloads to the next rank around the ring and receive those of the one before."""
    for number, payload in enumerate(payloads):
        transport.send((comm.rank + 1) % comm.size, parcel(number, payload))
    transport.flush()
    got = receive(transport, len(payloads))
    comm.Barrier()
    transport.close()
    return got


def case_every_kind_of_payload_arrives_as_it_was(comm: "MPI.Comm") -> None:
    got = exchange(comm, MpiTransport(comm), list(PAYLOADS.values()))
    for number, (name, payload) in enumerate(PAYLOADS.items()):
        assert_same(got[number], payload, name)


def case_every_shape_of_small_sizes_arrives_as_it_was(comm: "MPI.Comm") -> None:
    """Alone and beside an envelope, transposed or not."""
    shapes = [
        shape for dimensions in range(1, 5) for shape in product((1, 2, 3), repeat=dimensions)
    ]
    tensors = [torch.randn(size) for shape in shapes for size in (shape, (*shape, 9000))]
    tensors += [tensor.transpose(0, -1) for tensor in tensors]
    got = exchange(comm, MpiTransport(comm), tensors)
    for number, tensor in enumerate(tensors):
        assert (got[number].shape, got[number].stride()) == (tensor.shape, tensor.stride())
    torch.manual_seed(0)  # values too, where every rank has the same
    same = [torch.randn(size) for shape in shapes for size in (shape, (*shape, 9000))]
    got = exchange(comm, MpiTransport(comm), same)
    for number, tensor in enumerate(same):
        assert_same(got[number], tensor, str(tuple(tensor.shape)))


def case_a_large_tensor_goes_in_pieces(comm: "MPI.Comm") -> None:
    torch.manual_seed(5)
    tensors = [torch.randn(100_003), torch.randn(50_000).bfloat16(), torch.randn(300, 200).t()]
    got = exchange(comm, MpiTransport(comm, piece_bytes=4096), tensors)
    for number, tensor in enumerate(tensors):
        assert_same(got[number], tensor, str(number))


def case_what_is_known_to_be_sent_is_seen_by_the_first_poll(comm: "MPI.Comm") -> None:
    transport = MpiTransport(comm)
    for number in range(20):
        if comm.rank == 0:
            transport.send(1, parcel(number))
        comm.Barrier()
        if comm.rank == 1:
            assert [p.message.number for _, p in transport.poll(wait_s=0)] == [number]
        comm.Barrier()
    transport.close()


class SomeLooks:
    """A moment that has passed after so many looks."""

    def __init__(self, looks: float) -> None:
        self._left = looks

    def passed(self) -> bool:
        self._left -= 1
        return self._left < 0


class SlowStaging(InPlace):
    """Every copy takes a few looks, as a copy on a GPU's own stream does; what went out may be
    reused only then."""

    def outgoing(self, parcel: Parcel, after: Moment) -> Leaving:
        head, tensors, lent, _ = super().outgoing(parcel, after)
        copies = [tensor.clone() for tensor in tensors]
        return Leaving(head, copies, lent, SomeLooks(3 if tensors else 0))

    def incoming(
        self, tensors: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> tuple[list[Tensor], Moment]:
        return [tensor.clone() for tensor in tensors], SomeLooks(3)


def case_copies_that_take_their_time_keep_envelopes_and_tensors_together(comm: "MPI.Comm") -> None:
    payloads = [
        value for payload in PAYLOADS.values() for value in (payload, torch.full((20_000,), 3.0))
    ]
    got = exchange(comm, MpiTransport(comm, SlowStaging()), payloads)
    for number, payload in enumerate(payloads):
        mine, its = flatten(got[number])[1], flatten(payload)[1]
        assert [t.flatten().tolist() for t in mine if not t.is_complex()] == [
            t.flatten().tolist() for t in its if not t.is_complex()
        ]


class SlowToLeave(InPlace):
    """Copies that go out take a few looks."""

    def outgoing(self, parcel: Parcel, after: Moment) -> Leaving:
        leaving = super().outgoing(parcel, after)
        return leaving._replace(ready=SomeLooks(3 if leaving.tensors else 0))


def case_what_is_ready_does_not_overtake_what_was_sent_before(comm: "MPI.Comm") -> None:
    transport = MpiTransport(comm, SlowToLeave())
    for number in range(6):
        transport.send(
            (comm.rank + 1) % comm.size, parcel(number, None if number % 2 else torch.ones(3))
        )
    # whoever has everything stands at the barrier, where nothing of its own would leave
    transport.flush()
    order: list[int] = []
    while len(order) < 6:
        order += [p.message.number for _, p in transport.poll(wait_s=inf)]
    comm.Barrier()
    transport.close()
    assert order == sorted(order)


class OddOnesAreLate(InPlace):
    """Parcels with odd numbers are not ready yet."""

    def outgoing(self, parcel: Parcel, after: Moment) -> Leaving:
        leaving = super().outgoing(parcel, after)
        return leaving._replace(ready=SomeLooks(inf if parcel.message[2] % 2 else 0))


def case_what_is_not_ready_holds_up_no_other_rank(comm: "MPI.Comm") -> None:
    transport = MpiTransport(comm, OddOnesAreLate())
    transport.send(comm.rank, parcel(1, torch.ones(3)))
    transport.send((comm.rank + 1) % comm.size, parcel(2, torch.ones(3)))
    assert list(receive(transport, 1)) == [2]
    comm.Barrier()


class TakesAWhile(InPlace):
    """What goes out is ready after a tenth of a second, and counts how often it is asked."""

    asked = 0

    def outgoing(self, parcel: Parcel, after: Moment) -> Leaving:
        self._until_s = time.monotonic() + 0.1
        return super().outgoing(parcel, after)._replace(ready=self)

    def passed(self) -> bool:
        self.asked += 1
        return time.monotonic() > self._until_s


def case_a_flush_sleeps_while_copies_are_made(comm: "MPI.Comm") -> None:
    staging = TakesAWhile()
    transport = MpiTransport(comm, staging)
    transport.send((comm.rank + 1) % comm.size, parcel(0, torch.ones(3)))
    transport.flush()
    assert 1 < staging.asked < 6_000, "a sleep takes 20 us at least, and asking 1 us"
    receive(transport, 1)
    comm.Barrier()


class NeverReady(InPlace):
    """Copies that go out are not made yet."""

    def outgoing(self, parcel: Parcel, after: Moment) -> Leaving:
        leaving = super().outgoing(parcel, after)
        copies = [tensor.clone() for tensor in leaving.tensors]
        return leaving._replace(tensors=copies, ready=SomeLooks(inf))


def case_memory_is_read_until_what_was_sent_from_it_has_left(comm: "MPI.Comm") -> None:
    transport, sent = MpiTransport(comm), torch.ones(1 << 22)  # more than MPI takes in advance
    transport._progress = None  # so that nobody takes it before the ranks poll
    transport.send((comm.rank + 1) % comm.size, parcel(0, sent[: 1 << 21]))
    assert transport.still_reads(sent, wait_s=0.01)
    assert not transport.still_reads(torch.ones(8), wait_s=0.0)
    comm.Barrier()
    arrived: list[Any] = []
    while not arrived or transport.still_reads(sent, wait_s=0.0):
        arrived += transport.poll(wait_s=0.0)
    comm.Barrier()
    transport.close()
    waits = MpiTransport(comm, NeverReady())
    waits.send(comm.rank, parcel(0, sent))
    assert waits.still_reads(sent, wait_s=0.0), "what will be copied is read, too"
    waits._let_go_of_sent = fails_in_mpi  # type: ignore[method-assign]
    with pytest.raises(axrt.PeerLostError, match="a rank of the job has gone"):
        waits.still_reads(sent, wait_s=1.0)


def fails_in_mpi() -> None:
    from mpi4py import MPI

    raise MPI.Exception(MPI.ERR_OTHER)


class FirstEnvelopeIsLate:
    """A communicator whose first envelope takes a few looks to come in."""

    def __init__(self, comm: "MPI.Comm") -> None:
        self._comm, self._looks = comm, 5

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Improbe(self, *arguments: Any) -> Any:  # noqa: N802
        message, looks = self._comm.Improbe(*arguments), self._looks
        if message is None:
            return None
        self._looks = 0
        return SimpleNamespace(Irecv=lambda buffer: Late(message.Irecv(buffer), looks))


class Late:
    def __init__(self, request: "MPI.Request", looks: int) -> None:
        self._request, self._looks = request, looks

    def Test(self) -> bool:  # noqa: N802
        self._looks -= 1
        return self._looks < 0 and self._request.Test()


def case_an_envelope_that_is_late_keeps_its_place(comm: "MPI.Comm") -> None:
    transport = MpiTransport(comm)
    for number in range(4):
        transport.send((comm.rank + 1) % comm.size, parcel(number))
    comm.Barrier()
    transport._comm = FirstEnvelopeIsLate(transport._comm)  # type: ignore[assignment]
    order: list[int] = []
    while len(order) < 4:
        order += [p.message.number for _, p in transport.poll(wait_s=0)]
    comm.Barrier()
    transport.close()
    assert order == sorted(order)


class Roomy(InPlace):
    """Memory behind every tensor that arrives: Open MPI writes all that comes before it says that
    it was too much."""

    def allocate(self, layout: Layout) -> Tensor:
        return torch.empty(400_000)[: layout.num_bytes // 4]


def case_an_error_of_mpi_while_receiving_is_the_senders_end_and_names_it(comm: "MPI.Comm") -> None:
    """More bytes come than the envelope has said, which MPI takes for an error as it does a sender
    that dies in the middle."""
    from mpi4py import MPI

    transport = MpiTransport(comm, Roomy())
    if comm.rank == 0:
        head, tensors = pack(parcel(0, torch.ones(20_000)))
        transport._comm.Send([seal(head, tensors), MPI.BYTE], 1, 1)
        transport._comm.Send([bytes(200_000), MPI.BYTE], 1, 2)
    if comm.rank == 1:
        with pytest.raises(
            axrt.PeerLostError,
            match="rank 0 has gone while activation 0 for stage 0 came from it to rank 1",
        ):
            receive(transport, 1)
    comm.Barrier()


def case_what_fails_in_the_thread_is_raised_where_the_rank_polls(comm: "MPI.Comm") -> None:
    transport, fails = MpiTransport(comm), threading.Event()
    move = transport._move

    def failing(once: bool = False) -> Any:
        if threading.current_thread() is not threading.main_thread():
            fails.set()
            raise LookupError("in the thread")
        return move(once)

    transport._move = failing  # type: ignore[method-assign]
    transport.send((comm.rank + 1) % comm.size, parcel(0, torch.ones(200_000)))
    assert fails.wait(60)
    with pytest.raises(LookupError, match="in the thread"):
        receive(transport, 1)
    transport._failure = None
    got = receive(transport, 1)
    assert torch.equal(got[0], torch.ones(200_000))
    comm.Barrier()
    transport.close()


def case_ranks_of_a_node_agree_who_takes_messages_alone(comm: "MPI.Comm") -> None:
    """Also where a rank has no partner, and where one receiver has seen nothing arrive."""
    others = set(range(comm.size)) - {comm.rank}
    assert len(set(comm.allgather(bool(single_copy_peers(comm))))) == 1
    assert single_copy_peers(comm) in (frozenset(), others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_copy, "_arrived_in_silence", lambda node: True)
        assert single_copy_peers(comm) == others
        patch.setattr(single_copy, "_arrived_in_silence", lambda node: comm.rank > 0)
        assert single_copy_peers(comm) == frozenset()


def case_what_the_thread_has_found_ends_a_waits_longer_pauses(comm: "MPI.Comm") -> None:
    transport, ended = MpiTransport(comm), threading.Event()
    transport._patience.reset, transport._patience.spins = ended.set, 5  # type: ignore[method-assign]
    transport._arrived.append((0, parcel(7)))
    assert [p.message.number for _, p in transport.poll(wait_s=0)] == [7]
    assert ended.is_set()
    comm.Barrier()
    transport.close()


def case_ranks_of_a_node_share_its_cores_out(comm: "MPI.Comm") -> None:
    """Nothing says how many threads a rank computes with."""
    from mpi4py import MPI

    said, threads = os.environ.pop("OMP_NUM_THREADS", None), torch.get_num_threads()
    try:
        torch.set_num_threads(64)
        with axrt.initialize(perceptron(), config=configured(4), world=MpiWorld(MPI, comm=comm)):
            taken = comm.allgather(torch.get_num_threads())
    finally:
        torch.set_num_threads(threads)
        if said is not None:
            os.environ["OMP_NUM_THREADS"] = said
    cores = set().union(*comm.allgather(set(usable_cores())))
    assert sum(taken) <= max(comm.size, min(len(cores), 64 * comm.size)), (taken, cores)


class Deaf:
    """A communicator over which nothing can be sent any more."""

    def __init__(self, comm: "MPI.Comm") -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Issend(self, *arguments: Any) -> Any:  # noqa: N802
        from mpi4py import MPI

        raise MPI.Exception(MPI.ERR_OTHER)


def case_a_rank_that_cannot_even_be_asked_is_lost(comm: "MPI.Comm") -> None:
    heartbeat = Heartbeat(Deaf(comm.Dup()), 0.5)  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    with pytest.raises(  # noqa: PT012
        axrt.PeerLostError,
        match=rf"rank {comm.rank} has waited .* for rank 0, which has shown no sign of life",
    ):
        while time.monotonic() < deadline:
            heartbeat.waits(lambda: [0])
            time.sleep(0.01)
    heartbeat.stop()
    comm.Barrier()


def case_a_communicator_on_which_a_question_is_on_its_way_is_not_freed(comm: "MPI.Comm") -> None:
    """Another one would get its number, and the question."""
    from mpi4py import MPI

    signs = comm.Dup()
    heartbeat = Heartbeat(signs, 0.2)
    if comm.rank == 1:
        heartbeat.stop()
    comm.Barrier()
    if comm.rank == 0:
        before = heartbeat._sending
        while heartbeat._sending is before:  # a list is made for each question
            heartbeat.waits(lambda: [1])
            time.sleep(1e-3)
        heartbeat.free()
        assert signs != MPI.COMM_NULL
    comm.Barrier()


def case_a_rank_that_waits_for_itself_is_found_although_it_looks_for_messages(
    comm: "MPI.Comm",
) -> None:
    """It takes a fifth of a core for that, which is no sign of life."""
    heartbeat, told = Heartbeat(comm.Dup(), 2.0), ""
    owing = (lambda: (1,)) if comm.rank == 0 else (lambda: ())
    while not told and not comm.iprobe(0):
        try:
            heartbeat.waits(owing)
        except axrt.PeerLostError as error:
            told = str(error)
        looks_until_s = time.monotonic() + 1e-3
        while time.monotonic() < looks_until_s:
            pass
        time.sleep(4e-3)
    for rank in range(1, comm.size if comm.rank == 0 else 0):
        comm.send(told, rank)
    said = "for rank 1, which has shown no sign of life for 2 s (it answers, and does nothing"
    assert said in (told or comm.recv(source=0))
    heartbeat.stop()


def case_tensors_are_matched_to_their_envelopes_whatever_the_sizes(comm: "MPI.Comm") -> None:
    """Envelopes beyond what MPI sends eagerly, between small ones; large tensors find theirs by
    order alone."""
    payloads: list[Any] = []
    for number in range(12):
        small = [torch.full((4000,), float(number))] * (60 if number % 3 == 0 else 1)
        payloads.append((*small, torch.full((20_000,), float(number))))
    got = exchange(comm, MpiTransport(comm), payloads)
    for number, payload in enumerate(payloads):
        assert_same(got[number], payload, str(number))


class Dozes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(3e-4)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(3e-4)
        return gradient


class Dozing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Dozes.apply(x * self.factor)  # type: ignore[no-any-return, no-untyped-call]


def case_short_waits_are_in_the_timeline(comm: "MPI.Comm") -> None:
    """One microbatch is under way, so each rank waits while another works, for less than a
    millisecond each time."""
    schedule = {"policy": "axonn", "max_held": 1, "microbatches": 20}
    config = {"schedule": schedule, "run": {"device": "cpu", "trace_steps": 1}}
    model = axrt.PipelineModule([axrt.LayerSpec(Dozing)] * comm.size, lambda out, target: out.sum())
    engine = axrt.initialize(model, config=config, transport=MpiTransport(comm))
    batches = iter([(torch.ones(4, requires_grad=True), torch.ones(1))] * 40)
    for _ in range(2):
        engine.train_batch(batches)
    line = engine.timeline()
    if line is not None:
        waited_s = sum(
            pause.end - pause.start
            for pause in line.pauses
            if pause.rank == 1 and pause.cause == "input"
        )
        assert waited_s > 15 * 2 * 3e-4, line.pauses
    engine.close()


def of_one_rank(comm: "MPI.Comm", compute: Callable[[], T]) -> T:
    """What the first rank computes, on all. The others sleep so long: they share its cores."""
    if comm.rank == 0:
        found = compute()
        for rank in range(1, comm.size):
            comm.send(found, rank)
        return found
    while not comm.iprobe(0):
        time.sleep(0.01)
    return comm.recv(source=0)  # type: ignore[no-any-return]


def trained(
    comm: "MPI.Comm",
    model: Callable[[], axrt.PipelineModule],
    batches: Any,
    policy: str,
    **sections: Any,
) -> Outcome:
    config = configured(MICROBATCHES, schedule={"policy": policy}, **sections)
    transport = MpiTransport(comm)
    return together(comm.allgather(train_on_a_rank(transport, model(), batches, STEPS, config)))


def case_bits_of_every_policy(comm: "MPI.Comm") -> None:
    model = partial(small_gpt, fewer(6, 2))
    reference = of_one_rank(comm, lambda: train_in_plain_torch(model(), TOKEN_BATCHES, STEPS))
    assert comm.rank > 0 or reference == train_in_plain_torch(model(), TOKEN_BATCHES, STEPS)
    for policy in ONE_PIPE:
        assert trained(comm, model, TOKEN_BATCHES, policy) == reference, policy
    for policy in some(ONE_PIPE, ONE_PIPE[:1]):
        assert trained(comm, model, TOKEN_BATCHES, policy) == reference, f"{policy}, again"


def case_recomputation_has_the_bits(comm: "MPI.Comm") -> None:
    model = partial(small_gpt, fewer(6, 2))
    reference = of_one_rank(comm, lambda: train_in_plain_torch(model(), TOKEN_BATCHES, STEPS))
    for policy in ("merak", "varuna", "zb-v"):
        assert (
            trained(comm, model, TOKEN_BATCHES, policy, memory={"recompute": "full"}) == reference
        ), policy


def case_two_pipes_have_the_bits_of_a_world_in_one_process(comm: "MPI.Comm") -> None:
    model = partial(small_gpt, fewer(6, 2))
    for policy in TWO_PIPES:
        config = configured(MICROBATCHES, schedule={"policy": policy}, optimizer={"clip": 0.5})
        alone = lambda: LocalWorld(comm.size).run(  # noqa: E731
            lambda t: train_on_a_rank(t, model(), TOKEN_BATCHES, STEPS, config)  # noqa: B023
        )
        here = of_one_rank(comm, alone)
        assert (
            comm.allgather(
                train_on_a_rank(MpiTransport(comm), model(), TOKEN_BATCHES, STEPS, config)
            )
            == here
        ), policy


def case_structured_activations_have_the_bits(comm: "MPI.Comm") -> None:
    reference = of_one_rank(comm, lambda: train_in_plain_torch(motley(), MOTLEY_BATCHES, STEPS))
    assert trained(comm, motley, MOTLEY_BATCHES, "1f1b") == reference


def case_forwards_in_pieces_have_the_bits(comm: "MPI.Comm") -> None:
    batches = random_batches((6, 16), classes=16, microbatches=MICROBATCHES)
    reference = of_one_rank(comm, lambda: train_in_plain_torch(in_pieces(), batches, STEPS))
    for policy in ("1f1b", "zb-v"):
        assert trained(comm, in_pieces, batches, policy) == reference, policy


def case_masks_and_targets_with_a_size_of_one_have_the_bits(comm: "MPI.Comm") -> None:
    batches = masked_batches(MICROBATCHES)
    reference = of_one_rank(comm, lambda: train_in_plain_torch(masked(), batches, STEPS))
    for policy in ("1f1b", "adaptive" if comm.size < 4 else "zb-h1"):
        assert trained(comm, masked, batches, policy) == reference, policy


def case_sums_with_weights_have_the_bits(comm: "MPI.Comm") -> None:
    """The last microbatches count more; the weight is a tensor, a tensor of shape (1,), or a
    number."""
    for weight_of in (torch.Tensor.sum, lambda w: w.sum().view(1), lambda w: float(w.sum())):

        def model() -> axrt.PipelineModule:
            body = perceptron_of(layers=4).layers[:-1]
            return axrt.PipelineModule(
                [*body, axrt.LayerSpec(torch.nn.Linear, 16, 1)],
                lambda out, target: (
                    ((out - target[0]).square() * target[1]).sum(),
                    weight_of(target[1]),  # noqa: B023
                ),
            )

        generator = torch.Generator().manual_seed(11)
        items = [
            (
                torch.randn(4, 16, generator=generator),
                (torch.randn(4, 1, generator=generator), torch.full((4, 1), 1.0 + k)),
            )
            for k in range(MICROBATCHES)
        ]
        batches = [items] * STEPS
        expected = train_in_plain_torch(model(), batches.__getitem__, STEPS)
        assert trained(comm, model, batches.__getitem__, "1f1b") == expected


def case_outputs_of_an_evaluation_and_what_is_broadcast_arrive_as_they_were(
    comm: "MPI.Comm",
) -> None:
    batches = masked_batches(2 * comm.size)(0)
    with axrt.initialize(masked(), config=configured(2), transport=MpiTransport(comm)) as engine:
        found = engine.eval_batch(iter(batches) if engine.reads else None, outputs=True)
        if engine.is_main:
            whole = masked().sequential(7).eval()
            with torch.no_grad():
                assert [out.tolist() for out in found.outputs or ()] == [
                    whole(inputs).tolist() for inputs, _ in batches
                ]
        assert_same(
            engine.broadcast(PAYLOADS if engine.is_main else None), PAYLOADS, "all payloads"
        )


def case_modules_given_as_they_are_take_the_first_replicas_values(comm: "MPI.Comm") -> None:
    """Parameters and buffers of shapes with sizes of one, and one that lies transposed in
    memory."""
    torch.manual_seed(comm.rank)

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.column = torch.nn.Parameter(torch.randn(16, 1))
            self.turned = torch.nn.Parameter(torch.randn(200, 60).t())
            self.register_buffer("mask", torch.randn(3, 1, 4, 4))

        def forward(self, value: Tensor) -> Tensor:
            return value @ self.column + self.turned.sum() + self.get_buffer("mask").sum()

    model = axrt.PipelineModule([Odd()], torch.nn.functional.mse_loss)
    batches = [(torch.randn(4, 16), torch.randn(4, 1)) for _ in range(2)]
    config = configured(2, parallel={"data": comm.size})
    with axrt.initialize(model, config=config, transport=MpiTransport(comm)) as engine:
        engine.train_batch(iter(batches))
        mine = [value.detach().tolist() for _, value in engine.named_parameters()]
        assert all(theirs == mine for theirs in comm.allgather(mine))
        buffers = [
            value.tolist() for _, layer in engine._model.layers() for value in layer.buffers()
        ]
        assert all(theirs == buffers for theirs in comm.allgather(buffers))


def case_a_checkpoint_of_these_ranks_goes_on_with_the_bits(comm: "MPI.Comm") -> None:
    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    batches, config, steps = masked_batches(MICROBATCHES), configured(MICROBATCHES), 3
    reference = of_one_rank(comm, lambda: train_in_plain_torch(masked(), batches, steps))
    with axrt.initialize(masked(), adamw, config=config, transport=MpiTransport(comm)) as engine:
        engine.train_batch(iter(batches(0)))
        engine.save_checkpoint(folder / "step-1", extra={"epoch": [1]})
        engine.train_batch(iter(batches(1)))
        assert engine.load_checkpoint(folder) == {"epoch": [1]}
        losses = [engine.train_batch(iter(batches(step))).loss for step in range(1, steps)]
    assert losses == reference.losses[1:]


def case_large_activations_have_the_bits(comm: "MPI.Comm") -> None:
    batches = random_batches((600, 16), classes=5, microbatches=MICROBATCHES)
    assert trained(comm, perceptron, batches, "eager-1f1b") == train_in_plain_torch(
        perceptron(), batches, STEPS
    )


def case_replicas_have_the_bits_of_a_world_in_one_process(comm: "MPI.Comm") -> None:
    """So they do not depend on the MPI library, nor on timing, nor on how parameters are cut into
    buckets."""
    for pipe, data in [
        (pipe, comm.size // pipe) for pipe in range(1, comm.size + 1) if comm.size % pipe == 0
    ]:
        batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES * data)
        for sections in ({}, {"optimizer": {"clip": 0.5}, "memory": {"bucket_mb": 0.001}}):
            config = configured(MICROBATCHES, parallel={"data": data}, **sections)
            alone = lambda: LocalWorld(comm.size).run(  # noqa: E731
                lambda t: train_on_a_rank(t, perceptron(), batches, STEPS, config)  # noqa: B023
            )
            here = of_one_rank(comm, alone)
            there = comm.allgather(
                train_on_a_rank(MpiTransport(comm), perceptron(), batches, STEPS, config)
            )
            assert there == here, (pipe, data, sections)


def case_teams_have_the_bits_of_a_world_in_one_process(comm: "MPI.Comm") -> None:
    """Members of a team, stages behind each other, and replicas of teams."""
    layouts = {
        (tensor, data)
        for tensor in (2, 4)
        for data in (1, comm.size // tensor)
        if comm.size % tensor == 0
    }
    for (tensor, data), policy in product(sorted(layouts), ("1f1b", "zb-h1")):
        layout = {"tensor": tensor, "data": data}
        config = configured(4, parallel=layout, schedule={"policy": policy, "microbatches": 4})
        batches = sentences if data > 1 else few_sentences
        alone = lambda: LocalWorld(comm.size).run(  # noqa: E731
            lambda t: train_on_a_rank(t, of_teams(), batches, STEPS, config)  # noqa: B023
        )
        here = of_one_rank(comm, alone)
        there = comm.allgather(
            train_on_a_rank(MpiTransport(comm), of_teams(), batches, STEPS, config)
        )
        assert there == here, (tensor, data, policy)


def case_virtual_members_have_the_bits_of_one_rank(comm: "MPI.Comm") -> None:
    """Four of each stage, on as many members as there are ranks for; the rest are stages."""
    if 4 % comm.size and comm.size % 4:
        return
    tensor = min(4, comm.size)

    def trained(transport: Transport, members: int) -> Outcome:
        layout = {"tensor": members, "tensor_shards": 4}
        config = configured(4, parallel=layout, schedule=ZERO_BUBBLE, optimizer={"clip": 0.5})
        return train_on_a_rank(transport, of_teams(), few_sentences, STEPS, config)

    alone = of_one_rank(comm, lambda: trained(LocalWorld(1).alone(), 1))
    for members in (tensor, tensor // 2 or 1):
        found = trained(MpiTransport(comm), members)
        assert (found.losses, found.norms) == (alone.losses, alone.norms), members


def case_weights_of_a_team_come_and_go(comm: "MPI.Comm") -> None:
    """Shards of them, as in a world in one process."""
    if comm.size % 4:
        return
    layout = {"tensor": 2, "data": 2}
    config = configured(4, parallel=layout, memory={"zero": 3, "gathered": 1})
    here = of_one_rank(
        comm,
        lambda: LocalWorld(comm.size).run(
            lambda t: train_on_a_rank(t, of_teams(), sentences, STEPS, config)
        ),
    )
    there = comm.allgather(
        train_on_a_rank(MpiTransport(comm), of_teams(), sentences, STEPS, config)
    )
    assert there == here


def case_matrices_of_owners_have_the_bits_of_a_world_in_one_process(comm: "MPI.Comm") -> None:
    """Owners send new weights, and refresh when there is time; those of K-FAC vote, too."""
    if comm.size % 2:
        return
    layout = {"data": 2, "pipe": comm.size // 2}
    for of in ({"name": "soap", "clip": 0.5}, {"name": "kfac"}):
        optimizer = {"lr": 0.01, "refresh": 2, **of}
        config = configured(4, parallel=layout, memory={"zero": 1}, optimizer=optimizer)

        def trained(transport: Transport, config: Any = config) -> Outcome:
            by_key: Any = None
            return train_on_a_rank(transport, with_matrices(), for_matrices(2), 5, config, by_key)

        here = of_one_rank(comm, partial(LocalWorld(comm.size).run, trained))
        assert comm.allgather(trained(MpiTransport(comm))) == here


def case_layers_as_they_are_have_the_bits_of_a_world_in_one_process(comm: "MPI.Comm") -> None:
    """Their forwards pause; where there are replicas, copies share out what they step."""
    if comm.size % 2:
        return
    for data in sorted({1, comm.size // 2}):
        layout, batches = {"tensor": 2, "data": data}, sentences if data > 1 else few_sentences
        config = configured(
            4,
            parallel=layout,
            schedule=ZERO_BUBBLE,
            memory={"zero": int(data > 1)},
        )
        alone = lambda: LocalWorld(comm.size).run(  # noqa: E731
            lambda t: train_on_a_rank(t, as_they_are(), batches, STEPS, config)  # noqa: B023
        )
        here = of_one_rank(comm, alone)
        there = comm.allgather(
            train_on_a_rank(MpiTransport(comm), as_they_are(), batches, STEPS, config)
        )
        assert there == here, data


def case_a_cut_vocabulary_has_the_bits_of_a_world_in_one_process(comm: "MPI.Comm") -> None:
    """What is gathered comes again, too, and messages of a backward may have nothing in them."""
    if comm.size % 2:
        return
    config = configured(4, parallel={"tensor": 2, "gather_again": True}, schedule=ZERO_BUBBLE)
    alone = lambda: LocalWorld(comm.size).run(  # noqa: E731
        lambda t: train_on_a_rank(t, of_words(), masked_words, STEPS, config)
    )
    here = of_one_rank(comm, alone)
    there = comm.allgather(
        train_on_a_rank(MpiTransport(comm), of_words(), masked_words, STEPS, config)
    )
    assert there == here


class Slowly(torch.nn.Module):
    """Sleeps on one replica, and notes each microbatch."""

    def __init__(self, seconds: float, seen: list[float]) -> None:
        super().__init__()
        self.seconds, self.seen = seconds, seen

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.seconds)
        self.seen.append(float(value.sum()))
        return value


def case_replicas_share_microbatches_and_a_slow_one_computes_fewer(comm: "MPI.Comm") -> None:
    if comm.size % 2:
        return
    model, seen, steps = perceptron(), list[float](), 3
    batches = random_batches((6, 16), classes=5, microbatches=2 * HALF)
    slowly = axrt.PipelineModule(
        [Slowly(0.05 if comm.rank < comm.size // 2 else 0.001, seen), *model.layers], model.loss_fn
    )
    config = configured(
        HALF,
        schedule={"policy": "1f1b", "share": True},
        parallel={"data": 2},
        optimizer={"clip": 1.0},
        run={"deterministic": True},
    )
    outcome = train_on_a_rank(MpiTransport(comm), slowly, batches, steps, config, momentum)

    def somebody(transport: Transport) -> Outcome:
        layers = [torch.nn.Identity(), *perceptron().layers]
        usual = axrt.PipelineModule(layers, model.loss_fn)
        return train_on_a_rank(transport, usual, batches, steps, config, momentum)

    in_one_process = of_one_rank(
        comm, lambda: together(LocalWorld(2, seed=7).run(somebody), pipes=2).losses
    )
    assert outcome.losses == in_one_process, "bits, whoever computes what"
    expected = train_in_plain_torch(
        axrt.PipelineModule([torch.nn.Identity(), *perceptron().layers], model.loss_fn),
        batches,
        steps,
        momentum,
        clip=1.0,
    )
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
    counts = comm.allgather(seen)
    whole = sorted(float(inputs.sum()) for step in range(steps) for inputs, _ in batches(step))
    assert sorted(one for of in counts for one in of) == whole, "each once"
    slow, fast = (sum(map(len, of)) for of in (counts[: comm.size // 2], counts[comm.size // 2 :]))
    assert slow < fast - steps, "some in each step"


def case_a_library_adds_up_what_replicas_share_out(comm: "MPI.Comm") -> None:
    """Shards by gloo's reduce-scatter, beside the same by messages."""
    if comm.size == 1:
        return
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES * comm.size)
    found = {}
    for collectives in ("parts", "library"):
        config = configured(
            MICROBATCHES,
            parallel={"data": comm.size, "collectives": collectives},
            memory={"zero": 2, "reductions": 1, "bucket_mb": 0.001},
            precision={"weights": "bfloat16", "gradients": "weights"},
        )
        transport = MpiTransport(comm)
        found[collectives] = train_on_a_rank(transport, perceptron(), batches, STEPS, config)
    parts, library = found["parts"], found["library"]
    if comm.size == 2:
        assert library.losses == parts.losses
    torch.testing.assert_close(library.losses, parts.losses, rtol=1e-2, atol=1e-2)
    theirs = comm.allgather(library.parameters)
    for name, value in library.parameters.items():
        assert all(torch.equal(of[name], value) for of in theirs), name


def case_a_librarys_collectives_are_those_of_mpi(comm: "MPI.Comm") -> None:
    """Each as MPI itself has it, on a group of all ranks and one of the first two."""
    collectives = MpiTransport(comm).collectives(torch.device("cpu"))
    for ranks in [tuple(range(comm.size)), (0, 1)]:
        if comm.rank not in ranks:
            continue
        group, size = collectives.group(ranks), len(ranks)
        mine = torch.arange(6.0 * size) * (comm.rank + 1)
        total, own = mine.clone(), torch.zeros(6)
        sizes = [5 + rank for rank in ranks[:-1]]  # of no one size, as shards have
        uneven = [*sizes, len(mine) - sum(sizes)]
        odd = torch.zeros(uneven[comm.rank])
        moments = [
            group.all_reduce(total, "a sum"),
            group.reduce_scatter(own, list(mine.chunk(size)), "shards"),
            group.reduce_scatter(odd, list(torch.split(mine, uneven)), "uneven shards"),
        ]
        for moment in moments:
            wait_for(moment)
        expected = torch.arange(6.0 * size) * sum(rank + 1 for rank in ranks)
        assert torch.equal(total, expected)
        assert torch.equal(own, expected.chunk(size)[comm.rank])
        assert torch.equal(odd, torch.split(expected, uneven)[comm.rank])
    comm.Barrier()


def case_what_goes_by_a_library_arrives_as_it_was(comm: "MPI.Comm") -> None:
    """In the order of envelopes, in both directions at once, beside what MPI carries; also what was
    sent before the lines were there."""
    torch.manual_seed(7)
    large = [torch.randn(50_000), torch.randn(300, 200).t(), torch.arange(40_000) > 5]
    payloads = [*PAYLOADS.values(), *large, *PAYLOADS.values(), (large, torch.zeros(3), *large)]
    others = {(comm.rank + by) % comm.size for by in (1, -1)}
    transport, carry, carried = MpiTransport(comm), Lines.send, list[Tensor]()

    def watched(lines: Lines, to: int, tensors: Sequence[Tensor]) -> Moment:
        carried.extend(tensors)
        return carry(lines, to, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lines, "send", watched)
        for number, payload in enumerate(payloads):
            if number == len(payloads) // 2:
                transport.open_lines(torch.device("cpu"), others)
            for rank in others:
                transport.send(rank, Parcel(0, Message(Meaning.ACTIVATION, 1, number), payload))
    later = flatten(payloads[len(payloads) // 2 :])[1]
    by_library = sum(is_large(tensor.nbytes) for tensor in later)
    assert len(carried) == by_library * len(others) > 0
    got: dict[int, dict[int, Any]] = {rank: {} for rank in others}
    while any(len(of) < len(payloads) for of in got.values()):
        for source, (_, message, payload) in transport.poll(wait_s=inf):
            got[source][message.number] = payload
    for of in got.values():
        for number, payload in enumerate(payloads):
            assert_same(of[number], payload, str(number))
    comm.Barrier()
    transport.close()


def case_activations_by_a_library_have_the_bits(comm: "MPI.Comm") -> None:
    batches = random_batches((600, 16), classes=5, microbatches=MICROBATCHES)
    for policy in ("eager-1f1b", "zb-h1", "interleaved-1f1b"):
        reference = train_in_plain_torch(perceptron(), batches, STEPS)
        by_library = {"activations": "library"}
        assert trained(comm, perceptron, batches, policy, parallel=by_library) == reference, policy


def of_replicas(
    comm: "MPI.Comm",
    model: axrt.PipelineModule,
    factory: OptimizerFactory,
    collectives: str,
    **sections: Any,
) -> Outcome:
    """What all ranks train, each of them a replica, where gradients are added up in such a way."""
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES * comm.size)
    parallel = {"data": comm.size, "collectives": collectives}
    config = configured(MICROBATCHES, parallel=parallel, **sections)
    mine = train_on_a_rank(MpiTransport(comm), model, batches, STEPS, config, factory)
    return together(comm.allgather(mine), comm.size)


def case_a_librarys_sums_are_those_of_parts(comm: "MPI.Comm") -> None:
    """Of two replicas to the bit; torch's own reductions have another order of summation beyond."""
    for clip in (0.0, 0.5):
        sections = {"memory": {"bucket_mb": 0.001}, "optimizer": {"clip": clip}}
        parts, library = (
            of_replicas(comm, perceptron(), adamw, collectives, **sections)
            for collectives in ("parts", "library")
        )
        if comm.size == 2:
            assert library == parts
        torch.testing.assert_close(library.losses, parts.losses, rtol=1e-6, atol=1e-6)
        for name, value in parts.parameters.items():
            torch.testing.assert_close(library.parameters[name], value, rtol=1e-6, atol=1e-6)


# How far parameters of each type may lie apart when sums have another order. A float32 holds a sum
# of three bfloat16 numbers without rounding, unless one is some 2^14 times as large as another. So
# that sum is the same in any order, and a sum in bfloat16 is not.
APART = {torch.bfloat16: 0.0, torch.float32: 1e-6, torch.float64: 1e-14, torch.complex64: 1e-6}


class Typed(torch.nn.Module):
    """Adds up products of its input with a parameter of each type, in float32 at the end.

    It is linear in its parameters. So under a linear loss no gradient depends on them, and what the
    sums of one type lose is not seen in another. They begin at zero, so that all they hold is sums
    of gradients. A third of each is a multiple of 64 bytes, so three replicas own a shard each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.nn.ParameterList(torch.zeros(6, 16, dtype=dtype) for dtype in APART)

    def forward(self, value: Tensor) -> Tensor:
        products = [value * factor for factor in self.factors]
        real = [one.real - 2 * one.imag if one.is_complex() else one for one in products]
        return torch.stack(real).sum(0).float()


def case_a_librarys_sums_of_other_types_are_those_of_parts(comm: "MPI.Comm") -> None:
    """Of two replicas to the bit, and of three as far as the type allows."""
    model = axrt.PipelineModule(
        [axrt.LayerSpec(Typed)], lambda out, target: (out * target.unsqueeze(1)).sum()
    )
    parts, library = (
        of_replicas(comm, model, momentum, collectives) for collectives in ("parts", "library")
    )
    assert [value.dtype for value in parts.parameters.values()] == list(APART)
    assert all(value.count_nonzero() for value in parts.parameters.values())
    if comm.size == 2:
        assert library == parts
    for name, value in parts.parameters.items():
        apart = APART[value.dtype]
        torch.testing.assert_close(library.parameters[name], value, rtol=apart, atol=apart)


def case_tied_weights_have_the_bits_of_a_world_in_one_process(comm: "MPI.Comm") -> None:
    config = configured(MICROBATCHES, optimizer={"clip": 0.3})

    def alone() -> list[Outcome]:
        return LocalWorld(comm.size).run(
            lambda t: train_on_a_rank(t, tied(), tied_batches(MICROBATCHES // 4), STEPS, config)
        )

    here = of_one_rank(comm, alone)
    assert (
        comm.allgather(
            train_on_a_rank(
                MpiTransport(comm), tied(), tied_batches(MICROBATCHES // 4), STEPS, config
            )
        )
        == here
    )


def case_a_loss_with_weights_has_the_bits(comm: "MPI.Comm") -> None:
    def batches(step: int) -> list[Any]:
        """Anew each time: the loss changes targets."""
        return [(inputs.clone(), target.clone()) for inputs, target in BATCHES(step)]

    reference = of_one_rank(comm, lambda: train_in_plain_torch(scored(), batches, STEPS))
    split = "zb-v" if comm.size <= 2 else "zb-h1"  # two stages a rank need as many layers
    for policy in ("1f1b", split):
        for recompute in ("none", "full"):
            found = trained(comm, scored, batches, policy, memory={"recompute": recompute})
            assert found == reference, (policy, recompute)


def case_odd_models_have_the_bits_of_plain_torch(comm: "MPI.Comm") -> None:
    """Saved and gone on with; those that may be refused are in tests/contracts, on threads."""
    if comm.size != 2:
        return
    how = Run(2, "1f1b", "none", saves=True)
    trained = [(name, odd) for name, odd in ODD.items() if not odd.refused]
    for name, odd in trained[:: fewer(1, 6)]:
        with tempfile.TemporaryDirectory() as own:
            folder = Path(comm.bcast(own))
            found = on_ranks(
                odd, how, folder, lambda main: comm.allgather(main(MpiTransport(comm)))
            )
            comm.Barrier()
        is_that_of_plain_torch(name, how, found)


def case_what_is_written_to_a_tied_weight_reaches_every_rank(comm: "MPI.Comm") -> None:
    """Layers of it are on one rank with one policy, and on two with the other."""
    losses = {}
    for policy in ("1f1b", "zb-v"):
        config = configured(MICROBATCHES, schedule={"policy": policy})
        transport = MpiTransport(comm)
        with axrt.initialize(tied(), adamw, config=config, transport=transport) as engine:
            of_policy = []
            for step in range(3):
                for name, weight in engine.named_parameters():
                    if name == "0.weight":
                        weight.data.mul_(0.5).add_(0.25)
                batches = iter(tied_batches(MICROBATCHES // 4)(step))
                of_policy.append(engine.train_batch(batches).loss)
        losses[policy] = of_policy
    assert losses["1f1b"] == losses["zb-v"]


def case_large_buckets_are_added_up(comm: "MPI.Comm") -> None:
    """Parts that are larger than an envelope, a copy that is late, and steps that write to
    gradients."""
    model = axrt.PipelineModule(
        [axrt.LayerSpec(torch.nn.Linear, 16, 4000), axrt.LayerSpec(torch.nn.Linear, 4000, 5)],
        cross_entropy,
    )
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES * comm.size)

    def late(step: int) -> Any:
        time.sleep(0.05 * (comm.rank == 0))
        return batches(step)

    config = configured(MICROBATCHES, parallel={"data": comm.size})
    here = of_one_rank(
        comm,
        lambda: LocalWorld(comm.size).run(
            lambda t: train_on_a_rank(t, model, batches, STEPS, config, momentum)
        ),
    )
    there = train_on_a_rank(MpiTransport(comm), model, late, STEPS, config, spoiling)
    assert comm.allgather(there) == here


class Shift(torch.nn.Module):
    """The gradient of `by` is, for a batch of one, a view of the activation's, which the network
    reads straight from memory."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.zeros(shape))

    def forward(self, value: Tensor) -> Tensor:
        # The factor gives each layer gradients of its own: without it all layers' first gradients
        # are one piece of memory, and plain torch itself adds each microbatch once for every layer.
        return 0.5 * (value + self.by.unsqueeze(0))


def case_a_gradient_on_its_way_is_not_touched_by_the_next_backward(comm: "MPI.Comm") -> None:
    def model() -> axrt.PipelineModule:
        specs = [axrt.LayerSpec(Shift, 256, 256) for _ in range(comm.size)]
        return axrt.PipelineModule(
            specs, lambda outputs, target: (outputs * target).square().mean()
        )

    generator = torch.Generator().manual_seed(3)
    items = [
        (
            torch.randn(1, 256, 256, generator=generator),
            torch.randn(1, 256, 256, generator=generator),
        )
        for _ in range(MICROBATCHES)
    ]
    reference = of_one_rank(comm, lambda: train_in_plain_torch(model(), lambda step: items, STEPS))
    for _ in range(5):
        assert trained(comm, model, lambda step: items, "gpipe") == reference


def case_an_iterator_that_ends_drops_the_step_on_every_rank_and_training_goes_on(
    comm: "MPI.Comm",
) -> None:
    reference = of_one_rank(comm, lambda: train_in_plain_torch(perceptron(), BATCHES, STEPS))
    losses = []
    with axrt.initialize(
        perceptron(), adamw, config=configured(MICROBATCHES), transport=MpiTransport(comm)
    ) as engine:
        for step in range(STEPS):
            try:
                engine.train_batch(iter(BATCHES(step)[:3]))
                raise AssertionError("the step was not whole")
            except StopIteration:
                pass
            losses.append(engine.train_batch(iter(BATCHES(step))).loss)
    assert losses == reference.losses


def case_a_users_own_messages_do_not_meet_ours(comm: "MPI.Comm") -> None:
    with axrt.initialize(
        perceptron(), config=configured(MICROBATCHES), transport=MpiTransport(comm)
    ) as engine:
        for step in range(2):
            engine.train_batch(iter(BATCHES(step)))
            assert comm.allreduce(1) == comm.size


def case_a_task_takes_few_calls(comm: "MPI.Comm") -> None:
    """One message comes in for each microbatch, and one leaves; the first rank sends the target as
    well. How many come at a time depends on the load, so there are five tries. Last of all: where
    `scripts/mutants` adds calls it fails, and ends the job."""
    for policy, kinds in KINDS.items():
        tries = (
            max(comm.allgather(counted(policy, comm.size).of_a_task(*kinds))) for _ in range(5)
        )
        assert any(calls <= 190 for calls in tries), policy
