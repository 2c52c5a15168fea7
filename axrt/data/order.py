"""The order of samples: each replica's share of a step, the same for any layout at one global
batch.

Samples are numbered on over the epochs, and a step takes the next ones: first those of replica 0,
in the order of its microbatches, then those of replica 1, and so on.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One replica's part of every step."""

    # replica, replicas: index of the replica, and number of replicas
    replica: int
    replicas: int
    microbatches: int  # number of microbatches of a step and replica
    size: int  # number of samples of a microbatch

    @property
    def global_batch(self) -> int:
        """Number of samples of a step, over all replicas."""
        return self.replicas * self.microbatches * self.size

    def first_samples(self, used: int) -> Iterator[int]:
        """The number of the first sample of each of this replica's microbatches, without end.

        Args:
            used: number of samples that are used up, over all replicas; it need not be a multiple
                of `global_batch`.
        """
        while True:
            own = used + self.replica * self.microbatches * self.size
            yield from range(own, own + self.microbatches * self.size, self.size)
            used += self.global_batch
