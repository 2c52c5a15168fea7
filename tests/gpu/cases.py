"""What holds on a GPU, one rank and several that share it; every rank runs each case with a
communicator of its own.

Where the environment says so they run on the simulated accelerator (tests/device), or on the CPU:
then it is these cases that are tried, and not the code for GPUs.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import axrt
from axrt.checkpoint.layers import Live
from axrt.checkpoint.snapshot import Snapshot
from axrt.config import Precision
from axrt.model.costs import measure
from axrt.model.precision import types_of
from axrt.model.seeds import BorrowedGenerator
from axrt.runtime.compute import Ended, compute_on
from axrt.scheduler.policies import AlongPlan
from axrt.scheduler.simulation.cost_table import CostTable
from axrt.scheduler.simulation.costs import Edge
from axrt.scheduler.task import Kind, Task
from axrt.transport.mpi import MpiTransport
from axrt.transport.payload import flatten, on, unflatten
from axrt.transport.staging import Staging, staging_for
from axrt.world.mpi_library import is_device_aware
from tests.device import simulated
from tests.engine.models import Thin, motley, small_gpt
from tests.engine.models import perceptron as perceptron_of
from tests.engine.reference import (
    SEED,
    Outcome,
    Scale,
    adamw,
    configured,
    random_batches,
    together,
    token_batches,
    train_in_plain_torch,
    train_on_a_rank,
    train_with_masters,
)
from tests.mpi.cases import exchange, of_one_rank
from tests.mpi.jobs import DEVICE
from tests.sweeps import fewer, is_full, partners
from tests.transport.payloads import PAYLOADS, assert_same

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
MICROBATCHES, STEPS = fewer(4, 2), fewer(3, 2)  # some policies want a multiple of the ranks
LAYER_MB = fewer(4, 1) / 1024  # what a layer of the model has
WIDE = fewer(96, 192)  # of a layer whose gradients, and shards of them, are more than 32 KiB
_SIZES = {
    "case_payloads_arrive_through_pinned_memory": (2, 4),
    "case_replicas_agree": (2, 4),
    "case_replicas_with_narrow_weights_agree": (2,),
    "case_weights_come_from_scratch_and_go": (1, 2),
    "case_residencies_go_through_dropped_steps_and_checkpoints": (1, 2),
}
# Of one rank. On the simulated accelerator the first one of two runs them.
_ALONE = (
    "case_two_tasks_are_under_way",
    "case_a_task_has_ended_when_the_device_says_so",
    "case_a_layer_that_writes_to_weights_from_scratch_is_told",
)
# With four ranks of two replicas and more; a pipeline of four is as one of two.
_ON_FOUR = (
    "case_replicas_agree",
    "case_shards_have_the_bits_of_replicas_without",
    "case_sums_and_shards_in_groups_have_the_same_bits",
    "case_whole_weights_of_shards_come_and_go",
    "case_payloads_arrive_through_pinned_memory",
)
_NOT_ON_CPU = (
    "case_two_tasks_are_under_way",
    "case_a_task_has_ended_when_the_device_says_so",
    "case_what_the_library_may_touch_travels_directly",
)
# Dynamo makes tensors of its own there, for a device of which it knows no memory.
_NOT_SIMULATED = ("case_compiled_layers_train_alike",)
# In the default run a plan that the same model follows has its bits.
_IN_FULL = ("case_a_gpt_has_the_bits",)


def names(size: int, device: str = "") -> list[str]:
    """The cases for a job of so many ranks on that device; by default the one of the
    environment."""
    of = device or _device().type
    without = {"cpu": _NOT_ON_CPU, simulated.NAME: _NOT_SIMULATED}.get(of, ())
    without += () if is_full() or of == "cuda" else _IN_FULL
    return [
        name
        for name in globals()
        if name.startswith("case_") and size in _sizes_of(name, of) and name not in without
    ]


def _sizes_of(name: str, device: str) -> tuple[int, ...]:
    if name in _ALONE:
        return (1, 2) if device == simulated.NAME else (1,)
    return _SIZES.get(name, (1, 2, 4) if name in _ON_FOUR else (1, 2))


def _few(ways: Sequence[T], *places: int) -> list[T]:
    """All of the ways, or in the default run those at a few places."""
    return list(ways) if is_full() else [ways[place] for place in places]


def perceptron(width: int = 16) -> axrt.PipelineModule:
    """Layers enough for four stages. In the default run they are of few operators, since the
    simulated accelerator takes as long for a small one as for a large one."""
    if is_full():
        return perceptron_of(layers=8, width=width)
    return perceptron_of(layers=4, width=width, block=Thin)


def _device() -> torch.device:
    name = os.environ.get(DEVICE, "cuda")
    return torch.device("cpu") if name == "cpu" else torch.device(name, 0)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Kernels that give the same bits each time; the job's environment gives cuBLAS a workspace
    that does. torch's own function imports its compilers first, 3 s on each rank."""
    torch._C._set_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


