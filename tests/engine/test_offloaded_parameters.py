"""Weights in scratch, which come to the device for the tasks that read them: the bits of weights
that stay."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import axrt
from axrt.config import Config
from axrt.store.bucket import Bucket
from axrt.store.flat import is_hollow
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import first, swept
from .models import motley, perceptron
from .reference import (
    POLICIES,
    TWO_PIPES,
    Scale,
    adamw,
    configured,
    random_batches,
    together,
    train_on_a_rank,
    train_with_masters,
)
from .test_bits import MOTLEY_BATCHES
from .test_masters import without_losses
from .test_offload import (
    BATCHES,
    MICROBATCHES,
    OPTIMIZERS,
    SMALL,
    STEPS,
    TYPES,
    expected,
    on_ranks,
    on_ranks_once,
)
from .test_ties import MICROBATCHES as TIED_MICROBATCHES
from .test_ties import batches as tied_batches
from .test_ties import three_times
from .test_zero import check_equal
from .test_zero3 import Clamps, Replaces, reading

AWAY: dict[str, Any] = {"offload": "stream", "offload_parameters": True, "bucket_mb": SMALL}
CHUNKS = {"breadth-first": 4, "interleaved-1f1b": 4, "interleaved-zb": 4}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    """Copies run on threads of their own, beside the tasks."""
    yield f"disk:{tmp_path}"
    assert not list(tmp_path.iterdir()), "something is left in the directory"


def schedule(policy: str, ranks: int = 2) -> dict[str, Any]:
    return {"policy": policy, "chunks": CHUNKS.get(policy, 0) // min(ranks, 2)}


@swept(
    ("ranks", [2, 4]),
    ("policy", POLICIES),
    ("kind", TYPES),
    ("gathered, clip", [(1, 0.0), (2, 0.3), (3, 0.3), (2, 0.0)]),
    quick=5,
)
def test_every_policy_has_the_bits_of_plain_torch(
    ranks: int, policy: str, kind: str, gathered: int, clip: float, disk: str
) -> None:
    pipes = 2 if policy in TWO_PIPES else 1
    keys: dict[str, Any] = {
        "pipes": pipes,
        "schedule": schedule(policy, ranks),
        "optimizer": {"clip": clip},
    }
    room = max(gathered, 2) if pipes == 2 else gathered
    memory = {**AWAY, "scratch": disk, "gathered": room}
    found = on_ranks(ranks, memory, TYPES[kind], **keys)
    if pipes == 1:
        assert found == expected(TYPES[kind], clip=clip)
    else:
        assert found == on_ranks_once(ranks, {"bucket_mb": SMALL}, TYPES[kind], **keys)


@swept(
    ("kind", TYPES),
    ("optimizer", OPTIMIZERS),
    ("clip", [0.0, 0.3]),
    quick=4,
)
def test_every_optimizer_steps_what_is_in_scratch(
    kind: str, optimizer: str, clip: float, disk: str
) -> None:
    factory = OPTIMIZERS[optimizer]
    found = on_ranks(
        1,
        {**AWAY, "scratch": disk},
        TYPES[kind],
        factory=factory,
        schedule=schedule("breadth-first", 1),
        optimizer={"clip": clip},
    )
    assert found == expected(TYPES[kind], factory=factory, clip=clip)


@pytest.mark.parametrize("gradients", ["float32", "weights"])
def test_an_overflow_leaves_what_is_in_scratch_as_it_was(gradients: str, disk: str) -> None:
    """The third of five steps overflows: its state has come, and no weights have been made."""
    most = 2.0**18 if gradients == "float32" else 2.0**17  # that fits these batches
    precision = {"weights": "float16", "loss_scale": most, "gradients": gradients}
    precision |= {"loss_scale_interval": 2}
    config = configured(
        MICROBATCHES,
        memory={**AWAY, "scratch": disk},
        precision=precision,
        optimizer={"clip": 0.3},
        schedule=schedule("breadth-first"),
    )
    found = together(
        LocalWorld(2).run(lambda t: train_on_a_rank(t, perceptron(), BATCHES, 5, config))
    )
    of_plain = Scale(most, interval=2)
    in_weights = gradients == "weights"
    plain = train_with_masters(
        *(perceptron(), BATCHES, 5),
        to=torch.float16,
        scale=of_plain,
        clip=0.3,
        in_weights=in_weights,
    )
    assert of_plain.scale == 2 * most, "not the third step alone has overflowed"
    assert without_losses(found) == without_losses(plain)


@pytest.mark.parametrize("kind", first(TYPES))
@pytest.mark.parametrize("data", [1, 2])
def test_replicas_and_tied_weights(kind: str, data: int, disk: str) -> None:
    keys: dict[str, Any] = {
        "model": three_times,
        "batches": tied_batches(data),
        "microbatches": TIED_MICROBATCHES,
        "parallel": {"data": data},
        "schedule": schedule("breadth-first"),
    }
    plain, found = (
        on_ranks(2, memory, TYPES[kind], pipes=data, **keys)
        for memory in ({"bucket_mb": SMALL}, {**AWAY, "scratch": disk, "gathered": 1})
    )
    assert found == plain


@swept(
    ("recompute", ["none", "full"]),
    ("activations", [0, 6]),
    ("policy", ["breadth-first", "interleaved-zb", "adaptive"]),
)
def test_recomputation_and_activations_in_scratch(
    recompute: str, activations: int, policy: str, disk: str
) -> None:
    memory = {**AWAY, "scratch": disk, "recompute": recompute, "offload_activations": activations}
    found = on_ranks(2, memory, {}, schedule=schedule(policy))
    assert found == expected({})


def test_frozen_weights_and_layers_without_any(disk: str) -> None:
    plain, found = (
        on_ranks(3, memory, {}, model=motley, batches=MOTLEY_BATCHES)
        for memory in ({"bucket_mb": SMALL}, {**AWAY, "scratch": disk, "gathered": 1})
    )
    assert found == plain


@swept(
    ("kind", TYPES),
    ("policy", ["breadth-first", "interleaved-1f1b", "adaptive"]),
    ("gathered", [1, 2]),
    ("clip", [0.0, 0.4]),
)
def test_shards_are_gathered_from_scratch(
    kind: str, policy: str, gathered: int, clip: float, tmp_path: Path
) -> None:
    check_equal(
        2,
        2,
        clip=clip,
        precision=TYPES[kind],
        schedule=schedule(policy),
        zeros=[3],
        only={**AWAY, "reductions": 1, "gathered": gathered, "scratch": f"disk:{tmp_path}"},
    )


@swept(("policy", ["1f1b", "interleaved-zb", "adaptive"]), ("zero", [0, 3]))
def test_weights_that_others_read_change_no_bit(
    policy: str, zero: int, tmp_path: Path, landed: list[int]
) -> None:
    """A step is dropped, and there are evaluations."""
    batches = random_batches((6, 160), classes=5, microbatches=8)

    def on_a_rank(transport: Transport, memory: dict[str, Any]) -> dict[str, Tensor]:
        config = configured(
            4,
            memory={"bucket_mb": 0.05, **memory},
            parallel={"data": 2},
            schedule={"policy": policy, "chunks": 4 if policy == "interleaved-zb" else 0},
        )
        with axrt.initialize(reading(160), adamw, None, config, transport=transport) as engine:
            mine = slice(engine.data_rank * 4, engine.data_rank * 4 + 4)
            for step in range(2):
                engine.train_batch(iter(batches(step)[mine]) if engine.reads else None)
                engine.eval_batch(iter(batches(9)[:2]) if engine.reads else None)
                with pytest.raises(StopIteration):
                    engine.train_batch(iter(batches(7)[:3]) if engine.reads else None)
            engine.save_checkpoint(tmp_path / f"of-{len(memory)}")
            return {name: p.detach().clone() for name, p in engine.named_parameters()}

    memory = {**AWAY, "bucket_mb": 0.05, "zero": zero, "gathered": 1, "scratch": f"disk:{tmp_path}"}
    LocalWorld(4, seed=1).run(lambda t: on_a_rank(t, {}))
    LocalWorld(4, seed=2).run(lambda t: on_a_rank(t, memory))
    found = tmp_path / f"of-{len(memory)}"
    for file in sorted((tmp_path / "of-0").glob("*.safetensors")):
        assert file.read_bytes() == (found / file.name).read_bytes(), file.name
    assert landed


ROUTES: dict[str, dict[str, Any]] = {
    "device": {"offload": "none"},
    "state": {"offload": "stream"},
    "all": {"offload": "stream", "offload_parameters": True},
}


@swept(("kind", TYPES), ("saved", ROUTES), ("loaded", [*[*ROUTES][1:], "device"]))
def test_any_route_goes_on_from_what_any_other_has_saved(
    kind: str, saved: str, loaded: str, tmp_path: Path
) -> None:
    def run(route: str, steps: Sequence[int], folder: Path, load: bool) -> Any:
        memory = {"bucket_mb": SMALL, **ROUTES[route]}
        config = configured(
            MICROBATCHES, memory=memory, precision=TYPES[kind], schedule=schedule("breadth-first")
        )

        def on_a_rank(transport: Transport) -> list[float]:
            with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
                if load:
                    engine.load_checkpoint(folder)
                losses = [
                    engine.train_batch(iter(BATCHES(step)) if engine.reads else None).loss
                    for step in steps
                ]
                if not load:
                    engine.save_checkpoint(folder)
                return losses

        return LocalWorld(2).run(on_a_rank)[0]

    first_half = run(saved, [0, 1], tmp_path / "saved", load=False)
    whole = run("device", [0, 1, 2, 3], tmp_path / "whole", load=False)
    assert first_half + run(loaded, [2, 3], tmp_path / "saved", load=True) == whole


@pytest.mark.parametrize("kind", TYPES)
def test_looks_at_weights_and_writes_to_them_count(kind: str) -> None:
    def rank_main(transport: Transport, memory: dict[str, Any]) -> list[float]:
        config = configured(
            MICROBATCHES,
            memory={"bucket_mb": SMALL, **memory},
            precision=TYPES[kind],
            schedule=schedule("breadth-first"),
        )
        losses = []
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            for step in range(STEPS):
                losses.append(
                    engine.train_batch(iter(BATCHES(step)) if engine.reads else None).loss
                )
                with torch.no_grad():
                    for _, parameter in engine.named_parameters():
                        parameter.mul_(0.5)
                losses.append(
                    engine.eval_batch(iter(BATCHES(9)[:2]) if engine.reads else None).loss
                )
        return losses

    plain = LocalWorld(2).run(lambda transport: rank_main(transport, {}))
    assert LocalWorld(2).run(lambda transport: rank_main(transport, AWAY)) == plain


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_written_through_data_counts_and_two_looks_show_one_thing(kind: str) -> None:
    def rank_main(transport: Transport, memory: dict[str, Any]) -> list[float]:
        keys = {"bucket_mb": SMALL, **memory}
        config = configured(MICROBATCHES, memory=keys, precision=TYPES[kind])
        losses = []
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            for step in range(STEPS):
                losses.append(engine.train_batch(iter(BATCHES(step))).loss)
                for _, parameter in engine.named_parameters():
                    parameter.data.mul_(0.5)
                with torch.no_grad():
                    for _, parameter in engine.named_parameters():
                        parameter.add_(0.01)
                losses.append(engine.eval_batch(iter(BATCHES(9)[:2])).loss)
        return losses

    (plain,) = LocalWorld(1).run(lambda transport: rank_main(transport, {}))
    for memory in ({"offload": "stream"}, AWAY):
        assert LocalWorld(1).run(lambda t: rank_main(t, memory)) == [plain], memory  # noqa: B023


@pytest.mark.parametrize("fill", ["zero_", "data"])
def test_own_modules_may_not_be_filled_while_their_weights_are_away(fill: str) -> None:
    def on_a_rank(transport: Transport) -> None:
        layer = nn.Linear(16, 5)
        model = axrt.PipelineModule([layer], cross_entropy)
        config = configured(4, memory=AWAY)
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(BATCHES(0)[:4]))
            with torch.no_grad():
                (layer.weight.data if fill == "data" else layer.weight).zero_()
            engine.train_batch(iter(BATCHES(1)[:4]))

    with pytest.raises(axrt.ModelError, match="no memory.offload_parameters"):
        LocalWorld(1).run(on_a_rank)


def test_a_weight_that_numpy_has_seen_is_refused_with_what_to_do() -> None:
    def looks(module: nn.Module, *_: Any) -> None:
        module.weight.detach().numpy().std()  # type: ignore[operator]

    def on_a_rank(transport: Transport) -> None:
        layer = nn.Linear(16, 5)
        layer.register_forward_hook(looks)
        model = axrt.PipelineModule([layer], cross_entropy)
        config = configured(4, memory=AWAY)
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(BATCHES(0)[:4]))

    with pytest.raises(axrt.ModelError, match=r"clone\(\).numpy\(\)"):
        LocalWorld(1).run(on_a_rank)


@swept(("kind", ["float32", "bfloat16"]), ("zero", [3, 0]))
def test_modules_of_the_users_come_back_with_their_weights(kind: str, zero: int) -> None:
    def on_a_rank(transport: Transport, memory: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(1)
        layers = [nn.Linear(16, 16), nn.Linear(16, 5)]
        model = axrt.PipelineModule([layers[0], torch.tanh, layers[1]], cross_entropy)
        config = configured(2, memory=memory, precision=TYPES[kind], parallel={"data": 2})
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * 2, engine.data_rank * 2 + 2)
            for step in range(STEPS):
                engine.train_batch(iter(BATCHES(step)[mine]))
        return [p.detach().clone() for layer in layers for p in layer.parameters()]

    plain = LocalWorld(2).run(lambda t: on_a_rank(t, {"bucket_mb": SMALL}))
    found = LocalWorld(2).run(lambda t: on_a_rank(t, {**AWAY, "zero": zero}))
    for one, other in zip(plain, found, strict=True):
        assert all(torch.equal(*both) for both in zip(one, other, strict=True))


def test_layers_that_the_engine_has_built_have_no_values_when_it_is_closed() -> None:
    config = configured(4, memory=AWAY)
    with axrt.initialize(squares(2), adamw, config=config, transport=LocalWorld(1).alone()) as of:
        of.train_batch(iter([(torch.ones(4, 64), torch.ones(4, 64))] * 4))
        layers = [layer for _, layer in of._model.layers()]
    assert all(p.isnan().all() for layer in layers for p in layer.parameters())


# What is on the device.


def squares(count: int = 4) -> axrt.PipelineModule:
    return axrt.PipelineModule(
        [axrt.LayerSpec(nn.Linear, 64, 64, bias=False) for _ in range(count)],
        nn.functional.mse_loss,
    )


@swept(("kind", TYPES), ("gathered", [1, 2]))
def test_as_many_stages_have_weights_and_a_gradient_as_there_is_room_for(
    kind: str, gathered: int, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    """Looked at before each step and behind it; state and all else is in scratch."""
    buckets: list[Bucket] = []
    most = {"weights": 0, "gradients": 0}
    made, step = Bucket.__init__, Bucket.step

    def noting(bucket: Bucket, *args: Any, **keys: Any) -> None:
        made(bucket, *args, **keys)
        buckets.append(bucket)

    def looking(bucket: Bucket, number: int) -> None:
        here = [one for one in buckets if not is_hollow(one.named[0][1])]
        with_gradient = [one for one in buckets if one.gradient.sums]
        most["weights"] = max(most["weights"], len(here))
        most["gradients"] = max(most["gradients"], len(with_gradient))
        step(bucket, number)
        assert not bucket.gradient.sums

    monkeypatch.setattr(Bucket, "__init__", noting)
    monkeypatch.setattr(Bucket, "step", looking)
    config = configured(
        4,
        memory={**AWAY, "gathered": gathered, "scratch": disk},
        schedule={"policy": "breadth-first", "chunks": 8},
        precision=TYPES[kind],
    )
    with axrt.initialize(squares(8), adamw, config=config, transport=LocalWorld(1).alone()) as of:
        for _ in range(3):
            of.train_batch(iter([(torch.ones(4, 64), torch.ones(4, 64))] * 4))
            assert all(is_hollow(p) for bucket in buckets for _, p in bucket.named)
            assert not any(
                memory
                for bucket in buckets
                for memory in (bucket.gradient.sums, bucket.gradient.own_totals)
            )
    assert most["weights"] <= gathered
    assert 1 <= most["gradients"] <= gathered


@pytest.mark.parametrize("gathered", [1, 3])
def test_an_evaluation_has_no_more_stages_than_there_is_room_for(
    gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets: list[Bucket] = []
    most, made, begin = 0, Bucket.__init__, Bucket.begin_residency

    def noting(bucket: Bucket, *args: Any, **keys: Any) -> None:
        made(bucket, *args, **keys)
        buckets.append(bucket)

    def looking(bucket: Bucket) -> None:
        nonlocal most
        begin(bucket)
        most = max(most, sum(not is_hollow(one.named[0][1]) for one in buckets))

    monkeypatch.setattr(Bucket, "__init__", noting)
    config = configured(
        4,
        memory={**AWAY, "gathered": gathered},
        schedule={"policy": "breadth-first", "chunks": 8},
    )
    with axrt.initialize(squares(8), adamw, config=config, transport=LocalWorld(1).alone()) as of:
        monkeypatch.setattr(Bucket, "begin_residency", looking)
        of.eval_batch(iter([(torch.ones(4, 64), torch.ones(4, 64))] * 3))
        assert all(is_hollow(p) for bucket in buckets for _, p in bucket.named)
    assert most == gathered


# Refusals.


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [Clamps, Replaces])
def test_a_layer_that_writes_to_its_weights_is_refused(layer: type[nn.Linear], kind: str) -> None:
    def on_a_rank(transport: Transport) -> None:
        model = axrt.PipelineModule([axrt.LayerSpec(layer, 16, 5)], cross_entropy)
        config = configured(4, memory=AWAY, precision=TYPES[kind])
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(BATCHES(0)[:4]))

    with pytest.raises(axrt.ModelError, match=r"was written to.*no memory.offload_parameters"):
        LocalWorld(1).run(on_a_rank)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"memory": {"offload_parameters": True}}, "expected memory.offload = 'stream'"),
        ({"memory": {**AWAY, "offload": "cpu"}}, "expected memory.offload = 'stream'"),
        ({"memory": {**AWAY, "zero": 2}}, "expected memory.zero = 3, or 0"),
        ({"memory": AWAY, "run": {"compile": "eager"}}, "weights that are always there"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_set(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(axrt.ConfigError, match=text):
        Config.read(sections)
