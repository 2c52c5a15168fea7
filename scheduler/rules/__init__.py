"""The table of work, a feature a file: each gives the rows of a stage, and no row is made
elsewhere."""

from collections.abc import Callable, Iterable

from ..job import Job
from .clipping import clipping
from .evaluation import evaluation
from .pipeline import pipeline
from .recomputation import recomputation
from .replicas import replicas
from .row import Need, OnDevice, Queue, Row, StageHere

__all__ = ["Feature", "Need", "OnDevice", "Queue", "Row", "StageHere", "features_of"]

Feature = Callable[[StageHere], Iterable[Row]]


def features_of(job: Job) -> tuple[Feature, ...]:
    """Those of a training, or those of an evaluation."""
    return (pipeline, recomputation, replicas, clipping) if job.trains else (evaluation,)
