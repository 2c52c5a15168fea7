"""Narrow weights with float32 masters: the bits of plain PyTorch that keeps master copies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.scheduler.task import Kind
from axrt.store.loss_scale import LossScale
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import swept
from .models import Block, masked, masked_batches, motley, perceptron, small_gpt
from .reference import (
    ONE_PIPE,
    SEED,
    TWO_PIPES,
    Outcome,
    Scale,
    adamw,
    configured,
    momentum,
    plain_masters,
    plain_torch,
    random_batches,
    spoiling,
    together,
    token_batches,
    train_on_a_rank,
    train_with_masters,
)
from .test_engine import Watch
from .test_ties import batches as tied_batches
from .test_ties import three_times, tied
from .test_weighted_losses import batches as weighted_batches
from .test_weighted_losses import model as weighted_model

MICROBATCHES, STEPS = 4, 2
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
BFLOAT16 = {"weights": "bfloat16"}
IN_WEIGHTS = {"weights": "bfloat16", "gradients": "weights"}
FLOAT16 = {"weights": "float16", "loss_scale": 256.0}


def on_ranks(
    ranks: int,
    precision: dict[str, Any] = BFLOAT16,
    model: Any = perceptron,
    batches: Any = BATCHES,
    factory: Any = adamw,
    seed: int = 0,
    pipes: int = 1,
    microbatches: int = MICROBATCHES,
    steps: int = STEPS,
    **sections: Any,
) -> Outcome:
    config = configured(microbatches, precision=precision, **sections)
    return together(
        LocalWorld(ranks, seed).run(
            lambda t: train_on_a_rank(t, model(), batches, steps, config, factory)
        ),
        pipes,
    )


def without_losses(outcome: Outcome) -> Outcome:
    return Outcome([], [], outcome.parameters)


def without_norms(outcome: Outcome) -> Outcome:
    return Outcome(outcome.losses, [], outcome.parameters)


# Bits.


IN: dict[str, dict[str, Any]] = {"float32": BFLOAT16, "weights": IN_WEIGHTS}  # by the sum's type


def reference(gradients: str, **keys: Any) -> Outcome:
    """What plain torch makes of a run with gradients of that type."""
    in_weights = gradients == "weights"
    return plain_masters(perceptron, BATCHES, STEPS, in_weights=in_weights, **keys)


def test_every_type_has_bits_of_its_own() -> None:
    """So the tests below can fail."""
    float32, weights = reference("float32"), reference("weights")
    assert float32 != weights
    assert plain_torch(perceptron, BATCHES, STEPS) not in (float32, weights)


@swept(("ranks", [2, 4, 1]), ("policy", ONE_PIPE), ("gradients", IN), quick=4)
def test_every_policy_and_depth_has_the_bits_of_master_copies(
    ranks: int, policy: str, gradients: str
) -> None:
    schedule, memory = {"policy": policy}, {"bucket_mb": 0.002}
    found = on_ranks(ranks, IN[gradients], schedule=schedule, memory=memory)
    assert found == reference(gradients)


def test_a_longer_run_has_the_bits_of_master_copies() -> None:
    batches = random_batches((6, 16), classes=5, microbatches=12)
    expected = plain_masters(perceptron, batches, 3)
    assert on_ranks(3, batches=batches, microbatches=12, steps=3) == expected


@swept(
    ("recompute", ["full", 1, "stage-aware:0.6"]),
    ("policy", ["1f1b", "gpipe", "zb-h2"]),
    ("gradients", IN),
)
def test_layers_that_run_again(recompute: str | int, policy: str, gradients: str) -> None:
    memory = {"recompute": recompute}
    found = on_ranks(3, IN[gradients], schedule={"policy": policy}, memory=memory)
    assert found == reference(gradients)


@swept(("policy", ["1f1b", "zb-h1", "adaptive"]), ("in_weights", [False, True]))
def test_clipping_is_by_the_norm_of_what_the_optimizer_steps(policy: str, in_weights: bool) -> None:
    expected = plain_masters(perceptron, BATCHES, STEPS, in_weights=in_weights, clip=0.5)
    assert all(norm > 0.5 for norm in expected.norms)
    found = on_ranks(
        2,
        IN_WEIGHTS if in_weights else BFLOAT16,
        schedule={"policy": policy},
        optimizer={"clip": 0.5},
        memory={"bucket_mb": 0.002},
    )
    assert without_norms(found) == without_norms(expected)


@pytest.mark.parametrize("gradients", IN)
@pytest.mark.parametrize("factory", [momentum, spoiling])
def test_any_optimizer_steps_masters(gradients: str, factory: Any) -> None:
    expected = reference(gradients, factory=factory)
    assert on_ranks(2, IN[gradients], factory=factory) == expected


@swept(("ranks", [1, 2, 4]), ("policy", ["1f1b", "zb-h1"]))
def test_structured_activations_kept_modules_and_frozen_weights(ranks: int, policy: str) -> None:
    batches = random_batches((6, 12), classes=4, microbatches=MICROBATCHES)
    expected = plain_masters(motley, batches, STEPS, keep=[nn.BatchNorm1d])
    keep = {**BFLOAT16, "keep": ["BatchNorm1d"]}
    assert on_ranks(ranks, keep, motley, batches, schedule={"policy": policy}) == expected


def test_masks_travel_with_narrow_activations() -> None:
    batches = masked_batches(MICROBATCHES)
    expected = train_with_masters(masked(), batches, STEPS)
    assert on_ranks(3, BFLOAT16, masked, batches, schedule={"policy": "zb-h1"}) == expected


def test_a_gpt_whose_norms_are_kept_within_its_blocks() -> None:
    batches = token_batches(256, 8, MICROBATCHES)
    expected = train_with_masters(small_gpt(), batches, STEPS, keep=[nn.RMSNorm])
    assert expected != train_with_masters(small_gpt(), batches, STEPS)
    keep = {**BFLOAT16, "keep": ["RMSNorm"]}
    assert on_ranks(4, keep, small_gpt, batches, schedule={"policy": "adaptive"}) == expected


@pytest.mark.parametrize("in_weights", [False, True])
def test_weighted_losses_are_divided_by_all_weights(in_weights: bool) -> None:
    model, batches = weighted_model(), weighted_batches()
    expected = train_with_masters(model, batches, STEPS, in_weights=in_weights)
    precision = IN_WEIGHTS if in_weights else BFLOAT16
    found = on_ranks(2, precision, weighted_model, batches, microbatches=len(batches(0)))
    assert found == expected


@swept(("ranks", [1, 2, 3]), ("in_weights", [False, True]), ("model", [tied, three_times]))
def test_tied_weights_are_summed_in_the_order_of_layers(
    ranks: int, in_weights: bool, model: Any
) -> None:
    batches = tied_batches()
    expected = plain_masters(model, batches, STEPS, in_weights=in_weights)
    precision = IN_WEIGHTS if in_weights else BFLOAT16
    found = on_ranks(ranks, precision, model, batches, microbatches=len(batches(0)))
    assert found.losses == expected.losses
    first = expected.parameters["0.weight"]
    for name, value in found.parameters.items():
        is_tied = name not in expected.parameters
        assert torch.equal(value, first if is_tied else expected.parameters[name]), name
    assert len(found.parameters) > len(expected.parameters)


@swept(("collectives", ["parts", "library"]), ("in_weights", [True, False]))
def test_a_tied_weight_may_be_kept_in_one_of_its_layers(collectives: str, in_weights: bool) -> None:
    def model() -> axrt.PipelineModule:
        return axrt.PipelineModule(
            [
                axrt.TiedLayerSpec("tokens", nn.Embedding, 11, 16),
                axrt.LayerSpec(Block, 16),
                axrt.TiedLayerSpec("tokens", nn.Linear, 16, 11, bias=False),
            ],
            functional.cross_entropy,
        )

    data = 2 if collectives == "library" else 1
    batches = tied_batches()
    microbatches = len(batches(0)) // data
    precision = {**(IN_WEIGHTS if in_weights else BFLOAT16), "keep": ["Embedding"]}
    expected = train_with_masters(
        model(),
        batches,
        STEPS,
        in_weights=in_weights,
        keep=[nn.Embedding],
        holder_of=lambda k: k // microbatches,
    )
    found = on_ranks(
        2 * data,
        precision,
        model,
        batches,
        microbatches=microbatches,
        pipes=data,
        parallel={"data": data, "collectives": collectives},
    )
    for name, value in found.parameters.items():
        wanted = expected.parameters.get(name, expected.parameters["0.weight"])
        torch.testing.assert_close(value, wanted, rtol=0, atol=0 if data == 1 else 1e-6)


@swept(
    ("collectives", ["parts", "library"]),
    ("policy, in_weights", [*zip(("1f1b", "zb-h1", *TWO_PIPES), (True, False) * 2, strict=True)]),
)
def test_copies_are_added_up_in_float32(collectives: str, policy: str, in_weights: bool) -> None:
    """Of two holders, so that there is one order."""
    data = 1 if policy in TWO_PIPES else 2
    batches = random_batches((6, 16), classes=5, microbatches=data * MICROBATCHES)
    expected = train_with_masters(
        perceptron(),
        batches,
        STEPS,
        in_weights=in_weights,
        clip=0.5,
        holder_of=lambda k: k // MICROBATCHES if data == 2 else k % 2,
    )
    found = on_ranks(
        2 * data,
        IN_WEIGHTS if in_weights else BFLOAT16,
        batches=batches,
        pipes=2,
        schedule={"policy": policy},
        parallel={"data": data, "collectives": collectives},
        memory={"bucket_mb": 0.002},
        optimizer={"clip": 0.5},
    )
    assert without_losses(found) == without_losses(expected)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)


# What splits waits.


@pytest.mark.parametrize("precision", [BFLOAT16, IN_WEIGHTS], ids=["float32", "weights"])
def test_weight_gradients_wait_under_bfloat16_weights(precision: dict[str, Any]) -> None:
    watch = Watch()
    config = configured(MICROBATCHES, precision=precision, schedule={"policy": "zb-h1"})
    engine = axrt.initialize(
        perceptron(), config=config, transport=LocalWorld(1).alone(), observers=[watch]
    )
    with engine:
        engine.train_batch(iter(BATCHES(0)))
    pieces = [task.part for task in watch.tasks if task.kind is Kind.WEIGHT]
    assert pieces == [*range(15)] * MICROBATCHES  # of two linear layers a block, and the last one


# float16.


def overflowing(at: int) -> Any:
    """Microbatches of which one step has a gradient that float16 does not hold."""

    def of_step(step: int) -> Any:
        items = BATCHES(step)
        if step == at:
            items[2] = (items[2][0] * 1e6, items[2][1])
        return items

    return of_step


@swept(("ranks", [1, 2, 4]), ("policy", ["1f1b", "zb-h1", "adaptive"]), ("clip", [0.5, 0.0]))
def test_a_scaled_loss_has_the_bits_of_plain_torch_in_float16(
    ranks: int, policy: str, clip: float
) -> None:
    scale = Scale(256.0)
    expected = train_with_masters(
        perceptron(), BATCHES, STEPS, to=torch.float16, clip=clip, scale=scale
    )
    found = on_ranks(ranks, FLOAT16, schedule={"policy": policy}, optimizer={"clip": clip})
    assert without_norms(found) == without_norms(expected)
    assert scale.good == STEPS


def normed() -> axrt.PipelineModule:
    """A model whose running means an overflow would spoil."""
    return axrt.PipelineModule(
        [
            axrt.LayerSpec(nn.Linear, 16, 16),
            axrt.LayerSpec(nn.BatchNorm1d, 16),
            torch.tanh,
            axrt.LayerSpec(Block, 16, 0.0),
            axrt.LayerSpec(nn.Linear, 16, 5),
        ],
        functional.cross_entropy,
    )


@pytest.mark.parametrize(("data", "offload"), [(1, "none"), (2, "none"), (1, "cpu")])
def test_an_overflow_skips_the_step_everywhere_as_if_the_batch_had_not_been(
    data: int, offload: str
) -> None:
    """Buffers too, whatever steps the buckets."""
    seen: dict[int, list[Any]] = {}

    def rank_main(transport: Transport) -> None:
        config = configured(
            MICROBATCHES,
            precision=FLOAT16,
            parallel={"data": data},
            memory={"offload": offload, "scratch": "host"},
        )
        with axrt.initialize(normed(), adamw, config=config, transport=transport) as engine:
            told = []
            for step in range(4):
                before = _state(engine)
                items = [(one + engine.data_rank, two) for one, two in overflowing(1)(step)]
                result = engine.train_batch(iter(items))
                after = _state(engine)
                told.append(
                    (
                        result.skipped,
                        result.loss_scale,
                        all(torch.equal(before[name], after[name]) for name in before),
                    )
                )
            seen[engine.rank] = told

    LocalWorld(2 * data).run(rank_main)
    assert list(seen.values()) == [
        [(False, 256.0, False), (True, 256.0, True), (False, 128.0, False), (False, 128.0, False)]
    ] * (2 * data)


def _state(engine: axrt.Engine) -> dict[str, Tensor]:
    """Weights, moments and buffers of a rank."""
    model = engine._model
    found = {name: p.detach().clone() for name, p in engine.named_parameters()}
    for bucket in model.all_buckets:
        with bucket.route.present():
            for name, state in bucket.state.saved():
                found |= {f"{name}/{key}": value.clone() for key, value in state.tensors.items()}
    for place, layer in model.layers():
        found |= {f"{place}.{name}": value.clone() for name, value in layer.named_buffers()}
        found |= {f"{place}.{name}!": value.clone() for name, value in layer.named_parameters()}
    return found


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_skips_and_growth_follow_plain_torch(clip: float) -> None:
    scale = Scale(1024.0, interval=2)
    expected = train_with_masters(
        normed(), overflowing(1), 6, to=torch.float16, clip=clip, scale=scale
    )
    keys = {
        "weights": "float16",
        "loss_scale": 1024.0,
        "loss_scale_interval": 2,
    }
    config = configured(MICROBATCHES, precision=keys, optimizer={"clip": clip})
    outcomes = LocalWorld(2).run(lambda t: train_on_a_rank(t, normed(), overflowing(1), 6, config))
    assert all(str(outcome.losses) == str(expected.losses) for outcome in outcomes)
    parameters = {name: value for one in outcomes for name, value in one.parameters.items()}
    assert Outcome([], [], parameters) == without_losses(expected)
    assert scale.scale == 1024.0 * 0.5 * 2 * 2


def test_a_loss_that_overflows_skips_the_step_though_its_gradient_is_a_number() -> None:
    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, target)

    model = axrt.PipelineModule([axrt.LayerSpec(nn.Linear, 4, 1)], loss)
    config = configured(1, precision=FLOAT16)
    inputs = torch.full((2, 4), 60000.0)
    with axrt.initialize(model, config=config, transport=LocalWorld(1).alone()) as engine:
        for parameter in dict(engine.named_parameters()).values():
            with torch.no_grad():
                parameter.fill_(40000.0)
        result = engine.train_batch(iter([(inputs, torch.zeros(2, 1))]))
        assert not torch.tensor(result.loss).isfinite()
        assert result.skipped
        assert all(bool((parameter == 40000.0).all()) for _, parameter in engine.named_parameters())


@pytest.mark.parametrize("interval", [2000, 0])
def test_a_scale_ends_at_its_floor_unless_it_stays(interval: int) -> None:
    keys = {"loss_scale": 4.0, "loss_scale_floor": 2.0, "loss_scale_interval": interval}
    scale = LossScale(axrt.Config.read({"precision": {**FLOAT16, **keys}}).precision)
    scale.judge(0, overflowed=True)
    assert scale.of(1) == (2.0 if interval else 4.0)
    if not interval:
        scale.judge(1, overflowed=True)
        scale.judge(2, overflowed=False)
        assert scale.of(2) == scale.of(3) == 4.0
    else:
        with pytest.raises(axrt.NonFiniteLossError):
            scale.judge(1, overflowed=True)


@pytest.mark.parametrize("collectives", ["parts", "library"])
def test_replicas_divide_by_the_scale_of_the_step_while_it_grows(collectives: str) -> None:
    """The second replica divides when it steps, and has heard the vote by then."""
    batches = random_batches((6, 16), classes=5, microbatches=2 * MICROBATCHES)
    scale = Scale(16.0, interval=1)
    expected = train_with_masters(
        perceptron(),
        batches,
        STEPS,
        momentum,
        to=torch.float16,
        scale=scale,
        holder_of=lambda k: k // MICROBATCHES,
    )
    growing = {"loss_scale": 16.0, "loss_scale_interval": 1}
    found = on_ranks(
        4,
        {"weights": "float16", **growing},
        batches=batches,
        factory=momentum,
        pipes=2,
        parallel={"data": 2, "collectives": collectives},
        memory={"bucket_mb": 0.002},
    )
    assert without_losses(found) == without_losses(expected)
    assert scale.scale == 16.0 * 2.0**STEPS


def test_an_overflow_at_the_least_scale_ends_the_run() -> None:
    config = configured(
        MICROBATCHES, precision={**FLOAT16, "loss_scale": 2.0, "loss_scale_floor": 2.0}
    )
    engine = axrt.initialize(normed(), config=config, transport=LocalWorld(1).alone())
    with pytest.raises(axrt.NonFiniteLossError, match="overflowed at the least loss scale"):
        engine.train_batch(iter(overflowing(0)(0)))


def test_the_scale_is_in_checkpoints(tmp_path: Path) -> None:
    def rank_main(transport: Transport) -> list[tuple[float | None, float]]:
        config = configured(MICROBATCHES, precision={**FLOAT16, "loss_scale_interval": 3})
        told = []
        with axrt.initialize(normed(), adamw, config=config, transport=transport) as engine:
            for step in range(3):
                engine.train_batch(iter(overflowing(0)(step)))
            engine.save_checkpoint(tmp_path / "here")
            for step in range(3, 6):
                result = engine.train_batch(iter(BATCHES(step)))
                told.append((result.loss_scale, result.loss))
        with axrt.initialize(normed(), adamw, config=config, transport=transport) as engine:
            engine.load_checkpoint(tmp_path / "here")
            for step in range(3, 6):
                result = engine.train_batch(iter(BATCHES(step)))
                told.append((result.loss_scale, result.loss))
        return told

    told = LocalWorld(1).run(rank_main)[0]
    assert told[:3] == told[3:]
    assert [scale for scale, _ in told[:3]] == [128.0, 256.0, 256.0]


# What the user sees.


def test_a_factory_sees_masters_and_the_engine_lists_them() -> None:
    seen: list[tuple[str, torch.dtype, object]] = []

    def factory(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        seen.extend((name, p.dtype, getattr(p, "mark", None)) for name, p in pairs)
        assert all(p.is_leaf and type(p) is nn.Parameter for _, p in pairs)
        return torch.optim.SGD([p for _, p in pairs], lr=0.1)

    layer = nn.Linear(16, 5)
    layer.weight.mark = "mine"  # type: ignore[attr-defined]
    model = axrt.PipelineModule([layer], functional.cross_entropy)
    config = configured(MICROBATCHES, precision=BFLOAT16)
    with axrt.initialize(model, factory, config=config, transport=LocalWorld(1).alone()) as engine:
        assert seen == [("0.weight", torch.float32, "mine"), ("0.bias", torch.float32, None)]
        assert all(p.dtype == torch.float32 for _, p in engine.named_parameters())
        assert layer.weight.dtype == torch.bfloat16


def test_what_is_written_to_a_master_counts_from_the_next_call_on() -> None:
    def rank_main(transport: Transport, written: bool) -> float:
        config = configured(MICROBATCHES, precision=BFLOAT16)
        with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
            for _, parameter in engine.named_parameters() if written else ():
                with torch.no_grad():
                    parameter.zero_()
            return engine.eval_batch(iter(BATCHES(0))).loss

    assert LocalWorld(1).run(lambda t: rank_main(t, True))[0] == pytest.approx(
        torch.tensor(5.0).log().item(), rel=1e-3
    )
    assert LocalWorld(1).run(lambda t: rank_main(t, False))[0] != pytest.approx(1.609, rel=1e-3)


class Rotates(nn.Module):
    """Has a constant that narrow types round, a frozen weight, and a count that it changes."""

    angle: Tensor
    seen: Tensor
    times: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angle", torch.tensor([0.123456789]))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("times", torch.zeros(1))
        self.frozen = nn.Parameter(torch.tensor([1.000123]), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([1.0]))

    def forward(self, value: Tensor) -> Tensor:
        self.seen += 1
        self.times = self.times + 2  # another tensor
        rotated: Tensor = value * self.angle * self.frozen * self.scale
        return rotated


@pytest.mark.parametrize("gradients", ["float32", "weights"])
def test_modules_of_the_users_come_back_in_their_own_type(gradients: str) -> None:
    rotates, linear, norm = Rotates(), nn.Linear(16, 5), nn.LayerNorm(5)
    model = axrt.PipelineModule([rotates, linear, norm], functional.cross_entropy)
    precision = {**BFLOAT16, "gradients": gradients, "keep": ["LayerNorm"]}
    with axrt.initialize(
        model,
        adamw,
        config=configured(MICROBATCHES, precision=precision),
        transport=LocalWorld(1).alone(),
    ) as engine:
        before = linear.weight
        engine.train_batch(iter(BATCHES(0)))
        stepped = dict(engine.named_parameters())["1.weight"].detach().clone()
        assert rotates.angle.dtype == torch.bfloat16
        assert norm.weight.dtype == torch.float32
    assert linear.weight is before
    assert torch.equal(linear.weight, stepped)
    assert linear.weight.dtype == torch.float32
    assert float(rotates.angle) == float(torch.tensor(0.123456789))
    assert float(rotates.frozen) == float(torch.tensor(1.000123))
    assert float(rotates.seen) == MICROBATCHES
    assert float(rotates.times) == 2 * MICROBATCHES
    assert rotates.times.dtype == torch.float32
    inputs, target = BATCHES(0)[0]
    functional.cross_entropy(norm(linear(rotates(inputs))), target).backward()  # type: ignore[no-untyped-call]
    assert linear.weight.grad is not None
    assert not norm._forward_hooks
    assert not norm._forward_pre_hooks


def test_models_that_are_given_narrow_have_masters_too() -> None:
    def given() -> axrt.PipelineModule:
        torch.manual_seed(SEED)
        layers = [nn.Linear(16, 16).bfloat16(), nn.Linear(16, 5).bfloat16()]
        return axrt.PipelineModule(layers, functional.cross_entropy)

    model = given()
    with axrt.initialize(
        model,
        momentum,
        config=configured(MICROBATCHES, precision=BFLOAT16),
        transport=LocalWorld(1).alone(),
    ) as engine:
        engine.train_batch(iter(BATCHES(0)))
        masters = dict(engine.named_parameters())
        assert all(p.dtype == torch.float32 for p in masters.values())
        assert any(not torch.equal(p, p.bfloat16().float()) for p in masters.values())
    assert all(p.dtype == torch.bfloat16 for layer in model.layers for p in layer.parameters())  # type: ignore[union-attr]


def test_a_step_that_is_skipped_rounds_no_original(tmp_path: Path) -> None:
    rotates = Rotates()
    model = axrt.PipelineModule([rotates, nn.Linear(16, 5)], functional.cross_entropy)
    with axrt.initialize(
        model,
        config=configured(MICROBATCHES, precision={**FLOAT16, "loss_scale": 65536.0}),
        transport=LocalWorld(1).alone(),
    ) as engine:
        bad = [(inputs * 1e6, target) for inputs, target in BATCHES(0)]
        assert engine.train_batch(iter(bad)).skipped
    assert float(rotates.angle) == float(torch.tensor(0.123456789))
    assert float(rotates.seen) == 0


@pytest.mark.parametrize("weights", ["bfloat16", "float16"])
def test_running_means_are_saved_loaded_and_given_back(tmp_path: Path, weights: str) -> None:
    def given() -> tuple[nn.BatchNorm1d, axrt.PipelineModule]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16)
        return norm, axrt.PipelineModule([norm, nn.Linear(16, 5)], functional.cross_entropy)

    config = configured(MICROBATCHES, precision={**FLOAT16, "weights": weights})
    norm, model = given()
    with axrt.initialize(model, config=config, transport=LocalWorld(1).alone()) as engine:
        engine.train_batch(iter(BATCHES(0)))
        engine.save_checkpoint(tmp_path / "here")
        live = norm.running_mean.clone()  # type: ignore[union-attr]
        loss = engine.eval_batch(iter(BATCHES(1))).loss
    assert norm.running_mean.dtype == torch.float32  # type: ignore[union-attr]
    assert torch.equal(norm.running_mean, live.float())  # type: ignore[arg-type]
    assert bool(live.any())
    _, again = given()
    with axrt.initialize(again, config=config, transport=LocalWorld(1).alone()) as engine:
        engine.load_checkpoint(tmp_path / "here")
        assert engine.eval_batch(iter(BATCHES(1))).loss == loss


class Clamps(nn.Linear):
    """Changes its own weight."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(input)


