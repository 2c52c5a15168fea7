"""One reader a replica: pipe rank 0 draws microbatches when the brain wants one, and sends them to
the stages that need them."""

# The user's iterator is asked on one rank of a replica alone, and only when the brain wants a
# microbatch: one ahead, with two pipes up to a step. So data are read while the ranks behind
# compute, and an iterator that is slow shows as a wait for input, not as memory that grows.
#
# The number of microbatches is not known before the iterator ends. Its end is a message to every
# rank like any other, so no rank asks whether there is more. In a training all replicas hear it,
# since a step that one of them cannot end is dropped by all; in an evaluation replicas may have
# different numbers, and each ends for itself.
#
# The iterator is the user's code, and may draw from torch's generator. It gets the user's random
# state for as long as it runs, or shuffling would depend on the layers that run between two
# batches.

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from axrt.errors import DataError
from axrt.model.seeds import BorrowedGenerator
from axrt.scheduler.job import Job
from axrt.scheduler.lacks import Lack
from axrt.scheduler.message import Message
from axrt.scheduler.simulation.reader_messages import has_ended, has_read
from axrt.transport.payload import flatten

_EXHAUSTED = object()
Read = list[tuple[Message, Any]]  # what a reader tells the stages, with payloads


class BatchReader:
    """Draws microbatches from an iterable of (inputs, targets).

    Args:
        batches: the user's iterable; only the rank that holds stage 0 touches it.
        job: schedule that says where inputs and targets go, and which replicas must hear that the
            data has ended: all in a training, this one in an evaluation.
        replica: index of the replica that the microbatches are for.
        generator: random state, which is the user's while the iterator runs.
        first: function that is told the digest of the first microbatch; None: nobody is told.
        draws: function that is called before each draw, which is the user's code.
    """

    serves = False

    def __init__(
        self,
        batches: Iterable[Any] | None,
        job: Job,
        replica: int,
        generator: BorrowedGenerator,
        first: Callable[[str], None] | None = None,
        draws: Callable[[], None] = lambda: None,
    ) -> None:
        self._batches = batches
        self._iterator: Any = None
        self._job = job
        self._replica = replica
        self._told = range(job.replicas) if job.trains else (replica,)
        self._generator = generator
        self._first, self._draws = first, draws

    def __call__(self, number: int) -> Read | None:
        """Read one microbatch.

        Returns:
            Messages with their payloads: inputs and targets, or the news, for every rank, that
            there are no more.
        Raises:
            DataError: the batches are None, or an item is no pair.
        """
        item = self.draw(number)
        if item is None:
            return [(message, None) for message in has_ended(self._job, self._told, number)]
        told = has_read(self._job, self._replica, number)
        return list(zip(told, [*item] * self._job.team, strict=True))

    def serve(self) -> Read:
        """What other replicas want of this reader: nothing."""
        return []

    def lacks(self) -> list[Lack]:
        """What this reader waits for: nothing."""
        return []

    def draw(self, number: int) -> Any:
        """The next pair (inputs, targets); None: there are no more.

        Raises:
            DataError: the batches are None, or an item is no pair.
        """
        self._draws()
        item = self._generator.lent_back(self._draw)
        if item is _EXHAUSTED:
            return None
        if not isinstance(item, tuple | list) or len(item) != 2:
            size = f" of {len(item)}" if isinstance(item, tuple | list) else ""
            raise DataError(
                f"microbatch {number} is a {type(item).__name__}{size}; expected a pair (inputs, "
                "targets)"
            )
        if self._first is not None:
            self._first(_digest(item))
            self._first = None
        return item

    def _draw(self) -> Any:
        if self._iterator is None:
            if self._batches is None:
                raise DataError(
                    "batches is None on the rank that reads; expected an iterable of (inputs, "
                    "targets)"
                )
            self._iterator = iter(self._batches)
        return next(self._iterator, _EXHAUSTED)


def _digest(payload: Any) -> str:
    """A digest that is equal for equal payloads and, as far as a hash can tell, for no others."""
    skeleton, tensors = flatten(payload)
    digest = hashlib.blake2b(repr(skeleton).encode(), digest_size=16)
    for tensor in tensors:
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        plain = (
            tensor.detach()
            .cpu()
            .resolve_conj()
            .resolve_neg()
            .clone(memory_format=torch.contiguous_format)
        )
        digest.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
