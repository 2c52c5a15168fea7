"""Signs of life between ranks, from a thread of their own. A long task or a compilation is no false
alarm. A rank that is stopped, holds the interpreter for ever or waits for itself is found."""

# Nothing is sent while all goes well: only a rank that has waited for a while asks. `liveness.py`
# says what the signs mean.
#
# Signs have their own thread and communicator, since a thread that computes cannot answer. A
# sign says how long no rank that matters has worked: CPU time, children included, or bytes on disk.
# A rank that waits passes on the worst sign it has, so a circle of waits is found.

import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from axrt.errors import PeerLostError

from .liveness import Liveness, Sign

if TYPE_CHECKING:
    from mpi4py import MPI

_ASK, _ANSWER = 1, 2  # tags
_SIGN = struct.Struct("<di")
_LONGEST_TICK_S, _TICKS = 1.0, 20.0  # of the patience
_ASKS_AFTER_S, _SHARE_OF_PATIENCE = 5.0, 0.25
_ANSWERS = "it answers, and does nothing: a deadlock?"
_SILENT = "it does not answer: it has died, or is stopped"
_LAST_S = 0.2  # for signs on their way when an engine closes
_WORKS = 0.02  # of a core: a display that is drawn anew now and then takes less


class Silence:
    """The heartbeat that does nothing: for one process alone, and for ranks that may wait for
    ever."""

    def waits(self, owing: Callable[[], Iterable[int]]) -> None:
        """Note that this rank cannot go on without something from other ranks; called again and
        again while that lasts.

        Args:
            owing: function that gives these ranks; it may be costly and is called only when needed.
        """

    def moves(self) -> None:
        """Note that this rank goes on."""

    def stop(self) -> None:
        """Stop asking and answering."""

    def free(self) -> None:
        """Release what the heartbeat uses; called when the engine closes, on every rank."""


class Heartbeat(Silence):
    """The thread that asks and answers for one rank.

    Args:
        comm: communicator that this thread alone uses, and frees; MPI must allow calls from several
            threads.
        patience_s: seconds that a rank may be waited for without a sign of life, more than 0.
    """

    def __init__(self, comm: "MPI.Comm", patience_s: float) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self._patience_s = patience_s
        self._tick_s = min(_LONGEST_TICK_S, patience_s / _TICKS)
        self._asks_after_s = min(_ASKS_AFTER_S, _SHARE_OF_PATIENCE * patience_s)
        self._liveness = Liveness(comm.rank, patience_s)
        self._work = _Work()
        self._waits_since: float | None = None
        self._waits_for: tuple[int, ...] = ()
        self._verdict: tuple[tuple[int, ...], Sign] | None = (
            None  # the ranks that were waited for, and the sign of one that is lost
        )
        self._sending: list[tuple[MPI.Request, bytes]] = []
        self._asked: dict[int, MPI.Request] = {}  # the last question to each rank
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="axrt heartbeat", daemon=True)
        self._thread.start()

    # Called by the rank's own thread.

    def waits(self, owing: Callable[[], Iterable[int]]) -> None:
        """Note that this rank waits; see `Silence.waits`.

        Raises:
            PeerLostError: one of the ranks has shown no sign of life for too long.
        """
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
            self._work.looks_for_messages = _clock_of_this_thread()
        elif not self._waits_for and now - self._waits_since > self._asks_after_s:
            self._waits_for = tuple(sorted(set(owing())))
        verdict = self._verdict
        if (
            verdict is not None and verdict[0] is self._waits_for
        ):  # else it is of a wait that has ended
            sign = verdict[1]
            error = PeerLostError(self._told(sign, now - self._waits_since))
            if sign.about in self._waits_for and not sign.answered:
                error.silent = sign.about
            raise error

    def moves(self) -> None:
        if self._waits_since is not None:
            self._waits_since, self._waits_for, self._verdict = None, (), None
            self._work.looks_for_messages = None

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def revoke(self) -> None:
        """Let calls of all ranks on this communicator raise."""
        self._comm.Revoke()

    def free(self) -> None:
        self.stop()
        until = time.monotonic() + _LAST_S
        with suppress(self._mpi.Exception):
            while True:
                list(self._received())  # or whoever asked could not free theirs
                if all(request.Test() for request, _ in self._sending):
                    self._comm.Free()
                    return
                if time.monotonic() > until:  # of a rank that is lost it stays
                    return
                time.sleep(1e-3)

    def _told(self, sign: Sign, waited_s: float) -> str:
        whom = " and ".join(f"rank {rank}" for rank in self._waits_for)
        if sign.about not in self._waits_for:
            through, how = f" for {whom}, which waits", "so it is told"
        else:
            through, how = "", _ANSWERS if sign.answered else _SILENT
        return (
            f"rank {self._comm.rank} has waited {waited_s:.0f} s{through} for rank {sign.about}, "
            "which has shown no sign of life for "
            f"{sign.silent_s:.0f} s ({how}). Longer pauses are allowed by run.patience_s = "
            f"{self._patience_s:g}, any by 0"
        )

    # The thread.

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self._tick_s):
            now = time.monotonic()
            # it may have been stopped itself, like everyone
            self._beat(min(now - before, 3 * self._tick_s))
            before = now

    def _beat(self, seconds: float) -> None:
        waits_for, since = self._waits_for, self._waits_since
        # One that has waited for long, for nobody else, waits for itself.
        may_ask_soon = since is not None and time.monotonic() - since <= 2 * self._asks_after_s
        has_worked = self._work.was_done(seconds) or may_ask_soon
        self._liveness.pass_time(seconds, waits_for, has_worked)
        with suppress(
            self._mpi.Exception
        ):  # a rank that has died says nothing, which is what counts
            self._hear()
        for rank in waits_for:
            # A question that has not been received is as good as a new one.
            if rank not in self._asked or self._is_done(self._asked[rank]):
                self._send(rank, _ASK, Sign(0.0, rank))
        lost = self._liveness.lost()
        self._verdict = (waits_for, lost) if lost else None

    def _hear(self) -> None:
        """Answer, and then take in answers: a sign that is passed on has grown older here first,
        or two ranks that wait for each other would hand the same one to and fro."""
        asked, answers = [], []
        for source, tag, data in self._received():
            if tag == _ASK:
                asked.append(source)
            else:
                answers.append((source, *_SIGN.unpack(data)))
        for source in asked:
            self._send(source, _ANSWER, self._liveness.sign())
        for answer in answers:
            self._liveness.heard(*answer)

    def _received(self) -> Iterator[tuple[int, int, bytearray]]:
        """The source, tag and data of each sign that has come."""
        mpi, status = self._mpi, self._mpi.Status()
        while (message := self._comm.Improbe(mpi.ANY_SOURCE, mpi.ANY_TAG, status)) is not None:
            data = bytearray(status.Get_count(mpi.BYTE))
            message.Recv([data, mpi.BYTE])
            yield status.Get_source(), status.Get_tag(), data

    def _send(self, rank: int, tag: int, sign: Sign) -> None:
        """Send without waiting: a stopped rank receives nothing.

        A send is done once it has been received. Else a communicator might be freed with a sign on
        its way, and the next one that has its number would receive it.
        """
        self._sending = [
            (request, data) for request, data in self._sending if not self._is_done(request)
        ]
        data = _SIGN.pack(sign.silent_s, sign.about)
        with suppress(self._mpi.Exception):
            request = self._comm.Issend([data, self._mpi.BYTE], rank, tag)
            self._sending.append((request, data))
            if tag == _ASK:
                self._asked[rank] = request

    def _is_done(self, request: "MPI.Request") -> bool:
        """It has been sent, or never will be."""
        try:
            return bool(request.Test())
        except self._mpi.Exception:
            return True


