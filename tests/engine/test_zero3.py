"""Weights that are whole for a time alone (ZeRO stage 3). `test_zero.py` has the bits of policies,
optimizers, odd layers and checkpoints."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import axrt
from axrt.config import Config
from axrt.runtime.post import Post
from axrt.runtime.session import Session
from axrt.scheduler.message import Load, Meaning, Message
from axrt.scheduler.planning.residency_planner import plan_residencies
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.store.bucket import Bucket
from axrt.store.bucket_shard import BucketShard
from axrt.store.flat import is_hollow
from axrt.transport import Transport
from axrt.transport.local import LocalWorld
from axrt.transport.payload import flatten

from ..sweeps import swept
from .models import perceptron
from .reference import (
    Outcome,
    adamw,
    configured,
    random_batches,
    together,
    train_on_a_rank,
)
from .test_offload import TYPES
from .test_ties import MICROBATCHES as TIED_MICROBATCHES
from .test_ties import on_ranks, tied
from .test_zero2 import SMALL, num_bytes, squares

MICROBATCHES, STEPS = 4, 2
BATCHES = random_batches((6, 16), classes=5, microbatches=2 * MICROBATCHES)
CHUNKS = {"breadth-first": 4, "interleaved-1f1b": 4, "interleaved-zb": 3}


def trained(policy: str, memory: dict[str, Any], kind: str, seed: int) -> Outcome:
    config = configured(
        MICROBATCHES,
        memory={"bucket_mb": SMALL, **memory},
        parallel={"data": 2},
        schedule={"policy": policy, "chunks": CHUNKS.get(policy, 0)},
        precision=TYPES[kind],
        optimizer={"clip": 0.5},
    )
    outcomes = LocalWorld(4, seed=seed).run(
        lambda t: train_on_a_rank(t, perceptron(), BATCHES, STEPS, config, adamw)
    )
    return together(outcomes, 2)


@swept(
    ("kind", TYPES),
    (
        "policy",
        ["breadth-first", "zb-v", "interleaved-zb", "adaptive", "interleaved-1f1b", "v-half"],
    ),
    ("gathered, recompute", [(1, "none"), (2, "full"), (3, "none"), (1, "full")]),
    quick=4,
)
def test_stages_that_come_and_go_change_no_bit(
    kind: str, policy: str, gathered: int, recompute: str
) -> None:
    plain = trained(policy, {"recompute": recompute}, kind, seed=1)
    memory = {"zero": 3, "reductions": 1, "gathered": gathered, "recompute": recompute}
    found = trained(policy, memory, kind, seed=gathered)
    assert (found.losses, found.norms) == (plain.losses, plain.norms)
    for name, value in plain.parameters.items():
        assert torch.equal(found.parameters[name], value), name


@swept(("gathered", [1, 2]), ("microbatches_a_run", [2, 1]))
def test_tied_stages_that_come_and_go_within_a_step_change_no_bit(
    gathered: int, microbatches_a_run: int
) -> None:
    reductions = TIED_MICROBATCHES // microbatches_a_run
    schedule = {"policy": "breadth-first", "chunks": 4}
    memory = {"zero": 2, "reductions": reductions}
    plain = on_ranks(1, 2, tied(), schedule=schedule, memory=memory)
    for pipe in (1, 2):
        schedule["chunks"] = 4 // pipe
        memory = {"zero": 3, "reductions": reductions, "gathered": gathered}
        assert on_ranks(pipe, 2, tied(), schedule=schedule, memory=memory) == plain


# Bytes and what is sent, of four layers of 4096 parameters, each a bucket, on one rank a replica.

P, A_LAYER = 4 * 64 * 64, 64 * 64


def two_steps(
    transport: Transport, data: int, kind: str, chunks: int = 4, gathered: int = 1
) -> None:
    config = configured(
        4,
        memory={"zero": 3, "bucket_mb": SMALL, "gathered": gathered},
        schedule={"policy": "breadth-first", "chunks": chunks},
        parallel={"data": data},
        precision=TYPES[kind],
    )
    with axrt.initialize(squares(), adamw, config=config, transport=transport) as engine:
        of_rank = torch.Generator().manual_seed(transport.rank)
        for _ in range(2):
            inputs = torch.randn(4, 4, 64, generator=of_rank)
            engine.train_batch(iter([(one, torch.ones(4, 64)) for one in inputs]))
            assert all(is_hollow(p) for _, p in engine.named_parameters()), "none is whole"


@swept(("kind", TYPES), ("data", [2, 4]))
def test_a_rank_keeps_its_share_of_everything_for_the_step(
    kind: str, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2P/N + 12P/N in bfloat16 and the float32 total of 4P/N; 12P/N and the total in float32, to
    the byte, when a bucket steps."""
    found: list[tuple[int, ...]] = []
    step = Bucket.step

    def looking(bucket: Bucket, number: int) -> None:
        whole, own = bucket.gradient.sums, bucket.gradient.own_totals
        assert all(is_hollow(parameter) for _, parameter in bucket.named)
        before = num_bytes(whole), num_bytes(own)
        step(bucket, number)
        assert bucket.optimizer is not None
        assert bucket.shard is not None
        state = bucket.optimizer.state.values()
        moments = [value for of in state for value in of.values() if value.dim()]
        kept = num_bytes([*bucket.shard.weights, *bucket.stepped, *moments])
        found.append((*before, kept))

    monkeypatch.setattr(Bucket, "step", looking)
    LocalWorld(data).run(lambda t: two_steps(t, data, kind))
    share = A_LAYER // data
    assert set(found) == {(0, 4 * share, (12 if kind == "float32" else 14) * share)}


