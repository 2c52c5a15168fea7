"""The job of the ranks that are left when others are lost, where the MPI library goes on without
them (ULFM)."""

# Open MPI does under `mpirun --with-ft ulfm`: the other ranks live on, calls that need the lost one
# raise, and a communicator without it is made. Elsewhere the launcher ends every rank.

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from axrt.errors import PeerLostError

from .mpi_world import CallsMpi, MpiWorld
from .world import at_the_start

if TYPE_CHECKING:
    from mpi4py import MPI

_ENABLED = "OMPI_MCA_mpi_ft_enable"  # set by Open MPI's mpirun
_DONE, _SPARE_LOOKS_S = 1, 0.02  # the tag of the last word to spares
_FLAG = "--with-ft ulfm"
HOW = f"Open MPI's mpirun {_FLAG}"


class RankLostError(PeerLostError):
    """A rank is lost, and the others may go on: `SurvivingWorld.survivors` has the job without it.

    The engine of every rank that is left raises it, sooner or later.
    """


class _Process(NamedTuple):
    """A process of the job."""

    rank: int  # number that the launcher gave it
    host: str  # name of its host
    pid: int  # its number there

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


# A lost rank is survived by beginning anew in the same processes, under a communicator of those who
# are left. To go on with the step under way was thought of: microbatches of the torn replica would
# go to others. But steps have no barrier, so some buckets of some ranks have stepped when another
# dies. Only a state of one step is the same everywhere, and that a checkpoint has, or a copy in
# memory.
class SurvivingWorld(MpiWorld):
    """A job that may go on without ranks that are lost, seen from a rank that is left.

    Args:
        mpi: the module `mpi4py.MPI`, started.
        workers: number of its first ranks that train, the others being spares; 0: all.
        before: the job as it was. It is kept, since MPI may still write to memory that belongs to
            it.
        lost: a text about each rank that was lost since.
    """

    def __init__(
        self,
        mpi: Any,
        device: torch.device,
        everyone: "MPI.Comm",
        workers: int = 0,
        before: MpiWorld | None = None,
        lost: Sequence[str] = (),
    ) -> None:
        self.everyone, self._before, self.lost = everyone, before, tuple(lost)
        me = _Process(mpi.COMM_WORLD.rank, socket.gethostname(), os.getpid())
        self._processes: list[_Process] = everyone.allgather(me)
        self._workers = workers or everyone.size
        self.spares = range(self._workers, everyone.size)
        comm = everyone.Split(self.is_spare) if self.spares else everyone
        super().__init__(mpi, device, comm)
        self._keeps = list[CallsMpi]()  # what MPI may write to
        self.install_hooks()

    @classmethod
    def begun(cls, world: MpiWorld) -> "SurvivingWorld | None":
        """A job that the launcher has started; None where it ends all ranks when one is lost."""
        if not can_survive(world.mpi):
            return None
        return cls(world.mpi, world.device, world.comm, before=world)

    @property
    def survives(self) -> bool:
        return True

    @property
    def command(self) -> str:
        return f"mpirun {_FLAG} -n {self.everyone.size} "

    def launched_as(self, rank: int) -> int:
        return int(self.mpi.COMM_WORLD.rank)

    @property
    def is_spare(self) -> bool:
        """This rank does not train, and waits for the place of a lost one."""
        return self.everyone.rank in self.spares

    @property
    def has_lost(self) -> bool:
        # A spare may be lost without anybody who misses it.
        is_known = self.everyone.Get_failed().size > 0
        return bool(is_known or self.everyone.size < self.mpi.COMM_WORLD.size)

    def keep(self, thread: CallsMpi) -> None:
        super().keep(thread)
        self._keeps.append(thread)

    def with_spares(self, workers: int) -> "SurvivingWorld":
        """The same ranks, of which the last ones are spares; every rank calls it."""
        return self._with(self.everyone, workers)

    def survivors(self, workers: Callable[[int], int]) -> "SurvivingWorld":
        """The job without the ranks that are lost; every other rank calls it.

        Args:
            workers: function that says how many of so many ranks train.
        """
        left = self.everyone
        while True:
            left = left.Shrink()
            try:
                now = workers(left.size)
                numbers = self._numbers_of(left)
                order = in_places(numbers, self._workers, now)
                made = self._with(
                    left.Split(0, order.index(self.everyone.rank)),
                    now,
                    [str(one) for n, one in enumerate(self._processes) if n not in numbers],
                )
                # All ranks have come so far, or all begin again: another one may be lost meanwhile.
                if left.Agree(1):
                    return made
            except self.mpi.Exception:
                with suppress(self.mpi.Exception):
                    left.Agree(0)

    def _numbers_of(self, left: "MPI.Comm") -> list[int]:
        """The ranks that are left, by their numbers before."""
        group, before = left.Get_group(), self.everyone.Get_group()
        return list(self.mpi.Group.Translate_ranks(group, list(range(left.size)), before))

    def _with(
        self, everyone: "MPI.Comm", workers: int, lost: Sequence[str] = ()
    ) -> "SurvivingWorld":
        return SurvivingWorld(self.mpi, self.device, everyone, workers, self, lost)

    def wait_as_a_spare(self) -> int:
        """Wait until the others have done everything. Returns the exit code of the job.

        Raises:
            RankLostError: a rank that trains is lost.
        """
        mpi, everyone, status = self.mpi, self.everyone, self.mpi.Status()
        while True:
            try:
                if everyone.Iprobe(mpi.ANY_SOURCE, _DONE, status):
                    code = bytearray(1)
                    everyone.Recv([code, mpi.BYTE], status.Get_source(), _DONE)
                    return code[0]
            except mpi.Exception as error:
                revoked = error.Get_error_class() == mpi.ERR_REVOKED
                if revoked or all_are_lost(mpi, everyone, range(self._workers)):
                    self.fail(error)
                everyone.Ack_failed()  # a spare is lost, and nobody waits for it
            time.sleep(_SPARE_LOOKS_S)

    def dismiss_spares(self, code: int) -> None:
        """Tell spares that everything is done; the first rank calls it."""
        for spare in self.spares:
            with suppress(self.mpi.Exception):  # it is lost
                self.everyone.Send([bytearray([code]), self.mpi.BYTE], spare, _DONE)

    def end_mpi(self, code: int) -> None:
        if self.rank == 0 and not self.is_spare:
            self.dismiss_spares(code)
        if not self.has_lost:  # else its end may wait for them
            super().end_mpi(code)

    def abort(self, code: int) -> None:
        self.mpi.COMM_WORLD.Abort(code)  # that of a part of it ends that part alone

    def fail(self, error: BaseException) -> NoReturn:
        if not is_loss(self.mpi, error):
            super().fail(error)
        if isinstance(error, PeerLostError) and error.silent is not None:
            self._end_silent(self._processes[error.silent])
        self._let_go()
        raise RankLostError(str(error)) from None

    def _end_silent(self, process: "_Process") -> None:
        """Have a rank that is stopped end, which MPI takes for alive: the others cannot go on
        without it before."""
        if process.host == socket.gethostname():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            what = "it is killed"
        else:
            what = "kill it there, and the others go on"
        text = f"axrt: {process} has shown no sign of life for run.patience_s: {what}\n"
        os.write(2, text.encode(errors="backslashreplace"))

    def _let_go(self) -> None:
        """Let every rank that is left find out, and leave everything as it is. Nothing of this job
        holds its engine any more: the next one needs the memory."""
        self.where = at_the_start
        for close in tuple(self._closes):
            self.not_at_exit(close)
        for of in self._keeps:
            of.stop()
        for comm in (self.comm, self.everyone):
            with suppress(self.mpi.Exception):
                comm.Revoke()
        for of in self._keeps:
            with suppress(self.mpi.Exception):
                of.revoke()


