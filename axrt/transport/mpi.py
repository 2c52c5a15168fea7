"""Parcels over MPI: nonblocking, in any order, never waiting for a peer."""

# A parcel is an envelope and the large tensors beside it (see `envelope.py`), each one message or
# several. Large tensors need no matching by tag: MPI keeps the order of messages between two ranks
# on one tag, envelopes are taken in that order, and each posts the receives for its tensors at
# once. So the tag says only the channel.
#
# Two habits of MPI libraries shape `poll`. A probe looks at what is already matched, says no, and
# only then makes progress, so one that says no is asked again (a message known to be there is seen
# by the first poll). And large messages move only inside MPI calls, so every poll also asks after
# what is still going out. A thread does so while the rank computes (`progress.py`), but seldom
# where the receiver takes the message by itself (`single_copy.py`). One lock guards all that the
# two touch.

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from axrt.device.queues import NOW, Moment, wait_for
from axrt.errors import PeerLostError

from .collectives import LibraryCollectives
from .control import News
from .envelope import BY_LINE, BY_MPI, Arriving, is_by_line, is_large, open_envelope, seal
from .landing import Landings
from .lines import Lines
from .progress import Progress
from .single_copy import single_copy_peers
from .staging import InPlace, Leaving, Staging
from .transport import Parcel, share_memory
from .waiting import Patience, sharpen_sleep

_ENVELOPES, _TENSORS = 1, 2  # tags
_PIECE_BYTES = 1 << 30  # MPI counts with 31 bits
_MISSES = 2
_LOOK_S = 20e-6
# Where MPI has no single copy within a node, a call moves only so much of a large message, and a
# rank that computes looks seldom.
_BYTES_OF_A_CALL = 64 * 1024
_CALLS = 16  # at most, in one look
_ALWAYS_COPIED_BYTES = 2 * 1024
# so long a rank that waits looks for messages alone, before the loop looks after the rest
_LOOK_ALONE_S = 2e-3


class _Lent(NamedTuple):
    """What a message on its way out reads."""

    owner: object  # owner of the memory, to which MPI keeps no reference
    # bytes that calls of this rank must move; 0 where the receiver takes them by itself
    to_move: int


class _Going(NamedTuple):
    """A parcel on its way out, and the lines that carry its large tensors; None: MPI does."""

    leaving: Leaving
    lines: Lines | None


@dataclass(slots=True)
class _Coming:
    """A parcel whose envelope is here and whose tensors are not."""

    source: int  # rank that has sent it
    arriving: Arriving  # the envelope, opened
    staging: Staging  # what makes its tensors ready
    requests: list[MPI.Request]  # receives of its large tensors
    to_move: int  # bytes of its large tensors that MPI moves
    by_line: Moment  # end of those of the library
    # moment at which tasks may use its tensors; None while they are not staged
    ready: Moment | None = None


