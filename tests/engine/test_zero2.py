"""Gradients that are let go when a run of backwards ends (ZeRO stage 2)."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.runtime.post import Post
from axrt.runtime.session import Session
from axrt.scheduler.message import Load, Message
from axrt.store.bucket import Bucket
from axrt.transport import Transport
from axrt.transport.local import LocalWorld
from axrt.transport.payload import flatten

from ..sweeps import swept
from .models import perceptron
from .reference import (
    TWO_PIPES,
    adamw,
    configured,
    momentum,
    random_batches,
    together,
    train_on_a_rank,
    train_with_masters,
)
from .test_offload import TYPES

MICROBATCHES, STEPS = 4, 2
SMALL = 4 / 1024  # MiB: several buckets a stage
WHOLE = ("1f1b", "gpipe", "interleaved-1f1b", "breadth-first", "chimera")
WAYS: dict[str, dict[str, Any]] = {
    "one bucket": {"bucket_mb": 25.0},
    "several": {"bucket_mb": SMALL},
    "offloaded": {"bucket_mb": SMALL, "offload": "stream"},
}
BATCHES = random_batches((6, 16), classes=5, microbatches=4 * MICROBATCHES)
IN_TORCH: dict[str, dict[str, Any]] = {
    "float32": {"to": torch.float32},
    "bfloat16": {"to": torch.bfloat16},
    "in weights": {"to": torch.bfloat16, "in_weights": True},
}


@swept(
    ("policy, data", [*zip(WHOLE, (2, 3, 2, 3, 1), strict=True), ("1f1b", 3), ("chimera", 2)]),
    ("reductions", [2, 3, 4]),
    ("kind, way", [*zip([*TYPES] * 2, [*WAYS, "several", "offloaded", "one bucket"], strict=True)]),
    quick=5,
)
def test_sums_are_those_of_plain_torch_run_by_run(
    policy: str, data: int, reductions: int, kind: str, way: str
) -> None:
    """Microbatches of a run and pipe add up first, then pipes, then runs."""
    pipes = 2 if policy in TWO_PIPES else 1
    a_pipe = MICROBATCHES // pipes
    reductions = min(reductions, a_pipe)  # no run is empty
    config = configured(
        MICROBATCHES,
        memory={"zero": 2, "reductions": reductions, **WAYS[way]},
        parallel={"data": data},
        schedule={"policy": policy},
        precision=TYPES[kind],
    )

    def holder_of(k: int) -> int:
        replica, within = divmod(k, MICROBATCHES)
        place, pipe = divmod(within, pipes)
        run = max(run for run in range(reductions) if place * reductions >= run * a_pipe)
        return (run * data + replica) * pipes + pipe

    def batches(step: int) -> Any:
        return BATCHES(step)[: data * MICROBATCHES]

    plain = train_with_masters(
        perceptron(), batches, STEPS, momentum, holder_of=holder_of, **IN_TORCH[kind]
    )
    outcomes = LocalWorld(2 * data, seed=3).run(
        lambda t: train_on_a_rank(t, perceptron(), batches, STEPS, config, momentum)
    )
    found = together(outcomes, pipes * data)
    assert found.losses == plain.losses
    for name, value in plain.parameters.items():
        assert torch.equal(found.parameters[name].float(), value), name


def squares(count: int = 4) -> axrt.PipelineModule:
    """Layers of 4096 parameters, each as large as a bucket."""
    layers = [axrt.LayerSpec(nn.Linear, 64, 64, bias=False) for _ in range(count)]
    return axrt.PipelineModule(layers, functional.mse_loss)


P = 4 * 64 * 64


def one_step(
    transport: Transport,
    data: int,
    reductions: int,
    kind: str = "in weights",
    policy: str = "1f1b",
) -> None:
    config = configured(
        4,
        schedule={"policy": policy},
        memory={"zero": 2, "reductions": reductions, "bucket_mb": SMALL},
        parallel={"data": data},
        precision=TYPES[kind],
    )
    with axrt.initialize(squares(), adamw, config=config, transport=transport) as engine:
        of_rank = torch.Generator().manual_seed(transport.rank)
        inputs = torch.randn(4, 4, 64, generator=of_rank)
        engine.train_batch(iter([(one, torch.ones(4, 64)) for one in inputs]))
        gradients = [bucket.gradient for bucket in engine._model.all_buckets]
        assert not any((*gradient.sums, *gradient.own_totals) for gradient in gradients)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory that several tensors share counts once."""
    of = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(of.values())


