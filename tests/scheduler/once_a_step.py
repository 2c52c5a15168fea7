"""What is tested alike of the tasks that an optimizer adds to a step: pipelines in any order of
events, and rules that lack a need."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.rules import Feature, Row, StageHere, features_of
from axrt.scheduler.task import AnyKind

from .pipelines import Pipeline, run_in_random_order

# Arguments of `run`.
ANY: dict[str, st.SearchStrategy[Any]] = {
    "name": st.sampled_from(["1f1b", "zb-v", "breadth-first", "dualpipe", "adaptive", "gpipe"]),
    "copies": st.integers(1, 3),
    "buckets": st.integers(1, 3),
    "seed": st.integers(),
}


def run(name: str, copies: int, buckets: int, seed: int, **keys: Any) -> Pipeline:
    """Run a pipeline to its end in a random order of events."""
    policy = policy_by_name(name, 8 if name == "adaptive" else 0)
    slots = seed % 3 % 2
    pipeline = Pipeline(policy, 2, 4, replicas=copies, buckets=buckets, slots=slots, **keys)
    run_in_random_order(pipeline, seed)
    assert pipeline.finished
    return pipeline


def counts(pipeline: Pipeline, *kinds: AnyKind) -> list[list[int]]:
    """How many tasks of each kind each rank has run."""
    return [
        [sum(task.kind is kind for task in of_rank) for kind in kinds] for of_rank in pipeline.ran
    ]


def attack(rule: Feature, change: Callable[[StageHere, Row], Row], **keys: Any) -> None:
    """Run pipelines one of whose rules gives other rows, in many orders of events."""

    def changed(here: StageHere) -> Any:
        return (change(here, row) for row in rule(here))

    def features(job: Job) -> list[Feature]:
        return [changed if feature is rule else feature for feature in features_of(job)]

    for seed in range(99):
        of = Pipeline(policy_by_name("1f1b"), 1, 2, steps=4, features=features, **keys)
        run_in_random_order(of, seed)
