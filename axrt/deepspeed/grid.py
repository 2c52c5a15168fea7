"""DeepSpeed's grid of a pipeline's engine: where a rank stands."""

from axrt.engine import Engine


class Grid:
    """Where this rank stands, by DeepSpeed's names. Layers are not cut over ranks (tensor
    parallelism), so that has one rank.

    Args:
        engine: axrt's own engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def holds_last_stage(self) -> bool:
        """This rank computes the loss of its replica."""
        return self._engine.computes_loss

    def get_stage_id(self) -> int:
        """The number of this rank within its pipeline."""
        return self._engine.pipe_rank

    get_pipe_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Ranks of a pipeline."""
        return self._engine.pipe_size

    def get_data_parallel_id(self) -> int:
        """The number of this rank's replica."""
        return self._engine.data_rank

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Number of replicas."""
        return self._engine.data_size

    def get_global_rank(self) -> int:
        """The number of this rank in the job."""
        return self._engine.rank

    def get_model_parallel_rank(self) -> int:
        """0."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        """1."""
        return 1

    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size