def test_a_layer_that_changes_its_own_narrow_weight_is_refused() -> None:
    model = axrt.PipelineModule([axrt.LayerSpec(Clamps, 16, 5)], functional.cross_entropy)
    config = configured(MICROBATCHES, precision=BFLOAT16)
    engine = axrt.initialize(model, config=config, transport=LocalWorld(1).alone())
    with pytest.raises(axrt.ModelError, match="changed beside the optimizer"):
        engine.train_batch(iter(BATCHES(0)))


class Tells(nn.Linear):
    """Gives its state away detached, and has a count that checkpoints do not hold."""

    count: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        self.count += 1
        return super().forward(input)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, False)


def test_what_state_dicts_detach_is_saved_and_loaded_as_masters(tmp_path: Path) -> None:
    model = axrt.PipelineModule(
        [axrt.LayerSpec(Tells, 16, 16), axrt.LayerSpec(nn.Linear, 16, 5)], functional.cross_entropy
    )
    config = configured(MICROBATCHES, precision=BFLOAT16)
    with axrt.initialize(model, config=config, transport=LocalWorld(1).alone()) as engine:
        engine.train_batch(iter(BATCHES(0)))
        engine.save_checkpoint(tmp_path / "here")
        before = {name: p.detach().clone() for name, p in engine.named_parameters()}
        engine.train_batch(iter(BATCHES(1)))
        engine.load_checkpoint(tmp_path / "here")
        assert all(torch.equal(p, before[name]) for name, p in engine.named_parameters())
        (_, tells), _ = engine._model.layers()
        assert float(tells.count) == 2 * MICROBATCHES  # type: ignore[arg-type]


