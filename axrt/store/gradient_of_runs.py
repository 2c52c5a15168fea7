"""The gradient of a bucket that is whole only while a run of backwards adds to it (ZeRO stage
2)."""

# When the run ends, parts leave for the copies that own them, and this rank lets go of all the
# memory, which lives until the last part has left. The total of the own shard has memory for
# itself, and each run is added to it.
#
# A job says how many reductions a step has, and `Job.run_of` which of them a microbatch goes into.
# Reductions are numbered on over steps, as microbatches are. Parts are views of memory that nobody
# else knows, so it lives until the last of them has left. The first backward of a run waits for the
# reduction of the run before last: otherwise a rank whose replica is faster had the gradients of
# all its runs on their way.

from collections.abc import Sequence

import torch

from .flat import FlatBuffer
from .gradient import Shards
from .gradient_shard import GradientShard


class GradientOfRuns(GradientShard):
    """The memory of such a gradient; arguments are those of `GradientShard`."""

    def let_go(self) -> None:
        """Let go of the memory that microbatches add up in; parts of it that were asked for live as
        long as somebody has them."""
        self._sums, self._views = [], []
        for parameter in self._parameters:
            parameter.grad = None
        self.late.remember()

    def add_up(self, parts: Sequence[Shards], me: int, further: bool = False) -> Shards:
        return super().add_up(parts, me, further=bool(self._totals))

    @property
    def own_totals(self) -> list[torch.Tensor]:
        return [total.flat for total in self._totals]

    def _total_memory(self) -> list[FlatBuffer]:
        if not self._totals:
            self._totals = [FlatBuffer.unfilled(of, self._device) for of in self.layouts_of_totals]
        return self._totals
