"""Gradients that a library adds up, by tickets, on ranks in one process; tests/mpi has the
library."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import axrt
from axrt.observe.observer import Observer
from axrt.scheduler.message import Meaning
from axrt.scheduler.task import Kind, Task
from axrt.transport.control import News
from axrt.transport.local import LocalWorld
from axrt.transport.local_collectives import LocalCollectives, Meeting

from ..sweeps import first, swept
from .models import motley, perceptron
from .reference import (
    ONE_PIPE,
    POLICIES,
    TWO_PIPES,
    Outcome,
    configured,
    made_once,
    random_batches,
    together,
    train_on_a_rank,
)
from .test_ties import MICROBATCHES as TIED_MICROBATCHES
from .test_ties import batches as tied_batches
from .test_ties import tied

MICROBATCHES, STEPS = 4, 2


def outcome(
    collectives: str, pipe: int, data: int, seed: int = 0, model: Any = perceptron, **sections: Any
) -> Outcome:
    batches = random_batches((6, 16), classes=5, microbatches=MICROBATCHES * data)
    parallel = {"data": data, "collectives": collectives, **sections.pop("parallel", {})}
    config = configured(MICROBATCHES, parallel=parallel, **sections)
    pipes = data * (2 if sections.get("schedule", {}).get("policy") in TWO_PIPES else 1)
    return together(
        LocalWorld(pipe * data, seed=seed).run(
            lambda transport: train_on_a_rank(transport, model(), batches, STEPS, config)
        ),
        pipes,
    )


outcome_once = made_once(outcome)


@swept(
    ("policy", POLICIES),
    ("data", [2, 3]),
    ("sections", [{}, {"optimizer": {"clip": 0.5}}, {"memory": {"bucket_mb": 0.001}}]),
    quick=4,
)
def test_a_library_has_the_sums_of_parts_under_any_order_of_messages(
    policy: str, data: int, sections: dict[str, Any]
) -> None:
    schedule = {"policy": policy}
    parts = outcome_once("parts", 2, data, schedule=schedule, **sections)
    for seed in range(2):
        library = outcome("library", 2, data, seed, schedule=schedule, **sections)
        if data == 2 and policy in ONE_PIPE:  # two holders: one addition
            assert library == parts
        assert_close(library, parts)


@swept(
    ("zero", [1, 2, 3]),
    ("policy, data", [("1f1b", 3), ("zb-h1", 2), ("interleaved-1f1b", 3), ("chimera", 2)]),
    (
        "sections",
        [
            {},
            {"optimizer": {"clip": 0.5}},
            {"precision": {"weights": "bfloat16", "gradients": "weights"}},
        ],
    ),
    quick=4,
)
def test_a_library_adds_shards_up(
    zero: int, policy: str, data: int, sections: dict[str, Any]
) -> None:
    """By a reduce-scatter, with the sums of parts; weights of shards come by messages."""
    memory = {"zero": zero, "reductions": 1 if zero > 1 else 0, "bucket_mb": 4 / 1024}
    keys = {"schedule": {"policy": policy}, "memory": memory, **sections}
    parts = outcome("parts", 2, data, **keys)
    for seed in range(2):
        library = outcome("library", 2, data, seed, **keys)
        if data == 2 and policy in ONE_PIPE:
            assert library.parameters.keys() == parts.parameters.keys()
            for name, value in parts.parameters.items():
                assert torch.equal(library.parameters[name], value), name
        else:
            assert_close(library, parts)


def assert_close(one: Outcome, other: Outcome) -> None:
    """A library adds up in the order of ranks, parts in that of pipes."""
    torch.testing.assert_close(one.losses, other.losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(one.parameters, other.parameters, rtol=1e-6, atol=1e-6)


class Sometimes(nn.Module):
    """Uses one of two layers, by the sign of what comes; the other one has no gradient then."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.up if value.sum() > 0 else self.down)(value)
        return out


def sometimes() -> axrt.PipelineModule:
    return axrt.PipelineModule(
        [axrt.LayerSpec(Sometimes), axrt.LayerSpec(nn.Linear, 16, 5)], functional.cross_entropy
    )


@pytest.mark.parametrize("seed", first(range(3)))
def test_a_parameter_that_some_rank_has_used_gets_a_gradient_on_all(seed: int) -> None:
    assert outcome("library", 1, 3, seed, sometimes) == outcome("parts", 1, 3, seed, sometimes)


