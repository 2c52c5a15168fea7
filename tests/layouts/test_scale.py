"""A layout of thousands of ranks: what is alike is looked at once."""

from typing import Any

import pytest

from axrt.layouts.candidates import Saving, Shape
from axrt.layouts.step_time import StepTimes
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


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("shape", [Shape(1, 2, 20, 1, 4), Shape(2, 1, 20, 1, 4)])
def test_what_ranks_hold_at_least_is_no_more_than_they_do(shape: Shape, zero: int) -> None:
    of = search(cluster(5, 8))
    for recompute in ("none", "full"):
        found = of.in_shape(shape, policy="1f1b", recompute=recompute, zero=zero)
        assert found
        saving = Saving(recompute, "none")
        assert 0 < of._least_held(shape, zero, saving) <= found.prediction.most
