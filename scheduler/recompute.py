"""How much of a stage's forward runs again before its backward, so that it need not keep what that
part computed."""

from dataclasses import replace
from itertools import pairwise
from math import ceil

from .job import Job
from .placement import Placement
from .policies.policy import Policy


def recomputed_shares(
    policy: Policy, placement: Placement, microbatches: int, most: float = 1.0
) -> dict[int, float]:
    """Of each stage that recomputes anything the share of its layers, so that all ranks keep about
    as much.

    A rank that holds at most one microbatch saves nothing by it and recomputes nothing; with `most`
    = 1 every other recomputes all.

    Args:
        policy, placement, microbatches: the schedule; its bounds say how many microbatches a rank
            holds.
        most: the share on the rank that holds most.
    Source: Lai et al., "Merak", TPDS 2023, section V: of p stages under 1f1b, stage r recomputes 1
    - (1 - most)(p - 1) / (p - 1 - r).
    """
    # besides the one that runs
    besides = [
        policy.bounds(placement, rank, microbatches).held - 1 for rank in range(placement.ranks)
    ]
    kept = {
        rank: min(1.0, (1 - most) * max(besides) / others)
        for rank, others in enumerate(besides)
        if others > 0
    }
    shares = {
        stage: 1 - kept.get(placement.rank_of(stage), 1.0) for stage in range(placement.stages)
    }
    return {stage: share for stage, share in shares.items() if share > 0}


def recomputing(job: Job, recompute: str | int) -> Job:
    """The job with its recomputed layers, as `memory.recompute` says; its cuts say how many layers
    a stage has."""
    shares = recomputed_shares(
        job.policy, job.placement, job.microbatches, most_recomputed(recompute)
    )
    layers = {stage: end - first for stage, (first, end) in enumerate(pairwise(job.cuts))}
    return replace(job, recomputed=recomputed_layers(recompute, shares, layers))


def recomputed_layers(
    recompute: str | int, shares: dict[int, float], layers: dict[int, int]
) -> dict[int, int]:
    """How many layers of each stage run again, the first ones; at least what the share says.

    Args:
        recompute: a number of layers of each stage that recomputes at all; or a word: then the
            share says.
        shares: of the stages that recompute.
        layers: of each stage.
    """
    if isinstance(recompute, int):
        counts = {stage: min(recompute, layers[stage]) for stage in shares}
    else:
        counts = {stage: ceil(share * layers[stage] - 1e-9) for stage, share in shares.items()}
    return {stage: count for stage, count in counts.items() if count > 0}


def most_recomputed(recompute: str | int) -> float:
    """The share on the rank that holds most, by the setting: "none", "full", "stage-aware" (a
    half), "stage-aware:SHARE", or a number.

    Raises:
        ValueError: none of these.
    """
    if isinstance(recompute, int) and recompute >= 0:
        return float(recompute > 0)
    known = {"none": 0.0, "full": 1.0, "stage-aware": 0.5}
    if recompute in known:
        return known[str(recompute)]
    word, _, share = str(recompute).partition(":")
    if (
        word == "stage-aware"
        and share.isascii()
        and share.replace(".", "", 1).isdigit()
        and 0 <= float(share) <= 1
    ):
        return float(share)
    raise ValueError(
        f"{recompute!r}; expected 'none', 'full', 'stage-aware', or 'stage-aware:SHARE' with a "
        "share of 0 to 1"
    )
