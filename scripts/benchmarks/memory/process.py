"""The growth of this process, as the system counts it (resident memory)."""

from contextlib import suppress
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Growth:
    """Measures from when it is made. Everything counts: activations, buffers of libraries, and code
    that is loaded later."""

    def __init__(self) -> None:
        with suppress(OSError):  # then a process that was larger before is known by that size
            _RESET.write_text("5")  # the peak begins anew
        self._before = _bytes_of("VmRSS")

    def num_bytes(self) -> int:
        """Bytes at the highest, above what there was at first."""
        return _bytes_of("VmHWM") - self._before


def _bytes_of(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
