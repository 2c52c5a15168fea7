"""Optimizer state in shards over replicas (ZeRO): the bits of replicas without shards.

These cases alone prove that what is cut, sent, stepped in pieces and made whole again is the same
parameter: for each kind of weights, class of policy, kind of optimizer and odd memory, in scratch,
and through checkpoints of any other layout. The bytes that a rank keeps and sends are counted here
for stage 1; `test_zero2.py` and `test_zero3.py` have those of the other stages.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.runtime.post import Post
from axrt.runtime.session import Session
from axrt.scheduler.message import Load, Message
from axrt.transport import Transport
from axrt.transport.local import LocalWorld
from axrt.transport.payload import flatten

from ..sweeps import some, swept
from .models import motley, perceptron
from .reference import (
    CLASSES,
    TWO_PIPES,
    Outcome,
    adamw,
    configured,
    made_once,
    momentum,
    random_batches,
    together,
    train_on_a_rank,
)
from .test_bits import MOTLEY_BATCHES
from .test_offload import TYPES, amsgrad
from .test_ties import MICROBATCHES as TIED_MICROBATCHES
from .test_ties import batches as tied_batches
from .test_ties import three_times, tied

MICROBATCHES, STEPS = 4, 2
SMALL = 4 / 1024  # MiB: several buckets a stage
BATCHES = random_batches((6, 16), classes=5, microbatches=24)


def short() -> axrt.PipelineModule:
    """A layer for each of four stages, and one more."""
    return perceptron(5)


def brief() -> axrt.PipelineModule:
    """A layer for each of two stages, and one more."""
    return perceptron(3)


def trained(
    zero: int,
    ranks: int,
    data: int,
    model: Any = short,
    factory: Any = adamw,
    pipes: int = 1,
    batches: Any = BATCHES,
    microbatches: int = MICROBATCHES,
    steps: int = STEPS,
    memory: dict[str, Any] | None = None,
    group: int = 0,
    **sections: Any,
) -> Outcome:
    assert "zero" not in (memory or {}), "it would be that of all runs"
    config = configured(
        microbatches,
        memory={"zero": zero, "bucket_mb": SMALL, **(memory or {})},
        parallel={"data": data, "group": group},
        **sections,
    )
    outcomes = LocalWorld(ranks * data, seed=3).run(
        lambda t: train_on_a_rank(t, model(), batches, steps, config, factory)
    )
    return together(outcomes, pipes * data)


without_shards = made_once(trained)


def check_equal(
    ranks: int,
    data: int,
    *,
    clip: float = 0.0,
    zeros: Collection[int] = (1, 3),
    only: Mapping[str, Any] = MappingProxyType({}),
    **keys: Any,
) -> None:
    """Losses and weights are equal to the bit, also where gradients and weights are let go. So are
    norms where gradients are clipped; else those of parameters that are cut have another order of
    summation. `test_zero2.py` has stage 2.

    Args:
        zeros: stages of ZeRO that are tried.
        only: keys of [memory] that the run without shards does not have.
    """
    optimizer = {"clip": clip, **keys.pop("optimizer", {})}
    memory = keys.pop("memory", {})
    plain = without_shards(0, ranks, data, optimizer=optimizer, memory=memory, **keys)
    for zero in zeros:
        of_zero = {"reductions": 1, "gathered": keys.get("pipes", 1)} if zero == 3 else {}
        of = {**memory, **of_zero, **only}
        found = trained(zero, ranks, data, optimizer=optimizer, memory=of, **keys)
        assert found.losses == plain.losses
        assert found.parameters.keys() == plain.parameters.keys()
        for name, value in plain.parameters.items():
            assert torch.equal(found.parameters[name], value), (name, zero)
        # torch's own float32 norm of 150,000 values is off by 1e-6: one order may not be nearer.
        assert found.norms == (
            plain.norms if clip else pytest.approx(plain.norms, rel=1e-5, nan_ok=True)
        )


CLIPS_AND_STAGES = [(0.0, 1), (0.4, 3), (0.0, 3), (0.4, 1)]


@swept(
    (
        "policy, data",
        [
            *zip(CLASSES, (2, 3, 2, 3, 1), strict=True),
            *[("1f1b", 3), ("chimera", 2), ("gpipe", 2), ("interleaved-1f1b", 3)],
            *[("adaptive", 2), ("dualpipe", 1), ("dualpipe", 2)],
        ],
    ),
    ("kind", TYPES),
    ("clip, zero", CLIPS_AND_STAGES),
    quick=6,
)
def test_shards_change_no_bit(policy: str, data: int, kind: str, clip: float, zero: int) -> None:
    pipes = 2 if policy in TWO_PIPES else 1
    of, schedule = TYPES[kind], {"policy": policy}
    check_equal(2, data, pipes=pipes, clip=clip, zeros=(zero,), precision=of, schedule=schedule)


def test_shards_change_no_bit_of_a_longer_run() -> None:
    """A rank is a step ahead of another one, which is at its votes."""
    schedule = {"policy": "1f1b"}
    of: dict[str, Any] = {"model": perceptron, "microbatches": 12, "steps": 3, "schedule": schedule}
    check_equal(2, 2, clip=0.4, zeros=some((1, 3), quick=(3,)), **of)


def adagrad(named: Any) -> torch.optim.Optimizer:
    """Has its state from the start."""
    return torch.optim.Adagrad([p for _, p in named], lr=1e-2, initial_accumulator_value=0.1)


def adafactor(named: Any) -> torch.optim.Optimizer:
    """Looks at whole parameters."""
    return torch.optim.Adafactor([p for _, p in named], lr=1e-2)


def two_groups(named: Any) -> torch.optim.Optimizer:
    """What has one dimension in a shard has two in the model, and decays."""
    listed = list(named)
    groups = [
        {"params": [p for _, p in listed if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for _, p in listed if p.dim() < 2], "lr": 2e-2},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


class OfNorms(torch.optim.Optimizer):
    """Scales each parameter by its own norm."""

    def __init__(self, named: Any) -> None:
        super().__init__([p for _, p in named], {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["mean"] = 0.5 * state.get("mean", torch.zeros_like(p)) + p.grad
                p -= group["lr"] * state["mean"] * (1 + p.norm())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": momentum,
    "amsgrad": amsgrad,
    "adagrad": adagrad,
    "adafactor": adafactor,
    "two-groups": two_groups,
    "of-norms": OfNorms,
}


@swept(
    ("optimizer", OPTIMIZERS),
    ("kind", TYPES),
    ("data, zero", [(2, 1), (3, 3), (2, 3), (3, 1)]),
    quick=6,
)
def test_any_optimizer_steps_its_shard(optimizer: str, kind: str, data: int, zero: int) -> None:
    check_equal(1, data, zeros=(zero,), factory=OPTIMIZERS[optimizer], precision=TYPES[kind])


@swept(
    ("kind", TYPES),
    ("clip, zero", [(0.4, 3), (0.0, 1), (0.4, 1), (0.0, 3)]),
    ("policy", ["1f1b", "chimera", "zb-h1"]),
    quick=4,
)
def test_shards_may_be_offloaded(
    kind: str, clip: float, zero: int, policy: str, tmp_path: Path
) -> None:
    check_equal(
        2,
        2,
        zeros=(zero,),
        pipes=2 if policy in TWO_PIPES else 1,
        clip=clip,
        precision=TYPES[kind],
        steps=3,
        schedule={"policy": policy},
        only={"offload": "stream", "scratch": f"disk:{tmp_path}"},
    )
    assert not list(tmp_path.iterdir())


@swept(("kind", TYPES), ("model", [tied, three_times]), ("ranks", [2, 3, 1]), quick=3)
def test_tied_weights_have_the_order_of_layers(kind: str, model: Any, ranks: int) -> None:
    check_equal(
        ranks,
        2,
        model=model,
        batches=tied_batches(2 * TIED_MICROBATCHES),
        microbatches=TIED_MICROBATCHES,
        precision=TYPES[kind],
        clip=0.5,
    )


@swept(
    ("gradients", ["float32", "weights"]),
    ("data", [2, 3]),
    ("clip, zero", CLIPS_AND_STAGES),
    quick=2,
)
def test_classes_that_are_kept_are_cut_alike(
    gradients: str, data: int, clip: float, zero: int
) -> None:
    precision = {"weights": "bfloat16", "gradients": gradients, "keep": ["LayerNorm"]}
    check_equal(2, data, zeros=(zero,), precision=precision, clip=clip)


@swept(
    ("kind", TYPES),
    ("data", [2, 4]),
    ("recompute, zero", [("full", 3), ("none", 1), ("full", 1), ("none", 3)]),
    quick=3,
)
def test_odd_layers_keep_their_bits(kind: str, data: int, recompute: str, zero: int) -> None:
    """Dropout, buffers, frozen and unused parameters, odd shapes."""
    check_equal(
        2,
        data,
        zeros=(zero,),
        model=motley,
        batches=MOTLEY_BATCHES,
        microbatches=2,
        precision=TYPES[kind],
        memory={"recompute": recompute},
    )


class First(torch.optim.SGD):
    """Looks at its first parameter."""

    def __init__(self, named: Any) -> None:
        super().__init__([p for _, p in named], lr=0.1, momentum=0.5)

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["params"][0].numel() >= 0
        return super().step(closure)


class Inner(torch.optim.Optimizer):
    """Leaves the step to another optimizer of the same parameters."""

    def __init__(self, named: Any) -> None:
        parameters = [p for _, p in named]
        super().__init__(parameters, {"lr": 0.1})
        self.kept, self.inner = parameters, torch.optim.SGD(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        mine = {id(p) for group in self.param_groups for p in group["params"]}
        assert all(p.grad is None for p in self.kept if id(p) not in mine), "it is not whole here"
        self.inner.step()


class OfAll(torch.optim.SGD):
    """Keeps something that belongs to no parameter."""

    def __init__(self, named: Any) -> None:
        super().__init__([p for _, p in named], lr=0.1, momentum=0.5)

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        state: Any = self.state
        state.setdefault("of all", {"n": 0})["n"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = 1


@swept(("kind", TYPES), ("factory, zero", [(First, 1), (OfAll, 3), (First, 3), (OfAll, 1)]))
def test_optimizers_that_need_care_step_their_shards(kind: str, factory: Any, zero: int) -> None:
    of: dict[str, Any] = {"precision": TYPES[kind], "memory": {"bucket_mb": 0.0}}
    check_equal(1, 3, model=brief, zeros=(zero,), factory=factory, **of)


def wide() -> axrt.PipelineModule:
    """Its weights travel beside their envelopes, and land where layers read them."""
    return perceptron(4, width=192)


WIDE_BATCHES = random_batches((6, 192), classes=5, microbatches=4 * MICROBATCHES)


@swept(
    ("kind", TYPES),
    ("policy, clip", [("1f1b", 0.0), ("chimera", 0.4), ("zb-h1", 0.4), ("1f1b", 0.4)]),
    ("offload, zero", [("none", 3), ("stream", 1), ("none", 1), ("stream", 3)]),
    quick=4,
)
def test_weights_that_land_change_no_bit(
    kind: str, policy: str, clip: float, offload: str, zero: int, landed: list[int]
) -> None:
    check_equal(
        2,
        2,
        zeros=(zero,),
        model=wide,
        batches=WIDE_BATCHES,
        pipes=2 if policy in TWO_PIPES else 1,
        clip=clip,
        precision=TYPES[kind],
        schedule={"policy": policy},
        memory={"bucket_mb": 0.1},
        only={"offload": offload},
    )
    assert landed


def test_an_optimizer_within_an_optimizer_steps_nothing_of_others() -> None:
    """No parameter is cut, and a rank steps some of a bucket."""
    check_equal(
        1,
        2,
        model=wide,
        factory=Inner,
        batches=WIDE_BATCHES,
        memory={"bucket_mb": 25.0},
    )


@pytest.mark.parametrize(("writes", "seed"), [("in place", 0), ("other memory", 1)])
def test_what_the_user_writes_to_weights_between_steps_counts_once(
    writes: str, seed: int, landed: list[int]
) -> None:
    def rank_main(transport: Transport, zero: int) -> dict[str, Tensor]:
        config = configured(4, memory={"zero": zero, "bucket_mb": 0.1}, parallel={"data": 2})
        with axrt.initialize(wide(), adamw, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * 4, (engine.data_rank + 1) * 4)
            for step in range(STEPS):
                engine.train_batch(iter(WIDE_BATCHES(step)[mine]))
                with torch.no_grad():
                    for _, p in engine.named_parameters():
                        if writes == "in place":
                            p.mul_(0.5)
                        else:
                            p.data = p.data * 0.5
            engine.train_batch(iter(WIDE_BATCHES(9)[mine]))
        return {name: p.detach().clone() for name, p in engine.named_parameters()}

    plain = LocalWorld(2, seed=seed).run(lambda transport: rank_main(transport, 0))
    found = LocalWorld(2, seed=seed).run(lambda transport: rank_main(transport, 1))
    for of_rank in found:
        for name, value in plain[0].items():
            assert torch.equal(of_rank[name], value), name
    assert landed


def test_narrow_weights_may_not_be_written_to() -> None:
    def rank_main(transport: Transport) -> None:
        config = configured(
            4, memory={"zero": 1}, parallel={"data": 2}, precision=TYPES["bfloat16"]
        )
        with axrt.initialize(wide(), adamw, config=config, transport=transport) as engine:
            with torch.no_grad():
                for _, p in engine.named_parameters():
                    p.mul_(0.5)
            engine.train_batch(iter(WIDE_BATCHES(0)))

    with pytest.raises(axrt.ModelError, match=r"expected no changes of them with memory\.zero"):
        LocalWorld(2).run(rank_main)


class Odd(nn.Module):
    """Weights with gaps in their memory, one under two names, empty ones, and in other orders."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gap = nn.Parameter(torch.randn(37, 40)[:16, 3:19])
        self.turned = nn.Parameter(torch.randn(16, 37)[:, :16].t())
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.inner, self.again = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(x, self.gap) + functional.linear(x, self.turned)
        found: Tensor = self.again(self.inner(x))
        return found


