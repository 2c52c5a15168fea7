"""Several stages a rank: the bits of plain PyTorch all the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import swept
from .models import motley, perceptron
from .reference import (
    Outcome,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)
from .test_engine import plain_evaluation
from .test_ties import batches as token_batches
from .test_ties import three_times

MICROBATCHES, STEPS = 4, 2
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)


def deep() -> axrt.PipelineModule:
    return perceptron(layers=12)


def on_ranks(
    ranks: int,
    policy: str,
    chunks: int,
    seed: int = 0,
    model: Any = deep,
    batches: Any = BATCHES,
    **sections: Any,
) -> Outcome:
    data = sections.get("parallel", {}).get("data", 1)
    config = configured(MICROBATCHES, schedule={"policy": policy, "chunks": chunks}, **sections)
    outcomes = LocalWorld(ranks * data, seed).run(
        lambda t: train_on_a_rank(t, model(), batches, STEPS, config)
    )
    return together(
        [Outcome(outcome.losses, outcomes[0].norms, outcome.parameters) for outcome in outcomes],
        data,
    )


@pytest.fixture(scope="module")
def reference() -> Outcome:
    return train_in_plain_torch(deep(), BATCHES, STEPS)


@swept(
    ("ranks, chunks", [(1, 1), (1, 3), (3, 2), (2, 2), (4, 3)]),
    ("policy", ["breadth-first", "interleaved-1f1b"]),
    ("seed", range(2)),
)
def test_looped_policies_have_the_bits_of_plain_torch(
    reference: Outcome, ranks: int, chunks: int, policy: str, seed: int
) -> None:
    if policy == "interleaved-1f1b" and MICROBATCHES % ranks:
        pytest.skip("it takes multiples of the ranks")
    assert on_ranks(ranks, policy, chunks, seed) == reference


@swept(("clip", [0.0, 0.5]), ("policy", ["interleaved-1f1b", "zb-v", "adaptive"]))
def test_clipping_buckets_and_empty_stages_change_no_bit(clip: float, policy: str) -> None:
    reference = train_in_plain_torch(deep(), BATCHES, STEPS, clip=clip)
    sections: dict[str, Any] = {
        "optimizer": {"clip": clip},
        "memory": {"bucket_mb": 0.001},
        "parallel": {"partition": [0, 5, 5, 9, 12]},
    }
    assert on_ranks(2, policy, 2, **sections) == reference


def test_structured_activations_pass_between_stages_of_one_rank() -> None:
    batches = random_batches((6, 12), classes=4, microbatches=MICROBATCHES)
    reference = train_in_plain_torch(motley(), batches, STEPS)
    for ranks, chunks in ((1, 2), (1, 8), (2, 3)):
        assert on_ranks(ranks, "breadth-first", chunks, model=motley, batches=batches) == reference
    for ranks in (1, 2, 4):
        assert on_ranks(ranks, "adaptive", 0, model=motley, batches=batches) == reference


def test_replicas_and_tied_weights_depend_on_their_number_alone() -> None:
    batches = random_batches((6, 16), classes=5, microbatches=2 * MICROBATCHES)
    expected = on_ranks(1, "gpipe", 0, batches=batches, parallel={"data": 2})
    assert on_ranks(2, "breadth-first", 3, batches=batches, parallel={"data": 2}) == expected
    assert on_ranks(2, "adaptive", 0, batches=batches, parallel={"data": 2}) == expected
    tokens = token_batches(MICROBATCHES // 4)
    alone = on_ranks(1, "1f1b", 0, model=three_times, batches=tokens)
    assert on_ranks(2, "interleaved-1f1b", 2, model=three_times, batches=tokens) == alone
    assert on_ranks(1, "breadth-first", 5, model=three_times, batches=tokens) == alone
    assert on_ranks(2, "zb-v", 0, model=three_times, batches=tokens) == alone


@pytest.mark.parametrize(
    "policy", ["breadth-first", "interleaved-1f1b", "zb-h1", "zb-v", "adaptive"]
)
def test_evaluations_drops_and_checkpoints_hold(policy: str, tmp_path: Any) -> None:
    items = BATCHES(9)[:3]
    expected = plain_evaluation(deep().sequential(7), items)

    def rank_main(transport: Transport) -> list[float]:
        config = configured(MICROBATCHES, schedule={"policy": policy})
        adamw = lambda named: torch.optim.AdamW(named, lr=1e-2)  # noqa: E731
        with axrt.initialize(deep(), adamw, config=config, transport=transport) as engine:
            assert engine.eval_batch(iter(items)).loss == expected
            first = engine.train_batch(iter(BATCHES(0))).loss
            with pytest.raises(StopIteration):
                engine.train_batch(iter(BATCHES(1)[:3]))
            engine.save_checkpoint(tmp_path / "a")
            second = engine.train_batch(iter(BATCHES(1))).loss
            engine.load_checkpoint(tmp_path / "a")
            assert engine.train_batch(iter(BATCHES(1))).loss == second
            return [first, second]

    losses = LocalWorld(2, seed=1).run(rank_main)
    assert losses == [train_in_plain_torch(deep(), BATCHES, 2).losses] * 2


def test_what_does_not_go_together_is_refused() -> None:
    for schedule, text in (
        ({"policy": "zb-v", "placement": "linear"}, "made for placement vee, not linear"),
        ({"policy": "1f1b", "placement": "looped"}, "made for placement linear, not looped"),
        (
            {"policy": "interleaved-1f1b", "microbatches": 5},
            "takes multiples of 2 ranks; set microbatches = 6, not 5",
        ),
    ):
        config = configured(MICROBATCHES, schedule=schedule)
        with pytest.raises(axrt.ConfigError, match=text):
            LocalWorld(2).run(
                lambda transport: axrt.initialize(deep(), config=config, transport=transport)  # noqa: B023
            )


class Positions(nn.Module):
    """For a batch of one the first gradient of `by` is a view of what came back, which the next
    stage's own product still reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.by = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(6, 16))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value.unsqueeze(0) * self.scale, value + self.by.unsqueeze(0)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = (self.linear(value[0]) + value[1]).squeeze(0)
        return out


@pytest.mark.parametrize("max_held", [0, 6])
def test_what_passes_between_stages_of_one_rank_is_read_before_anything_is_added_to_it(
    max_held: int,
) -> None:
    layers = [axrt.LayerSpec(Positions), axrt.LayerSpec(Joined), axrt.LayerSpec(nn.Linear, 16, 5)]
    model = axrt.PipelineModule(layers, functional.cross_entropy)
    config = configured(
        MICROBATCHES,
        schedule={"policy": "adaptive", "max_held": max_held},
        parallel={"partition": [0, 0, 1, 2, 3]},
    )
    reference = train_in_plain_torch(model, BATCHES, STEPS)
    for seed in range(2):
        assert (
            together(
                LocalWorld(2, seed).run(lambda t: train_on_a_rank(t, model, BATCHES, STEPS, config))
            )
            == reference
        )
