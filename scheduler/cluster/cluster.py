"""A cluster as numbers: nodes of equal devices, and two tiers of links.

Everything is in SI units: seconds, bytes, bytes a second, operations a second. Ranks are numbered
node by node, one rank a device, so ranks 0 to `devices` - 1 are on the first node.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Link:
    """What joins a device to others of its tier, in each direction at once.

    Args:
        latency: seconds that any message takes on the way, 0 or more.
        bandwidth: bytes a second, above 0; infinity makes size free.
        shared: whether the devices of a node share that bandwidth; else each device has it.
    """

    latency: float = 0.0
    bandwidth: float = inf
    shared: bool = False

    def seconds(self, size: float, sharing: int = 1) -> float:
        """How long a message takes.

        Args:
            size: bytes of the message, 0 or more.
            sharing: number of devices of the node that send at the same time, 1 or more.
        """
        return self.latency + size / self.of_each(sharing)

    def of_each(self, sharing: int) -> float:
        """The bandwidth that each of `sharing` devices of a node has while all of them send."""
        return self.bandwidth / sharing if self.shared else self.bandwidth


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or whatever computes as one rank.

    Args:
        operations: peak operations a second in products, by the name of the type, such as
            "bfloat16".
        share: share of that peak which products reach, above 0 and at most 1.
        memory: bytes of the device's own memory.
        bandwidth: bytes a second of that memory.
        expanded_memory: bytes of slower memory that the device addresses as well; 0: none.
        expanded_bandwidth: bytes a second of that slower memory.
    """

    operations: Mapping[str, float]
    share: float
    memory: float
    bandwidth: float
    expanded_memory: float = 0.0
    expanded_bandwidth: float = inf

    @property
    def digest(self) -> str:
        """What tells this device from others: 12 hexadecimal digits of what costs depend on."""
        numbers = [sorted(self.operations.items()), self.share, self.bandwidth]
        return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:12]

    def rate(self, kind: str) -> float:
        """Operations a second that products of a type reach.

        Raises:
            ValueError: the cluster says no rate for that type; the text names those that it has.
        """
        if kind not in self.operations:
            raise ValueError(
                f"the device has no operations a second of {kind}, only of "
                f"{', '.join(self.operations)}; expected device.operations.{kind} in the file of "
                "the cluster"
            )
        return self.operations[kind] * self.share


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal devices.

    Args:
        nodes: number of nodes, 1 or more.
        devices: number of devices of a node, 1 or more.
        device: each of them.
        within: link between devices of a node.
        across: link between devices of different nodes.
    """

    nodes: int
    devices: int
    device: Device
    within: Link
    across: Link

    @property
    def num_devices(self) -> int:
        """Number of devices of all nodes; ranks are 0 to one less."""
        return self.nodes * self.devices

    def node_of(self, rank: int) -> int:
        """The node that a rank is on.

        Raises:
            ValueError: the cluster has no such rank.
        """
        if not 0 <= rank < self.num_devices:
            raise ValueError(
                f"there is no rank {rank} in a cluster of {self.nodes} x {self.devices} devices; "
                f"expected 0 to {self.num_devices - 1}"
            )
        return rank // self.devices

    def link(self, a: int, b: int) -> Link:
        """The link that joins two ranks.

        Raises:
            ValueError: the cluster has no such rank.
        """
        return self.within if self.node_of(a) == self.node_of(b) else self.across

    def by_node(self, ranks: Sequence[int]) -> list[int]:
        """How many of the ranks each node has, of those nodes that have one.

        Raises:
            ValueError: the cluster has no such rank.
        """
        return list(Counter(map(self.node_of, ranks)).values())
