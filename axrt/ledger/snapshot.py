"""What the copy takes that a checkpoint is written from while training goes on."""

from axrt.config import Config
from axrt.scheduler.job import Job

from .parameters import StageBytes


def snapshot_bytes(stage: StageBytes, config: Config, job: Job, pipe: int) -> int:
    """Bytes on the host for what a rank copies of a stage, scalars of the optimizer apart.

    Args:
        pipe: pipe that the copy belongs to. The first one's is saved, and what its team has cut; of
            shards, each has a part.
    """
    saves = pipe < job.team
    if not (saves or job.shards):
        return 0
    if job.shards:
        # Weights that have no masters are whole on each rank.
        in_place = config.precision.weights == "float32" and job.residencies is None
        weights = saves * in_place * sum(bucket.weights for bucket in stage.buckets)
    else:
        weights = sum(bucket.in_place for bucket in stage.buckets)
    state = sum(
        bucket.masters + sum(bucket.moments or ()) + bucket.factors for bucket in stage.buckets
    )
    # Frozen tensors that are narrow are saved as their originals, which are twice as large.
    return weights + state + saves * (stage.originals + stage.frozen - stage.originals // 2)