def can_survive(mpi: Any, environment: Mapping[str, str] = os.environ) -> bool:
    """The MPI library and the launcher keep the other ranks when one is lost.

    Args:
        mpi: the module `mpi4py.MPI`.
    """
    return environment.get(_ENABLED) in ("1", "true") and hasattr(mpi.Comm, "Shrink")


def is_loss(mpi: Any, error: BaseException) -> bool:
    """The error says that a rank is lost, or that another rank has found one lost."""
    if isinstance(error, PeerLostError):
        return True
    classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
    return isinstance(error, mpi.Exception) and error.Get_error_class() in classes


def all_are_lost(mpi: Any, comm: "MPI.Comm", ranks: range) -> bool:
    """All of these ranks of a communicator are known to be lost."""
    everyone, failed = comm.Get_group(), comm.Get_failed()
    places = mpi.Group.Translate_ranks(everyone, list(ranks), failed)
    return all(place != mpi.UNDEFINED for place in places)


def in_places(left: Sequence[int], before: int, now: int) -> list[int]:
    """The order of the ranks that are left: where as many train as before, spares take the places
    of those that are lost, and all others keep theirs; else the order stays.
    """
    if now != before:
        return list(left)
    spares = iter([rank for rank in left if rank >= before])
    workers = [rank if rank in left else next(spares) for rank in range(now)]
    return [*workers, *spares]
