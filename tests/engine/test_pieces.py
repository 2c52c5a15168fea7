"""Buckets that leave one by one: which leaves when, and that no bit depends on it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.model.stage import Stage
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.task import Kind, Task
from axrt.transport import Transport
from axrt.transport.control import News
from axrt.transport.local import LocalWorld

from ..sweeps import first, swept
from .models import perceptron
from .reference import (
    Outcome,
    configured,
    made_once,
    random_batches,
    together,
    train_on_a_rank,
)
from .test_engine import Watch
from .test_ties import MICROBATCHES as TIED
from .test_ties import batches as tied_batches
from .test_ties import tied

MICROBATCHES, STEPS = 4, 2
SMALL, LARGE = 1e-6, 1000.0  # MiB: a bucket a parameter, a bucket a stage
POLICIES = ("1f1b", "gpipe", "zb-h1", "adaptive", "breadth-first", "merak")


def batches_for(replicas: int) -> Any:
    return random_batches((6, 16), classes=5, microbatches=MICROBATCHES * replicas)


def trained(
    pipe: int, bucket_mb: float, policy: str, seed: int = 0, memory: dict[str, Any] | None = None
) -> Outcome:
    config = configured(
        MICROBATCHES,
        parallel={"data": 2, "pipe": pipe},
        schedule={"policy": policy},
        memory={"bucket_mb": bucket_mb, **(memory or {})},
        optimizer={"clip": 0.5},
    )
    outcomes = LocalWorld(2 * pipe, seed).run(
        lambda transport: train_on_a_rank(transport, perceptron(), batches_for(2), STEPS, config)
    )
    return together(outcomes, 2)


trained_once = made_once(trained)


@swept(("policy", POLICIES), ("pipe", [2, 1]))
def test_the_size_of_buckets_changes_no_bit(policy: str, pipe: int) -> None:
    whole = trained_once(pipe, LARGE, policy)
    assert trained(pipe, SMALL, policy, seed=pipe) == whole
    assert trained(pipe, 0.002, policy, seed=5) == whole


@pytest.mark.parametrize("recompute", ["full", 1])
def test_nor_where_forwards_run_again(recompute: str | int) -> None:
    """On two ranks a pipeline: a rank that holds one microbatch recomputes nothing."""
    plain = trained_once(2, LARGE, "1f1b")
    for bucket_mb in (SMALL, LARGE):
        assert trained(2, bucket_mb, "1f1b", memory={"recompute": recompute}) == plain


class WhenPartsLeave(Watch):
    """How many pieces of a step's last backward had started when each part was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces_before: list[int] = []
        self._pieces = 0

    def started(self, task: Task) -> None:
        if task.kind in (Kind.BACKWARD, Kind.WEIGHT) and task.microbatch == MICROBATCHES - 1:
            self._pieces += 1

    def sent(self, rank: int, message: News, payload: object) -> None:
        if isinstance(message, Message) and message.meaning is Meaning.PART:
            self.pieces_before.append(self._pieces)


@pytest.mark.parametrize(("policy", "pieces"), [("1f1b", 5), ("zb-h1", 9)])
def test_a_bucket_leaves_with_the_piece_that_completes_it(policy: str, pieces: int) -> None:
    """A whole backward has a piece a layer, a weight gradient one for each nn.Linear."""
    layers = 5
    watches = [WhenPartsLeave(), WhenPartsLeave()]
    config = configured(
        MICROBATCHES,
        parallel={"data": 2},
        schedule={"policy": policy, "placement": "linear"},
        memory={"bucket_mb": SMALL},
    )

    def rank_main(transport: Transport) -> None:
        engine = axrt.initialize(
            perceptron(layers=layers),
            config=config,
            transport=transport,
            observers=[watches[transport.rank]],
        )
        with engine:
            items = batches_for(2)(0)[transport.rank * MICROBATCHES :][:MICROBATCHES]
            engine.train_batch(iter(items))

    LocalWorld(2).run(rank_main)
    for watch in watches:
        assert watch.pieces_before == sorted(watch.pieces_before)
        assert watch.pieces_before[0] == 1, "the last layer's weights leave with the first piece"
        assert len(set(watch.pieces_before)) == pieces


class Boxes(nn.Module):
    """Hands on an object that may not travel between stages, but within one."""

    def forward(self, value: Tensor) -> object:
        return type("Box", (), {"value": value})()


class Opens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 5)

    def forward(self, box: Any) -> Tensor:
        return self.linear(box.value)  # type: ignore[no-any-return]


def test_a_stage_is_not_cut_where_what_a_layer_hands_on_cannot_travel() -> None:
    def outcome(bucket_mb: float) -> Outcome:
        layers = [axrt.LayerSpec(nn.Linear, 16, 16), axrt.LayerSpec(Boxes), axrt.LayerSpec(Opens)]
        model = axrt.PipelineModule(layers, nn.functional.cross_entropy)
        config = configured(MICROBATCHES, parallel={"data": 2}, memory={"bucket_mb": bucket_mb})
        return together(
            LocalWorld(2).run(lambda t: train_on_a_rank(t, model, batches_for(2), STEPS, config)), 2
        )

    assert outcome(SMALL) == outcome(LARGE)


