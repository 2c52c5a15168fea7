"""`deepspeed.accelerator`: the device of this rank, which axrt chooses by itself."""

from typing import NoReturn

import torch

from axrt.device.device import choose
from axrt.world.launchers import told


class _Accelerator:
    def __init__(self) -> None:
        said = told()
        self._device = choose("auto", said.local_rank if said else None)

    def set_device(self, index: int) -> None:
        """Do nothing: the device is chosen already, by the rank's number on its host."""

    def device_name(self, index: int | None = None) -> str:
        kind = self._device.type
        return kind if index is None or kind == "cpu" else f"{kind}:{index}"

    def current_device_name(self) -> str:
        return str(self._device)

    def communication_backend_name(self) -> str:
        return "gloo" if self._device.type == "cpu" else "nccl"

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1 if self._device.type == "cpu" else torch.accelerator.device_count()

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def __getattr__(self, name: str) -> NoReturn:
        known = [name for name in vars(type(self)) if not name.startswith("_")]
        raise AttributeError(
            f"axrt.deepspeed's accelerator has no {name}; it has {', '.join(known)}"
        )


def get_accelerator() -> _Accelerator:
    """The accelerator, or the CPU where there is none."""
    return _Accelerator()
