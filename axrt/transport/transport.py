"""The contract of a transport: parcels go out at once and come in when polled; it knows nothing of
their meaning."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from axrt.device.queues import NOW, Moment

from .collectives import Collectives
from .control import News


class Parcel(NamedTuple):
    """A message with the payload that travels beside it.

    Args:
        generation: number of the `RankState` that the parcel is for. Every rank counts alike: one
            for the training, one for each evaluation, one after a dropped step or a loaded
            checkpoint.
        message: message to a stage, or control message to the rank.
        payload: a tensor, None, bool, int, float, str, or tuples, lists and dicts of payloads.
    """

    generation: int
    message: News
    payload: Any = None


class Transport(Protocol):
    """The contract of a transport. Parcels may overtake each other; none is lost or doubled."""

    @property
    def rank(self) -> int:
        """Rank of this process in the job."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        ...

    @property
    def takes_time(self) -> bool:
        """True if parcels on their way come with time, so that it may pay to wait a moment; False
        if they come only when other ranks have run, as ranks of one process take turns."""
        ...

    def send(self, rank: int, parcel: Parcel, after: Moment = NOW) -> None:
        """Hand a parcel over; returns at once.

        The transport keeps alive what it needs of the payload. The sender must not change the
        payload any more.

        Args:
            rank: rank of the job that the parcel is for.
            parcel: parcel to send.
            after: moment at which tensors of a device have their values.
        Raises:
            TypeError: the payload holds something that cannot travel.
            PeerLostError: the rank has gone.
        """
        ...

    def poll(self, wait_s: float) -> list[tuple[int, Parcel]]:
        """All parcels that have arrived, each with the rank that sent it.

        Args:
            wait_s: seconds to sleep and look again where nothing has arrived, shortened to a few
                milliseconds; 0: look once. Infinity says that this rank can do nothing before
                something arrives. The result may still be empty.
        Raises:
            PeerLostError: some rank has gone.
        """
        ...

    def expect(self, generation: int, message: News, buffers: Sequence[Tensor]) -> None:
        """Put the tensors that come with a message into this memory, one each and in order, where
        they fit.

        Args:
            generation, message: generation and message of a parcel that has not come yet.
            buffers: contiguous tensors whose memory is lent until the parcel has been polled, or
                for good if it never comes; () takes back what was said before.
        """
        ...

    def collectives(self, device: torch.device) -> Collectives:
        """The library's collectives of tensors on a device; all ranks call it at the same time."""
        ...

    def open_lines(self, device: torch.device, peers: Collection[int]) -> None:
        """Let large tensors of a device go by the library, to these ranks and from them; all ranks
        call it at the same time. Where nothing has to travel it does nothing."""
        ...

    def still_reads(self, memory: Tensor, wait_s: float) -> bool:
        """True if something that was sent from this memory has not left it yet.

        Args:
            memory: a tensor; all of its storage counts.
            wait_s: seconds to wait for it at most.
        Raises:
            PeerLostError: some rank has gone.
        """
        ...

    @property
    def receiving(self) -> bool:
        """Something is on its way in, as far as this rank can see."""
        ...

    def flush(self) -> None:
        """Return when the network has everything that was sent, and no copy of ours is still to
        come.

        Large messages may still need polls.
        """
        ...

    def close(self) -> None:
        """Complete what was sent, then release the transport. The peers keep polling until they
        close too."""
        ...


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Two tensors are views of one storage."""
    start = one.untyped_storage().data_ptr()
    return start != 0 and start == other.untyped_storage().data_ptr()