def odd() -> axrt.PipelineModule:
    torch.manual_seed(4)
    twice = nn.Linear(16, 16)
    layers: list[Any] = [Odd(), twice, torch.tanh, twice, nn.Linear(16, 5)]
    return axrt.PipelineModule(layers, functional.cross_entropy)


@pytest.mark.parametrize(("kind", "data"), [*zip(TYPES, (2, 3, 2), strict=True)])
def test_weights_of_odd_memory_and_under_several_names_keep_their_bits(
    kind: str, data: int
) -> None:
    check_equal(1, data, model=odd, precision=TYPES[kind])


# Between steps.

LAYOUTS: dict[str, tuple[int, int, dict[str, Any], str]] = {
    # ranks of a pipeline, replicas, [memory], policy
    "whole": (1, 1, {}, "1f1b"),
    "replicas": (2, 2, {}, "1f1b"),
    "shards": (2, 2, {"zero": 1}, "1f1b"),
    "three shards": (1, 3, {"zero": 3}, "zb-h1"),
    "shards on disk": (1, 2, {"zero": 1, "offload": "stream"}, "1f1b"),
    "two pipes": (2, 1, {"zero": 3, "reductions": 1}, "chimera"),
    "groups": (1, 4, {"zero": 2}, "1f1b"),
}
ONE_STAGE = ["whole", "three shards", "shards on disk"]


