"""Collectives of a library over groups of ranks: NCCL on GPUs, gloo on CPUs; and its messages."""

# Groups come up from the ranks of the transport: rank 0 keeps a store on a port that the system
# chooses, and tells the others where. A process group of the user's own is not touched.
#
# All ranks of a group must issue the same collectives in the same order: another order gives wrong
# sums in silence, or none ever. `scheduler/tickets.py` keeps that order.

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from axrt.device.device import CPU
from axrt.device.queues import DeviceStream, Inline, Moment, Queue, wait_for
from axrt.device.thread_queue import ThreadQueue
from axrt.errors import LaunchError, PeerLostError

_START = timedelta(seconds=300)
# A rank may come late by as long as a task of its takes; who has died is for the loop to find.
_UNLIMITED = timedelta(days=365)


class Group(Protocol):
    """Some ranks that collect; this rank is one of them. What is passed belongs to the library
    until the moment that is returned has passed."""

    def all_reduce(self, flat: Tensor, what: str) -> Moment:
        """Add up the tensors of all ranks, shape (elements,); each gets the sum in place."""
        ...

    def reduce_scatter(self, mine: Tensor, shards: Sequence[Tensor], what: str) -> Moment:
        """Add up the tensors of all ranks, and put the sum of one shard into `mine`.

        Args:
            mine: memory for the sum of this rank's shard, shape (elements,).
            shards: what this rank has of each rank's shard, in the order of ranks; a shard has the
                same size on all ranks, and two may have two sizes.
        """
        ...


class Collectives(Protocol):
    """The groups of a rank."""

    def group(self, ranks: Sequence[int]) -> Group:
        """A group of these ranks of the job, in rising order. All of them must call it, and each
        must come to its groups in the same order."""
        ...


class LibraryCollectives:
    """Implements `Collectives` over `torch.distributed`; every rank makes one at the same time.

    Args:
        broadcast: function that gives rank 0's value on every rank.
    Raises:
        LaunchError: torch has no collectives for such a device here, or rank 0 is not reached.
    """

    def __init__(self, rank: int, device: torch.device, broadcast: Callable[[Any], Any]) -> None:
        self._rank, self._device, self._backend = rank, device, _backend_for(device)
        self._made = Counter[tuple[int, ...]]()
        self._groups: list[LibraryGroup] = []
        mine = _store("localhost", 0, serves=True) if rank == 0 else None
        here = socket.gethostname()
        host, port = broadcast((here, mine.port) if mine else None)
        # One who shares rank 0's node needs no name of it.
        self._store = mine or _store("localhost" if host == here else host, port, serves=False)

    def group(self, ranks: Sequence[int]) -> "LibraryGroup":
        one = torch.zeros(1, device=self._device)
        return self._connected(ranks, lambda group: group.all_reduce(one, "nothing"))

    def line(self, sender: int, receiver: int) -> "LibraryGroup":
        """A group of two ranks for messages from one to the other; in all else as `group`."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        return self._connected(
            sorted((sender, receiver)),
            lambda group: (
                group.send(byte, receiver) if sender == self._rank else group.receive(byte, sender)
            ),
        )

    def _connected(
        self, ranks: Sequence[int], call: Callable[["LibraryGroup"], Moment]
    ) -> "LibraryGroup":
        """A group that has done its first call.

        NCCL connects within that one. There, ranks that come to their groups in different orders
        would wait for each other for ever.
        """
        self._made[tuple(ranks)] += 1
        name = f"{' '.join(map(str, ranks))}, number {self._made[tuple(ranks)]}"
        store = dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]
        try:
            of = _process_group(self._backend, store, list(ranks).index(self._rank), len(ranks))
            group = LibraryGroup(of, tuple(ranks), is_polled=self._device != CPU)
            wait_for(call(group))
        except (RuntimeError, PeerLostError) as error:
            raise LaunchError(
                f"the library does not connect ranks {', '.join(map(str, ranks))}, as rank "
                f"{self._rank} sees it ({error}); expected a network between them, and under NCCL "
                "a GPU for each"
            ) from None
        of._set_default_timeout(_UNLIMITED)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Release all groups; nothing may be under way on them."""
        for group in self._groups:
            group.close()
        self._groups.clear()
        self._store = None


def _store(host: str, port: int, serves: bool) -> Any:
    """The store where groups meet; the one that serves it chooses a port where that is 0."""
    try:
        return dist.TCPStore(host, port, None, serves, _START, False)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise LaunchError(
            f"the groups of the library cannot meet at {host}, port {port or 'any'} ({error}); "
            "expected the host name of rank 0 to lead to it from every node, and an open network "
            "between nodes"
        ) from None


def _backend_for(device: torch.device) -> Any:
    try:
        name = dist.get_default_backend_for_device(device.type)
    except ValueError:
        name = "none"
    group = "ProcessGroupGloo" if name == "gloo" else f"ProcessGroup{name.upper()}"
    backend = getattr(dist, group, None)
    if backend is None:
        raise LaunchError(
            f"a library is to add up gradients or carry activations, but torch {torch.__version__} "
            f"has none for {device.type} here (it names {name!r}); expected gloo, nccl or xccl. "
            "Set parallel.collectives = 'parts' and parallel.activations = 'mpi'"
        )
    return backend


