"""The table of work against the brain that had a branch for each kind: every span and every pause is the same."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from axrt.scheduler.job import Job
from axrt.scheduler.policies import NAMES, Nested, named, placement_for
from axrt.scheduler.recompute import recomputed_shares
from axrt.scheduler.simulator import Costs, Edge, Work, simulate

from .old import policies as old_policies
from .old import simulator as old

_SIZES = ((1, 2), (2, 4), (3, 6), (4, 8), (4, 4), (2, 2), (6, 18))
_COSTS: dict[str, dict[str, Any]] = {
    "steady": {},
    "varied": {"jitter": 0.4, "edge": (0.3, 2.0), "sent": 0.5, "bucket": 3.0},
    "hiccups": {"hiccups": (0.1, 5.0), "step": 0.7, "reduce": 0.4, "task": 0.05, "pieces": 1},
    "slow rank": {"stragglers": {1: 2.5}, "edge": (0.5, float("inf")), "linger": 0.5, "pieces": 1, "seed": 7},
}


def _both(policy: str, ranks: int, microbatches: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    mine, theirs = named(policy), old_policies.named(policy)
    for placement in mine.placements if policy != "adaptive" else ("vee", "linear"):
        try:
            ours = placement_for(mine, ranks, microbatches, placement)
        except ValueError:
            continue
        yield ours, mine, old_policies.placement_for(theirs, ranks, microbatches, placement), theirs


def _costs(kind: str, shares: dict[int, float]) -> tuple[Any, Any]:
    said = dict(_COSTS[kind])
    edge, sent = said.pop("edge", (0.0, float("inf"))), said.pop("sent", 0.0)
    both: Any = ((Costs, Work, Edge), (old.Costs, old.Work, old.Edge))
    now, before = [of(work(sent=sent), edge=to(*edge), recomputed=shares, **said) for of, work, to in both]
    return now, before


def _drawn(line: Any) -> tuple[list[Any], list[Any]]:
    spans = [(span.rank, str(span.task), span.start, span.end) for span in line.spans]
    return spans, [tuple(pause) for pause in line.pauses]


@pytest.mark.parametrize("policy", NAMES)
def test_every_timetable_of_training_is_as_it_was(policy: str) -> None:
    drawn = 0
    for (ranks, m), replicas, votes, kind, again in product(_SIZES, (1, 2), (False, True), _COSTS, (False, True)):
        for placement, mine, before, theirs in _both(policy, ranks, m):
            shares = recomputed_shares(mine, placement, m, 0.5) if again else {}
            if again and not shares:
                continue
            costs, theirs_too = _costs(kind, shares)
            job = Job(placement, mine, m, replicas, recomputed=dict.fromkeys(shares, 1), votes=votes)
            now = simulate(job, costs, steps=2)
            then = old.simulate(before, theirs, m, theirs_too, steps=2, replicas=replicas, clips=votes)
            assert _drawn(now) == _drawn(then), (ranks, m, replicas, votes, kind, again, placement.name)
            drawn += 1
    assert drawn > 60


def test_every_timetable_of_an_evaluation_is_as_it_was() -> None:
    for policy, (ranks, m), replicas, kind in product(NAMES, _SIZES, (1, 2), _COSTS):
        for placement, _, before, _ in _both(policy, ranks, m):
            if placement.pipes > 1:
                placement, before = placement.first_pipe, before.first_pipe
            costs, theirs = _costs(kind, {})
            now = simulate(Job(placement, Nested(), m, replicas, trains=False), costs)
            then = old.simulate(before, old_policies.Nested(), m, theirs, replicas=replicas, evaluate=True)
            assert _drawn(now) == _drawn(then), (policy, ranks, m, replicas, kind, placement.name)