def _configured(**sections: Any) -> dict[str, dict[str, Any]]:
    run = {"device": _device().type, "share_gpu": True, **sections.pop("run", {})}
    return configured(MICROBATCHES, run=run, **sections)


def _folder(comm: "MPI.Comm") -> Path:
    return Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))


def _trained(
    comm: "MPI.Comm",
    model: Callable[[], axrt.PipelineModule],
    batches: Any,
    staging: Staging | None = None,
    **sections: Any,
) -> Outcome:
    transport = MpiTransport(comm, staging or staging_for(_device(), device_aware=False))
    return together(
        comm.allgather(
            train_on_a_rank(
                transport, model(), batches, STEPS, _configured(**sections), sample=batches(0)[0]
            )
        )
    )


def _same_as_plain_torch(
    comm: "MPI.Comm",
    model: Callable[[], axrt.PipelineModule],
    batches: Any,
    policies: tuple[str, ...],
    clip: float = 0.0,
) -> None:
    with _repeatable():
        reference = of_one_rank(
            comm, lambda: train_in_plain_torch(model(), batches, STEPS, clip=clip, device=_device())
        )
        if comm.rank == 0 and _device().type == "cuda":
            again = train_in_plain_torch(model(), batches, STEPS, clip=clip, device=_device())
            assert reference == again, "plain torch does not repeat itself"
        for policy in policies:
            assert (
                _trained(
                    comm, model, batches, schedule={"policy": policy}, optimizer={"clip": clip}
                )
                == reference
            ), policy


def case_every_kind_of_policy_has_the_bits_of_plain_torch(comm: "MPI.Comm") -> None:
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    policies = ("1f1b", "zb-h1", "interleaved-1f1b", "adaptive")
    # The first has its bits with structured activations, too, the second with clipping.
    _same_as_plain_torch(comm, perceptron, batches, tuple(_few(policies, 2, 3)))


def case_a_gpt_has_the_bits(comm: "MPI.Comm") -> None:
    _same_as_plain_torch(
        comm,
        small_gpt,
        token_batches(vocab=256, context=8, microbatches=MICROBATCHES),
        ("adaptive",),
    )


def case_plans_from_measured_costs_have_the_bits(comm: "MPI.Comm") -> None:
    """Of what layers take on this device; one rank alone follows none."""
    model = partial(small_gpt, fewer(6, 2))
    batches = token_batches(vocab=256, context=8, microbatches=MICROBATCHES)
    costs = _folder(comm) / "costs.json"
    if comm.rank == 0:
        generator = BorrowedGenerator(SEED, _device())
        with generator.borrowed():
            layers = measure(model(), SEED, batches(0)[0], generator, types_of(Precision()))
        assert all(layer.forward_s > 0 for layer in layers)
        assert sum(layer.weight_s for layer in layers if layer.pieces) > 0
        costs.write_text(CostTable({1: tuple(layers)}, Edge(1e-3), task_s=1e-4).to_json())
    comm.Barrier()
    with _repeatable():
        reference = of_one_rank(
            comm, lambda: train_in_plain_torch(model(), batches, STEPS, device=_device())
        )
        schedule: dict[str, Any] = {"policy": "adaptive", "costs": str(costs)}
        assert _trained(comm, model, batches, schedule=schedule) == reference
    transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
    config = _configured(schedule=schedule)
    with axrt.initialize(model(), adamw, config=config, transport=transport) as engine:
        assert isinstance(engine._job.policy, AlongPlan) == (comm.size > 1)


def case_clipping_has_the_bits(comm: "MPI.Comm") -> None:
    _same_as_plain_torch(
        comm,
        perceptron,
        random_batches((6, 16), classes=5, microbatches=MICROBATCHES),
        ("zb-h1",),
        clip=0.5,
    )


def case_structured_activations_have_the_bits(comm: "MPI.Comm") -> None:
    _same_as_plain_torch(
        comm, motley, random_batches((6, 12), classes=4, microbatches=MICROBATCHES), ("1f1b",)
    )


def case_large_activations_have_the_bits(comm: "MPI.Comm") -> None:
    _same_as_plain_torch(
        comm,
        perceptron,
        random_batches((2000, 16), classes=5, microbatches=MICROBATCHES),
        ("eager-1f1b",),
    )