@swept(("kind", TYPES), ("data", [2, 4]), ("reductions", [2, 4, 1]), quick=4)
def test_a_rank_keeps_its_share_of_the_gradient_for_the_step(
    kind: str, data: int, reductions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2P + 12P/N in bfloat16 and the float32 total of 4P/N, and 4P + 12P/N in float32, to the byte,
    when the first bucket steps and every other gradient is whole; each step has its state before
    it begins."""
    found: list[tuple[int, ...]] = []
    step = Bucket.step

    def looking(bucket: Bucket, number: int) -> None:
        weights = [parameter for _, parameter in bucket.named]
        whole, own = bucket.gradient.sums, bucket.gradient.own_totals
        found.append((num_bytes(weights), num_bytes(whole), num_bytes(own)))
        step(bucket, number)
        state = bucket.optimizer.state.values()  # type: ignore[union-attr]
        moments = [value for of in state for value in of.values() if value.dim()]
        found[-1] += (num_bytes([*bucket.stepped, *moments, *weights]) - num_bytes(weights),)

    monkeypatch.setattr(Bucket, "step", looking)
    LocalWorld(data).run(lambda t: one_step(t, data, reductions, kind))
    a_weight = 4 if kind == "float32" else 2
    kept = 8 if kind == "float32" else 12
    size = P // 4
    assert found == [(a_weight * size, 0, 4 * size // data, kept * size // data)] * 4 * data


@pytest.mark.parametrize(("policy", "most"), [("1f1b", 4), ("breadth-first", 2)])
def test_the_gradient_of_one_stage_is_whole_where_a_rank_goes_from_stage_to_stage(
    policy: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four layers, each a bucket: one stage, or two."""
    found: list[int] = []
    close = Bucket.close

    def looking(bucket: Bucket) -> None:
        found.append(sum(bool(one.gradient.sums) for one in buckets))
        close(bucket)

    buckets: list[Bucket] = []
    made = Bucket.__init__

    def noting(bucket: Bucket, *args: Any, **keys: Any) -> None:
        made(bucket, *args, **keys)
        if bucket.me.pipe == 0:
            buckets.append(bucket)

    monkeypatch.setattr(Bucket, "close", looking)
    monkeypatch.setattr(Bucket, "__init__", noting)
    LocalWorld(2).run(lambda t: one_step(t, 2, 0, policy=policy))
    assert max(found) == most


@swept(("kind", TYPES), ("data", [2, 4]), ("reductions", [2, 4, 1]), quick=4)
def test_each_reduction_sends_the_parts_again(
    kind: str, data: int, reductions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(k + 1) P (N - 1)/N elements a rank and step: 2P (N - 1)/N with one reduction."""
    sent: list[int] = []
    post = Post.post

    def counting(of: Post, session: Session, message: Message, payload: Any = None) -> None:
        if message.meaning.load is Load.SHARD and not session.state.is_here(message):
            sent.append(sum(tensor.numel() for tensor in flatten(payload)[1]))
        post(of, session, message, payload)

    monkeypatch.setattr(Post, "post", counting)
    LocalWorld(data).run(lambda t: one_step(t, data, reductions, kind))
    assert sum(sent) == data * (reductions + 1) * P * (data - 1) // data


class Scale(nn.Module):
    """A later layer that uses a weight of the first one and does not list it. With a batch of one
    the gradient of `pos` is a view of the gradient that flows on."""

    def __init__(self, pos: nn.Parameter) -> None:
        super().__init__()
        self.of = [pos]  # in a list, so it is no parameter of this layer
        self.own = nn.Parameter(torch.linspace(0.5, 1.5, pos.shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.of[0].unsqueeze(0)) * self.own


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.linspace(-1, 1, 16).repeat(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pos


@pytest.mark.parametrize("reductions", [1, 2, 4])
def test_a_weight_that_a_later_layer_uses_is_added_up_once(reductions: int) -> None:
    """Were a bucket opened later than a backward, autograd would take over a gradient that is
    memory of another one."""

    def trained(memory: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
        def on_a_rank(transport: Transport) -> tuple[list[float], dict[str, Tensor]]:
            torch.manual_seed(0)
            first = Embed()
            layers = [first, Scale(first.pos), nn.Linear(16, 16), Scale(first.pos)]
            model = axrt.PipelineModule(layers, functional.mse_loss)
            config = configured(
                4,
                memory={"bucket_mb": 0, **memory},
                parallel={"data": 2},
                schedule={"policy": "1f1b", "microbatch_size": 1},
            )
            with axrt.initialize(model, momentum, config=config, transport=transport) as engine:
                batches = iter([(torch.randn(1, 6, 16), torch.ones(1, 6, 16)) for _ in range(12)])
                losses = [engine.train_batch(batches).loss for _ in range(3)]
                weights = {name: one.detach().clone() for name, one in engine.named_parameters()}
            return losses, weights

        return LocalWorld(2, seed=1).run(on_a_rank)[0]

    plain, found = trained({}), trained({"zero": 2, "reductions": reductions})
    assert found[0] == pytest.approx(plain[0], rel=1e-6)
    for name, value in plain[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-7)


def test_a_gradient_that_the_user_leaves_between_steps_is_dropped() -> None:
    def trained(zero: int) -> dict[str, Tensor]:
        def on_a_rank(transport: Transport) -> dict[str, Tensor]:
            config = configured(4, memory={"zero": zero}, parallel={"data": 2})
            with axrt.initialize(squares(), adamw, config=config, transport=transport) as engine:
                for _ in range(2):
                    for _, parameter in engine.named_parameters():
                        parameter.grad = torch.ones_like(parameter)
                    inputs = torch.randn(
                        4, 4, 64, generator=torch.Generator().manual_seed(transport.rank)
                    )
                    engine.train_batch(iter([(one, torch.ones(4, 64)) for one in inputs]))
                return {name: one.detach().clone() for name, one in engine.named_parameters()}

        return LocalWorld(2).run(on_a_rank)[0]

    plain, found = trained(0), trained(2)
    assert all(torch.equal(found[name], value) for name, value in plain.items())
