"""Optimizer state that lives in scratch: the bits of plain torch, and the device's bytes.

Nothing else steps in slots: these cases prove the bits for each kind of weights and optimizer, what
the device has to the byte, and that other bytes from a disk are found. `test_host_steps.py` has
steps on the host.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.config import Memory
from axrt.engine import parts
from axrt.observe.observer import Observer
from axrt.offload.arena import Stretch
from axrt.offload.tier import DiskTier, Tier
from axrt.scheduler.rules.offload import SLOTS
from axrt.scheduler.task import Task
from axrt.store.bucket import Bucket
from axrt.store.routes import Offloaded
from axrt.store.scratch import scratch_tier
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import first, swept
from .models import motley, perceptron
from .reference import (
    POLICIES,
    TWO_PIPES,
    Outcome,
    Scale,
    adamw,
    configured,
    made_once,
    momentum,
    plain_masters,
    plain_torch,
    random_batches,
    together,
    train_on_a_rank,
    train_with_masters,
)
from .test_bits import MOTLEY_BATCHES
from .test_masters import without_losses
from .test_ties import MICROBATCHES as TIED_MICROBATCHES
from .test_ties import batches as tied_batches
from .test_ties import three_times

MICROBATCHES, STEPS = 4, 3
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
TYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"weights": "bfloat16"},
    "in weights": {"weights": "bfloat16", "gradients": "weights"},
}
SMALL = 4 / 1024  # MiB: several buckets a stage


def amsgrad(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=1e-2, amsgrad=True)


def stateless(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def rprop(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Rprop([p for _, p in named], lr=1e-3)


class Keeper(torch.optim.Optimizer):
    """Has a moment before its first step, one that is new in each, one of another shape, and a
    number."""

    def __init__(self, named: Any) -> None:
        super().__init__([p for _, p in named], {"lr": 1e-2})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(begun=p.detach().clone(), scale=torch.ones(3), count=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["mean"] = p.grad + 0.5 * state.get("mean", torch.zeros_like(p))
                state["count"] += 1
                state["scale"] += state["count"]
                p -= group["lr"] * (state["mean"] + 0.01 * (p - state["begun"]))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": momentum,
    "amsgrad": amsgrad,
    "rprop": rprop,
    "keeper": Keeper,
    "stateless": stateless,
}


def offloaded(scratch: str = "host", **keys: Any) -> dict[str, Any]:
    return {"offload": "stream", "scratch": scratch, "bucket_mb": SMALL, **keys}


def on_ranks(
    ranks: int,
    memory: dict[str, Any],
    precision: dict[str, Any],
    model: Any = perceptron,
    factory: Any = adamw,
    pipes: int = 1,
    batches: Any = BATCHES,
    microbatches: int = MICROBATCHES,
    **sections: Any,
) -> Outcome:
    config = configured(microbatches, memory=memory, precision=precision, **sections)
    return together(
        LocalWorld(ranks, seed=3).run(
            lambda t: train_on_a_rank(t, model(), batches, STEPS, config, factory)
        ),
        pipes,
    )


on_ranks_once = made_once(on_ranks)


def expected(precision: dict[str, Any], model: Any = perceptron, **keys: Any) -> Outcome:
    if not precision:
        return plain_torch(model, BATCHES, STEPS, **keys)
    in_weights = precision.get("gradients") == "weights"
    return plain_masters(model, BATCHES, STEPS, in_weights=in_weights, **keys)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    yield f"disk:{tmp_path}"
    assert not list(tmp_path.iterdir()), "something is left in the directory"


# Bits.


@swept(("ranks", [2, 4]), ("policy", POLICIES), ("kind", TYPES), quick=5)
def test_every_policy_has_the_bits_of_plain_torch(
    ranks: int, policy: str, kind: str, disk: str
) -> None:
    pipes, schedule = 2 if policy in TWO_PIPES else 1, {"policy": policy}
    found = on_ranks(ranks, offloaded(disk), TYPES[kind], pipes=pipes, schedule=schedule)
    if pipes == 1:
        assert found == expected(TYPES[kind])
    else:
        memory = {"bucket_mb": SMALL}
        assert found == on_ranks_once(ranks, memory, TYPES[kind], pipes=pipes, schedule=schedule)


@swept(
    ("kind", TYPES),
    ("optimizer", OPTIMIZERS),
    ("clip, tier", [(0.0, "host"), (0.3, "disk"), (0.3, "host"), (0.0, "disk")]),
)
def test_every_optimizer_steps_in_slots(
    kind: str, optimizer: str, clip: float, tier: str, tmp_path: Path
) -> None:
    scratch = "host" if tier == "host" else f"disk:{tmp_path}"
    factory = OPTIMIZERS[optimizer]
    found = on_ranks(1, offloaded(scratch), TYPES[kind], factory=factory, optimizer={"clip": clip})
    assert found == expected(TYPES[kind], factory=factory, clip=clip)


@pytest.mark.parametrize("kind", first(TYPES))
@pytest.mark.parametrize("collectives", ["parts", "library"])
def test_replicas_and_tied_weights(kind: str, collectives: str, disk: str) -> None:
    keys: dict[str, Any] = {
        "model": three_times,
        "batches": tied_batches(2),
        "microbatches": TIED_MICROBATCHES,
        "parallel": {"data": 2, "collectives": collectives},
    }
    with_all, offload = (
        on_ranks(4, memory, TYPES[kind], pipes=2, **keys)
        for memory in ({"bucket_mb": SMALL}, offloaded(disk))
    )
    assert with_all == offload


def test_frozen_weights_and_layers_without_any() -> None:
    plain, found = (
        on_ranks(3, memory, {}, model=motley, batches=MOTLEY_BATCHES)
        for memory in ({"bucket_mb": SMALL}, offloaded())
    )
    assert found == plain


def test_a_step_that_overflows_changes_nothing(disk: str) -> None:
    precision = {"weights": "float16", "loss_scale": 2.0**19}
    scale = Scale(2.0**19)
    plain = train_with_masters(perceptron(), BATCHES, STEPS, to=torch.float16, scale=scale)
    found = on_ranks(2, offloaded(disk), precision)
    assert 0 < scale.good < STEPS, "no step has overflowed, or all have"
    assert without_losses(found) == without_losses(plain)


@swept(
    ("ranks, policy", [(1, "1f1b"), (2, "1f1b"), (4, "zb-v"), (2, "chimera")]),
    ("kind", TYPES),
    ("clip", [0.3, 1.5]),
    quick=5,
)
def test_clipped_steps_have_the_bits_of_steps_on_the_device(
    ranks: int, policy: str, kind: str, clip: float, disk: str
) -> None:
    """At 0.3 every step is clipped, at 1.5 some are."""
    keys: dict[str, Any] = {"pipes": 2 if policy in TWO_PIPES else 1}
    keys |= {"schedule": {"policy": policy}, "optimizer": {"clip": clip}}
    plain, found = (
        on_ranks(ranks, memory, TYPES[kind], **keys)
        for memory in ({"bucket_mb": SMALL}, offloaded(disk))
    )
    assert found == plain


@swept(
    (
        "clip, gradients",
        [(0.3, "weights"), (0.0, "float32"), (0.0, "weights"), (0.3, "float32")],
    ),
)
def test_an_overflow_is_as_if_the_step_had_not_been(clip: float, gradients: str, disk: str) -> None:
    """The third of five steps overflows: weights, moments and counts stay."""
    most = 2.0**18 if gradients == "float32" else 2.0**17  # that fits these batches
    precision = {"weights": "float16", "loss_scale": most, "gradients": gradients}
    precision |= {"loss_scale_interval": 2}
    config = configured(
        MICROBATCHES,
        memory=offloaded(disk),
        precision=precision,
        optimizer={"clip": clip},
    )
    found = together(
        LocalWorld(2).run(lambda t: train_on_a_rank(t, perceptron(), BATCHES, 5, config))
    )
    of_plain = Scale(most, interval=2)
    plain = train_with_masters(
        perceptron(),
        BATCHES,
        5,
        to=torch.float16,
        scale=of_plain,
        clip=clip,
        in_weights=gradients == "weights",
    )
    assert of_plain.scale == 2 * most, "not the third step alone has overflowed"
    assert without_losses(found) == without_losses(plain)


class Turns(torch.optim.SGD):
    """Its moment has another type from the third step on, and its first gradient is kept as it
    is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("mean", torch.zeros_like(p))
                if state["count"] == 3:
                    state["mean"] = state["mean"].double()
                state["mean"].mul_(0.5).add_(p.grad)
                state.setdefault("first", p.grad)
                p -= 0.1 * (state["mean"] + 0.1 * state["first"]).to(p.dtype)