def case_bfloat16_has_the_bits_of_autocast(comm: "MPI.Comm") -> None:
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    with _repeatable():
        reference = train_in_plain_torch(
            perceptron(), batches, STEPS, compute=torch.bfloat16, device=_device()
        )
        assert _trained(comm, perceptron, batches, precision={"compute": "bfloat16"}) == reference


def case_narrow_weights_have_the_bits_of_master_copies(comm: "MPI.Comm") -> None:
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    kinds: list[tuple[torch.dtype, bool, float, Scale | None]] = [
        (torch.bfloat16, False, 0.0, None),
        (torch.bfloat16, True, 0.5, None),
        (torch.float16, False, 0.5, Scale(1024.0)),
    ]
    for to, in_weights, clip, scale in _few(kinds, 1, 2):
        with _repeatable():
            reference = of_one_rank(
                comm,
                lambda: train_with_masters(
                    perceptron(),
                    batches,
                    STEPS,
                    to=to,  # noqa: B023
                    in_weights=in_weights,  # noqa: B023
                    clip=clip,  # noqa: B023
                    scale=scale,  # noqa: B023
                    device=_device(),
                ),
            )
            precision = {
                "weights": str(to).removeprefix("torch."),
                "gradients": "weights" if in_weights else "float32",
                "loss_scale": 1024.0,
            }
            policies = ("1f1b", "zb-h1") if is_full() else ("1f1b" if scale else "zb-h1",)
            for policy in policies:
                found = _trained(
                    comm,
                    perceptron,
                    batches,
                    schedule={"policy": policy},
                    precision=precision,
                    optimizer={"clip": clip},
                )
                assert found == reference, (policy, precision)


def case_replicas_with_narrow_weights_agree(comm: "MPI.Comm") -> None:
    # Sums of more than 32 KiB travel beside their envelopes.
    batches = random_batches((6, WIDE), classes=5, microbatches=MICROBATCHES * comm.size)
    kinds: list[tuple[dict[str, Any], torch.dtype, Scale | None]] = [
        ({"weights": "bfloat16", "gradients": "weights"}, torch.bfloat16, None),
        ({"weights": "float16", "loss_scale": 1024.0}, torch.float16, Scale(1024.0)),
    ]
    for precision, to, scale in _few(kinds, 0):
        transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
        config = _configured(
            parallel={"data": comm.size},
            precision=precision,
            memory={"bucket_mb": fewer(5, 1) / 10},
        )
        outcome = together(
            comm.allgather(
                train_on_a_rank(transport, perceptron(width=WIDE), batches, STEPS, config)
            ),
            pipes=comm.size,
        )
        plain = train_with_masters(
            perceptron(width=WIDE),
            batches,
            STEPS,
            to=to,
            in_weights=scale is None,
            scale=scale,
            holder_of=lambda k: k // MICROBATCHES,
            device=_device(),
        )
        assert outcome.losses == plain.losses, precision


def case_offloaded_state_has_the_bits_of_state_on_the_device(comm: "MPI.Comm") -> None:
    """Several buckets in few slots, from the host's memory and from a disk; clipping lets the slots
    wait for a norm."""
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    small = {"bucket_mb": LAYER_MB}
    folder = _folder(comm)
    with _repeatable():
        narrow = {"weights": "bfloat16", "gradients": "weights"}
        ways: list[tuple[dict[str, Any], float]] = [
            ({}, 0.0),
            (narrow, 0.3),
            (narrow, 0.75),
            ({}, 0.75),
        ]
        # Through checkpoints state comes from the host's memory in the default run, too.
        where = _few(("host", f"disk:{folder}"), 1)
        for (precision, clip), scratches in partners(_few(ways, 2), where):
            optimizer = {"clip": clip}
            sections: dict[str, Any] = {"precision": precision, "optimizer": optimizer}
            plain = _trained(comm, perceptron, batches, memory=small, **sections)
            for scratch in scratches:
                memory = {**small, "offload": "stream", "scratch": scratch}
                found = _trained(comm, perceptron, batches, memory=memory, **sections)
                assert found == plain, f"{scratch} {precision}"


