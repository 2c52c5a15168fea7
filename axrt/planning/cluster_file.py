"""C.toml, a file that describes a cluster, read and checked as the file of a run is.

    [cluster]             nodes, and devices of each
    [device]              share of the operations that products reach, memory, bandwidths
    [device.operations]   operations a second by type
    [links.node]          latency, bandwidth, shared: between devices of a node
    [links.across]        the same between nodes

Units are SI and are not written, so a number in others, such as 25 for 25 GB/s, is the mistake that
comes most easily. Each quantity therefore has a range that is far wider than any machine, and a
text that shows how to write it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from axrt.config.reading import apply, built, parse_file, unknown
from axrt.config.section import Mistakes, Section, key, name_of
from axrt.scheduler.cluster.cluster import Cluster, Device, Link


class _Unit(NamedTuple):
    """A unit, the range of what is written in it, and how to write an example."""

    name: str
    least: float
    most: float
    example: str


_SECONDS = _Unit("seconds", 1e-9, 1.0, "2e-6 for 2 us")
_BYTES = _Unit("bytes", 1e6, 1e15, "80e9 for 80 GB")
_BYTES_A_SECOND = _Unit("bytes a second", 1e5, 1e15, "25e9 for 25 GB/s")
_OPERATIONS = _Unit("operations a second", 1e7, 1e19, "312e12 for 312 TFLOP/s")
_SHARE = _Unit("", 1e-3, 1.0, "0.6 for 60 %")
_COUNT = _Unit("", 1, 1e7, "8")

# Sections have a value for each key. One that must be said begins as that of an example, and
# `_missing` looks into the file for it.
_REQUIRED: dict[str, dict[str, _Unit | None]] = {
    "cluster": {"nodes": _COUNT, "devices": _COUNT},
    "device": {"share": _SHARE, "memory": _BYTES, "bandwidth": _BYTES_A_SECOND},
    "links.node": {"latency": _SECONDS, "bandwidth": _BYTES_A_SECOND, "shared": None},
    "links.across": {"latency": _SECONDS, "bandwidth": _BYTES_A_SECOND, "shared": None},
}
_OPTIONAL: dict[str, dict[str, _Unit]] = {
    "device": {"expanded_memory": _BYTES, "expanded_bandwidth": _BYTES_A_SECOND},
    "device.operations": dict.fromkeys(("float32", "bfloat16", "float16"), _OPERATIONS),
}


class _Quantities(Section):
    """A section whose numbers have units. Defaults are in range: `built` falls back on them."""

    def _of_all(self) -> Iterator[str]:
        section = name_of(type(self))
        units = _OPTIONAL.get(section, {}) | _REQUIRED.get(section, {})
        for item in fields(self):  # type: ignore[arg-type]
            value, unit = getattr(self, item.name), units.get(item.name)
            is_off = value == 0 and item.name in _OPTIONAL.get(section, {})
            if unit is None or is_off or unit.least <= value <= unit.most:
                continue
            number = f"{value:g}" if isinstance(value, float) else f"{value!r:.40}"
            said = f"{number} {unit.name}".rstrip()
            yield (
                f"{section}.{item.name} = {said}; expected {_range(unit)} "
                f"({item.metadata['meaning']}): write {unit.example}"
            )


@dataclass(frozen=True, slots=True)
class _Nodes(_Quantities):
    """How many devices there are."""

    SECTION: ClassVar[str] = "cluster"
    nodes: int = key(1, "nodes of the cluster")
    devices: int = key(1, "devices of each node")


@dataclass(frozen=True, slots=True)
class _Device(_Quantities):
    """One of the devices, which are all alike."""

    SECTION: ClassVar[str] = "device"
    share: float = key(1.0, "share of its operations a second that products reach")
    memory: float = key(80e9, "memory of a device")
    bandwidth: float = key(2e12, "of that memory")
    expanded_memory: float = key(0.0, "slower memory that a device addresses as well; 0 = none")
    expanded_bandwidth: float = key(0.0, "of the expanded memory")

    def _of_all(self) -> Iterator[str]:
        yield from _Quantities._of_all(self)
        if bool(self.expanded_memory) != bool(self.expanded_bandwidth):
            yield (
                f"device.expanded_memory = {self.expanded_memory:g} with "
                f"device.expanded_bandwidth = {self.expanded_bandwidth:g}; expected both, or "
                "neither where a device has its own memory alone"
            )


@dataclass(frozen=True, slots=True)
class _Operations(_Quantities):
    """Peak operations a second in products, by type."""

    SECTION: ClassVar[str] = "device.operations"
    float32: float = key(0.0, "peak in products of float32; 0 = not known")
    bfloat16: float = key(0.0, "peak in products of bfloat16; 0 = not known")
    float16: float = key(0.0, "peak in products of float16; 0 = not known")


@dataclass(frozen=True, slots=True)
class _NodeLink(_Quantities):
    """What joins devices of a node."""

    SECTION: ClassVar[str] = "links.node"
    latency: float = key(2e-6, "of a message between devices of a node")
    bandwidth: float = key(25e9, "between devices of a node, in each direction")
    shared: bool = key(False, "devices of a node share that bandwidth; false = each has it")


@dataclass(frozen=True, slots=True)
class _AcrossLink(_Quantities):
    """What joins nodes."""

    SECTION: ClassVar[str] = "links.across"
    latency: float = key(2e-6, "of a message between nodes")
    bandwidth: float = key(25e9, "between nodes, in each direction")
    shared: bool = key(False, "devices of a node share that bandwidth; false = each has it")


_SECTIONS = {name_of(kind): kind for kind in (_Nodes, _Device, _Operations, _NodeLink, _AcrossLink)}


def read_cluster(path: Path, overrides: Sequence[str] = ()) -> Cluster:
    """Read the file of a cluster.

    Args:
        path: the file, in TOML.
        overrides: texts such as `links.node.bandwidth=100e9` that are laid over it, in order.
    Raises:
        ConfigError: the file cannot be read or is no TOML, keys are unknown or missing, or numbers
            cannot be; all of them are named.
    """
    tree = parse_file(path)
    mistakes = [text for override in overrides for text in apply(override, tree)]
    sections = _flat(tree)
    mistakes += unknown(sections, _SECTIONS)
    mistakes += _missing(sections)
    found = {
        name: built(kind, sections.get(name, {}), mistakes) for name, kind in _SECTIONS.items()
    }
    if mistakes:
        raise Mistakes(mistakes)
    return _cluster(found)


def is_of_cluster(override: str) -> bool:
    """An override is of a section of this file, or of one that is misspelt within one."""
    return override.strip().partition(".")[0] in {name.partition(".")[0] for name in _SECTIONS}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Sections within others under names of their own, such as "links.node"."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inner = {one for one in _SECTIONS if one.startswith(f"{name}.")}
        if not (inner and isinstance(value, Mapping)):
            found[name] = value
            continue
        for below, keys in value.items():
            _lay(f"{name}.{below}", keys, found)
    return found


def _lay(name: str, value: Any, found: dict[str, Any]) -> None:
    """Put a section, or a key, in its place. An override of a key of a section within another has
    left `node.bandwidth` as a key of `links`."""
    if isinstance(value, Mapping) or name in _SECTIONS:
        found[name] = dict(value) if isinstance(value, Mapping) else value
        return
    section, _, last = name.rpartition(".")
    keys = found.setdefault(section, {})
    if isinstance(keys, dict):  # else it is refused as a section
        keys[last] = value


def _missing(sections: Mapping[str, Any]) -> Iterator[str]:
    """The keys that must be said. A tier that joins nobody needs no link."""
    counts = sections.get("cluster")
    counts = counts if isinstance(counts, Mapping) else {}
    needless = {
        name
        for name, count in (("links.node", "devices"), ("links.across", "nodes"))
        if counts.get(count) == 1 and name not in sections
    }
    for section, units in _REQUIRED.items():
        keys = sections.get(section, {})
        for name, unit in units.items() if isinstance(keys, Mapping) else ():
            if section not in needless and name not in keys:
                meaning = _meaning(section, name)
                what = f"{_range(unit)}, such as {unit.example}" if unit else "true or false"
                yield f"{section}.{name} is missing ({meaning}); expected {what}"
    rates = sections.get("device.operations", {})
    if isinstance(rates, Mapping) and not any(rates.values()):
        yield (
            "device.operations says none; expected operations a second of one type at least, such "
            "as device.operations.bfloat16=312e12"
        )


def _meaning(section: str, name: str) -> str:
    meanings = {item.name: str(item.metadata["meaning"]) for item in fields(_SECTIONS[section])}
    return meanings[name]


def _range(unit: _Unit) -> str:
    return f"{unit.name or 'a number'} from {unit.least:g} to {unit.most:g}"


def _cluster(found: Mapping[str, Any]) -> Cluster:
    nodes, device, operations = found["cluster"], found["device"], found["device.operations"]
    rates = {item.name: float(getattr(operations, item.name)) for item in fields(operations)}
    return Cluster(
        nodes.nodes,
        nodes.devices,
        Device(
            {name: rate for name, rate in rates.items() if rate},
            device.share,
            device.memory,
            device.bandwidth,
            device.expanded_memory,
            device.expanded_bandwidth or inf,
        ),
        _link(found["links.node"]),
        _link(found["links.across"]),
    )


def _link(section: Any) -> Link:
    return Link(section.latency, section.bandwidth, section.shared)
