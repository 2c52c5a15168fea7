"""What the loop and its queues owe to a device, seen by the checker of the simulated one; every
rank runs each case with a communicator of its own."""

import gc
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import axrt
from axrt.device.device import CPU
from axrt.device.queues import DeviceStream, Inline, current_stream, moment_of
from axrt.device.thread_queue import ThreadQueue
from axrt.runtime.compute import compute_on
from axrt.runtime.user_tensors import UserTensors
from axrt.transport.local import LocalTransport, LocalWorld
from axrt.transport.mpi import MpiTransport
from axrt.transport.staging import Direct, Leaving, Pinned, PinnedMemory
from tests.engine.models import motley
from tests.engine.reference import (
    adamw,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)
from tests.engine.test_pausing import model_of as as_they_are
from tests.engine.test_tensor import few_sentences
from tests.engine.test_tensor import language as teams
from tests.engine.test_vocabulary import means as of_words
from tests.gpu.cases import perceptron
from tests.mpi.cases import of_one_rank, parcel, receive
from tests.queue_contract import CHECKS, Keeper
from tests.sweeps import fewer, is_full

from . import library
from .clocks import HOST
from .simulated import NAME, accelerator

if TYPE_CHECKING:
    from mpi4py import MPI

DEVICE = torch.device("privateuseone", 0)  # its name before it has ours
MICROBATCHES, STEPS = fewer(6, 4), fewer(3, 2)
# Of one rank: the first one runs them.
_ALONE = (
    "case_a_rank_on_the_cpu_takes_batches_from_a_device",
    "case_batches_of_any_layout_are_taken_as_torch_would",
    "case_pinned_memory_that_lies_free_has_a_bound",
    "case_queues_keep_their_contract",
    "case_ranks_in_one_process_have_the_bits",
    "case_ranks_in_one_process_wait_for_each_others_streams",
)


def names(size: int) -> list[str]:
    """The cases for a job of so many ranks."""
    return [
        name for name in globals() if name.startswith("case_") and (size == 2 or name not in _ALONE)
    ]


def _configured(**sections: Any) -> dict[str, dict[str, Any]]:
    return configured(MICROBATCHES, run={"device": NAME, "share_gpu": True}, **sections)


def _engine(comm: "MPI.Comm", model: axrt.PipelineModule, **sections: Any) -> axrt.Engine:
    transport = MpiTransport(comm, Pinned(DEVICE))
    return axrt.initialize(model, adamw, config=_configured(**sections), transport=transport)


def case_no_copy_waits_for_later_tasks(comm: "MPI.Comm") -> None:
    """What a task has made leaves though others stand behind it on the stream: the queue of copies
    knows no more of that stream than the host does."""
    clocks, ahead = accelerator().clocks, []

    class Watched(Pinned):
        def outgoing(self, *arguments: Any) -> Leaving:
            leaving = super().outgoing(*arguments)
            computing = current_stream(DEVICE).stream_id
            if any(
                row is not lent for row, lent in zip(leaving.tensors, leaving.lent, strict=True)
            ):
                ahead.append(
                    clocks.known(self._out.stream.stream_id, computing)
                    - clocks.known(HOST, computing)
                )
            return leaving

    batches = random_batches((2000, 16), classes=5, microbatches=MICROBATCHES)
    config = _configured(schedule={"policy": "1f1b"})
    transport = MpiTransport(comm, Watched(DEVICE))
    train_on_a_rank(transport, perceptron(), batches, STEPS, config, sample=batches(0)[0])
    assert comm.size == 1 or ahead, "nothing has left the device"
    assert all(later <= 0 for later in ahead), ahead