def case_activations_leave_the_device_and_come_back(comm: "MPI.Comm") -> None:
    """Whole and split backwards, with layers that draw, with views, and with one that works in
    place; to the host's memory and to a disk."""
    perceptrons = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    motleys = random_batches((6, 12), classes=4, microbatches=MICROBATCHES)
    folder = _folder(comm)
    with _repeatable():
        ways: list[Any] = [
            (perceptron, perceptrons, "gpipe", 3),
            (motley, motleys, "gpipe", 3),
            (perceptron, perceptrons, "adaptive", 4),
        ]
        for way, scratches in partners(_few(ways, 1, 2), ("host", f"disk:{folder}")):
            model, batches, policy, places = way
            held = 3 * max(comm.size, 2) if policy == "adaptive" else 0
            schedule: dict[str, Any] = {"policy": policy, "max_held": held}
            plain = _trained(comm, model, batches, schedule=schedule)
            for scratch in scratches:
                memory = {"offload_activations": places, "scratch": scratch}
                found = _trained(comm, model, batches, schedule=schedule, memory=memory)
                assert found == plain, f"{policy} {scratch}"


def case_steps_on_the_host_have_the_bits_of_steps_on_the_device(comm: "MPI.Comm") -> None:
    """Several buckets and few places; on a GPU the host's kernels have bits of their own."""
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    small = {"bucket_mb": LAYER_MB}
    narrow = {"weights": "bfloat16", "gradients": "weights"}
    scaled = {"weights": "float16", "loss_scale": 2.0**19}
    ways: list[tuple[dict[str, Any], float, list[str]]] = [
        ({}, 0.0, ["cpu"]),
        (narrow, 0.3, ["cpu"]),
        ({"weights": "bfloat16"}, 0.0, ["cpu"]),
        (scaled, 0.5, ["cpu"]),
    ]
    for precision, clip, routes in _few(ways, 3):
        sections: dict[str, Any] = {"precision": precision, "optimizer": {"clip": clip}}
        plain = _trained(comm, perceptron, batches, memory=small, **sections)
        for route in routes:
            memory = {**small, "offload": route}
            found = _trained(comm, perceptron, batches, memory=memory, **sections)
            _assert_same_steps(found, plain, memory, sections)


def case_shards_have_the_bits_of_replicas_without(comm: "MPI.Comm") -> None:
    """Optimizer state in shards (ZeRO), also offloaded; large and small weights travel. A run goes
    on from what shards have saved."""
    if comm.size == 1:
        return
    batches = random_batches((6, WIDE), classes=5, microbatches=MICROBATCHES * comm.size)

    def trained(memory: dict[str, Any], load: Path | None = None, **sections: Any) -> Outcome:
        transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
        parallel = {"data": comm.size}
        config = _configured(parallel=parallel, memory={"bucket_mb": 0.1, **memory}, **sections)
        model = perceptron(width=WIDE)
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            if load:
                engine.load_checkpoint(load)
            losses = [engine.train_batch(iter(batches(step)[mine])).loss for step in range(STEPS)]
            if not load:
                engine.save_checkpoint(folder / _named(memory))
            found = {name: p.detach().cpu().clone() for name, p in engine.named_parameters()}
        return together(comm.allgather(Outcome(losses, [], found)), pipes=comm.size)

    with _repeatable():
        ways: list[dict[str, Any]] = [
            {},
            {"optimizer": {"clip": 0.5}},
            {"precision": {"weights": "bfloat16", "gradients": "weights"}},
        ]
        memories: list[dict[str, Any]] = [
            {"zero": 1},
            {"zero": 1, "offload": "stream"},
            {"offload": "cpu"},
            {"zero": 1, "offload": "cpu"},
            {"zero": 2, "offload": "cpu"},
        ]
        for sections, met in partners(_few(ways, 1, 2), _few(memories, 4, 1)):
            folder = _folder(comm)
            plain = trained({}, **sections)
            for memory in met:
                _assert_same_steps(trained(memory, **sections), plain, memory, sections)
                if not is_full():  # residencies of shards go through checkpoints there
                    continue
                saved = folder / _named(memory)
                apart = trained(memory | {"zero": 0}, saved, **sections)
                _assert_same_steps(apart, trained({}, saved, **sections), memory, sections)


def _assert_same_steps(
    found: Outcome, plain: Outcome, memory: dict[str, Any], sections: dict[str, Any]
) -> None:
    """To the bit; but steps on the host have bits of their own beside a GPU's, from the second loss
    on."""
    about = (memory, sections)
    if _device().type == "cuda" and memory.get("offload") == "cpu":
        near = 1e-2 if sections.get("precision") else 1e-4
        assert str(found.losses[0]) == str(plain.losses[0]), about
        torch.testing.assert_close(found.losses, plain.losses, rtol=near, atol=near, equal_nan=True)
        return
    assert str(found.losses) == str(plain.losses), about  # as texts: that of an overflow is nan
    assert str(found.norms) == str(plain.norms), about
    assert found.parameters.keys() == plain.parameters.keys(), about
    for name, value in found.parameters.items():  # shown in the layers' type
        assert torch.equal(plain.parameters[name].to(value.dtype), value), (name, about)


