"""Memory near an accelerator: the processors of its node (NUMA), which the system tells."""

# A page of memory lies with the processor that touches it first. So whoever allocates for a device
# touches the memory on a processor of the device's node.

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_SYSTEM = Path("/sys")


def cpus_near(pci_address: str, system: Path = _SYSTEM) -> list[int]:
    """The processors of a device's node.

    Args:
        pci_address: address of the device, such as "0000:3b:00.0".
    Returns:
        Numbers of processors; empty where the kernel knows no node, or there is only one.
    """
    try:
        device = system / "bus/pci/devices" / pci_address.lower()
        node = int((device / "numa_node").read_text())
        nodes = system / "devices/system/node"
        if node < 0 or len(list(nodes.glob("node[0-9]*"))) < 2:
            return []
        return _numbers((nodes / f"node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return []


@contextmanager
def on_cpus(cpus: Sequence[int]) -> Iterator[None]:
    """Context in which the calling thread runs on these processors, of those that it may use; on
    any where it may use none of them."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    wanted = before.intersection(cpus)
    if wanted:
        os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        if wanted:
            os.sched_setaffinity(0, before)


def _numbers(text: str) -> list[int]:
    """The numbers of a list of ranges, such as "0-3,8"."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
