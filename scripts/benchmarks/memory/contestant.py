"""The form of a runtime that is ready to train, the same for all of them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from torch import Tensor


class Counter(Protocol):
    """A number of bytes that grows."""

    @property
    def num_bytes(self) -> float:
        """Bytes so far."""
        ...


class Contestant(NamedTuple):
    """A runtime with a setting, ready to train on all ranks of the job.

    Args:
        step: trains one step and returns the mean loss of this rank's microbatches; None where the
            rank has none. Every rank calls it.
        held: gives the tensors in which this rank has weights, gradients and optimizer state now.
        sending: makes a context that counts the bytes which this rank sends within.
        close: lets go of everything.
    """

    step: Callable[[], float | None]
    held: Callable[[], Iterable[Tensor]]
    sending: Callable[[], AbstractContextManager[Counter]]
    close: Callable[[], None]
