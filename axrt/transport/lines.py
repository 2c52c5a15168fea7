"""Large activations from rank to rank by a library instead of MPI: NCCL between GPUs, gloo on
CPUs."""

# Envelopes stay with MPI, which keeps their order, and say which way their tensors come. The sender
# issues its sends in the order of its envelopes, and the receiver its receives as it opens them. So
# both ends of a line issue the same operations in the same order, and nobody waits for an envelope.
#
# A line has one direction and a group of its own. In one group for both directions a send would
# hold up the receive behind it until the peer has taken what is sent.
#
# `parallel.activations = "library"` opens two lines between ranks with neighbouring stages, one a
# direction. gloo's messages cannot be polled, so a thread waits for each line. NCCL connects within
# the first call. There, ranks that come to their groups in different orders would wait for ever, so
# each group and line makes its first call when it is opened, and all ranks open theirs in one
# order.

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from axrt.device.queues import Moment
from axrt.scheduler.message import Load, Message

from .collectives import CollectiveQueue, LibraryCollectives, LibraryGroup
from .control import News
from .staging import staging_for


class Lines:
    """The lines of a rank to some others and back; each of them opens its own at the same time.

    Args:
        device: device of the tensors that go by it.
    Attributes:
        staging: what lets tensors of the device leave and arrive where they are.
    """

    def __init__(
        self, collectives: LibraryCollectives, device: torch.device, rank: int, peers: Iterable[int]
    ) -> None:
        self.staging = staging_for(device, device_aware=True)
        self._device, self._queue = device, CollectiveQueue(device)
        self._out: dict[int, LibraryGroup] = {}
        self._in: dict[int, LibraryGroup] = {}
        # In one order on all ranks: pair by pair, and first from the lower rank to the higher one.
        for low, high in sorted((min(rank, peer), max(rank, peer)) for peer in peers):
            for sender, receiver in ((low, high), (high, low)):
                line = collectives.line(sender, receiver)
                if sender == rank:
                    self._out[receiver] = line
                else:
                    self._in[sender] = line

    def takes(self, rank: int, message: News) -> bool:
        """The large tensors of a message to that rank go by a line: those are what a stage's task
        has made for the next one."""
        return (
            rank in self._out
            and isinstance(message, Message)
            and message.meaning.load is Load.ACTIVATIONS
            and not message.is_read
        )

    def carry(self, tensor: Tensor) -> bool:
        """A large tensor goes by a line; what is on the host beside a device stays with MPI."""
        return tensor.device == self._device

    def send(self, rank: int, tensors: Sequence[Tensor]) -> Moment:
        """Send tensors, in order; they are read until the moment has passed."""
        return self._issued(self._out[rank].send, rank, tensors)

    def receive(self, rank: int, tensors: Sequence[Tensor]) -> Moment:
        """Receive into tensors, in order."""
        return self._issued(self._in[rank].receive, rank, tensors)

    def _issued(
        self, operation: Callable[[Tensor, int], Moment], rank: int, tensors: Sequence[Tensor]
    ) -> Moment:
        def issue() -> None:
            for tensor in tensors:
                self._queue.issued(operation(_bytes_of(tensor), rank))

        return self._queue.put(issue)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, uint8 of shape (bytes,): libraries do not know every type."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
