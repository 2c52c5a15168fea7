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
from .precondition import precondition
from .recomputation import recomputation
from .refreshes import refreshes
from .replicas import replicas
from .residencies import residencies
from .row import Need, OnDevice, Pool, Queue, Row, StageHere
from .sharding import sharding
from .stash import stash

__all__ = ["Feature", "Need", "OnDevice", "Pool", "Queue", "Row", "StageHere", "features_of"]

Feature = Callable[[StageHere], Iterable[Row]]

# A kind of work is a row for each stage, or for each bucket of one. Its next task, the head, may
# start once every counter that the row needs has passed the head's number: tasks that have started
# here, messages that have come, and gates. `table.py` compiles that, and `rank_state.py` only
# counts. So the brain, the simulator and what is told of a rank that waits read the same rows.
#
# That nobody waits in a circle is argued at the head of each feature's file, and attacked by
# tests/scheduler with any order of events.
#
# Below is a middle stage of three, and what the first one has besides. In brackets are the runs
# that have it so: replicas, groups of them, sums by a library, gradients that are clipped, ...
#
# The table of work (scripts/table_of_work):
#
#   F         needs activation; weights; whole weights for forwards [weights, zero 3] | sends
#             activation
#   B         needs F [not recompute]; gradient; R [recompute]; whole weights for backwards
#             [weights, zero 3]; reload [stash] | sends gradient; at the end of a step sends part
#             [groups, replicas, zero 1, zero 3]; at the end of a step sends ready [library]
#   step      needs B [not split]; loss; W [split]; vote [clip, kfac]; sum [groups, library,
#             replicas]; fetch [offload, weights]; reduce [zero 1, zero 3]; release [zero 3];
#             refreshes [kfac, refreshes] | opens weights [not weights, zero 1]; sends weights [zero
#             1]; opens new weights of the own shard [zero 3]
#   I         needs F; gradient | sends gradient
#   W         needs I
#   R         needs F
#   norm      needs B [clip]; loss; precond [kfac] | sends norm
#   vote      needs norm | sends vote
#   reduce    needs part | sends sum [replicas]; sends subtotal [groups]
#   across    needs subtotal | sends total
#   join      needs total | sends sum
#   announce  needs ready | sends ticket | on tickets
#   collect   needs ticket | sends sum | on collectives
#   fetch     needs B; stores; a free slot | on copies in
#   store     needs step | opens stores; frees a slot; opens weights [weights]; opens new weights of
#             the own shard [weights] | on copies out
#   scale     needs B; loss
#   unload    needs scale; a free slot on the host | on copies out
#   hoststep  needs unload; B | on host
#   load      needs hoststep | opens weights; frees a slot on the host | on copies in
#   gather    needs weights | opens weights [zero 1]; opens whole weights for forwards [zero 3];
#             opens whole weights for recomputation [zero 3]; opens whole weights for backwards
#             [zero 3]
#   share     needs new weights of the own shard; a free place for whole weights | sends weights
#   release   needs share [zero 3]; bring [weights] | opens the end of the residency before; frees a
#             place for whole weights
#   bring     needs new weights of the own shard; the end of the residency before; a free place for
#             whole weights | opens whole weights for forwards; opens whole weights for
#             recomputation; opens whole weights for backwards | on copies in
#   refresh   needs step | opens refreshes
#   precond   needs B; loss; refreshes
#   offload   needs F | on copies out
#   reload    needs offload | on copies in
#
# The end of the table.


def features_of(job: Job) -> tuple[Feature, ...]:
    """The features that make the rows of a training, or of an evaluation."""
    if not job.trains:
        return (evaluation,)
    by_library = (collectives,) if job.by_library else ()
    grouped = (groups,) if job.is_grouped else ()
    offloaded = (offload,) if job.slots else ()
    on_host = (host_steps,) if job.host_slots else ()
    sharded = (residencies,) if job.residencies else (sharding,) if job.shards else ()
    sums = (*grouped, *by_library, clipping)
    preconditioned = (precondition,) if job.preconditions else ()
    refreshed = (*preconditioned, refreshes) if job.lag else preconditioned
    kept = (stash,) if job.held_on_device else ()
    of_state = (*offloaded, *on_host, *kept, *sharded)
    return (pipeline, recomputation, replicas, *sums, *refreshed, *of_state)