def test_kept_modules_that_are_given_narrow_are_float32_meanwhile() -> None:
    norm = nn.LayerNorm(16).bfloat16()
    model = axrt.PipelineModule([norm, nn.Linear(16, 5)], functional.cross_entropy)
    config = configured(MICROBATCHES, precision={**BFLOAT16, "keep": ["LayerNorm"]})
    with axrt.initialize(model, adamw, config=config, transport=LocalWorld(1).alone()) as engine:
        engine.train_batch(iter(BATCHES(0)))
        assert norm.weight.dtype == torch.float32
    assert norm.weight.dtype == torch.bfloat16
    assert not torch.equal(norm.weight, torch.ones(16).bfloat16())


def test_a_parameter_of_a_kept_module_and_another_one_is_refused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)
            self.head.weight = self.tokens.weight

    model = axrt.PipelineModule([axrt.LayerSpec(Both)], functional.cross_entropy)
    config = configured(MICROBATCHES, precision={**BFLOAT16, "keep": ["Embedding"]})
    with pytest.raises(axrt.ConfigError, match="weight of a Linear is also that of a module"):
        axrt.initialize(model, config=config, transport=LocalWorld(1).alone())


def test_a_class_within_a_kept_one_is_known() -> None:
    config = configured(MICROBATCHES, precision={**BFLOAT16, "keep": ["Block", "LayerNorm"]})
    with axrt.initialize(perceptron(), config=config, transport=LocalWorld(1).alone()) as engine:
        types = {p.dtype for _, layer in engine._model.layers() for p in layer.parameters()}
    assert types == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_class_that_no_module_has_is_refused_on_every_rank(ranks: int) -> None:
    def rank_main(transport: Transport) -> str:
        config = configured(MICROBATCHES, precision={**BFLOAT16, "keep": ["LayerNorm", "LayerNrm"]})
        with pytest.raises(axrt.ConfigError) as found:
            axrt.initialize(perceptron(), config=config, transport=transport)
        return str(found.value)

    for text in LocalWorld(ranks).run(rank_main):
        assert "no module of class LayerNrm; did you mean LayerNorm?" in text


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(axrt.ConfigError, match=r"expected precision.compute = 'float32'"):
        axrt.Config.read({"precision": {"weights": "bfloat16", "compute": "bfloat16"}})
    with pytest.raises(axrt.ConfigError, match=r"is below precision.loss_scale_floor"):
        axrt.Config.read({"precision": {"loss_scale": 1.0, "loss_scale_floor": 2.0}})