@pytest.mark.parametrize(("gathered", "chunks", "gathers"), [(1, 4, 7), (2, 4, 6), (4, 4, 4)])
def test_a_pass_gathers_each_stage_once_and_the_room_saves_some(
    gathered: int, chunks: int, gathers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a gather a stage and pass 3P (N - 1)/N elements are sent a rank and step. The last stage
    goes from its forwards to its backwards, and with more room others stay, too."""
    sent: dict[Meaning, int] = {}
    post = Post.post

    def counting(of: Post, session: Session, message: Message, payload: Any = None) -> None:
        if message.meaning.load is Load.SHARD and not session.state.is_here(message):
            size = sum(tensor.numel() for tensor in flatten(payload)[1])
            sent[message.meaning] = sent.get(message.meaning, 0) + size
        post(of, session, message, payload)

    monkeypatch.setattr(Post, "post", counting)
    data = 4
    LocalWorld(data).run(lambda t: two_steps(t, data, "in weights", chunks, gathered))
    ranks_and_steps, of_others = 2 * data, data - 1
    assert sent[Meaning.PART] == ranks_and_steps * P * of_others // data
    of_stage = P // chunks
    assert sent[Meaning.WEIGHTS] == ranks_and_steps * gathers * of_stage * of_others // data
    assert sum(sent.values()) <= ranks_and_steps * 3 * P * of_others // data


@pytest.mark.parametrize("gathered", [1, 2, 3])
def test_no_more_stages_are_whole_than_there_is_room_for(
    gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards: list[BucketShard] = []
    most, begin, made = 0, Bucket.begin_residency, BucketShard.__init__

    def looking(bucket: Bucket) -> None:
        nonlocal most
        begin(bucket)
        weights = [one._masters.weights(0)[0] for one in shards]
        most = max(most, sum(one.untyped_storage().nbytes() > 0 for one in weights))

    def noting(shard: BucketShard, *args: Any) -> None:
        made(shard, *args)
        if shard._me.pipe == 0:
            shards.append(shard)

    monkeypatch.setattr(Bucket, "begin_residency", looking)
    monkeypatch.setattr(BucketShard, "__init__", noting)
    LocalWorld(2).run(lambda t: two_steps(t, 2, "float32", gathered=gathered))
    assert most == gathered


# Which stays there are.


def test_the_stage_that_is_needed_last_is_let_go() -> None:
    """One rank with four stages: forwards along them, and backwards back."""
    job = build_schedule("breadth-first", 1, 2, chunks=4)
    assert plan_residencies(job, 1).order == ((0, 1, 2, 3, 2, 1, 0),)
    assert plan_residencies(job, 2).order == ((0, 1, 2, 3, 1, 0),)
    assert plan_residencies(job, 4).order == ((0, 1, 2, 3),)
    assert plan_residencies(job, 1).of_stage[2] == ((2, 0, 0), (2, 0, 2))
    assert plan_residencies(job, 4).of_stage[2] == ((2, 0, 2),)


# Refusals.


def refused(**sections: Any) -> str:
    def on_a_rank(transport: Transport) -> None:
        config = configured(4, **{"parallel": {"data": 2}, **sections})
        axrt.initialize(squares(), adamw, config=config, transport=transport)

    with pytest.raises(axrt.ConfigError) as found:
        LocalWorld(4).run(on_a_rank)
    return str(found.value)


def test_what_cannot_be_is_refused_with_what_to_set() -> None:
    text = refused(memory={"zero": 3, "gathered": 1}, schedule={"policy": "chimera"})
    assert text.startswith("memory.gathered = 1 under policy 'chimera'")
    assert "expected at least 2" in text
    text = refused(memory={"zero": 2, "reductions": 2})
    assert text.startswith("memory.reductions = 2 under policy 'adaptive'")
    assert text.endswith("schedule.policy names none, and 'adaptive' was taken")
    with pytest.raises(axrt.ConfigError, match="compiled layers need weights that are always"):
        Config.read({"memory": {"zero": 3}, "run": {"compile": "eager"}})


def test_weights_are_back_when_the_engine_is_closed_and_after_an_evaluation() -> None:
    def on_a_rank(transport: Transport, zero: int) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 16) for _ in range(3)]
        model = axrt.PipelineModule([*layers, nn.Linear(16, 5)], cross_entropy)
        config = configured(4, memory={"zero": zero, "bucket_mb": 0}, parallel={"data": 2})
        losses = []
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            for step in range(2):
                mine = BATCHES(step)[engine.data_rank * 4 :][:4]
                engine.train_batch(iter(mine))
                losses.append(engine.eval_batch(iter(mine[: 1 + engine.data_rank])).loss)
        return losses, [p.detach().clone() for layer in layers for p in layer.parameters()]

    plain = LocalWorld(2).run(lambda transport: on_a_rank(transport, 0))
    found = LocalWorld(2).run(lambda transport: on_a_rank(transport, 3))
    assert found[0][0] == plain[0][0]
    for of_rank in found:
        for one, other in zip(of_rank[1], plain[0][1], strict=True):
            assert torch.equal(one, other)


# Weights that are looked at, and that others read.


class Query(nn.Module):
    """A `Linear` of a parameter: its weight gradient reads weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.linspace(-1, 1, 4 * width).view(4, width))
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        asked: Tensor = self.linear(self.query)
        return x + asked.mean(0)