class MpiTransport:
    """Implements `Transport` over an MPI communicator.

    Args:
        communicator: communicator of the job; it is duplicated, so that no message of the user's is
            taken for ours.
        staging: mover of tensors between the device and the memory that MPI touches; None: tensors
            are in CPU memory.
        piece_bytes: largest MPI message for a tensor, in bytes; a larger tensor goes in several.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        staging: Staging | None = None,
        piece_bytes: int = _PIECE_BYTES,
    ) -> None:
        self.takes_time = communicator.size > 1
        self._comm = communicator.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        self._staging = staging or InPlace()
        self._piece_bytes = piece_bytes
        # On every rank, whatever its device: all of a node take part.
        self._single_copy_peers = single_copy_peers(self._comm)
        # Parcels that are not ready, by the rank that they are for, in order.
        self._going: dict[int, deque[_Going]] = {}
        self._sending: list[MPI.Request] = []  # those that MPI did not take at once
        self._lent: list[_Lent] = []  # place by place
        self._library: LibraryCollectives | None = None
        self._lines: Lines | None = None
        self._sending_by_line: list[tuple[Moment, list[Tensor]]] = []  # and what it reads from
        self._status = MPI.Status()
        self._envelopes: dict[
            int, deque[tuple[bytearray, MPI.Request]]
        ] = {}  # on their way in, by source, in order
        self._coming: list[_Coming] = []
        self._landings = Landings()
        self._patience = Patience()
        sharpen_sleep()
        self._lock = threading.Lock()
        self._arrived: list[tuple[int, Parcel]] = []  # parcels that are whole and were not polled
        self._failure: Exception | None = None  # of the thread
        # A loop that puts tasks on a device is back at once, and needs nobody to look meanwhile.
        looks = self.size > 1 and isinstance(self._staging, InPlace)
        self._progress = (
            Progress(self._look) if looks and MPI.Query_thread() == MPI.THREAD_MULTIPLE else None
        )

    def send(self, rank: int, parcel: Parcel, after: Moment = NOW) -> None:
        lines = self._lines if self._lines and self._lines.takes(rank, parcel.message) else None
        leaving = (lines.staging if lines else self._staging).outgoing(parcel, after)
        with self._lock:
            if rank in self._going or not (leaving.ready is NOW or leaving.ready.passed()):
                self._going.setdefault(rank, deque()).append(_Going(leaving, lines))
            else:
                self._isend(rank, leaving, lines)
            if self._is_busy:
                self._tell_progress()

    def poll(self, wait_s: float) -> list[tuple[int, Parcel]]:
        with self._lock:
            try:
                return self._poll(wait_s)
            except MPI.Exception as error:
                raise self._some_rank_is_lost(error) from None
            finally:
                if self._is_busy:
                    self._tell_progress()

    def expect(self, generation: int, message: News, buffers: Sequence[Tensor]) -> None:
        with self._lock:
            self._landings.expect(generation, message, buffers)

    def collectives(self, device: torch.device) -> LibraryCollectives:
        # Kept, and with it the store where groups meet: rank 0 may have no group itself.
        if self._library is None:
            self._library = LibraryCollectives(self.rank, device, self._comm.bcast)
        return self._library

    def open_lines(self, device: torch.device, peers: Collection[int]) -> None:
        # With the lock: a peer that is ready first may send already, and the thread would open it.
        with self._lock:
            self._lines = Lines(self.collectives(device), device, self.rank, peers)

    def _look(self) -> None:
        """Let large messages move on, from the thread; the rank's own thread comes first."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not MPI.Is_finalized():  # by a user who has not closed his engine
                self._take_envelopes()
                self._move()
        except MPI.Exception as error:
            self._failure = self._some_rank_is_lost(error)
        except Exception as error:  # raised where the rank polls next, which its loop expects
            self._failure = error
        finally:
            self._tell_progress()
            self._lock.release()

    @property
    def _is_busy(self) -> bool:
        """Something is under way, or the thread looks after what was."""
        is_under_way = self._lent or self._coming or self._envelopes
        return bool(is_under_way or (self._progress is not None and self._progress.looks))

    def _tell_progress(self) -> None:
        if self._progress is not None:
            moving = bool(self._coming or self._envelopes or self._bytes_to_move())
            fails = self._failure is not None
            self._progress.wanted(moving and not fails, bool(self._lent) and not fails)

    def _poll(self, wait_s: float) -> list[tuple[int, Parcel]]:
        if self._failure is not None:
            raise self._failure
        until_s = time.perf_counter() + min(wait_s, _LOOK_ALONE_S) if wait_s else 0.0
        while True:
            self._take_envelopes()
            if self._going:
                self._send_what_is_ready()
            if self._sending or self._sending_by_line or self._coming:
                self._move(once=bool(self._arrived))  # what is here already need not wait
            arrived, self._arrived = self._arrived, []
            if arrived or not wait_s:
                if self._patience.spins:
                    self._patience.reset()
                return arrived
            if self._going or any(one.ready is not None for one in self._coming):
                time.sleep(_LOOK_S)  # copies are being made, which take no longer than a moment
            else:
                self._patience.pause(until_s)
            if time.perf_counter() >= until_s:
                return arrived

    def _move(self, once: bool = False) -> None:
        """Let messages move on, large ones several times unless told otherwise, until the tensors
        of some parcel are here."""
        calls = 1 if once else min(1 + self._bytes_to_move() // _BYTES_OF_A_CALL, _CALLS)
        for _ in range(calls):
            if self._sending or self._sending_by_line:
                self._let_go_of_sent()
            if self._coming and self._complete():
                return

    def _bytes_to_move(self) -> int:
        """Bytes under way that calls of this rank move."""
        going = sum([lent.to_move for lent in self._lent]) if self._lent else 0
        return going + sum([one.to_move for one in self._coming]) if self._coming else going

    def still_reads(self, memory: Tensor, wait_s: float) -> bool:
        until_s = time.perf_counter() + wait_s
        with self._lock:
            try:
                while self._is_lent(memory):
                    if time.perf_counter() >= until_s:
                        return True
                    self._send_what_is_ready()
                    self._let_go_of_sent()
            except MPI.Exception as error:
                raise self._some_rank_is_lost(error) from None
        return False

    def _some_rank_is_lost(self, error: MPI.Exception) -> PeerLostError:
        return PeerLostError(
            f"a rank of the job has gone: MPI fails on rank {self.rank}, which talks to it "
            f"({error})"
        )

    def _is_lent(self, memory: Tensor) -> bool:
        waiting = [one.leaving for going in self._going.values() for one in going]
        lent = [tensor for leaving in waiting for tensor in leaving.lent]
        lent += [each.owner for each in self._lent if isinstance(each.owner, Tensor)]
        lent += [tensor for _, tensors in self._sending_by_line for tensor in tensors]
        return any(share_memory(memory, tensor) for tensor in lent)

    @property
    def receiving(self) -> bool:
        return bool(self._coming or self._envelopes or self._arrived)

    def flush(self) -> None:
        while self._going:
            with self._lock:
                try:
                    self._send_what_is_ready()
                    self._let_go_of_sent()
                except MPI.Exception as error:
                    raise self._some_rank_is_lost(error) from None
            if self._going:
                time.sleep(_LOOK_S)

    def stop(self) -> None:
        """End the thread: from now on messages move in calls alone."""
        if self._progress is not None:
            self._progress.stop()

    def revoke(self) -> None:
        """Let calls of all ranks on this communicator raise."""
        self._comm.Revoke()

    def close(self) -> None:
        self.flush()
        self.stop()
        MPI.Request.Waitall(self._sending)
        for moment, _ in self._sending_by_line:
            wait_for(moment)
        self._sending.clear()
        self._sending_by_line.clear()
        self._lent.clear()
        self._lines = None
        if self._library is not None:
            self._library.close()
        self._comm.Free()

    def _send_what_is_ready(self) -> None:
        """Send in the order of `send`, rank by rank: an envelope and its tensors are matched by
        order alone."""
        for rank in list(self._going):
            going = self._going[rank]
            while going and going[0].leaving.ready.passed():
                self._isend(rank, *going.popleft())
            if not going:
                del self._going[rank]

    def _isend(self, rank: int, leaving: Leaving, lines: Lines | None) -> None:
        try:
            self._isend_all(rank, leaving, lines)
        except MPI.Exception as error:
            raise PeerLostError(
                f"rank {rank} has gone: MPI can no longer send to it from rank {self.rank} "
                f"({error})"
            ) from None

    def _isend_all(self, rank: int, leaving: Leaving, lines: Lines | None) -> None:
        envelope = seal(leaving.head, leaving.tensors, BY_LINE if lines else BY_MPI)
        self._begin(envelope, len(envelope), envelope, rank, _ENVELOPES)
        large = [tensor for tensor in leaving.tensors if is_large(tensor.nbytes)]
        if not large:
            return
        by_line, by_mpi = _parted(large, lines)
        if lines and by_line:
            self._sending_by_line.append((lines.send(rank, by_line), by_line))
        for tensor in by_mpi:
            for piece in _pieces(tensor, self._piece_bytes):
                self._begin(piece, piece.nbytes, tensor, rank, _TENSORS)

    def _begin(
        self, memory: bytes | MPI.memory, num_bytes: int, owner: object, rank: int, tag: int
    ) -> None:
        """Begin a message; what MPI has not copied at once stays lent until it has."""
        self._sending.append(self._comm.Isend([memory, MPI.BYTE], rank, tag))
        # One as small as that MPI copies at once, unless its queues are full.
        by_itself = rank in self._single_copy_peers and num_bytes > _ALWAYS_COPIED_BYTES
        self._lent.append(_Lent(owner, 0 if by_itself else num_bytes))
        if self._sending[-1].Test():
            del self._sending[-1], self._lent[-1]

    def _let_go_of_sent(self) -> None:
        self._sending_by_line = [one for one in self._sending_by_line if not one[0].passed()]
        done = MPI.Request.Testsome(self._sending)
        for place in sorted(done or (), reverse=True):
            del self._sending[place], self._lent[place]

    def _take_envelopes(self) -> None:
        status, misses = self._status, 0
        while misses < _MISSES:
            message = self._comm.Improbe(MPI.ANY_SOURCE, _ENVELOPES, status)
            if message is None:
                misses += 1
                continue
            envelope, source = bytearray(status.Get_count(MPI.BYTE)), status.Get_source()
            # Not Recv: a large envelope would wait in there for its sender to look.
            request = message.Irecv([envelope, MPI.BYTE])
            if source not in self._envelopes and request.Test():
                self._open(envelope, source)
            else:
                self._envelopes.setdefault(source, deque()).append((envelope, request))
        if self._envelopes:
            self._take_late_envelopes()

    def _take_late_envelopes(self) -> None:
        for source in list(self._envelopes):
            envelopes = self._envelopes[source]
            while envelopes and envelopes[0][1].Test():
                self._open(envelopes.popleft()[0], source)
            if not envelopes:
                del self._envelopes[source]

    def _open(self, envelope: bytearray, source: int) -> None:
        """Read an envelope that has come. A parcel that is in it whole has arrived; of others the
        tensors are received."""
        lines = self._lines if is_by_line(envelope) else None
        staging = lines.staging if lines else self._staging
        arriving = open_envelope(envelope, staging.allocate, self._landings)
        if not arriving.large and isinstance(staging, InPlace):
            self._arrived.append((source, arriving.parcel()))
            return
        by_line, by_mpi = _parted(arriving.large, lines)
        requests = [
            self._comm.Irecv([piece, MPI.BYTE], source, _TENSORS)
            for tensor in by_mpi
            for piece in _pieces(tensor, self._piece_bytes)
        ]
        moment = lines.receive(source, by_line) if lines and by_line else NOW
        to_move = sum([tensor.nbytes for tensor in by_mpi])
        self._coming.append(_Coming(source, arriving, staging, requests, to_move, moment))

    def _complete(self) -> bool:
        """Note the parcels whose tensors are here; True if there are any."""
        left: list[_Coming] = []
        for one in self._coming:
            if self._is_here(one):
                self._arrived.append((one.source, one.arriving.parcel()))
            else:
                left.append(one)
        found = len(left) < len(self._coming)
        self._coming = left  # at last: `receiving` looks without the lock
        return found

    def _is_here(self, one: _Coming) -> bool:
        if one.requests:
            try:
                if not MPI.Request.Testall(one.requests):
                    return False
            except MPI.Exception as error:
                raise PeerLostError(
                    f"rank {one.source} has gone while {one.arriving.message} came from it to rank "
                    f"{self.rank} ({error})"
                ) from None
            one.requests, one.to_move = [], 0
        if one.ready is None:
            if not one.by_line.passed():
                return False
            of = one.arriving
            of.tensors, one.ready = one.staging.incoming(of.tensors, of.layouts)
        return one.ready.passed()


def _parted(tensors: Sequence[Tensor], lines: Lines | None) -> tuple[list[Tensor], list[Tensor]]:
    """Large tensors that go by a line, and those that go by MPI."""
    if lines is None:
        return [], list(tensors)
    by_line = [tensor for tensor in tensors if lines.carry(tensor)]
    return by_line, [tensor for tensor in tensors if not lines.carry(tensor)]


def _pieces(tensor: Tensor, piece_bytes: int) -> list[MPI.memory]:
    """The tensor's memory as MPI buffers of at most `piece_bytes`; the caller keeps the tensor
    alive."""
    start, length = tensor.data_ptr(), tensor.nbytes
    return [
        MPI.memory.fromaddress(start + at, min(piece_bytes, length - at))
        for at in range(0, length, piece_bytes)
    ]
