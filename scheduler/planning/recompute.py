"""Recomputation (activation checkpointing): how much of a stage's forward runs again before its
backward, so that the stage need not keep the activations of that part."""

from dataclasses import replace
from itertools import pairwise
from math import ceil

from ..job import Job
from ..placement import Placement
from ..policies.policy import Policy


def recomputed_shares(
    policy: Policy, placement: Placement, microbatches: int, most: float = 1.0
) -> dict[int, float]:
    """The share of layers that run again, by stage, so that all ranks keep about as much; stages
    without any are left out.

    A rank that holds at most one microbatch saves nothing by it and recomputes nothing; with `most`
    = 1 every other rank recomputes all.

    Args:
        policy, placement, microbatches: the schedule; its bounds say how many microbatches a rank
            holds.
        most: share on the rank that holds most, 0 to 1.
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


# Recomputation is a setting, not part of merak. It skips ranks that hold one microbatch.
def recomputing(job: Job, recompute: str | int) -> Job:
    """The job with the recomputed layers that `memory.recompute` asks for; its cuts are known.

    Args:
        recompute: a number of layers, or a word that `most_recomputed` takes.
    Raises:
        ValueError: `recompute` is no such setting.
    """
    shares = recomputed_shares(
        job.policy, job.placement, job.microbatches, most_recomputed(recompute)
    )
    layers = {stage: end - first for stage, (first, end) in enumerate(pairwise(job.cuts))}
    return replace(job, recomputed=recomputed_layers(recompute, shares, layers))


# Layers that run again are the first ones of a stage. Any set of layers could be told apart by
# bytes a second of forward. Layers of a transformer are alike, and a prefix needs one input, one
# walk and one number.
def recomputed_layers(
    recompute: str | int, shares: dict[int, float], layers: dict[int, int]
) -> dict[int, int]:
    """The number of first layers of a stage that run again, by stage, at least 1; stages without
    any are left out.

    Args:
        recompute: largest number of layers of each stage that recomputes at all; or a word: then
            the share decides, rounded up to whole layers.
        shares: share of layers that run again, by stage, for the stages that recompute.
        layers: number of layers, by stage.
    """
    if isinstance(recompute, int):
        counts = {stage: min(recompute, layers[stage]) for stage in shares}
    else:
        counts = {stage: ceil(share * layers[stage] - 1e-9) for stage, share in shares.items()}
    return {stage: count for stage, count in counts.items() if count > 0}


def most_recomputed(recompute: str | int) -> float:
    """The share of layers that the rank with most microbatches recomputes, 0 to 1.

    Args:
        recompute: "none", "full", "stage-aware" (a half), "stage-aware:SHARE", or a number of
            layers, which counts as all unless it is 0.
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
        f"{recompute!r}; expected 'none', 'full', 'stage-aware', or 'stage-aware:SHARE' "
        "with a share of 0 to 1"
    )
