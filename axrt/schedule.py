"""What `[schedule]` comes to: a job, which is a policy on a placement with a number of
microbatches."""

import hashlib
from pathlib import Path

from axrt.config import Schedule
from axrt.errors import ConfigError
from axrt.scheduler.job import Job
from axrt.scheduler.planner import build_schedule


def job_of(settings: Schedule, ranks: int) -> Job:
    """The same of a configuration, for a pipeline of so many ranks; `ConfigError` where its keys do
    not go together."""
    try:
        return build_schedule(
            settings.policy,
            ranks,
            settings.microbatches,
            placement=settings.placement,
            chunks=settings.chunks,
            max_held=settings.max_held,
            order=settings.order,
        )
    except ValueError as error:
        raise ConfigError(f"[schedule] {error}") from None


def digest_of_order(settings: Schedule) -> str:
    """Of the file with the order, which every rank reads for itself and all must have alike; ""
    where there is none."""
    file = Path(settings.order)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""
