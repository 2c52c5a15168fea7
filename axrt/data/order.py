"""Which replica reads which samples: the same order of samples for any layout at one global batch.

Samples are numbered on over the epochs, and a step takes the next ones: first those of replica 0,
in the order of its microbatches, then those of replica 1, and so on.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One replica's part of every step.

    Args:
        replica, replicas: which one of how many.
        microbatches: per step and replica.
        size: samples a microbatch.
    """

    replica: int
    replicas: int
    microbatches: int
    size: int

    @property
    def global_batch(self) -> int:
        """Samples a step, over all replicas."""
        return self.replicas * self.microbatches * self.size

    def first_samples(self, used: int) -> Iterator[int]:
        """The first sample of each of this replica's microbatches, without end.

        Args:
            used: samples that are used up, over all replicas; any number.
        """
        while True:
            own = used + self.replica * self.microbatches * self.size
            yield from range(own, own + self.microbatches * self.size, self.size)
            used += self.global_batch
