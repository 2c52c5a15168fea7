"""Every policy, placement, depth, partition and order of events has the bits of plain PyTorch."""

from collections.abc import Iterable

import pytest
import torch

import axrt
from axrt.transport.local import LocalWorld

from ..sweeps import swept
from .models import motley, perceptron
from .reference import (
    ONE_PIPE,
    Outcome,
    configured,
    plain_torch,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

MICROBATCHES, STEPS = 12, 3  # a multiple of any number of ranks here, as interleaved-1f1b wants it
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
MOTLEY_BATCHES = random_batches((6, 12), classes=4, microbatches=MICROBATCHES)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def on_ranks(
    ranks: int, seed: int, policy: str, partition: object = "uniform", model: str = "perceptron"
) -> Outcome:
    config = configured(
        MICROBATCHES, schedule={"policy": policy}, parallel={"partition": partition}
    )
    make, batches = (perceptron, BATCHES) if model == "perceptron" else (motley, MOTLEY_BATCHES)
    whole = make()
    return together(
        LocalWorld(ranks, seed).run(
            lambda transport: train_on_a_rank(transport, whole, batches, STEPS, config)
        )
    )


@pytest.fixture(scope="module")
def reference() -> Outcome:
    outcome = train_in_plain_torch(perceptron(), BATCHES, STEPS)
    assert outcome == train_in_plain_torch(perceptron(), BATCHES, STEPS), (
        "plain torch does not repeat itself here"
    )
    assert len(set(outcome.losses)) == STEPS
    return outcome


@swept(("ranks", [4, 3, 2, 1]), ("policy", ONE_PIPE), ("seed", range(3)), quick=6)
def test_every_policy_and_depth_has_the_bits_of_plain_torch(
    reference: Outcome, ranks: int, policy: str, seed: int
) -> None:
    assert on_ranks(ranks, seed, policy) == reference


@pytest.mark.parametrize(
    "partition", ["parameters", "type:block", [0, 1, 8], [0, 7, 8], [0, 0, 8], [0, 8, 8]]
)
def test_where_the_model_is_cut_changes_no_bit(reference: Outcome, partition: object) -> None:
    assert on_ranks(2, 0, "1f1b", partition) == reference


def test_a_run_repeats_itself_under_another_order_of_events() -> None:
    assert on_ranks(4, 1, "axonn") == on_ranks(4, 2, "axonn")


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_structured_activations_travel_without_changing_a_bit(ranks: int) -> None:
    reference = plain_torch(motley, MOTLEY_BATCHES, STEPS)
    assert reference == train_in_plain_torch(motley(), MOTLEY_BATCHES, STEPS)
    assert on_ranks(ranks, 0, "1f1b", model="motley") == reference


def test_another_seed_has_other_bits(reference: Outcome) -> None:
    config = configured(MICROBATCHES, run={"seed": 8})
    outcome = train_on_a_rank(LocalWorld(1).alone(), perceptron(), BATCHES, STEPS, config)
    assert outcome != reference


def test_parameter_groups_by_name_and_a_schedule_follow_plain_torch() -> None:
    def factory(named: object) -> torch.optim.Optimizer:
        pairs = list(named)  # type: ignore[call-overload]
        biases = [p for name, p in pairs if name.endswith("bias")]
        others = [p for name, p in pairs if not name.endswith("bias")]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}]
        return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1, momentum=0.9)

    def schedule(step: int) -> float:
        return 1 / (step + 1)

    reference = train_in_plain_torch(perceptron(), BATCHES, STEPS, factory, schedule)
    model, config = perceptron(), configured(MICROBATCHES)
    outcomes = LocalWorld(3).run(
        lambda transport: train_on_a_rank(
            transport, model, BATCHES, STEPS, config, factory, schedule
        )
    )
    assert together(outcomes) == reference


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.NAdam])
def test_an_optimizer_that_needs_whole_parameters_has_them(
    kind: type[torch.optim.Optimizer],
) -> None:
    def factory(named: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        return kind([parameter for _, parameter in named], lr=1e-2)  # type: ignore[call-arg]

    reference = train_in_plain_torch(perceptron(), BATCHES, STEPS, factory)
    config = configured(MICROBATCHES, memory={"bucket_mb": 0})
    outcomes = LocalWorld(2).run(
        lambda transport: train_on_a_rank(transport, perceptron(), BATCHES, STEPS, config, factory)
    )
    assert together(outcomes) == reference


def test_the_users_generator_is_left_alone_and_used_by_the_users_iterator() -> None:
    torch.manual_seed(3)
    expected = [torch.rand(1) for _ in range(2 * MICROBATCHES + 1)]
    torch.manual_seed(3)
    drawn = []

    def batches() -> object:
        while True:
            drawn.append(torch.rand(1))
            yield BATCHES(0)[0]

    stream = batches()
    with axrt.initialize(
        perceptron(), config=configured(MICROBATCHES), transport=LocalWorld(1).alone()
    ) as engine:
        for _ in range(2):
            engine.train_batch(stream)  # type: ignore[arg-type]
    assert [*drawn, torch.rand(1)] == expected
