"""A layout of thousands of ranks: what is alike is looked at once."""

from typing import Any

import pytest

from axrt.layouts.candidates import Saving, Shape
from axrt.layouts.step_time import StepTimes
from axrt.ledger.ledger import Purpose
from axrt.planning import step_prediction
from axrt.scheduler.job import Job

from .test_search import cluster, layers_of, search


def test_replicas_and_members_are_told_apart_by_what_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,048 ranks: 512 replicas of two teams of two."""
    jobs: list[Job] = []
    simulate: Any = vars(step_prediction)["simulate"]

    def noted(job: Job, *arguments: Any, **keys: Any) -> Any:
        jobs.append(job)
        return simulate(job, *arguments, **keys)

    monkeypatch.setattr(step_prediction, "simulate", noted)
    of = search(cluster(256, 8))
    of.times = StepTimes(cluster(256, 8), layers_of)
    found = of.in_shape(Shape(2, 2, 512, 1, 4), policy="1f1b", fill="never", zero=1)
    assert found
    assert {(job.replicas, job.team, job.ranks) for job in jobs} == {(1, 1, 2)}
    prediction = found.prediction
    assert prediction.size == 2048
    assert len(prediction.different) < 40
    every = [prediction.of_rank(rank) for rank in range(prediction.size)]
    assert {id(one) for one in every} == {id(one) for one in prediction.different}
    assert prediction.most == max(one.total() for one in every)
    assert prediction.most == every[prediction.fullest].total()
    assert all(one.total() < prediction.most for one in every[: prediction.fullest])


LASTING = (Purpose.WEIGHTS, Purpose.MASTERS, Purpose.MOMENTS)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("shape", [Shape(1, 2, 20, 1, 4), Shape(2, 1, 20, 1, 4)])
def test_what_ranks_hold_at_least_is_what_no_policy_changes(shape: Shape, zero: int) -> None:
    of = search(cluster(5, 8))
    found = of.in_shape(shape, policy="1f1b", recompute="none", zero=zero)
    assert found
    ledgers = [found.prediction.ledger_of(0, rank, 0) for rank in range(shape.pipe)]
    held = sum(one.of_purpose(purpose) for one in ledgers for purpose in LASTING) / shape.pipe
    kept = sum(layer.stash_bytes for layer in layers_of(shape.tensor, 1)) / shape.pipe
    again = of._least_held(shape, zero, Saving("full", "none"))
    assert again == pytest.approx(held, rel=0.05)
    assert of._least_held(shape, zero, Saving("none", "none")) == pytest.approx(again + kept)
    assert again + kept < found.prediction.most