# Checkpoints.


@pytest.mark.parametrize(
    "then", [BFLOAT16, IN_WEIGHTS, FLOAT16, {}], ids=["same", "weights", "float16", "float32"]
)
def test_a_checkpoint_has_masters_and_goes_on_in_any_type(
    tmp_path: Path, then: dict[str, Any]
) -> None:
    def model() -> axrt.PipelineModule:
        return axrt.PipelineModule(
            [
                axrt.LayerSpec(Rotates),
                axrt.LayerSpec(nn.Linear, 16, 16),
                axrt.LayerSpec(nn.BatchNorm1d, 16),
                axrt.LayerSpec(nn.Linear, 16, 5),
            ],
            functional.cross_entropy,
        )

    def saved(transport: Transport) -> tuple[dict[str, Tensor], float]:
        config = configured(MICROBATCHES, precision=BFLOAT16)
        with axrt.initialize(model(), adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(BATCHES(0)))
            engine.save_checkpoint(tmp_path / "here")
            weights = {name: p.detach().clone() for name, p in engine.named_parameters()}
            return weights, engine.train_batch(iter(BATCHES(1))).loss

    def loaded(transport: Transport) -> tuple[dict[str, Tensor], float, list[Any]]:
        config = configured(MICROBATCHES, precision=then)
        with axrt.initialize(model(), adamw, config=config, transport=transport) as engine:
            engine.load_checkpoint(tmp_path / "here")
            weights = {name: p.detach().clone() for name, p in engine.named_parameters()}
            here = [b for _, layer in engine._model.layers() for b in layer.buffers()]
            full = engine._model.full()
            buffers = [full(buffer).clone() for buffer in here]
            return weights, engine.train_batch(iter(BATCHES(1))).loss, buffers

    before = LocalWorld(2).run(saved)
    after = LocalWorld(1).run(loaded)[0]
    weights = {name: value for of, _ in before for name, value in of.items()}
    assert after[0].keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in after[0].items())
    assert after[1] == pytest.approx(before[0][1], rel=2e-2)
    if then in (BFLOAT16, IN_WEIGHTS):
        assert after[1] == before[0][1]
    assert float(after[2][0]) == float(torch.tensor(0.123456789))
    assert [float(value) for value in after[2][1:3]] == [MICROBATCHES, 2 * MICROBATCHES]


def test_an_evaluation_computes_in_the_type_of_weights() -> None:
    def rank_main(transport: Transport, precision: dict[str, Any]) -> tuple[float, Any]:
        config = configured(MICROBATCHES, precision=precision)
        with axrt.initialize(perceptron(), config=config, transport=transport) as engine:
            found = engine.eval_batch(iter(BATCHES(0)), outputs=True)
            return found.loss, found.outputs

    narrow = LocalWorld(2).run(lambda t: rank_main(t, BFLOAT16))[0]
    wide = LocalWorld(2).run(lambda t: rank_main(t, {}))[0]
    assert narrow[0] == pytest.approx(wide[0], rel=1e-2)
    assert narrow[0] != wide[0]
    assert narrow[1][0].dtype == torch.bfloat16