def case_teams_train_as_on_the_cpu(comm: "MPI.Comm") -> None:
    """Slices leave the device while the next piece runs there, and come back to it. Features with
    two dimensions of tokens have other last bits here, with teams and without."""
    if comm.size % 2:
        return
    of_models: list[tuple[Any, str, dict[str, Any]]] = [
        (teams, "1f1b", {}),
        (teams, "zb-h1", {"tensor_shards": 4}),
        (as_they_are, "zb-h1", {}),
        (of_words, "zb-h1", {"gather_again": True}),
    ]
    steps = fewer(2, 1)
    for model, policy, parallel in of_models if is_full() else of_models[1:]:
        sections: dict[str, Any] = {
            "parallel": {"tensor": 2, **parallel},
            "schedule": {"policy": policy, "microbatches": 4},
        }
        on_cpu = lambda: LocalWorld(comm.size).run(  # noqa: E731
            lambda t: train_on_a_rank(t, model(), few_sentences, steps, configured(4, **sections))  # noqa: B023
        )
        expected = of_one_rank(comm, on_cpu)[comm.rank]
        transport = MpiTransport(comm, Pinned(DEVICE))
        found = train_on_a_rank(transport, model(), few_sentences, steps, _configured(**sections))
        accelerator().check_clocks()
        assert found.losses == pytest.approx(expected.losses, rel=1e-5), policy
        for name, value in expected.parameters.items():
            # The gradient of a bias of keys is rounding, which Adam scales up.
            if model is as_they_are and name.endswith("qkv.bias"):
                continue
            torch.testing.assert_close(found.parameters[name], value, rtol=1e-3, atol=1e-4)


def case_memory_that_changes_hands_is_recorded(comm: "MPI.Comm") -> None:
    """The user drops what he was given, and what he has given, while the other side still uses
    it."""
    check = accelerator().check_clocks
    batches = random_batches((600, 12), classes=4, microbatches=MICROBATCHES * comm.size)
    mine = slice(comm.rank * MICROBATCHES, (comm.rank + 1) * MICROBATCHES)
    model = motley()
    for layer in (layer for layer in model.layers if isinstance(layer, nn.Module)):
        layer.to(DEVICE)
    with _engine(comm, model, parallel={"data": comm.size}) as engine:
        check()  # the first pipe's weights of modules went to the others
        engine.train_batch(iter(batches(0)[mine]))
        check()
        value = torch.full((20_000,), 3.0).to(DEVICE) if comm.rank == 0 else None
        got = engine.broadcast(value)
        used = (got * 2).sum()
        del got, value
        check()
        result = engine.eval_batch(iter(batches(1)[mine]), outputs=True)
        outputs = result.outputs
        used = used + sum(one.sum() for one in outputs) if outputs else used
        del outputs, result
        gc.collect()
        check()
        given = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(2)[mine]]

        def dropped() -> Iterator[Any]:
            while given:
                yield given.pop(0)

        engine.train_batch(dropped())
        check()


def case_what_has_gaps_leaves_whole(comm: "MPI.Comm") -> None:
    """It is laid out anew on the queue of copies, while the loop lets the source go."""
    for staging in (Pinned(DEVICE), Direct(DEVICE)):
        transport, stream = MpiTransport(comm, staging), DeviceStream(DEVICE)
        with stream.current():
            for number in range(3):
                _send_with_gaps(transport, (comm.rank + 1) % comm.size, number)
                torch.zeros(200, 300, device=DEVICE).add_(1)  # where the source was, perhaps
            transport.flush()
            got = receive(transport, 3)
            for number, payload in got.items():
                expected = torch.arange(60_000.0).view(200, 300) + number
                assert [one.tolist() for one in payload] == [
                    expected[:, :100].tolist(),
                    expected[:3, :2].tolist(),
                    expected[:, 5].tolist(),
                ]
        comm.Barrier()
        transport.close()


def _send_with_gaps(transport: MpiTransport, to: int, number: int) -> None:
    wide = torch.arange(60_000.0).view(200, 300).to(DEVICE) + number
    payload = [wide[:, :100], wide[:3, :2], wide[:, 5]]
    transport.send(to, parcel(number, payload), moment_of(payload))


