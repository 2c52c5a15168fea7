"""The contract of a transport: parcels go out at once and come in when polled; it has no opinion on
what they mean."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from axrt.note import News


class Parcel(NamedTuple):
    """A message with what travels beside it.

    Args:
        generation: which `RankState` it is for: one is made for the training, one for each
            evaluation, one after a dropped step.
        message: what became true; or a note to the rank.
        payload: a tensor, None, bool, int, float, str, or tuples, lists and dicts of payloads.
    """

    generation: int
    message: News
    payload: Any = None


class Transport(Protocol):
    """What the loop asks of a transport. Parcels may overtake each other; none is lost or
    doubled."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def takes_time(self) -> bool:
        """What is on its way comes with time, so that it may pay to wait a moment; else only with
        other ranks' turns."""
        ...

    def send(self, rank: int, parcel: Parcel) -> None:
        """Hand a parcel over; returns at once. The transport keeps what it needs of the payload
        alive, the sender must not change it any more.

        Raises:
            TypeError: the payload holds something that cannot travel.
        """
        ...

    def poll(self, wait_s: float) -> list[tuple[int, Parcel]]:
        """Everything that has arrived, each with the rank that sent it.

        Args:
            wait_s: where nothing has arrived, sleep and look again for so long, or for a few
                milliseconds if that is less; infinite where nothing can be done before something
                arrives. It may still return nothing.
        """
        ...

    def expect(self, generation: int, message: News, rooms: Sequence[Tensor]) -> None:
        """Put the tensors that come with a message into this memory, one each and in order, where
        they fit.

        Args:
            generation, message: of the parcel; it has not come yet.
            rooms: contiguous memory, lent until the parcel has been polled, or for good if it never
                comes.
        """
        ...

    @property
    def receiving(self) -> bool:
        """Something is on its way in, as far as this rank can see."""
        ...

    def flush(self) -> None:
        """Return when everything sent is in the network's hands, no copy of ours is still to come;
        large messages may still want polls."""
        ...

    def close(self) -> None:
        """Complete what was sent. The peers keep polling until they close too."""
        ...