def _process_group(backend: Any, store: Any, rank: int, size: int) -> Any:
    """A process group of torch's; `rank` counts within it."""
    if backend is dist.ProcessGroupGloo:  # the only one that takes its time limit as it is
        return backend(store, rank, size, _START)
    options = backend.Options()
    options._timeout = _START
    return backend(store, rank, size, options)


class LibraryGroup:
    """Implements `Group`, and messages, by a process group of torch's.

    Args:
        is_polled: all its works can be asked whether they are done. Those of gloo say no until
            somebody waits for them, where they reduce and scatter, send or receive; so a thread
            does.
    """

    def __init__(self, group: Any, ranks: tuple[int, ...], is_polled: bool) -> None:
        self._group, self._ranks, self._is_polled = group, ranks, is_polled
        self._waiting: ThreadQueue | None = None

    def all_reduce(self, flat: Tensor, what: str) -> Moment:
        # Libraries do not know complex numbers.
        parts = torch.view_as_real(flat) if flat.is_complex() else flat
        return self._polled(lambda: self._group.allreduce([parts]), what)

    def reduce_scatter(self, mine: Tensor, shards: Sequence[Tensor], what: str) -> Moment:
        # Libraries do not know complex numbers.
        real = [torch.view_as_real(of) if of.is_complex() else of for of in (mine, *shards)]
        return self._awaited(lambda: self._group.reduce_scatter([real[0]], [real[1:]]), what)

    def send(self, tensor: Tensor, to: int) -> Moment:
        """Send a dense tensor to a rank of the job."""
        place = self._ranks.index(to)
        return self._awaited(lambda: self._group.send([tensor], place, 0), f"a tensor to rank {to}")

    def receive(self, tensor: Tensor, of: int) -> Moment:
        """Receive what a rank of the job sends next, into a dense tensor of that size."""
        place = self._ranks.index(of)
        return self._awaited(
            lambda: self._group.recv([tensor], place, 0), f"a tensor from rank {of}"
        )

    def close(self) -> None:
        """Release the group."""
        self._group.shutdown()
        self._group = self._waiting = None

    def _polled(self, call: Callable[[], Any], what: str) -> Moment:
        """The end of a call whose work is asked whether it is done."""
        work, failed = self._called(call, what)
        return _End(lambda: _is_done(work), failed)

    def _awaited(self, call: Callable[[], Any], what: str) -> Moment:
        """The end of a call whose work a thread waits for, where it cannot be polled."""
        if self._is_polled:
            return self._polled(call, what)
        if self._waiting is None:
            self._waiting = ThreadQueue("axrt collectives")
        work, failed = self._called(call, what)
        return _End(self._waiting.put(work.wait).passed, failed)

    def _called(self, call: Callable[[], Any], what: str) -> tuple[Any, "_Failed"]:
        """The work of a call, and the context for whatever asks about it."""
        failed = _Failed(what, self._ranks)
        with failed:
            return call(), failed


def _is_done(work: Any) -> bool:
    """A work of the library's has ended; raises if it has failed."""
    if not work.is_completed():
        return False
    work.wait()  # it does not wait any more: it says whether all went well
    return True


class _Failed:
    """Context in which an error of the library's is that of a lost rank."""

    __slots__ = ("_ranks", "_what")

    def __init__(self, what: str, ranks: tuple[int, ...]) -> None:
        self._what, self._ranks = what, ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            of = ", ".join(map(str, self._ranks))
            raise PeerLostError(
                f"the library of ranks {of} has failed in {self._what} ({error})"
            ) from None


class _End:
    """The moment at which a work of the library's is done."""

    __slots__ = ("_failed", "_is_done")

    def __init__(self, is_done: Callable[[], bool], failed: _Failed) -> None:
        self._is_done, self._failed = is_done, failed

    def passed(self) -> bool:
        with self._failed:
            return self._is_done()


class CollectiveQueue:
    """A queue of collectives: what is put issues some, and its moment is the end of all of them."""

    apart = at_once = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._issued: list[Moment] = []
        self._last: Moment = _All([])

    def issued(self, moment: Moment) -> None:
        """Note a collective that what is being put has issued."""
        self._issued.append(moment)

    def put(self, run: Callable[[], object]) -> Moment:
        self._issued = []
        self._queue.put(run)
        self._last = _All(self._issued)
        return self._last

    def moment(self) -> Moment:
        return self._last

    def after(self, moment: Moment) -> None:
        self._queue.after(moment)

    def current(self) -> AbstractContextManager[Any]:
        return self._queue.current()

    def drain(self) -> None:
        """Does not wait: a collective ends when all ranks have issued it, and some may not."""

    @cached_property
    def _queue(self) -> Queue:
        """What issues; a stream of the device, which only those have who use it."""
        return Inline() if self._device == CPU else DeviceStream(self._device)


class _All:
    """The moment at which several have passed."""

    __slots__ = ("_left",)

    def __init__(self, moments: list[Moment]) -> None:
        self._left = moments

    def passed(self) -> bool:
        self._left = [moment for moment in self._left if not moment.passed()]
        return not self._left