def test_an_end_of_data_drops_the_step_and_training_goes_on() -> None:
    batches = random_batches((6, 12), classes=4, microbatches=2 * MICROBATCHES)

    def rank_main(transport: Any) -> list[float]:
        config = configured(MICROBATCHES, parallel={"data": 2, "collectives": "library"})
        with axrt.initialize(motley(), config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            losses = [engine.train_batch(iter(batches(0)[mine])).loss]
            with pytest.raises(StopIteration):  # the second replica has one too few
                engine.train_batch(iter(batches(1)[mine][: MICROBATCHES - engine.data_rank]))
            losses.append(engine.train_batch(iter(batches(2)[mine])).loss)
            return losses

    first, second = LocalWorld(2, seed=5).run(rank_main)
    assert first == second


class InOrder(Observer):
    """Notes what starts and what is sent, in one order."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def started(self, task: Task) -> None:
        self.seen.append(task.kind)

    def sent(self, rank: int, message: News, payload: object) -> None:
        self.seen.append(message[0])


def test_a_turn_leaves_before_a_task_that_may_take_long() -> None:
    noted = InOrder()
    batches = random_batches((6, 16), classes=5, microbatches=2 * MICROBATCHES)
    config = configured(
        MICROBATCHES,
        parallel={"data": 2, "collectives": "library"},
        memory={"bucket_mb": 0.001},
    )
    LocalWorld(2, seed=1).run(
        lambda transport: train_on_a_rank(
            transport,
            perceptron(),
            batches,
            STEPS,
            config,
            observers=[noted] if transport.rank == 0 else [],
        )
    )
    begun = [place for place, what in enumerate(noted.seen) if what is Kind.ANNOUNCE]
    assert len(begun) > STEPS
    for place in begun:
        until = noted.seen.index(Meaning.TICKET, place)
        assert set(noted.seen[place:until]) <= {Kind.ANNOUNCE, Kind.COLLECT, Meaning.READY}


def test_ranks_that_issue_in_another_order_are_found_out() -> None:
    meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}
    first, second = (LocalCollectives(rank, meetings).group((0, 1)) for rank in range(2))
    first.all_reduce(torch.zeros(3), "bucket 0")
    with pytest.raises(AssertionError, match="rank 1 issues all_reduce of bucket 1.* as number 0"):
        second.all_reduce(torch.zeros(3), "bucket 1")


@swept(
    ("policy", ["1f1b", "zb-h1", "chimera"]),
    ("sections", [{}, {"optimizer": {"clip": 0.3}}, {"memory": {"bucket_mb": 0.0001}}]),
)
def test_tied_weights_are_added_up_by_messages_and_the_rest_by_the_library(
    policy: str, sections: dict[str, Any]
) -> None:
    outcomes = [
        LocalWorld(4, seed=3).run(
            lambda transport: train_on_a_rank(
                transport,
                tied(),
                tied_batches(replicas=2),
                STEPS,
                configured(
                    TIED_MICROBATCHES,
                    parallel={"data": 2, "collectives": collectives},  # noqa: B023
                    schedule={"policy": policy},
                    **sections,
                ),
            )
        )
        for collectives in ("parts", "library")
    ]
    for parts, library in zip(*outcomes, strict=True):
        assert_close(library, parts)


def test_evaluations_and_loaded_checkpoints_lie_between_the_librarys_steps(tmp_path: Path) -> None:
    batches = random_batches((6, 12), classes=4, microbatches=2 * MICROBATCHES)

    def rank_main(transport: Any, collectives: str) -> list[float]:
        config = configured(MICROBATCHES, parallel={"data": 2, "collectives": collectives})
        with axrt.initialize(motley(), config=config, transport=transport) as engine:
            mine = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)

            def train(step: int) -> float:
                return engine.train_batch(iter(batches(step)[mine])).loss

            losses = [train(0)]
            engine.save_checkpoint(tmp_path / collectives)
            losses += [train(1), engine.eval_batch(iter(batches(9)[mine])).loss, train(2)]
            engine.load_checkpoint(tmp_path / collectives)
            return [*losses, train(1)]

    by_parts, by_library = (
        LocalWorld(2, seed=5).run(lambda transport: rank_main(transport, collectives))  # noqa: B023
        for collectives in ("parts", "library")
    )
    assert by_library == by_parts
    assert by_library[0][1] == by_library[0][-1]
