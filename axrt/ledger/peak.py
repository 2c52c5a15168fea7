"""The most memory that this process has had since some moment, to stand beside a prediction."""

from pathlib import Path

import psutil
import torch

from axrt.device.device import allocated, most_allocated

_STATUS = Path("/proc/self/status")


class Peak:
    """Measures from when it is made.

    On an accelerator it is what torch has allocated there. On the CPU it is the growth of the
    process, where kernels and libraries count as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = allocated(device)
        self._rss, self._most = _resident(), _most_resident()

    def num_bytes(self) -> int:
        """Bytes at the highest. A process that was larger before is known only by its present
        size."""
        most = most_allocated(self._device)
        if most is not None and self._on_device is not None:
            return max(0, most - self._on_device)
        of_process = _most_resident()
        return max(0, (of_process if of_process > self._most else _resident()) - self._rss)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _most_resident() -> int:
    """The largest resident size that the process has had, in bytes; 0 where the system does not
    say."""
    if peak := getattr(psutil.Process().memory_info(), "peak_wset", 0):  # on Windows
        return int(peak)
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return found[0] if found else 0