class Hands(nn.Module):
    """Hands a weight of its own on, which the next stage reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, width).repeat(width, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.weight


class Takes(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, weight = given
        return x @ weight


def reading(width: int) -> axrt.PipelineModule:
    layers: list[Any] = [Query(width), Hands(width), Takes(), nn.Linear(width, width)] * 2
    specs = [
        axrt.LayerSpec(type(one), width, *([width] * isinstance(one, nn.Linear)))
        if not isinstance(one, Takes)
        else axrt.LayerSpec(Takes)
        for one in layers
    ]
    return axrt.PipelineModule([*specs, axrt.LayerSpec(nn.Linear, width, 5)], cross_entropy)


@swept(("width", [160, 16]), ("policy", ["1f1b", "interleaved-zb", "adaptive"]))
def test_weights_that_land_and_that_others_read_change_no_bit(
    width: int, policy: str, landed: list[int]
) -> None:
    """The wide ones land where layers read them. A step is dropped, and there are evaluations."""
    batches = random_batches((6, width), classes=5, microbatches=8)

    def on_a_rank(transport: Transport, memory: dict[str, Any]) -> dict[str, Tensor]:
        config = configured(
            4,
            memory={"bucket_mb": 0.05, **memory},
            parallel={"data": 2},
            schedule={"policy": policy, "chunks": 4 if policy == "interleaved-zb" else 0},
        )
        with axrt.initialize(reading(width), adamw, None, config, transport=transport) as engine:
            mine = slice(engine.data_rank * 4, engine.data_rank * 4 + 4)
            for step in range(2):
                engine.train_batch(iter(batches(step)[mine]) if engine.reads else None)
                engine.eval_batch(iter(batches(9)[:2]) if engine.reads else None)
                with pytest.raises(StopIteration):
                    engine.train_batch(iter(batches(7)[:3]) if engine.reads else None)
        return {name: p.detach().clone() for name, p in engine.named_parameters()}

    plain = LocalWorld(4, seed=1).run(lambda t: on_a_rank(t, {}))
    for seed in range(2):
        memory = {"zero": 3, "reductions": 1, "gathered": 1 + seed % 2}
        found = LocalWorld(4, seed=seed).run(lambda t: on_a_rank(t, memory))  # noqa: B023
        for one, other in zip(plain, found, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(other[name], value) for name, value in one.items())
    assert bool(landed) == (width > 16)


def test_parameters_between_calls_are_nan_and_may_not_be_written_to() -> None:
    def on_a_rank(transport: Transport) -> None:
        config = configured(4, memory={"zero": 3}, parallel={"data": 2})
        with axrt.initialize(squares(), adamw, config=config, transport=transport) as engine:
            parameters = [p for _, p in engine.named_parameters()]
            assert all(p.shape == (64, 64) and p.norm().isnan() for p in parameters)
            with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
                parameters[0].mul_(2)
            parameters[0].data = torch.ones(64, 64)
            engine.train_batch(iter([(torch.ones(4, 64), torch.ones(4, 64))] * 4))

    with pytest.raises(axrt.ModelError, match=r"other values between two calls.*memory.zero = 2"):
        LocalWorld(2).run(on_a_rank)


class Clamps(nn.Linear):
    """Writes to its weight in its forward, in a way that no version tells."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.weight.data.clamp_(-0.05, 0.05)
        return super().forward(x)


class Replaces(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [Clamps, Replaces])
def test_a_layer_that_writes_to_its_weights_is_refused(layer: type[nn.Linear], kind: str) -> None:
    def on_a_rank(transport: Transport) -> None:
        model = axrt.PipelineModule([axrt.LayerSpec(layer, 16, 5)], cross_entropy)
        config = configured(4, memory={"zero": 3}, parallel={"data": 2}, precision=TYPES[kind])
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(BATCHES(0)[engine.data_rank * 4 :][:4]))

    with pytest.raises(axrt.ModelError, match=r"was written to.*expected memory\.zero = 2"):
        LocalWorld(2).run(on_a_rank)