def case_batches_of_any_layout_are_taken_as_torch_would(comm: "MPI.Comm") -> None:
    if comm.rank:
        return
    compute = compute_on(DEVICE)
    user_tensors, row = UserTensors(DEVICE, compute), torch.arange(12.0).view(3, 4)
    batches = [row[:1].expand(6, 4), row.t(), row[:, ::2], row.clone().requires_grad_(), row]
    taken = user_tensors.taken(batches)
    compute.queue.drain()
    for mine, batch in zip(taken, batches, strict=True):
        plain = batch.to(DEVICE)
        assert (mine.stride(), mine.requires_grad) == (plain.stride(), plain.requires_grad)
        assert mine.tolist() == plain.tolist()
    accelerator().clocks.waits.clear()  # those of `to`


def case_a_rank_on_the_cpu_takes_batches_from_a_device(comm: "MPI.Comm") -> None:
    if comm.rank:
        return
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    config = configured(MICROBATCHES, run={"device": "cpu"})
    with axrt.initialize(
        perceptron(), adamw, config=config, transport=LocalWorld(1).alone()
    ) as engine:
        on_device = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(0)]
        loss = engine.train_batch(iter(on_device)).loss
    assert [loss] == train_in_plain_torch(perceptron(), batches, 1).losses


def case_what_a_call_has_told_has_left_when_it_returns(comm: "MPI.Comm") -> None:
    """A rank that is in a call of the user's own looks after nothing."""
    with _engine(comm, perceptron()) as engine:
        for _ in range(3):
            value = torch.ones(3000, device=DEVICE) * 5 if comm.rank == 0 else None
            got = engine.broadcast(value)
            comm.Barrier()
            assert got.sum().item() == 15_000


def case_pinned_memory_that_lies_free_has_a_bound(comm: "MPI.Comm") -> None:
    if comm.rank:
        return
    memory = PinnedMemory()
    for size in range(1, 200):
        del_me = memory.take(size, lambda row: row.view(torch.uint8))
        del del_me
    assert memory._free_bytes == sum(row.nbytes for row in memory._free) <= 199
    assert memory._taken_bytes == 0
    again = memory.take(199, lambda row: row.view(torch.uint8))
    assert (memory._free_bytes, memory._taken_bytes) == (0, 199)
    assert again.is_pinned()


def case_what_the_user_has_launched_before_comes_first(comm: "MPI.Comm") -> None:
    """He puts weights on the device himself, on his stream, just before a step; and reads them
    just behind it."""
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    with _engine(comm, perceptron()) as engine:
        parameters = [parameter for _, parameter in engine.named_parameters()]
        pinned = [torch.zeros(parameter.shape).pin_memory() for parameter in parameters]
        with torch.no_grad():
            for parameter, source in zip(parameters, pinned, strict=True):
                parameter.copy_(source, non_blocking=True)
        engine.train_batch(iter(batches(0)))
        used = [parameter.detach() * 2 for parameter in parameters]
        assert used or comm.size > 1


def case_a_library_that_may_touch_the_device_does(comm: "MPI.Comm") -> None:
    """Large tensors go from device memory to device memory, which is the CPU's here."""
    batches = random_batches((2000, 16), classes=5, microbatches=MICROBATCHES)
    transport, sample = MpiTransport(comm, Direct(DEVICE)), batches(0)[0]
    torch._C._set_deterministic_algorithms(True)  # which fills memory that is allocated
    try:
        mine = train_on_a_rank(
            transport, perceptron(), batches, STEPS, _configured(), sample=sample
        )
    finally:
        torch._C._set_deterministic_algorithms(False)
    outcome = together(comm.allgather(mine))
    reference = of_one_rank(
        comm, lambda: train_in_plain_torch(perceptron(), batches, STEPS, device=DEVICE)
    )
    assert comm.rank > 0 or outcome == reference


def case_a_device_without_a_library_is_refused(comm: "MPI.Comm") -> None:
    for keys in ({"collectives": "library"}, {"activations": "library"}):
        config = _configured(parallel={"data": comm.size, **keys})
        with pytest.raises(axrt.LaunchError, match="has none for sim here"):
            axrt.initialize(perceptron(), adamw, config=config, transport=MpiTransport(comm))