def resumed(
    layout: str, kind: str, folder: Path, load: bool, model: Any, factory: Any, scratch: Path
) -> dict[str, Tensor]:
    """Train two steps and save, or go on for one step from there; the weights."""
    ranks, data, memory, policy = LAYOUTS[layout]
    if "offload" in memory:
        memory = {**memory, "scratch": f"disk:{scratch}"}
    microbatches = MICROBATCHES // data
    config = configured(
        microbatches,
        memory={"bucket_mb": SMALL, **memory},
        parallel={"data": data, "group": 2 if data == 4 else 0},
        precision=TYPES[kind],
        optimizer={"clip": 0.5},
        schedule={"policy": policy},
    )
    batches = tied_batches(3) if model is three_times else BATCHES

    def main(transport: Transport) -> dict[str, Tensor]:
        with axrt.initialize(model(), factory, config=config, transport=transport) as engine:
            if load:
                engine.load_checkpoint(folder)
            mine = slice(engine.data_rank * microbatches, (engine.data_rank + 1) * microbatches)
            for step in (2,) if load else (0, 1):
                engine.train_batch(iter(batches(step)[mine]) if engine.reads else None)
            if not load:
                engine.save_checkpoint(folder)
        return {name: value.detach().clone() for name, value in engine.named_parameters()}

    found: dict[str, Tensor] = {}
    for of_rank in LocalWorld(ranks * data).run(main):
        for name, value in of_rank.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


