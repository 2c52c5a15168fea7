"""Optimizer steps on the host, where their state lives: the bits of steps on the device.

Nothing else takes this route: the way of gradients there and of weights back, and shards and groups
that take it.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
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
    Turns,
    expected,
    on_ranks,
    on_ranks_once,
)
from .test_ties import MICROBATCHES as TIED_MICROBATCHES
from .test_ties import batches as tied_batches
from .test_ties import three_times
from .test_zero import check_equal

CPU: dict[str, Any] = {"offload": "cpu", "bucket_mb": SMALL}


@swept(("ranks", [2, 4]), ("policy", POLICIES), ("kind", TYPES), quick=5)
def test_every_policy_has_the_bits_of_plain_torch(ranks: int, policy: str, kind: str) -> None:
    pipes, schedule = 2 if policy in TWO_PIPES else 1, {"policy": policy}
    found = on_ranks(ranks, CPU, TYPES[kind], pipes=pipes, schedule=schedule)
    if pipes == 1:
        assert found == expected(TYPES[kind])
    else:
        memory = {"bucket_mb": SMALL}
        assert found == on_ranks_once(ranks, memory, TYPES[kind], pipes=pipes, schedule=schedule)


@swept(("kind", TYPES), ("optimizer", OPTIMIZERS), ("clip", [0.0, 0.3]))
def test_every_optimizer_steps_on_the_host(kind: str, optimizer: str, clip: float) -> None:
    factory = OPTIMIZERS[optimizer]
    found = on_ranks(1, CPU, TYPES[kind], factory=factory, optimizer={"clip": clip})
    assert found == expected(TYPES[kind], factory=factory, clip=clip)


@pytest.mark.parametrize("kind", first(TYPES))
@pytest.mark.parametrize("collectives", ["parts", "library"])
def test_replicas_and_tied_weights(kind: str, collectives: str) -> None:
    keys: dict[str, Any] = {
        "model": three_times,
        "batches": tied_batches(2),
        "microbatches": TIED_MICROBATCHES,
        "parallel": {"data": 2, "collectives": collectives},
    }
    plain, found = (
        on_ranks(4, memory, TYPES[kind], pipes=2, **keys) for memory in ({"bucket_mb": SMALL}, CPU)
    )
    assert found == plain


def test_frozen_weights_and_layers_without_any() -> None:
    plain, found = (
        on_ranks(3, memory, {}, model=motley, batches=MOTLEY_BATCHES)
        for memory in ({"bucket_mb": SMALL}, CPU)
    )
    assert found == plain


@swept(
    ("kind", TYPES),
    ("zero", [1, 2, 3]),
    ("policy", ["1f1b", "breadth-first", "chimera"]),
    ("clip", [0.0, 0.4]),
)
def test_shards_step_on_the_host(kind: str, zero: int, policy: str, clip: float) -> None:
    check_equal(
        2,
        2,
        pipes=2 if policy in TWO_PIPES else 1,
        clip=clip,
        precision=TYPES[kind],
        schedule={"policy": policy},
        zeros=[zero],
        only={"reductions": 1, "offload": "cpu"},
    )


@pytest.mark.parametrize("memory", [{}, {"zero": 1}], ids=["replicas", "shards"])
@pytest.mark.parametrize("kind", first(TYPES))
def test_replicas_in_groups_step_on_the_host(kind: str, memory: dict[str, Any]) -> None:
    keys: dict[str, Any] = {
        "batches": random_batches((6, 16), classes=5, microbatches=16),
        "microbatches": 4,
        "pipes": 4,
        "parallel": {"data": 4, "group": 2},
        "optimizer": {"clip": 0.4},
    }
    plain, found = (
        on_ranks(4, {"bucket_mb": SMALL, **memory, "offload": offload}, TYPES[kind], **keys)
        for offload in ("none", "cpu")
    )
    assert found == plain


@swept(("gradients", ["float32", "weights"]), ("recompute", ["full", "none"]))
def test_an_overflow_leaves_weights_moments_and_counts_as_they_were(
    gradients: str, recompute: str
) -> None:
    """The third of five steps overflows."""
    most = 2.0**18 if gradients == "float32" else 2.0**17  # that fits these batches
    precision = {"weights": "float16", "loss_scale": most, "gradients": gradients}
    precision |= {"loss_scale_interval": 2}
    memory = {**CPU, "recompute": recompute}
    config = configured(MICROBATCHES, memory=memory, precision=precision, optimizer={"clip": 0.3})
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
        clip=0.3,
        in_weights=gradients == "weights",
    )
    assert of_plain.scale == 2 * most, "not the third step alone has overflowed"
    assert without_losses(found) == without_losses(plain)


@pytest.mark.parametrize("kind", TYPES)
def test_moments_that_change_their_type_and_gradients_that_are_kept(kind: str) -> None:
    factory = lambda named: Turns([p for _, p in named], lr=0.1)  # noqa: E731
    plain, found = (
        on_ranks(1, memory, TYPES[kind], factory=factory, optimizer={"clip": 0.5})
        for memory in ({"bucket_mb": SMALL}, CPU)
    )
    assert found == plain


# Between steps.


@pytest.mark.parametrize("kind", TYPES)
def test_evaluations_ends_of_data_and_looks_at_weights_change_nothing(kind: str) -> None:
    def rank_main(transport: Transport, disturbed: bool) -> dict[str, Tensor]:
        memory = CPU if disturbed else {"bucket_mb": SMALL}
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


ROUTES: dict[str, dict[str, Any]] = {
    "device": {"offload": "none"},
    "slots": {"offload": "stream"},
    "host": {"offload": "cpu"},
}


@swept(("kind", TYPES), ("saved", ROUTES), ("loaded", [*[*ROUTES][1:], "device"]))
def test_any_route_goes_on_from_what_any_other_has_saved(
    kind: str, saved: str, loaded: str, tmp_path: Path
) -> None:
    def run(route: str, steps: Sequence[int], folder: Path, load: bool) -> Any:
        memory = {"bucket_mb": SMALL, **ROUTES[route]}
        config = configured(MICROBATCHES, memory=memory, precision=TYPES[kind])

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


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_modules_of_the_users_come_back_with_the_weights_of_masters(kind: str) -> None:
    def given() -> axrt.PipelineModule:
        torch.manual_seed(1)
        layers: list[Any] = [nn.Linear(16, 16), torch.tanh, nn.Linear(16, 5)]
        return axrt.PipelineModule(layers, nn.functional.cross_entropy)

    found = []
    for memory in ({}, CPU):
        model: Any = given()
        config = configured(MICROBATCHES, memory=memory, precision=TYPES[kind])
        train_on_a_rank(LocalWorld(1).alone(), model, BATCHES, STEPS, config)
        found.append([p for place in (0, 2) for p in model.layers[place].parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_steps_run_on_a_thread_of_their_own() -> None:
    names = set()

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            names.add(threading.current_thread().name)
            return super().step(closure)

    def steppers(memory: dict[str, Any]) -> set[str]:
        names.clear()
        factory = lambda named: Noting([p for _, p in named], lr=0.1)  # noqa: E731
        train_on_a_rank(
            LocalWorld(1).alone(),
            perceptron(),
            BATCHES,
            1,
            configured(MICROBATCHES, memory=memory),
            factory,
        )
        return names - {threading.current_thread().name}

    assert steppers(CPU) == {"axrt steps"}
    assert steppers({"offload": "none"}) == set()


def test_an_error_of_the_optimizer_ends_the_call() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if all(p.numel() > 200 for group in self.param_groups for p in group["params"]):
                raise ArithmeticError("no such number")
            return super().step(closure)

    factory = lambda named: Fails([p for _, p in named], lr=0.1)  # noqa: E731
    with pytest.raises(ArithmeticError, match="no such number"):
        on_ranks(1, {**CPU, "bucket_mb": 0.0}, {}, factory=factory)
