"""Many ranks in one process, for tests: one thread a rank, of which exactly one runs at a time."""

# A rank runs until it polls; then a seeded generator draws the next rank to run, and which of its
# waiting parcels arrive in which order. So a seed is a history: any failure can be run again. The
# order is as hostile as a network may be: parcels overtake each other, and a parcel that was sent
# long ago may still be under way. It is read from the sender's memory when it arrives, so that a
# sender who writes to it too early is found out. Parcels take the form of `envelope.py`, as they do
# over MPI.
#
# When every rank polls with nothing to do and nothing is under way, no rank can ever move again:
# that is raised as `Stuck` rather than waited for.
#
# A network may also deliver a parcel twice, or never (`Chaos`). The second one is dropped, as TCP
# does by numbers; what is lost stays lost, and the ranks must say what they wait for. A rank may
# die at any of its looks for mail. The others find out sooner or later, as under MPI with ULFM.

import threading
from collections.abc import Callable, Collection
from math import inf
from random import Random
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from axrt.device.device import CPU
from axrt.device.queues import NOW, Moment, moment_of, wait_on_device
from axrt.errors import PeerLostError
from axrt.scheduler.task import Vocabulary

from .collectives import Collectives
from .control import Topic
from .envelope import is_large, open_envelope, pack, seal
from .landing import Landings
from .local_collectives import LocalCollectives, Meeting
from .transport import Parcel, share_memory

T = TypeVar("T")


class Stuck(AssertionError):
    """No rank can move and nothing is under way."""


class Stopped(Exception):
    """Another rank of this world has failed."""


class Chaos(NamedTuple):
    """What a bad network does."""

    delayed: float = 0.3  # share of the looks at which a parcel that might arrive does not
    duplicated: float = 0.0  # share of parcels that arrive twice
    # number of the parcel that never arrives, in the order in which all ranks send; -1: none
    lost: int = -1
    # a rank, and the number of its look for mail at which it dies; None: none does
    dies: tuple[int, int] | None = None


_USUAL = Chaos()
_FINDS_OUT = 0.3  # share of its looks at which a rank finds out that another one has died


class Lost(NamedTuple):
    """A parcel that has been lost: its meaning or topic, and its way."""

    says: Vocabulary
    source: int
    to: int


class _UnderWay(NamedTuple):
    """A parcel that has been sent and not arrived: its number, its sender, its meaning or topic,
    its header, the sender's own memory, and the moment at which that has its values."""

    number: int
    source: int
    says: Vocabulary
    head: bytes
    tensors: list[Tensor]
    after: Moment


class LocalWorld:
    """Some ranks in one process.

    Attributes:
        sent: number of parcels that ranks have sent.
        lost: the parcel that has been lost; None: none has.
        dead: ranks that have died.
    """

    def __init__(self, size: int, seed: int = 0, chaos: Chaos = _USUAL) -> None:
        self.size, self.chaos = size, chaos
        self.sent = 0
        self.lost: Lost | None = None
        self.dead: set[int] = set()
        self.random = Random(seed)
        self.mail: list[list[_UnderWay]] = [[] for _ in range(size)]
        self.meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self.blocked = [False] * size
        self._alive = [True] * size
        self._failed = False
        # A rank waits at its gate, which whoever runs opens for the next one: nobody else wakes up.
        self._gates = [threading.Lock() for _ in range(size)]
        for gate in self._gates:
            gate.acquire()

    def run(self, rank_main: Callable[["LocalTransport"], T]) -> list[T]:
        """Call `rank_main` once a rank.

        Returns:
            The result of each rank, in order, but for ranks that have died.
        Raises:
            BaseException: the first failure of a rank, as it was raised there.
        """
        results: dict[int, T] = {}
        failures: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                self._wait_for_turn(rank)
                results[rank] = rank_main(LocalTransport(self, rank))
            except Stopped:
                pass
            except BaseException as failure:
                failures.append(failure)
                self._failed = True
            finally:
                self._leave(rank)

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}")
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return [results[rank] for rank in range(self.size) if rank not in self.dead]

    def alone(self) -> "LocalTransport":
        """The transport of the only rank, to be used without `run`."""
        assert self.size == 1
        return LocalTransport(self, 0)

    def pass_on(self, rank: int) -> None:
        """Let a rank drawn by lot run, which may be this one again.

        Raises:
            Stuck: every rank waits and nothing is under way.
            Stopped: another rank has failed.
        """
        self._check_not_stuck()
        if self.size == 1:
            return
        if self._failed:
            raise Stopped
        chosen = self.random.choice([r for r, alive in enumerate(self._alive) if alive])
        if chosen != rank:
            self._gates[chosen].release()
            self._wait_for_turn(rank)

    def _wait_for_turn(self, rank: int) -> None:
        self._gates[rank].acquire()
        if self._failed:
            raise Stopped

    def _leave(self, rank: int) -> None:
        """Let another rank run, which stops, too, if one has failed."""
        self._alive[rank] = False
        if any(self._alive):
            self._gates[self._alive.index(True)].release()

    def _check_not_stuck(self) -> None:
        if all(
            blocked or not alive for blocked, alive in zip(self.blocked, self._alive, strict=True)
        ):
            raise Stuck("every rank waits and nothing is under way")


