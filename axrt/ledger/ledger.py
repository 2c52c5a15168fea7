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
    GATHERED = "gathered"  # weights that are whole for a residency
    FROZEN = "frozen"  # frozen parameters and buffers, as layers compute with them
    ORIGINALS = "originals"  # the float32 values of frozen tensors that are narrow
    MASTERS = "masters"
    GRADIENTS = "gradients"  # over the microbatches of a step
    TOTALS = "totals"  # over copies, where these are not the same memory
    MOMENTS = "moments"
    FACTORS = "factors"  # with bases, of an optimizer that looks at whole matrices
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

    def told(self, unit: "Unit", *tiers: Tier) -> str:
        """What is on some tiers, the largest first, such as "moments 4.10, weights 0.05 GB".

        Args:
            unit: what sizes are said in.
            tiers: the tiers; none: the device.
        """
        there = [entry for entry in self.entries if entry.tier in (tiers or (Tier.DEVICE,))]
        there.sort(key=lambda entry: -entry.num_bytes)
        if not there:
            return ""
        sizes = [f"{one.purpose.value} {unit.number(one.num_bytes)}" for one in there]
        return f"{', '.join(sizes)} {unit.name}"

    def as_dict(self) -> dict[str, Any]:
        """The entries and sums, as JSON can hold them."""
        return {
            **{f"{tier.value}_bytes": self.total(tier) for tier in Tier},
            "entries": [
                {"purpose": purpose.value, "tier": tier.value, "bytes": num_bytes}
                for purpose, tier, num_bytes in self.entries
            ],
        }


class Unit(NamedTuple):
    """What sizes are said in. One output has one of them, so that its sizes can be compared by eye.

    Attributes:
        name: such as "MB".
        num_bytes: how many bytes it is, such as 10^6.
    """

    name: str
    num_bytes: float

    @classmethod
    def of(cls, largest: float) -> "Unit":
        """The unit for sizes in bytes of which this is the largest."""
        for name, num_bytes in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if abs(largest) >= num_bytes * 0.9995:
                return cls(name, num_bytes)
        return cls("B", 1.0)

    def number(self, num_bytes: float) -> str:
        """A size without the unit, with two decimals; what rounds to nothing is "<0.01"."""
        value = num_bytes / self.num_bytes
        if self.num_bytes == 1:
            return f"{value:.0f}"
        return f"{value:,.2f}" if value >= 0.005 or not num_bytes else "<0.01"

    def text(self, num_bytes: float) -> str:
        """A size of three digits or, where it is less than the unit, as `number` has it."""
        value = num_bytes / self.num_bytes
        if self.num_bytes == 1 or value < 9.995:
            return f"{self.number(num_bytes)} {self.name}"
        return f"{value:,.{1 if value < 99.95 else 0}f} {self.name}"


def readable(num_bytes: float) -> str:
    """A size by itself, with three digits, such as "12.3 MB" (10^6 bytes)."""
    return Unit.of(num_bytes).text(num_bytes)