def _named(memory: dict[str, Any]) -> str:
    return "-".join(["saved", *map(str, memory.values())])


def case_sums_and_shards_in_groups_have_the_same_bits(comm: "MPI.Comm") -> None:
    """Four replicas in two groups; large and small shards travel between them."""
    if comm.size != 4:
        return
    batches = random_batches((6, 256), classes=5, microbatches=MICROBATCHES * comm.size)

    def trained(sections: dict[str, Any], **others: Any) -> Outcome:
        transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
        parallel = {"data": comm.size, **others}
        config = _configured(parallel=parallel, **sections)
        model = perceptron(width=256)
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            losses = [engine.train_batch(iter(batches(step)[mine])).loss for step in range(STEPS)]
            found = {name: p.detach().cpu().clone() for name, p in engine.named_parameters()}
        return together(comm.allgather(Outcome(losses, [], found)), pipes=comm.size)

    with _repeatable():
        for sections in (
            {"optimizer": {"clip": 0.5}},
            {"precision": {"weights": "bfloat16", "gradients": "weights"}},
        ):
            plain = trained(sections, group=2)
            for memory in (
                {"zero": 1},
                {"zero": 2},
                {"zero": 1, "offload": "cpu"},
            ):
                found = trained({**sections, "memory": memory}, group=2)
                _assert_same_steps(found, plain, memory, sections)


def case_what_is_written_to_weights_after_a_step_counts_once_in_shards(comm: "MPI.Comm") -> None:
    """Large weights may still be on their way to others when `train_batch` returns."""
    if comm.size == 1:
        return
    batches = random_batches((6, 512), classes=5, microbatches=MICROBATCHES * comm.size)

    def trained(zero: int) -> dict[str, torch.Tensor]:
        transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
        config = _configured(parallel={"data": comm.size}, memory={"zero": zero, "bucket_mb": 1.0})
        model = perceptron(width=512)
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            for step in range(STEPS):
                engine.train_batch(iter(batches(step)[mine]))
                with torch.no_grad():
                    for _, parameter in engine.named_parameters():
                        parameter.mul_(0.5)
        return {name: value.detach().clone() for name, value in engine.named_parameters()}

    plain, found = trained(0), trained(1)
    for name, value in plain.items():
        assert torch.equal(found[name], value), name


def case_offloaded_state_goes_through_checkpoints(comm: "MPI.Comm") -> None:
    """A run that saves while stores are under way, and goes on without offload and with it."""
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    precision = {"weights": "bfloat16", "gradients": "weights"}
    small = {"bucket_mb": LAYER_MB}
    folder = _folder(comm)

    def trained(memory: dict[str, Any], steps: range, save: bool, load: bool) -> list[float]:
        config = _configured(precision=precision, memory={**small, **memory})
        transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            if load:
                engine.load_checkpoint(folder)
            losses = [
                engine.train_batch(iter(batches(step)) if engine.reads else None).loss
                for step in steps
            ]
            if save:
                engine.save_checkpoint(folder / f"step-{steps.stop}")
            return losses

    offload = {"offload": "stream"}
    with _repeatable():
        half = fewer(2, 1)
        first = trained(offload, range(half), save=True, load=False)
        whole = trained({}, range(2 * half), save=False, load=False)
        for memory in ({}, offload):
            later = range(half, 2 * half)
            assert [*first, *trained(memory, later, save=False, load=True)] == whole


