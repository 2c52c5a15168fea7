"""The coordinates of a rank in the job: its index in a pipeline, the replica of that pipeline, and
which member it is of the team that holds its stages."""

#   order     consecutive ranks are       rank of the job
#   -------   -------------------------   ----------------------------------------------
#   "pipe"    a team, then a pipeline     (replica x pipe + pipe rank) x tensor + member
#   "data"    a team, then replicas       (pipe rank x data + replica) x tensor + member
#
# Members of a team exchange most, so they stand next to each other in either order.

from dataclasses import dataclass, replace

from axrt.errors import ConfigError
from axrt.scheduler.plural import plural


@dataclass(frozen=True, slots=True)
class Mesh:
    """Coordinates of one rank."""

    rank: int  # rank in the job, from 0
    pipe: int  # number of stages' ranks of a pipeline, each of them a team
    data: int  # number of replicas of the pipeline (data parallelism)
    # layout of ranks. "pipe": consecutive teams are one pipeline; "data": consecutive teams hold
    # the same stages.
    order: str = "pipe"
    tensor: int = 1  # number of members of a team (tensor parallelism)

    @classmethod
    def of(
        cls, rank: int, size: int, pipe: int, data: int, order: str = "pipe", tensor: int = 1
    ) -> "Mesh":
        """The mesh of a job.

        Args:
            pipe: number of ranks of a pipeline, or of teams; 0: size / (data x tensor).
            data: number of replicas, at least 1.
            order: layout of ranks, "pipe" or "data".
            tensor: number of members of a team, at least 1.
        Raises:
            ConfigError: the ranks do not factor into pipe x data x tensor.
        """
        fixed = data * tensor * max(pipe, 1)
        if size % fixed or (pipe and fixed != size):
            raise ConfigError(_refusal(size, pipe, data, tensor))
        return cls(rank, pipe or size // (data * tensor), data, order, tensor)

    @property
    def pipe_rank(self) -> int:
        """Index of this rank, or of its team, in its pipeline."""
        team = self.rank // self.tensor
        return team % self.pipe if self.order == "pipe" else team // self.data

    @property
    def data_rank(self) -> int:
        """Index of the replica that this rank belongs to."""
        team = self.rank // self.tensor
        return team // self.pipe if self.order == "pipe" else team % self.data

    @property
    def member(self) -> int:
        """Index of this rank in its team."""
        return self.rank % self.tensor

    @property
    def named_member(self) -> str:
        """Which member this rank is, to stand behind its number; "" without teams."""
        return f" (member {self.member} of {self.tensor})" if self.tensor > 1 else ""

    @property
    def place(self) -> int:
        """Place of this rank in its replica, as `Job.place_of` has them."""
        return self.pipe_rank * self.tensor + self.member

    def row_of(self, rank: int) -> int:
        """The row of a rank of the job in pictures: the ranks of the first replica come first."""
        there = replace(self, rank=rank)
        return there.data_rank * self.pipe * self.tensor + there.place

    def rank_of(self, replica: int, place: int) -> int:
        """The rank of the job that has these coordinates.

        Args:
            place: place in the replica, as `Job.place_of` has them; without teams the index in the
                pipeline.
        """
        pipe_rank, member = divmod(place, self.tensor)
        team = (
            replica * self.pipe + pipe_rank
            if self.order == "pipe"
            else pipe_rank * self.data + replica
        )
        return team * self.tensor + member


def _refusal(size: int, pipe: int, data: int, tensor: int) -> str:
    """Why so many ranks do not factor, and what fits nearest."""
    keys = ["parallel.pipe", "parallel.data", "parallel.tensor"][: 3 if tensor > 1 else 2]
    numbers = [str(pipe or "any"), str(data), str(tensor)][: len(keys)]
    others = data * tensor
    start = max(pipe, 1) * others if pipe else max(size // others, 1) * others
    if pipe and size % others == 0:
        fits = "parallel.pipe = 0"
    elif size % tensor == 0:
        fits = "parallel.data = 1 and parallel.pipe = 0"
    else:
        fits = "parallel.tensor = 1, parallel.data = 1 and parallel.pipe = 0"
    a_replica = pipe * tensor
    replicas = f", or parallel.data = {size // a_replica}" if pipe and size % a_replica == 0 else ""
    return (
        f"{plural(size, 'rank')} {'does' if size == 1 else 'do'} not factor into "
        f"{' x '.join(keys)} = {' x '.join(numbers)}. Start {plural(start, 'rank')}, or set {fits} "
        f"to take what there is{replicas}"
    )