@swept(
    ("kind", TYPES), ("saved", LAYOUTS), ("loaded", [*[*LAYOUTS][1:], "whole"]), quick=len(LAYOUTS)
)
def test_checkpoints_know_nothing_of_shards(
    kind: str, saved: str, loaded: str, tmp_path: Path
) -> None:
    check_resumed(kind, saved, loaded, "adamw", brief, tmp_path)


@swept(
    ("kind", TYPES),
    ("saved,loaded", [("shards", "three shards"), ("shards on disk", "shards")]),
    ("optimizer", ["adafactor", "adagrad", "momentum"]),
    ("model", [brief, three_times]),
    quick=3,
)
def test_checkpoints_hold_the_state_of_any_optimizer(
    kind: str, saved: str, loaded: str, optimizer: str, model: Any, tmp_path: Path
) -> None:
    check_resumed(kind, saved, loaded, optimizer, model, tmp_path)


def check_resumed(
    kind: str, saved: str, loaded: str, optimizer: str, model: Any, tmp_path: Path
) -> None:
    factory = {"adamw": adamw, **OPTIMIZERS}[optimizer]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for layout, folder in ((saved, "a"), (_like(saved), "b")):
        resumed(layout, kind, tmp_path / folder / "step", False, model, factory, scratch)
    for name in (path.name for path in (tmp_path / "a/step").iterdir()):
        if name.endswith(".safetensors"):
            one, other = ((tmp_path / of / "step" / name).read_bytes() for of in "ab")
            assert one == other, f"{name} tells whether state was sharded"
    found, plain = (
        resumed(layout, kind, tmp_path / "a/step", True, model, factory, scratch)
        for layout in (loaded, _like(loaded))
    )
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(found[name], value), name


