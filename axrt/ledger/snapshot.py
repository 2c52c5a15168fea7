"""What the copy takes that a checkpoint is written from while training goes on."""

from axrt.scheduler.job import Job

from .parameters import BucketBytes, StageBytes


def snapshot_bytes(stage: StageBytes, job: Job, pipe: int) -> int:
    """Bytes on the host for what a rank copies of a stage, scalars of the optimizer apart.

    Args:
        stage: sizes of its copy of the stage.
        job: schedule of the run.
        pipe: pipe that the copy belongs to. The first one's is saved; of shards, each has a part.
    """
    saves = pipe == 0
    if not (saves or job.shards):
        return 0
    buckets = sum(_of_bucket(bucket, bool(job.shards), saves) for bucket in stage.buckets)
    # Frozen tensors that are narrow are saved as their originals, which are twice as large.
    return buckets + saves * (stage.originals + stage.frozen - stage.originals // 2)


def _of_bucket(bucket: BucketBytes, sharded: bool, saves: bool) -> int:
    in_place = bucket.in_place
    if sharded:  # the parameters themselves are whole on each rank
        in_place = bucket.weights if saves and not bucket.masters else 0
    return in_place + bucket.masters + sum(bucket.moments or ())
