"""The table of work. Each file is a feature that gives the rows of a stage; no row is made
elsewhere."""

from collections.abc import Callable, Iterable

from ..job import Job
from .clipping import clipping
from .collectives import collectives
from .evaluation import evaluation
from .groups import groups
from .host_steps import host_steps
from .offload import offload
from .pipeline import pipeline
from .recomputation import recomputation
from .replicas import replicas
from .row import Need, OnDevice, Pool, Queue, Row, StageHere
from .sharding import sharding
from .stash import stash
from .stays import stays

__all__ = ["Feature", "Need", "OnDevice", "Pool", "Queue", "Row", "StageHere", "features_of"]

Feature = Callable[[StageHere], Iterable[Row]]


def features_of(job: Job) -> tuple[Feature, ...]:
    """The features that make the rows of a training, or of an evaluation."""
    if not job.trains:
        return (evaluation,)
    by_library = (collectives,) if job.by_library else ()
    grouped = (groups,) if job.is_grouped else ()
    offloaded = (offload,) if job.slots else ()
    on_host = (host_steps,) if job.host_rooms else ()
    sharded = (stays,) if job.stays else (sharding,) if job.shards else ()
    sums = (*grouped, *by_library, clipping)
    kept = (stash,) if job.held_on_device else ()
    of_state = (*offloaded, *on_host, *kept, *sharded)
    return (pipeline, recomputation, replicas, *sums, *of_state)