@swept(("kind", TYPES), ("saved", ONE_STAGE), ("loaded", [*ONE_STAGE[1:], "whole"]))
def test_checkpoints_of_weights_under_several_names_are_whole(
    kind: str, saved: str, loaded: str, tmp_path: Path
) -> None:
    check_resumed(kind, saved, loaded, "adamw", odd, tmp_path)


def _like(layout: str) -> str:
    """A layout with as many copies and without shards, whose sums have the same order."""
    ranks, data, memory, policy = LAYOUTS[layout]
    if not memory:
        return layout
    LAYOUTS[name := f"{layout}, not cut"] = (ranks, data, {}, policy)
    return name


@swept(("kind", TYPES), ("shared", [1, 2, 3]))
def test_evaluations_ends_of_data_and_looks_at_weights_change_nothing(
    kind: str, shared: int
) -> None:
    def rank_main(transport: Transport, zero: int) -> dict[str, Tensor]:
        config = configured(
            MICROBATCHES,
            memory={"zero": zero, "bucket_mb": SMALL},
            parallel={"data": 2},
            precision=TYPES[kind],
        )
        with axrt.initialize(short(), adamw, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            for step in range(STEPS):
                engine.train_batch(iter(BATCHES(step)[mine]) if engine.reads else None)
                if zero:
                    engine.eval_batch(iter(BATCHES(9)[:2]) if engine.reads else None)
                    with pytest.raises(StopIteration):
                        engine.train_batch(iter(BATCHES(7)[:3]) if engine.reads else None)
                    engine.named_parameters()
        return {name: p.detach().clone() for name, p in engine.named_parameters()}

    quiet = LocalWorld(4).run(lambda transport: rank_main(transport, 0))
    disturbed = LocalWorld(4).run(lambda transport: rank_main(transport, shared))
    for one, other in zip(quiet, disturbed, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_overflow_anywhere_skips_the_step_everywhere() -> None:
    precision = {"weights": "float16", "loss_scale": 2.0**19}
    check_equal(2, 2, precision=precision)


@swept(("kind", TYPES), ("shared", [1, 3]))
def test_modules_that_differ_take_the_first_ones_and_come_back_whole(
    kind: str, shared: int
) -> None:
    def rank_main(transport: Transport, zero: int) -> list[Tensor]:
        torch.manual_seed(transport.rank)
        layers: list[Any] = [nn.Linear(16, 16), torch.tanh, nn.Linear(16, 5)]
        config = configured(
            MICROBATCHES,
            memory={"zero": zero, "bucket_mb": 0.0},
            parallel={"data": 2},
            precision=TYPES[kind],
        )
        model = axrt.PipelineModule(layers, functional.cross_entropy)
        train_on_a_rank(transport, model, BATCHES, STEPS, config)
        return [p for place in (0, 2) for p in layers[place].parameters()]

    plain = LocalWorld(2).run(lambda transport: rank_main(transport, 0))
    found = LocalWorld(2).run(lambda transport: rank_main(transport, shared))
    for one, other in zip(chain(*plain), chain(*found), strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert torch.equal(one, other)


@swept(("kind", TYPES), ("data", [2, 4]))
def test_a_rank_keeps_its_share_of_masters_and_moments(kind: str, data: int) -> None:
    """4P + 12P/N with gradients in the weights' type, and 8P + 8P/N in float32, to the byte."""

    def rank_main(transport: Transport) -> tuple[int, int, int]:
        model = axrt.PipelineModule(
            [nn.Linear(64, 64, bias=False) for _ in range(4)], functional.mse_loss
        )
        config = configured(
            2,
            memory={"zero": 1, "bucket_mb": SMALL},
            parallel={"data": data},
            precision=TYPES[kind],
        )
        pairs = pairs_of(transport.rank)
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(pairs))
            buckets = engine._model.all_buckets
            memory = {
                one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
                for bucket in buckets
                for one in (
                    *(p for _, p in bucket.named),
                    *bucket.gradient.sums,
                    *bucket.stepped,
                    *(
                        value
                        for state in bucket.optimizer.state.values()  # type: ignore[union-attr]
                        for value in state.values()
                        if value.dim()
                    ),
                )
            }
            return sum(memory.values()), 4 * 64 * 64, data

    for found, parameters, copies in LocalWorld(data).run(rank_main):
        share = parameters // copies
        expected = {
            "float32": 8 * parameters + 8 * share,
            "bfloat16": 6 * parameters + 12 * share,
            "in weights": 4 * parameters + 12 * share,
        }[kind]
        assert found == expected


def pairs_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Two microbatches, not by torch's own generator, which ranks of one process share."""
    inputs = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(rank))
    return [(one, torch.ones(4, 64)) for one in inputs]


@swept(("kind", TYPES), ("zero", [1, 0]), ("data", [2, 4]), quick=4)
def test_as_many_elements_are_sent_as_without_shards(
    kind: str, zero: int, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2P(N - 1)/N a rank and step, in parts and in sums or weights."""
    sent: list[int] = []
    post = Post.post

    def counting(of: Post, session: Session, message: Message, payload: Any = None) -> None:
        if message.meaning.load is Load.SHARD and not session.state.is_here(message):
            sent.append(sum(tensor.numel() for tensor in flatten(payload)[1]))
        post(of, session, message, payload)

    def rank_main(transport: Transport) -> None:
        layers = [axrt.LayerSpec(nn.Linear, 64, 64, bias=False) for _ in range(4)]
        config = configured(
            2,
            memory={"zero": zero, "bucket_mb": SMALL},
            parallel={"data": data},
            precision=TYPES[kind],
        )
        model = axrt.PipelineModule(layers, functional.mse_loss)
        pairs = pairs_of(transport.rank)
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(pairs))

    monkeypatch.setattr(Post, "post", counting)
    LocalWorld(data).run(rank_main)
    assert sum(sent) == data * 2 * (4 * 64 * 64) * (data - 1) // data


def test_no_copy_has_most_of_the_state_where_parameters_are_not_cut() -> None:
    """Each bucket has one large parameter, which clipping leaves whole: it is another copy's from
    bucket to bucket."""
    config = configured(
        1,
        parallel={"data": 4},
        memory={"zero": 1, "bucket_mb": 4 / 1024},
        optimizer={"clip": 0.5},
    )

    def stepped(transport: Transport) -> int:
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            return sum(one.numel() for b in engine._model.all_buckets for one in b.stepped)

    found = LocalWorld(4).run(stepped)
    assert max(found) < 1.5 * sum(found) / len(found), found
