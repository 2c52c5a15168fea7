"""The coordinates of a rank in the job: its index in a pipeline, and the replica of that
pipeline."""

from dataclasses import dataclass, replace

from axrt.errors import ConfigError
from axrt.scheduler.plural import plural


@dataclass(frozen=True, slots=True)
class Mesh:
    """Coordinates of one rank."""

    rank: int  # rank in the job, from 0
    pipe: int  # number of ranks of a pipeline
    data: int  # number of replicas of the pipeline (data parallelism)
    # layout of ranks. "pipe": consecutive ranks are one pipeline; "data": consecutive ranks
    # hold the same stages.
    order: str = "pipe"

    @classmethod
    def of(cls, rank: int, size: int, pipe: int, data: int, order: str = "pipe") -> "Mesh":
        """The mesh of a job.

        Args:
            pipe: number of ranks of a pipeline; 0: size / data.
            data: number of replicas, at least 1.
            order: layout of ranks, "pipe" or "data".
        Raises:
            ConfigError: the ranks do not factor into pipe x data.
        """
        if size % data or (pipe and pipe * data != size):
            fits = (
                "parallel.pipe = 0"
                if pipe and not size % data
                else "parallel.data = 1 and parallel.pipe = 0"
            )
            fewer = max(size // (max(pipe, 1) * data), 1) if not pipe else 1
            replicas = f", or parallel.data = {size // pipe}" if pipe and size % pipe == 0 else ""
            raise ConfigError(
                f"{plural(size, 'rank')} {'does' if size == 1 else 'do'} not factor into "
                f"parallel.pipe x parallel.data = {pipe or 'any'} x {data}. Start "
                f"{plural(max(pipe, 1) * data * fewer, 'rank')}, or set {fits} to take what there "
                f"is{replicas}"
            )
        return cls(rank, pipe or size // data, data, order)

    @property
    def pipe_rank(self) -> int:
        """Index of this rank in its pipeline."""
        return self.rank % self.pipe if self.order == "pipe" else self.rank // self.data

    @property
    def data_rank(self) -> int:
        """Index of the replica that this rank belongs to."""
        return self.rank // self.pipe if self.order == "pipe" else self.rank % self.data

    def row_of(self, rank: int) -> int:
        """The row of a rank of the job in pictures: the ranks of the first replica come first."""
        there = replace(self, rank=rank)
        return there.data_rank * self.pipe + there.pipe_rank

    def rank_of(self, replica: int, pipe_rank: int) -> int:
        """The rank of the job that has these coordinates."""
        return (
            replica * self.pipe + pipe_rank
            if self.order == "pipe"
            else pipe_rank * self.data + replica
        )