def case_weights_come_from_scratch_and_go(comm: "MPI.Comm") -> None:
    """Residencies of a few tasks, from the host's memory and from a disk;
    evaluations bring weights on demand."""
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    small = {"bucket_mb": LAYER_MB}
    folder = _folder(comm)
    by_stage = {"policy": "breadth-first", "chunks": max(4 // comm.size, 2)}
    narrow = {"weights": "bfloat16", "gradients": "weights"}

    def trained(memory: dict[str, Any], evaluates: bool, **sections: Any) -> list[float]:
        config = _configured(schedule=by_stage, memory={**small, **memory}, **sections)
        transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            losses = []
            for step in range(STEPS):
                losses.append(
                    engine.train_batch(iter(batches(step)) if engine.reads else None).loss
                )
                if evaluates:
                    losses.append(
                        engine.eval_batch(iter(batches(step)) if engine.reads else None).loss
                    )
            return losses

    with _repeatable():
        ways: list[tuple[dict[str, Any], int, bool]] = [
            ({}, 1, True),
            ({"precision": narrow, "optimizer": {"clip": 0.3}}, 2, False),
            ({"precision": {"weights": "bfloat16"}}, 1, True),
        ]
        where = _few(("host", f"disk:{folder}"), 1)
        for (sections, gathered, evaluates), scratches in partners(_few(ways, 2), where):
            plain = trained({}, evaluates, **sections)
            for scratch in scratches:
                memory = {"offload": "stream", "offload_parameters": True, "gathered": gathered}
                found = trained({**memory, "scratch": scratch}, evaluates, **sections)
                assert found == plain, (scratch, sections)


def case_whole_weights_of_shards_come_and_go(comm: "MPI.Comm") -> None:
    """All-gathers before runs of tasks (ZeRO stage 3), of shards here and in scratch."""
    if comm.size == 1:
        return
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES * comm.size)
    by_stage = {"policy": "breadth-first", "chunks": 4}

    def trained(memory: dict[str, Any], **sections: Any) -> Outcome:
        transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
        config = _configured(
            schedule=by_stage,
            parallel={"data": comm.size},
            memory={"bucket_mb": LAYER_MB, **memory},
            **sections,
        )
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            losses = []
            for step in range(STEPS):
                losses.append(engine.train_batch(iter(batches(step)[mine])).loss)
                losses.append(engine.eval_batch(iter(batches(step)[mine])).loss)
        return Outcome(losses, [], {})

    with _repeatable():
        ways: list[tuple[dict[str, Any], int]] = [
            ({"optimizer": {"clip": 0.5}}, 1),
            ({"precision": {"weights": "bfloat16", "gradients": "weights"}}, 2),
        ]
        away = {"offload": "stream", "offload_parameters": True}
        memories: list[dict[str, Any]] = [{}, {"offload": "stream"}, away, {"offload": "cpu"}]
        for (sections, gathered), met in partners(_few(ways, 1), _few(memories, 2)):
            plain = trained({}, **sections)
            for memory in met:
                found = trained({"zero": 3, "gathered": gathered, **memory}, **sections)
                _assert_same_steps(found, plain, memory, sections)


class _Flips(torch.nn.Linear):
    """Changes the sign of one weight, once, past autograd."""

    place = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.training and _Flips.place >= 0:
            self.weight.data.view(-1)[_Flips.place].neg_()
            _Flips.place = -1
        return super().forward(value)


def case_a_layer_that_writes_to_weights_from_scratch_is_told(comm: "MPI.Comm") -> None:
    from mpi4py import MPI

    if comm.rank:
        return
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    layer = axrt.LayerSpec(_Flips, 16, 5)
    model = axrt.PipelineModule([layer], torch.nn.functional.cross_entropy)
    config = _configured(memory={"offload": "stream", "offload_parameters": True})
    for place in (0, 1, 2, 17, 40, 79):
        _Flips.place = place
        transport = MpiTransport(MPI.COMM_SELF, staging_for(_device(), device_aware=False))
        try:
            with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
                engine.train_batch(iter(batches(0)))
        except axrt.ModelError:
            continue
        raise AssertionError(f"a change of weight {place} is not seen")


def case_residencies_go_through_dropped_steps_and_checkpoints(comm: "MPI.Comm") -> None:
    """Each step is begun twice; what is saved goes on without any of it."""
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES * comm.size)
    by_stage = {"policy": "breadth-first", "chunks": 4}
    folder = _folder(comm)

    def trained(
        memory: dict[str, Any], drops: bool, save: Path | None = None, load: Path | None = None
    ) -> list[float]:
        transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
        config = _configured(
            schedule=by_stage,
            parallel={"data": comm.size},
            memory={"bucket_mb": LAYER_MB, **memory},
        )
        losses = []
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            if load:
                engine.load_checkpoint(load)
            for step in range(2):
                if drops:
                    try:
                        engine.train_batch(iter(batches(step)[mine][: MICROBATCHES // 2]))
                        raise AssertionError("a step of half its microbatches")
                    except StopIteration:
                        pass
                losses.append(engine.train_batch(iter(batches(step)[mine])).loss)
            if save:
                engine.save_checkpoint(save)
        return losses

    with _repeatable():
        plain = trained({}, False, save=folder / "plain")
        after = trained({}, False, load=folder / "plain")
        shards = {"zero": 3} if comm.size > 1 else {}
        away = {**shards, "offload": "stream", "offload_parameters": True, "gathered": 1}
        on_disk = {**away, "scratch": f"disk:{folder}"}
        for number, memory in enumerate(_few((away, on_disk), 1)):
            saved = folder / f"saved-{number}"
            assert trained(memory, True, save=saved) == plain, memory
            assert trained(memory, False, load=saved) == after, memory
            if is_full():  # of state alone it is so in the default run, too
                assert trained({}, False, load=saved) == after, memory


def case_an_evaluation_between_steps_has_the_bits_and_changes_none(comm: "MPI.Comm") -> None:
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
    with _repeatable():
        with axrt.initialize(
            perceptron(), adamw, config=_configured(), transport=transport
        ) as engine:
            losses = []
            for step in range(STEPS):
                losses.append(engine.train_batch(iter(batches(step))).loss)
                result = engine.eval_batch(iter(batches(step)), outputs=True)
                again = engine.eval_batch(iter(batches(step)))
                assert result.loss == again.loss
        plain = train_in_plain_torch(perceptron(), batches, STEPS, device=_device())
    assert losses == plain.losses
    if result.outputs:  # on the rank that is told them
        for outputs, (_, target) in zip(result.outputs, batches(STEPS - 1), strict=True):
            assert outputs.device.type == _device().type
            assert outputs.shape[0] == target.shape[0]


def case_compiled_layers_train_alike(comm: "MPI.Comm") -> None:
    batches = token_batches(vocab=256, context=8, microbatches=MICROBATCHES)
    backend = "inductor" if _device().type == "cuda" else "aot_eager"

    def without_dropout() -> axrt.PipelineModule:
        whole = small_gpt()
        for layer in whole.layers:
            assert isinstance(layer, axrt.LayerSpec)
            layer.args = tuple(0.0 if value == 0.1 else value for value in layer.args)
        return whole

    eager = _trained(comm, without_dropout, batches)
    compiled = _trained(comm, without_dropout, batches, run={"compile": backend})
    alone = _trained(comm.Split(comm.rank), without_dropout, batches, run={"compile": backend})
    assert compiled.losses == alone.losses
    torch.testing.assert_close(compiled.losses[0], eager.losses[0], rtol=1e-4, atol=1e-4)
    near = 1e-3 if _device().type == "cuda" else 1e-4  # AdamW enlarges what kernels round
    torch.testing.assert_close(compiled.losses, eager.losses, rtol=near, atol=near)


def case_replicas_agree(comm: "MPI.Comm") -> None:
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES * comm.size)
    transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
    config = _configured(parallel={"data": comm.size})
    outcome = together(
        comm.allgather(train_on_a_rank(transport, perceptron(), batches, STEPS, config)),
        pipes=comm.size,
    )
    plain = train_in_plain_torch(perceptron(), batches, STEPS, device=_device())
    torch.testing.assert_close(outcome.losses, plain.losses, rtol=1e-5, atol=1e-5)


def case_a_run_goes_on_from_its_checkpoint_with_the_same_bits(comm: "MPI.Comm") -> None:
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    folder = _folder(comm) / "saved"

    def engine() -> axrt.Engine:
        return axrt.initialize(
            perceptron(),
            adamw,
            config=_configured(),
            transport=MpiTransport(comm, staging_for(_device(), device_aware=False)),
        )

    with _repeatable():
        with engine() as first:
            first.train_batch(iter(batches(0)))
            first.save_checkpoint(folder)
            straight_on = first.train_batch(iter(batches(1))).loss
        comm.Barrier()
        with engine() as second:
            second.load_checkpoint(folder)
            assert second.train_batch(iter(batches(1))).loss == straight_on


def case_saves_beside_training_have_the_files_of_saves_that_are_waited_for(
    comm: "MPI.Comm",
) -> None:
    """Copies leave the device while the next step runs, which waits for those of its own bucket."""
    memories: list[dict[str, Any]] = [{}, {"offload": "stream"}, {"offload": "cpu"}]
    memories += [{"zero": 1}, {"zero": 3}] * (comm.size > 1)
    for memory in _few(memories, -1):
        folder = _folder(comm)
        config = _configured(
            memory={"bucket_mb": 0.001, **memory},
            precision={"weights": "bfloat16"},
            parallel={"data": comm.size},
            optimizer={"clip": 0.5},
        )
        transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            count = engine.config.schedule.microbatches
            batches = random_batches((6, 16), classes=5, microbatches=count)
            for step in range(STEPS):
                engine.train_batch(iter(batches(step)))
                engine.save_checkpoint(folder / f"waited-{step}")
                assert engine.save_checkpoint(folder / f"beside-{step}", wait=False)
                engine.train_batch(iter(batches(step + 10)))
                engine.finish_saving()
        for step in range(STEPS):
            waited, beside = (
                {one.name: one.read_bytes() for one in (folder / f"{how}-{step}").glob("*.safe*")}
                for how in ("waited", "beside")
            )
            assert len(waited) > 2
            assert beside == waited, (memory, step)
        comm.Barrier()


def case_a_step_comes_after_the_copy_of_its_bucket(comm: "MPI.Comm") -> None:
    """It comes after what the user has written, and nobody looks whether it has ended before the
    bucket steps."""
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
    transport = MpiTransport(comm, staging_for(_device(), device_aware=False))
    config = _configured(memory={"bucket_mb": 0.001})
    with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
        engine.train_batch(iter(batches(0)))
        before = [one.detach().cpu().clone() for _, one in engine.named_parameters()]
        with torch.no_grad():
            for _, one in engine.named_parameters():
                one.add_(1)  # on the user's stream
        snapshot = Snapshot(engine._saves.arena)
        copies = [
            snapshot.take(Live(master, bucket))
            for bucket in engine._model.all_buckets
            for _, master in bucket.trained
        ]
        snapshot.begin()
        engine.train_batch(iter(batches(1)))
        snapshot.end()
        assert all(torch.equal(copy, one + 1) for copy, one in zip(copies, before, strict=True))


def case_payloads_arrive_through_pinned_memory(comm: "MPI.Comm") -> None:
    with torch.no_grad():
        payloads = [on(_device(), payload) for payload in PAYLOADS.values()]
    got = exchange(comm, MpiTransport(comm, staging_for(_device(), device_aware=False)), payloads)
    for number, (name, payload) in enumerate(zip(PAYLOADS, payloads, strict=True)):
        assert all(
            tensor.device == payload_tensor.device
            for tensor, payload_tensor in _pairs(got[number], payload)
        ), name
        assert_same(_on_host(got[number]), _on_host(payload), name)


def case_what_the_library_may_touch_travels_directly(comm: "MPI.Comm") -> None:
    """Only where the library says so: else it would crash."""
    if not is_device_aware(_device().type):
        return
    batches = random_batches((2000, 16), classes=5, microbatches=MICROBATCHES)
    with _repeatable():
        reference = train_in_plain_torch(perceptron(), batches, STEPS, device=_device())
        assert (
            _trained(comm, perceptron, batches, staging=staging_for(_device(), device_aware=True))
            == reference
        )


def case_two_tasks_are_under_way(comm: "MPI.Comm") -> None:
    if comm.rank:
        return
    compute, tasks = compute_on(_device()), [Task(Kind.FORWARD, 0, number) for number in range(2)]
    with compute.current():
        _long()  # the first launch of a kernel loads it, and waits for the device
        compute.drain()
        for task in tasks:
            assert compute.idle
            compute.start(task, _long)
        assert not compute.idle
        assert compute.finished() == [], "the device is still at the first"
        ended: list[Task] = []
        while compute.running:
            ended += [ran.task for ran in compute.finished()]
    assert ended == tasks


def case_a_task_has_ended_when_the_device_says_so(comm: "MPI.Comm") -> None:
    """The host looks a second later: no run is judged by its speed, and a device's clock can be
    tried by time alone."""
    if comm.rank:
        return
    compute, tasks = compute_on(_device()), [Task(Kind.FORWARD, 0, number) for number in range(3)]

    def seen(number: int) -> list[Ended]:
        ended: list[Ended] = []
        while len(ended) < number:
            ended += compute.finished()
        return ended

    with compute.current():
        _long()
        compute.drain()
        compute.start(tasks[0], _long)
        seen(1)  # at once: the host's clock and the device's
        before_s = time.perf_counter()
        for task in tasks[1:]:
            compute.start(task, _long)
        time.sleep(1)
        looked_s = time.perf_counter()
        first, second = seen(2)
    assert before_s <= first.began_s <= first.ended_s <= second.began_s <= second.ended_s
    assert second.ended_s < looked_s - 0.5, "two tasks of a tenth of a second"
    if _device().type == "cuda":
        assert second.began_s == first.ended_s, "it was launched before"
        took = [ran.ended_s - ran.began_s for ran in (first, second)]
        assert 0.04 < min(took) <= max(took) < 1.5 * min(took)


def _long() -> None:
    if _device().type == "cuda":  # elsewhere nothing has passed at the first question
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles, a tenth of a second
    torch.zeros(1, device=_device()).add_(1)


def _on_host(payload: Any) -> Any:
    skeleton, tensors = flatten(payload)
    return unflatten(skeleton, [tensor.cpu() for tensor in tensors])


def _pairs(mine: Any, its: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(flatten(mine)[1], flatten(its)[1], strict=True)
