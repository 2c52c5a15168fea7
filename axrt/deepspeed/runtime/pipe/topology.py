"""`deepspeed.runtime.pipe.topology`: how the ranks of a job are laid out."""

from axrt.errors import ConfigError


class PipeDataParallelTopology:
    """Replicas of a pipeline.

    Args:
        num_pp: ranks of a pipeline.
        num_dp: replicas.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        self.pipe, self.data = num_pp, num_dp


class PipeModelDataParallelTopology(PipeDataParallelTopology):
    """The same, with layers that are not cut.

    Args:
        num_pp: ranks of a pipeline.
        num_mp: ranks that share each layer (tensor parallelism); only 1 is accepted.
        num_dp: replicas.
    Raises:
        ConfigError: layers are to be cut.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        if num_mp != 1:
            raise ConfigError(
                f"num_mp = {num_mp}: layers are not cut over ranks (tensor parallelism); expected 1"
            )
        super().__init__(num_pp, num_dp)
