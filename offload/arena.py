"""Arenas: the memory of a tier, cut once."""

# A *tier* is where bytes lie: a device, the host, or a disk. Whoever needs memory there cuts a
# *stretch* first, all of them together make the arena, and nothing is allocated later. A budget is
# kept where the cut is made: what does not fit is refused before anything is allocated.

import math
from typing import NamedTuple

# Direct input and output want addresses, offsets and lengths that are multiples of a disk's block,
# and a page is at least that on every machine that torch runs on.
PAGE_BYTES = 4096


class Stretch(NamedTuple):
    """Bytes of an arena."""

    start: int  # offset from the arena's first byte, a multiple of `PAGE_BYTES`
    num_bytes: int  # length, a multiple of `PAGE_BYTES`


class BudgetError(MemoryError):
    """A stretch that the budget of its tier does not hold."""


class Cut:
    """The stretches of an arena, before there is one.

    Args:
        budget_bytes: most that the arena may have, in bytes.
    Attributes:
        num_bytes: size of all stretches, in bytes.
        purposes: what the bytes are for, with their number.
    """

    def __init__(self, tier: str, budget_bytes: float = math.inf) -> None:
        self._tier, self._budget_bytes = tier, budget_bytes
        self.num_bytes = 0
        self.purposes: dict[str, int] = {}

    def stretch(self, num_bytes: int, purpose: str) -> Stretch:
        """Cut a stretch.

        Args:
            num_bytes: bytes that it must hold; rounded up to whole pages.
            purpose: what they are for, such as "moments".
        Raises:
            BudgetError: the budget does not hold it.
        """
        whole = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if self.num_bytes + whole > self._budget_bytes:
            already = ", ".join(f"{name} {size}" for name, size in self.purposes.items())
            raise BudgetError(
                f"{whole} bytes of {purpose} do not fit the {self._tier}, of which "
                f"{self._budget_bytes:.0f} bytes may be used and {self.num_bytes} are"
                f"{f' ({already})' if already else ''}; expected a larger budget"
            )
        made = Stretch(self.num_bytes, whole)
        self.num_bytes += whole
        self.purposes[purpose] = self.purposes.get(purpose, 0) + whole
        return made
