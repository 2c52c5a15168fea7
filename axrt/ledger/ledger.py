"""The ledger of a rank: every allocation that axrt decides, by purpose and tier."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple


class Tier(Enum):
    """A kind of memory."""

    DEVICE = "device"  # what layers compute on; without an accelerator, the memory of the process
    HOST = "host"
    DISK = "disk"


class Purpose(Enum):
    """What memory is for."""

    WEIGHTS = "weights"
    GATHERED = "gathered"  # weights that are whole for a stay
    FROZEN = "frozen"  # frozen parameters and buffers, as layers compute with them
    ORIGINALS = "originals"  # the float32 values of frozen tensors that are narrow
    MASTERS = "masters"
    GRADIENTS = "gradients"  # over the microbatches of a step
    TOTALS = "totals"  # over copies, where these are not the same memory
    MOMENTS = "moments"
    SLOTS = "slots"  # offloaded state that is on the device for its step
    STASH = "stash"  # from a forward to its backward
    MESSAGES = "messages"
    SNAPSHOT = "snapshot"  # of what a checkpoint has, to be written while training goes on


IN_SCRATCH = (Purpose.MASTERS, Purpose.MOMENTS, Purpose.WEIGHTS)
_LOW = (Tier.HOST, Tier.DISK)


class Entry(NamedTuple):
    """An amount of memory."""

    purpose: Purpose  # what it is for
    tier: Tier  # where it is
    num_bytes: int  # its size, in bytes


@dataclass(frozen=True, slots=True)
class Ledger:
    """The memory of a rank."""

    entries: tuple[Entry, ...]  # amounts of memory; several may have one purpose and tier
    # for each purpose that could not be predicted, a text that says why
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[Entry], unknown: Iterable[str] = ()) -> "Ledger":
        """The ledger with one entry for each purpose and tier, without empty ones."""
        sums: dict[tuple[Purpose, Tier], int] = {}
        for purpose, tier, num_bytes in entries:
            sums[purpose, tier] = sums.get((purpose, tier), 0) + num_bytes
        listed = tuple(
            Entry(purpose, tier, sums[purpose, tier])
            for tier in Tier
            for purpose in Purpose
            if sums.get((purpose, tier))
        )
        return cls(listed, tuple(dict.fromkeys(unknown)))

    def total(self, tier: Tier = Tier.DEVICE) -> int:
        """Bytes on a tier."""
        return sum(entry.num_bytes for entry in self.entries if entry.tier is tier)

    def of_purpose(self, purpose: Purpose, tier: Tier = Tier.DEVICE) -> int:
        """Bytes of a purpose on a tier."""
        return sum(
            entry.num_bytes
            for entry in self.entries
            if entry.purpose is purpose and entry.tier is tier
        )

    def without(self, purpose: Purpose) -> "Ledger":
        """The ledger without what is for a purpose."""
        return replace(self, entries=tuple(e for e in self.entries if e.purpose is not purpose))

    @property
    def scratch(self) -> "Ledger":
        """What is in `memory.scratch` alone."""
        there = (*IN_SCRATCH, Purpose.STASH)
        return Ledger(tuple(e for e in self.entries if e.purpose in there and e.tier in _LOW))

    def told(self, *tiers: Tier) -> str:
        """What is on some tiers, the largest first, such as "moments 4.10, weights 0.05 GB".

        All sizes are in the unit of the largest.

        Args:
            tiers: the tiers; none: the device.
        """
        there = [entry for entry in self.entries if entry.tier in (tiers or (Tier.DEVICE,))]
        there.sort(key=lambda entry: -entry.num_bytes)
        if not there:
            return ""
        unit, factor = unit_of(there[0].num_bytes)
        sizes = [f"{one.purpose.value} {size_in(factor, one.num_bytes)}" for one in there]
        return f"{', '.join(sizes)} {unit}"

    def as_dict(self) -> dict[str, Any]:
        """The entries and sums, as JSON can hold them."""
        return {
            **{f"{tier.value}_bytes": self.total(tier) for tier in Tier},
            "entries": [
                {"purpose": purpose.value, "tier": tier.value, "bytes": num_bytes}
                for purpose, tier, num_bytes in self.entries
            ],
        }


def readable(num_bytes: float) -> str:
    """A size with three digits, such as "12.3 MB" (10^6 bytes)."""
    unit, factor = unit_of(num_bytes)
    value = num_bytes / factor
    if factor == 1:
        return f"{value:.0f} {unit}"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def unit_of(num_bytes: float) -> tuple[str, float]:
    """The unit a size is said in, and its bytes: ("MB", 1e6) for 45,600,000."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= factor * 0.9995:
            return unit, factor
    return "B", 1.0


def size_in(factor: float, num_bytes: float) -> str:
    """A size in a unit of so many bytes, with two decimals; what rounds to nothing is "<0.01"."""
    if factor == 1:
        return f"{num_bytes:.0f}"
    value = num_bytes / factor
    return f"{value:,.2f}" if value >= 0.005 or not num_bytes else "<0.01"