class LocalTransport:
    """One rank's end of a `LocalWorld`; implements `Transport`."""

    takes_time = False

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self._landings = Landings()
        self._heard: set[int] = set()  # numbers of parcels that may come once more
        self._looks = 0  # for mail
        self.expect = self._landings.expect

    def send(self, rank: int, parcel: Parcel, after: Moment = NOW) -> None:
        wait_on_device(after)
        head, tensors = pack(parcel)
        world, says = self._world, parcel.message[0]
        if self.rank in world.dead:
            return
        number, world.sent = world.sent, world.sent + 1
        if number == world.chaos.lost:
            world.lost = Lost(says, self.rank, rank)
            return
        one = _UnderWay(number, self.rank, says, head, tensors, moment_of(tensors))
        times = 1 + (world.random.random() < world.chaos.duplicated)
        world.mail[rank] += [one] * times
        world.blocked[rank] = False

    def poll(self, wait_s: float) -> list[tuple[int, Parcel]]:
        world, block = self._world, wait_s == inf
        if world.size == 1 and not block and world.chaos.dies is None:
            return []  # a rank sends nothing to itself
        world.blocked[self.rank] = block and not world.mail[self.rank]
        self._die_or_find_out()
        try:
            world.pass_on(self.rank)
        except Stuck:
            self._find_out()
            raise
        mail = world.mail[self.rank]
        if not mail:
            return []
        seen = 1.0 - world.chaos.delayed
        places = [place for place in range(len(mail)) if block or world.random.random() < seen]
        world.random.shuffle(places)
        places = places[: world.random.randint(1, len(places))] if places else []
        if len(places) < len(mail):  # a rank's goodbye may not overtake what it said before
            places = [place for place in places if mail[place].says is not Topic.LEAVES]
        coming = [mail[place] for place in places if not self._came_before(mail[place])]
        arrived = [(one.source, _received(one, self._landings)) for one in coming]
        world.mail[self.rank] = [item for place, item in enumerate(mail) if place not in places]
        return arrived

    def _die_or_find_out(self) -> None:
        world, self._looks = self._world, self._looks + 1
        if (self.rank, self._looks) == world.chaos.dies:
            world.dead.add(self.rank)
        if self.rank in world.dead:
            raise Stopped
        if world.dead and world.random.random() < _FINDS_OUT:
            self._find_out()

    def _find_out(self) -> None:
        """Raise an error if a rank has died."""
        if self._world.dead:
            raise PeerLostError(f"rank {min(self._world.dead)} has died")

    def _came_before(self, one: _UnderWay) -> bool:
        """The parcel has come once."""
        if not self._world.chaos.duplicated:
            return False
        came = one.number in self._heard
        self._heard.add(one.number)
        return came

    def collectives(self, device: torch.device) -> Collectives:
        return LocalCollectives(self.rank, self._world.meetings)

    def open_lines(self, device: torch.device, peers: Collection[int]) -> None:
        pass

    def still_reads(self, memory: Tensor, wait_s: float) -> bool:
        return any(
            one.source == self.rank and any(share_memory(memory, tensor) for tensor in one.tensors)
            for mail in self._world.mail
            for one in mail
        )

    @property
    def receiving(self) -> bool:
        return bool(self._world.mail[self.rank])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _received(one: _UnderWay, landings: Landings) -> Parcel:
    """The parcel, out of its envelope and the large tensors beside it, on the device that each
    tensor came from."""
    wait_on_device(one.after)
    on_host = [tensor.cpu() for tensor in one.tensors]
    beside = [tensor for tensor in on_host if is_large(tensor.nbytes)]
    arriving = open_envelope(
        bytearray(seal(one.head, on_host)), lambda layout: layout.allocate(CPU), landings
    )
    for buffer, sent in zip(arriving.large, beside, strict=True):
        _row(buffer).copy_(_row(sent))
    arriving.tensors = [
        buffer.to(sent.device) for buffer, sent in zip(arriving.tensors, one.tensors, strict=True)
    ]
    return arriving.parcel()


def _row(tensor: Tensor) -> Tensor:
    """The tensor's memory as MPI would read or write it, shape (elements,)."""
    return tensor.as_strided((tensor.numel(),), (1,))