def _clock_of_this_thread() -> int | None:
    """The clock of its time on a core; None where the system has none, as macOS."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    return None if clock_of is None else clock_of(threading.get_ident())


class _Work:
    """A meter of whether this process, its children included, has computed or used the disk.

    One thread asks it, and that thread's own time does not count.

    Attributes:
        looks_for_messages: clock of a thread that waits, whose looks are no work; None: none does.
    """

    def __init__(self) -> None:
        self.looks_for_messages: int | None = None
        self._looked_s = 0.0
        self._process = psutil.Process()
        self._own_s, self._others, self._disk = self._own(), 0.0, 0

    def was_done(self, seconds: float) -> bool:
        """Some work was done since the last call, `seconds` ago."""
        own_s, self._own_s = self._own_s, self._own()
        looked_s, self._looked_s = self._looked_s, self._looked()
        looks_s = max(0.0, self._looked_s - looked_s) if looked_s else 0.0
        return self._own_s - own_s - looks_s > _WORKS * seconds or self._elsewhere(seconds)

    def _own(self) -> float:
        return time.process_time() - time.thread_time()

    def _looked(self) -> float:
        """Seconds of the thread that waits, all its life; 0 where none does."""
        clock = self.looks_for_messages
        return 0.0 if clock is None else time.clock_gettime(clock)

    def _elsewhere(self, seconds: float) -> bool:
        (before_s, bytes_before) = self._others, self._disk
        self._others, self._disk = self._of_children(), self._on_disk()
        return self._others - before_s > _WORKS * seconds or self._disk != bytes_before

    def _of_children(self) -> float:
        total = 0.0
        with suppress(psutil.Error, OSError):
            for child in self._process.children(recursive=True):
                with suppress(psutil.Error):
                    times = child.cpu_times()
                    total += times.user + times.system
        return total

    def _on_disk(self) -> int:
        try:
            counters = self._process.io_counters()
        except (psutil.Error, OSError, AttributeError):  # not told here
            return 0
        return int(counters.read_bytes + counters.write_bytes)
