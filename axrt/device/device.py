"""The device that a rank computes on: which one, what torch calls its streams, and its
generators."""

# CUDA, ROCm, XPU and whatever else torch takes for its accelerator are one path:
# `torch.accelerator`, `torch.Stream` and `torch.Event`. No other module asks which kind of device
# there is.

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from axrt.errors import ConfigError
from axrt.scheduler.plural import plural

from .host_memory import free_on_host

CPU = torch.device("cpu")
# They have no streams beside which the host and copies could go on.
_WITHOUT_STREAMS = ("mps",)


def accelerator() -> str | None:
    """The type of the accelerator that torch sees here, such as "cuda" or "xpu"; None without
    one."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None or device.type in _WITHOUT_STREAMS else device.type


def choose(wanted: str, local_rank: int | None) -> torch.device:
    """Choose the device of this process, and make it the current one.

    It is called once, before MPI starts: a library that is aware of GPUs takes the device that is
    current then.

    Args:
        wanted: "auto", "cpu", or the type of an accelerator.
        local_rank: index of this process among those on its node, where a launcher says it. The
            accelerators that this process sees are taken in turn. None: the current one is taken.
    Returns:
        The CPU where torch sees no such accelerator; `agreed` refuses it, when all ranks are up.
    """
    found = accelerator()
    if found is None or wanted not in ("auto", found):
        return CPU
    if local_rank is not None:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return torch.device(found, torch.accelerator.current_device_index())


def identity(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """A name of the device that is the same in every process of the node; "" for the CPU.

    Args:
        environment: variables of this process. Slices of one GPU (MIG) are told apart by their
            names there, since some drivers give them the UUID of the whole.
    """
    if device == CPU:
        return ""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if visible[0].startswith("MIG-") and (device.index or 0) < len(visible):
        return visible[device.index or 0]
    properties = _module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", f"{device.type} {device.index}"))


def agreed(device: torch.device, node: Sequence[str], wanted: str, share: bool) -> torch.device:
    """The device of a rank, when all ranks of its node have chosen.

    Args:
        wanted: "auto", "cpu", or the type of an accelerator.
        share: True if several ranks may use one accelerator.
    Returns:
        The CPU where some rank of the node has no accelerator.
    Raises:
        ConfigError: an accelerator is wanted and not every rank has one, or ranks would share one
            without leave.
    """
    if not all(node):
        if wanted not in ("auto", "cpu"):
            without = (
                f" on {node.count('')} of {plural(len(node), 'rank')}" if len(node) > 1 else ""
            )
            raise ConfigError(
                f"run.device = {wanted!r}, but torch sees no such device here{without}; set "
                "run.device = 'auto' or 'cpu', or see what the driver says, as nvidia-smi does"
            )
        return CPU
    if len(set(node)) < len(node) and not share:
        raise ConfigError(
            f"{plural(len(node), 'rank')} on this node and {plural(len(set(node)), 'device')}; "
            "expected at most one rank a device. Start fewer ranks, or set run.share_gpu = true"
        )
    return device


def generators(device: torch.device) -> list[torch.Generator]:
    """Torch's own generators that work on the device may use: the CPU's, and the device's."""
    if device == CPU:
        return [torch.default_generator]
    return [torch.default_generator, _module(device).default_generators[device.index or 0]]


def names() -> tuple[str, ...]:
    """The names of the accelerators that this process sees."""
    found = accelerator()
    if found is None:
        return ()
    module = torch.get_device_module(found)
    return tuple(
        str(getattr(module.get_device_properties(index), "name", found))
        for index in range(torch.accelerator.device_count())
    )


def synchronize(device: torch.device) -> None:
    """Wait until everything that was launched on the device has run."""
    if device != CPU:
        torch.accelerator.synchronize(device)


def allocated(device: torch.device) -> int | None:
    """Bytes that torch has allocated on an accelerator for tensors; None for the CPU, and where
    torch does not say."""
    return _asked_for(device, "memory_allocated")


def most_allocated(device: torch.device) -> int | None:
    """The most that `allocated` has been in this process."""
    return _asked_for(device, "max_memory_allocated")


def free_memory(device: torch.device) -> int:
    """Bytes that are free now on a device, for all processes; 0 where torch does not say."""
    if device == CPU:
        return free_on_host()
    try:
        return int(_module(device).mem_get_info(device)[0])
    except (AttributeError, RuntimeError):  # some drivers do not tell, as of integrated devices
        return 0


def is_on_host(tensor: Tensor) -> bool:
    """The tensor's memory is the CPU's."""
    return tensor.device.type == "cpu"


def _asked_for(device: torch.device, name: str) -> int | None:
    ask = None if device == CPU else getattr(_module(device), name, None)
    return None if ask is None else int(ask(device))


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device.type)