def case_a_library_adds_up_and_carries(comm: "MPI.Comm") -> None:
    """Two replicas of one stage, or two stages; also in buckets, with clipping, and evaluated
    between steps."""
    library.install()
    large = {"collectives": "library", "activations": "library"}
    for data in (1, 2):
        if comm.size % data:
            continue
        outcomes = []
        for parallel in ({}, large):
            batches = random_batches((600, 16), classes=5, microbatches=MICROBATCHES * data)
            transport, sample = MpiTransport(comm, Pinned(DEVICE)), batches(0)[0]
            config = _configured(
                parallel={"data": data, **parallel},
                memory={"bucket_mb": 0.002},
                optimizer={"clip": 0.5},
            )
            mine = train_on_a_rank(transport, perceptron(), batches, STEPS, config, sample=sample)
            outcomes.append(together(comm.allgather(mine), data))
        assert outcomes[0] == outcomes[1], data


def case_a_library_adds_up_narrow_gradients(comm: "MPI.Comm") -> None:
    library.install()
    kinds = [(gradients, zero) for gradients in ("weights", "float32") for zero in (0, 1, 2)]
    for gradients, zero in kinds if is_full() else (("weights", 2),):
        outcomes = []
        for collectives in ("parts", "library"):
            batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES * comm.size)
            config = _configured(
                parallel={"data": comm.size, "collectives": collectives},
                precision={"weights": "bfloat16", "gradients": gradients},
                memory={"bucket_mb": 0.001, "zero": zero, "reductions": int(zero == 2)},
            )
            transport = MpiTransport(comm, Pinned(DEVICE))
            mine = train_on_a_rank(transport, perceptron(), batches, STEPS, config)
            outcomes.append(together(comm.allgather(mine), comm.size))
        assert outcomes[0].losses == outcomes[1].losses, (gradients, zero)
        for name, value in outcomes[0].parameters.items():
            assert torch.equal(outcomes[1].parameters[name], value), (name, gradients, zero)


def case_ranks_in_one_process_have_the_bits(comm: "MPI.Comm") -> None:
    if comm.rank:
        return
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    model, config = perceptron(), _configured(schedule={"policy": "zb-h1"})
    outcome = together(
        LocalWorld(2, seed=4).run(
            lambda transport: train_on_a_rank(transport, model, batches, STEPS, config)
        )
    )
    assert outcome == train_in_plain_torch(model, batches, STEPS, device=DEVICE)


def case_ranks_in_one_process_wait_for_each_others_streams(comm: "MPI.Comm") -> None:
    if comm.rank:
        return

    def broadcast(transport: LocalTransport) -> Any:
        config = _configured()
        with (
            axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine,
            torch.Stream(DEVICE),
        ):
            return engine.broadcast(torch.ones(3, device=DEVICE) * 5)

    assert [got.tolist() for got in LocalWorld(2).run(broadcast)] == [[5.0] * 3] * 2


def case_queues_keep_their_contract(comm: "MPI.Comm") -> None:
    if comm.rank:
        return
    keepers = [
        Keeper(lambda: DeviceStream(DEVICE), DEVICE),
        Keeper(lambda: ThreadQueue("of a test"), CPU),
        Keeper(Inline, CPU),
    ]
    pairs = list(product(keepers, keepers)) if is_full() else product(keepers[:1], keepers[:2])
    for one, other in pairs:
        for check in CHECKS:
            check(one, other)
            accelerator().check_clocks()


def case_what_is_wrong_is_found(comm: "MPI.Comm") -> None:
    """A copy that does not wait for what it reads."""
    check, ours = accelerator().check_clocks, torch.Stream(DEVICE)
    check()
    value = torch.ones(1000, device=DEVICE) + 1
    value.record_stream(ours)
    with ours:
        on_host = value.to("cpu", non_blocking=True)
    with pytest.raises(AssertionError, match="race: stream"):
        check()
    float(on_host[0])
    with pytest.raises(AssertionError, match="race: the host reads"):
        check()