class Borrows(nn.Module):
    """Uses the weight of a later layer, which it does not list."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self._lender = [lender]
        self.own = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        return self.own(value @ self._lender[0].weight)  # type: ignore[no-any-return, operator]


class Lends(nn.Module):
    """Holds a weight, and uses it or not."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.weight, self.other, self._uses = nn.Parameter(torch.eye(4)), nn.Linear(4, 4), uses

    def forward(self, value: Tensor) -> Tensor:
        return self.other(value @ self.weight if self._uses else value)  # type: ignore[no-any-return]


class Keeps(nn.Module):
    """Keeps what came in for a later layer."""

    def __init__(self, box: dict[str, Tensor]) -> None:
        super().__init__()
        self.box, self.linear = box, nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        self.box["kept"] = value
        return torch.tanh(self.linear(value))


class Adds(nn.Module):
    """Has buffers that change in place, and one that is put there anew."""

    count: Tensor

    def __init__(self, box: dict[str, Tensor]) -> None:
        super().__init__()
        self.box, self.norm = box, nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.norm(value) / self.count + self.box["kept"]  # type: ignore[no-any-return]


def borrowing(uses: bool) -> list[nn.Module]:
    lender = Lends(uses)
    return [Borrows(lender), nn.Linear(4, 4), lender]


def skipping() -> list[nn.Module]:
    box: dict[str, Tensor] = {}
    return [nn.Linear(4, 4), Keeps(box), nn.Linear(4, 4), Adds(box), nn.Linear(4, 4)]


@swept(
    ("layers", [lambda: borrowing(True), lambda: borrowing(False), skipping]),
    ("policy, microbatches", [("1f1b", 3), ("zb-h1", 1), ("1f1b", 1), ("zb-h1", 3)]),
    quick=6,
)
def test_layers_that_know_each_other_have_the_bits_of_one_bucket(
    layers: Any, policy: str, microbatches: int
) -> None:
    def outcome(bucket_mb: float) -> list[list[float]]:
        def rank_main(transport: Transport) -> list[list[float]]:
            torch.manual_seed(0)
            model = axrt.PipelineModule(
                layers(), lambda out, target: (out - target).square().mean()
            )
            config = configured(
                microbatches,
                parallel={"data": 2},
                memory={"bucket_mb": bucket_mb},
                schedule={"policy": policy},
            )
            own = torch.Generator().manual_seed(1 + transport.rank)
            with axrt.initialize(model, config=config, transport=transport) as engine:
                for _ in range(STEPS):
                    items = [
                        (torch.randn(3, 4, generator=own), torch.zeros(3, 4))
                        for _ in range(microbatches)
                    ]
                    engine.train_batch(iter(items))
                values = (*model.layers[0].parameters(), *model.layers[-1].parameters())  # type: ignore[union-attr]
                return [value.flatten().tolist() for value in values]

        return LocalWorld(2).run(rank_main)[0]

    assert outcome(SMALL) == outcome(LARGE)


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", first(range(6), quick=3))
def test_a_call_does_not_return_before_the_last_piece(policy: str, seed: int) -> None:
    """The last piece of a stage that begins with layers without weights completes no bucket."""
    linear = axrt.LayerSpec(nn.Linear, 8, 8)
    layers = [linear, linear, axrt.LayerSpec(nn.ReLU), linear, axrt.LayerSpec(nn.Linear, 8, 5)]
    batches = random_batches((3, 8), classes=5, microbatches=4)

    def rank_main(transport: Transport) -> None:
        model = axrt.PipelineModule(layers, nn.functional.cross_entropy, partition_method=[0, 2, 5])
        config = configured(
            2,
            parallel={"data": 2, "pipe": 2},
            schedule={"policy": policy},
            memory={"bucket_mb": SMALL},
        )
        with axrt.initialize(model, config=config, transport=transport) as engine:
            for step in range(3):
                mine = batches(step)[2 * engine.data_rank :][:2]
                engine.train_batch(iter(mine))
                stages = engine._model.stages.values()
                assert not any(stage._open for stage in stages if isinstance(stage, Stage))

    LocalWorld(4, seed).run(rank_main)


def test_nothing_is_expected_for_ever() -> None:
    """With tied weights on one rank some sums never pass the transport."""

    def rank_main(transport: Any) -> None:
        config = configured(TIED, parallel={"data": 2})
        engine = axrt.initialize(tied(), config=config, transport=transport)
        with engine:
            for step in range(STEPS):
                mine = tied_batches(2)(step)[transport.rank * TIED :][:TIED]
                engine.train_batch(iter(mine))
            assert not transport._landings._buffers

    LocalWorld(2).run(rank_main)
