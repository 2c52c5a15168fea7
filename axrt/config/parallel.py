"""`[parallel]`: the layout of ranks."""

from dataclasses import dataclass

from axrt.errors import ConfigError

from .section import Section, key


@dataclass(frozen=True, slots=True)
class Parallel(Section):
    """The layout of ranks: pipelines and replicas (data parallelism)."""

    pipe: int = key(0, "ranks a pipeline; 0 = all ranks", least=0)
    data: int = key(1, "replicas of the pipeline, each with its part of the data", least=1)
    tensor: int = key(
        1,
        "members that hold each stage together (tensor parallelism); consecutive ranks are a team",
        least=1,
    )
    tensor_shards: int = key(
        0,
        "virtual members of each team, of which each rank has as many: a power of two and a "
        "multiple of parallel.tensor. Bits depend on it, not on parallel.tensor; 0 = one a rank",
        least=0,
    )
    gather_again: bool = key(
        False,
        "members of a team let go the tokens of others behind a layer that keeps them, and gather "
        "them again for its backward: less memory, in a block a quarter more to send",
    )
    collectives: str = key(
        "parts",
        "what adds gradients of replicas up: 'parts' = messages, in one order of summation; "
        "'library' = NCCL or gloo",
        choices=("parts", "library"),
    )
    group: int = key(
        0,
        "replicas that add gradients up among themselves, such as those of a node, before groups "
        "do; with memory.zero they share out among themselves, too (hybrid sharding). 1 = all at "
        "once; 0 = the same with memory.zero or up to 8 replicas, else groups for nodes of 8 "
        "ranks. The sum has another order",
        least=0,
    )
    activations: str = key(
        "mpi",
        "what carries large activations and their gradients between stages: 'mpi'; 'library' = "
        "NCCL or gloo",
        choices=("mpi", "library"),
    )
    rank_order: str = key(
        "pipe",
        "what consecutive ranks are: 'pipe' = one pipeline, 'data' = the replicas of a stage",
        choices=("pipe", "data"),
    )
    partition: str | tuple[int, ...] = key(
        "",
        "'uniform', 'parameters', 'operations', 'type:REGEX' or boundaries [0, 4, 8]; '' = the "
        "model's own",
    )

    @property
    def virtual_members(self) -> int:
        """Number of parts into which a stage is cut; each member of a team has as many of them."""
        return self.tensor_shards or self.tensor

    def check_one_member(self, what: str) -> None:
        """Check that a rank holds its stages alone.

        Args:
            what: what takes nothing else yet.
        Raises:
            ConfigError: members of a team do, or virtual ones.
        """
        if self.virtual_members > 1:
            key, off = self.cut_by
            raise ConfigError(
                f"{what} does not take {key} = {self.virtual_members} yet; expected {key} = {off}"
            )

    @property
    def cut_by(self) -> tuple[str, int]:
        """The key that says into how many parts a stage is cut, and its value where it is one."""
        if self.virtual_members > self.tensor:
            return "parallel.tensor_shards", 0
        return "parallel.tensor", 1
