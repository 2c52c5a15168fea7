"""The device that a rank computes on."""

from collections.abc import Sequence

import torch

from axrt.errors import ConfigError


def visible_gpus(wanted: str) -> list[str]:
    """The GPUs that this process sees, each by its UUID, which is the same in every process.

    Args:
        wanted: "auto", "cpu" or "cuda"; "cpu" gives [].
    """
    if wanted == "cpu" or not torch.cuda.is_available():
        return []
    return [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]


def device_of(
    wanted: str, node_rank: int, visible: Sequence[Sequence[str]], share: bool
) -> torch.device:
    """The device of a rank: the GPUs that it sees are taken in turn by its rank on the node.

    Args:
        wanted: "auto", "cpu" or "cuda".
        node_rank: index of this rank among the ranks of its node.
        visible: the GPUs that each rank of the node sees, by UUID. A launcher may show each rank
            all of them, or one of its own.
        share: True if several ranks may use one GPU.
    Raises:
        ConfigError: CUDA is wanted and not there, or ranks would share a GPU without leave.
    """
    if wanted == "cuda" and not all(visible):
        raise ConfigError(
            "run.device = 'cuda', but torch sees no GPU here; set run.device = 'cpu', or see what "
            "nvidia-smi says"
        )
    if not all(visible):
        return torch.device("cpu")
    taken = [gpus[rank % len(gpus)] for rank, gpus in enumerate(visible)]
    if len(set(taken)) < len(taken) and not share:
        raise ConfigError(
            f"{len(taken)} ranks on this node and {len(set(taken))} GPUs; expected at most one "
            "rank a GPU. Start fewer ranks, "
            "or set run.share_gpu = true"
        )
    return torch.device("cuda", node_rank % len(visible[node_rank]))
