"""The scratch tier that settings ask for: where the optimizer's state lives while it is off the
device."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from axrt.config import Memory
from axrt.errors import ConfigError, ScratchError
from axrt.offload.arena import BudgetError
from axrt.offload.numa import cpus_near
from axrt.offload.scratch_file import DiskError
from axrt.offload.tier import DiskTier, HostTier, PacedTier, Tier

_GB = 1e9


def scratch_tier(memory: Memory, device: torch.device) -> Tier:
    """The tier of `memory.scratch`, which is empty.

    Raises:
        ConfigError: the directory cannot be used.
    """
    budget_bytes = memory.scratch_gb * _GB or math.inf
    directory = memory.scratch_directory
    with refused_as_setting():
        tier: Tier = (
            DiskTier(Path(directory), budget_bytes)
            if directory
            else HostTier(device, budget_bytes, _near(device))
        )
    return PacedTier(tier, memory.scratch_gb_s * _GB) if memory.scratch_gb_s else tier


@contextmanager
def refused_as_setting() -> Iterator[None]:
    """Context in which scratch that has no room is a mistake of the settings."""
    try:
        yield
    except BudgetError as error:
        raise ConfigError(f"memory.scratch_gb: {error}") from None
    except DiskError as error:
        raise ConfigError(f"memory.scratch: {error}") from None


@contextmanager
def named_faults(what: str) -> Iterator[None]:
    """Context in which a fault of scratch is no fault of whatever else is written then, and says
    what is lost.
    """
    try:
        yield
    except DiskError as error:
        raise ScratchError(f"{error}. Lost are {what}; go on from a checkpoint") from None


def _near(device: torch.device) -> list[int]:
    """The processors near a device, where the system tells its address."""
    if device.type != "cuda":
        return []
    of: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
    except AttributeError:  # an older torch, or a device that is no PCI device
        return []
    return cpus_near(address)