@pytest.mark.parametrize("kind", first(TYPES))
def test_moments_that_change_their_type_and_gradients_that_are_kept(kind: str, disk: str) -> None:
    factory = lambda named: Turns([p for _, p in named], lr=0.1)  # noqa: E731
    plain, found = (
        on_ranks(1, memory, TYPES[kind], factory=factory, optimizer={"clip": 0.5})
        for memory in ({"bucket_mb": SMALL}, offloaded(disk))
    )
    assert found == plain


def test_weights_in_other_memory_formats_have_the_same_bits(disk: str) -> None:
    def strided() -> axrt.PipelineModule:
        torch.manual_seed(3)
        convolutions: list[Any] = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)]
        layers = [layer.to(memory_format=torch.channels_last) for layer in convolutions]
        return axrt.PipelineModule(layers, nn.functional.mse_loss)

    def batches(step: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        pairs = torch.randn(2, 2, 2, 4, 6, 6, generator=generator)
        return [(one[0].to(memory_format=torch.channels_last), one[1]) for one in pairs]

    for kind in TYPES.values():
        plain, found = (
            on_ranks(
                1,
                memory,
                kind,
                model=strided,
                batches=batches,
                microbatches=2,
                optimizer={"clip": 0.1},
            )
            for memory in ({"bucket_mb": 0.0}, offloaded(disk, bucket_mb=0.0))
        )
        assert found == plain


# Between steps.


def test_what_is_written_to_shown_masters_counts_before_the_next_call_and_not_after_a_load(
    tmp_path: Path,
) -> None:
    layer = nn.Linear(16, 5)
    config = configured(MICROBATCHES, memory=offloaded(), precision=TYPES["bfloat16"])
    model = axrt.PipelineModule([layer], nn.functional.cross_entropy)
    with axrt.initialize(model, adamw, config=config, transport=LocalWorld(1).alone()) as engine:
        engine.train_batch(iter(BATCHES(0)))
        engine.save_checkpoint(tmp_path / "saved")
        saved = {name: p.detach().clone() for name, p in engine.named_parameters()}
        filled(engine, 7.0)
        engine.load_checkpoint(tmp_path / "saved")
        for name, p in engine.named_parameters():
            assert torch.equal(p, saved[name])
        filled(engine, 7.0)
        engine.train_batch(iter(BATCHES(0)))
        assert all(bool((p > 6).all()) for _, p in engine.named_parameters())
        filled(engine, 3.0)
    assert bool((layer.weight == 3).all())


def filled(engine: axrt.Engine, value: float) -> None:
    for _, parameter in engine.named_parameters():
        with torch.no_grad():
            parameter.fill_(value)


@pytest.mark.parametrize("kind", TYPES)
def test_evaluations_ends_of_data_and_looks_at_weights_change_nothing(kind: str, disk: str) -> None:
    def rank_main(transport: Transport, disturbed: bool) -> dict[str, Tensor]:
        memory = offloaded(disk) if disturbed else {"bucket_mb": SMALL}
        config = configured(MICROBATCHES, memory=memory, precision=TYPES[kind])
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            for step in range(STEPS):
                engine.train_batch(iter(BATCHES(step)) if engine.reads else None)
                if disturbed:
                    engine.eval_batch(iter(BATCHES(9)[:2]) if engine.reads else None)
                    with pytest.raises(StopIteration):
                        engine.train_batch(iter(BATCHES(7)[:3]) if engine.reads else None)
                    engine.named_parameters()
            return {name: p.detach().clone() for name, p in engine.named_parameters()}

    quiet = LocalWorld(2).run(lambda transport: rank_main(transport, False))
    disturbed = LocalWorld(2).run(lambda transport: rank_main(transport, True))
    for one, other in zip(quiet, disturbed, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["bfloat16"])
def test_modules_of_the_users_come_back_with_the_weights_of_masters(kind: str, disk: str) -> None:
    def given() -> axrt.PipelineModule:
        torch.manual_seed(1)
        layers: list[Any] = [nn.Linear(16, 16), torch.tanh, nn.Linear(16, 5)]
        return axrt.PipelineModule(layers, nn.functional.cross_entropy)

    found = []
    for memory in ({}, offloaded(disk, bucket_mb=0.0)):
        model: Any = given()
        config = configured(MICROBATCHES, memory=memory, precision=TYPES[kind])
        train_on_a_rank(LocalWorld(1).alone(), model, BATCHES, STEPS, config)
        found.append([p for place in (0, 2) for p in model.layers[place].parameters()])
    assert all(one.dtype == torch.float32 for one in found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_outside_a_step_masters_and_moments_are_hollow() -> None:
    config = configured(MICROBATCHES, memory=offloaded(), precision=TYPES["bfloat16"])
    with axrt.initialize(
        perceptron(), adamw, config=config, transport=LocalWorld(1).alone()
    ) as engine:
        engine.train_batch(iter(BATCHES(0)))
        engine._trainer.settle()
        for bucket in engine._model.all_buckets:
            for tensor in _state_of(bucket):
                assert tensor.isnan().all()
                assert tensor.untyped_storage().nbytes() <= 8
            with bucket.route.present():
                assert all(tensor.isfinite().all() for tensor in _state_of(bucket))


def _state_of(bucket: Bucket) -> list[Tensor]:
    assert bucket.optimizer is not None
    moments = [
        value
        for parameter in bucket.optimizer.state
        for key, value in bucket.optimizer.state[parameter].items()
        if key != "step"
    ]
    return [*moments, *(master for _, master in bucket.trained)]


# The device's bytes.


class Wide(nn.Module):
    """Parameters that fill whole pages in every type, so that formulas hold to the byte."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 8)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(value @ self.weight)


def wide() -> axrt.PipelineModule:
    return axrt.PipelineModule([axrt.LayerSpec(Wide) for _ in range(8)], nn.functional.mse_loss)


def wide_batches(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(2, 64, generator=generator), torch.randn(2, 64, generator=generator))
        for _ in range(2)
    ]


class Bytes(Observer):
    """The most bytes of weights, masters, gradients, moments and slots at any event of the second
    step."""

    def __init__(self) -> None:
        self.engine: axrt.Engine | None = None
        self.most = 0

    def started(self, task: Task) -> None:
        if not task.kind.of_a_microbatch and self.engine:
            self.most = max(self.most, self._now())

    def _now(self) -> int:
        assert self.engine is not None
        model = self.engine._model
        tensors: list[Tensor] = [p for _, layer in model.layers() for p in layer.parameters()]
        for bucket in model.all_buckets:
            tensors += [master for _, master in bucket.trained]
            tensors += [*bucket.gradient.sums, *bucket.gradient.own_totals]
            tensors += [p.grad for _, p in bucket.trained if p.grad is not None]
            assert bucket.optimizer is not None
            tensors += [
                value
                for of in bucket.optimizer.state.values()
                for value in of.values()
                if value.dim()
            ]
            if isinstance(bucket.route, Offloaded) and bucket.route._state.present:
                tensors.append(bucket.route._state.memory)
        tensors += list(model.slots._free) if model.slots else []
        real = [tensor for tensor in tensors if tensor.numel() and not _hollow(tensor)]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in real}
        return sum(_bytes_of(t) for t in storages.values())


def _hollow(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def _bytes_of(tensor: Tensor) -> int:
    """Bytes of the storage; a slot has a page more, so that it begins at one."""
    whole = tensor.untyped_storage().nbytes()
    return whole - 4096 if whole % 8192 == 4096 and whole > 4096 * 3 else whole


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize(
    ("precision", "offload", "bytes_each", "bytes_in_slot"),
    [
        (TYPES["float32"], "none", 16, 0),
        (TYPES["float32"], "stream", 8, 8),
        (TYPES["bfloat16"], "stream", 6, 12),
        (TYPES["in weights"], "stream", 4, 16),
    ],
    ids=["float32", "float32 offloaded", "bfloat16 offloaded", "in weights offloaded"],
)
def test_the_device_has_the_bytes_of_the_formulas(
    precision: dict[str, Any],
    offload: str,
    bytes_each: int,
    bytes_in_slot: int,
    clip: float,
) -> None:
    parameters, bucket = 8 * 64 * 64, 64 * 64
    watch = Bytes()
    memory = {"offload": offload, "bucket_mb": bucket * 4 / 2**20}
    config = configured(2, memory=memory, precision=precision, optimizer={"clip": clip})
    with axrt.initialize(
        wide(), adamw, config=config, transport=LocalWorld(1).alone(), observers=[watch]
    ) as engine:
        engine.train_batch(iter(wide_batches(0)))
        watch.engine = engine
        engine.train_batch(iter(wide_batches(1)))
        watch.engine = None
    assert watch.most == bytes_each * parameters + bytes_in_slot * bucket * SLOTS
    gc.collect()


# Refusals and faults.


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        ({"scratch": "disk:/no/such/place"}, "/no/such/place"),
        ({"scratch": "disk:"}, "memory.scratch"),
        ({"scratch": "tape"}, "memory.scratch"),
        ({"scratch_gb": 1e-6}, "memory.scratch_gb"),
    ],
)
def test_scratch_that_cannot_be_is_refused_at_the_start(memory: dict[str, Any], text: str) -> None:
    config = configured(2, memory={"offload": "stream", **memory})
    with pytest.raises(axrt.ConfigError, match=text):
        axrt.initialize(wide(), adamw, config=config, transport=LocalWorld(1).alone())


def test_other_bytes_from_a_disk_end_the_training(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = DiskTier.read

    def flipped(tier: DiskTier, stretch: Stretch, into: Tensor) -> None:
        with open(f"/proc/self/fd/{tier._file._file}", "r+b", buffering=0) as plain:
            plain.seek(stretch.start)
            (byte,) = plain.read(1)
            plain.seek(stretch.start)
            plain.write(bytes([byte ^ 1]))
        read(tier, stretch, into)

    monkeypatch.setattr(DiskTier, "read", flipped)
    config = configured(2, memory=offloaded(disk))
    engine = axrt.initialize(wide(), adamw, config=config, transport=LocalWorld(1).alone())
    engine.train_batch(iter(wide_batches(0)))
    with pytest.raises(axrt.ScratchError, match="other bytes came back"):
        engine.train_batch(iter(wide_batches(1)))


def test_one_tensor_under_two_keys_is_refused() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["again"] = self.state[p]["momentum_buffer"]

    config = configured(2, memory=offloaded())
    factory = lambda named: Twice([p for _, p in named], lr=0.1, momentum=0.5)  # noqa: E731
    engine = axrt.initialize(wide(), factory, config=config, transport=LocalWorld(1).alone())
    with pytest.raises(axrt.ModelError, match="are one tensor"):
        engine.train_batch(iter(wide_batches(0)))


def test_a_mistake_that_one_rank_finds_is_refused_on_all(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    make = scratch_tier

    def main(transport: Transport) -> None:
        here.rank = transport.rank
        try:
            axrt.initialize(wide(), adamw, config=config, transport=transport).close()
        except axrt.ConfigError as error:
            refused.append(str(error))

    def on_a_host(memory: Memory, device: torch.device) -> Tier:
        missing = replace(memory, scratch="disk:/no/such/place")
        return make(missing if here.rank == 1 else memory, device)

    here, config = threading.local(), configured(2, memory=offloaded(disk))
    monkeypatch.setattr(parts, "scratch_tier", on_a_host)
    LocalWorld(3).run(main)
    assert len(refused) == 3
    assert len(set(refused)) == 1
    assert refused[0].startswith("rank 1: memory.scratch: ")


class Unsteppable(torch.optim.SGD):
    """Wants parameters that are larger than tiny ones."""

    def step(self, closure: Any = None) -> Any:
        assert all(p.numel() > 10 for group in self.param_groups for p in group["params"])
        return super().step(closure)


def test_what_slows_down_or_stays_is_said_at_the_start(
    disk: str, capsys: pytest.CaptureFixture[str]
) -> None:
    factory = lambda named: Unsteppable([p for _, p in named], lr=0.1, momentum=0.5)  # noqa: E731
    for of, memory in ((adamw, {"scratch_gb_s": 1e-8}), (factory, {})):
        config = configured(2, memory=offloaded(disk, **memory))
        axrt.initialize(wide(), of, config=config, transport=LocalWorld(1).alone()).close()
    said = capsys.readouterr().err
    assert "axrt: memory.scratch_gb_s = 1e-08: a step takes at least " in said
    assert "what it keeps stays on the device" in said
