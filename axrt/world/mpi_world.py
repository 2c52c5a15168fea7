"""The job of several ranks under MPI. When this rank cannot go on it ends the job, or leaves with
all others where they have found the same error."""

import atexit
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar
from weakref import WeakSet

import torch

from axrt.device.device import CPU
from axrt.errors import AxrtError, ConfigError, EmptyEvaluationError
from axrt.exit_codes import Exit, exit_code_of, leave_code
from axrt.transport import Transport

from . import leaving
from .heartbeat import Heartbeat, Silence
from .mpi_library import is_device_aware
from .world import World

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_ALL_AGREE_S = 5.0
_SLURM_JOB, _SRUN = "SLURM_JOB_ID", "srun (as before) "


class CallsMpi(Protocol):
    """A thread that calls MPI, and must not when MPI has ended."""

    def stop(self) -> None: ...

    def revoke(self) -> None:
        """Let calls of all ranks on its communicator raise."""


class MpiWorld(World):
    """The job of several ranks under MPI, seen from this process.

    Args:
        mpi: the module `mpi4py.MPI`, started.
        comm: communicator of its ranks; None: those that the launcher started.
    """

    def __init__(
        self, mpi: Any, device: torch.device = CPU, comm: "MPI.Comm | None" = None
    ) -> None:
        super().__init__(device)
        self.mpi = mpi
        self.comm: MPI.Comm = comm or mpi.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self._node = self.comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.node_rank = self._node.rank
        self._pid = os.getpid()
        self._failed: threading.Thread | None = None  # in which thread
        self._closes: set[Callable[[], None]] = set()
        self._threads = WeakSet[CallsMpi]()
        self._has_left = False  # the mark of an orderly end

    @property
    def command(self) -> str:
        return _SRUN if _SLURM_JOB in os.environ else f"mpirun -n {self.size} "

    def gathered_on_node(self, mine: T) -> list[T]:
        everyones: list[T] = self._node.allgather(mine)
        return everyones

    def transport(self, device: torch.device, cuda_aware: str) -> Transport:
        from axrt.transport.mpi import MpiTransport
        from axrt.transport.staging import staging_for

        aware = cuda_aware == "true" or (cuda_aware == "auto" and is_device_aware(device.type))
        transport = MpiTransport(self.comm, staging_for(device, aware))
        self.keep(transport)
        return transport

    def heartbeat(self, patience_s: float) -> Silence:
        if not patience_s or self.mpi.Query_thread() < self.mpi.THREAD_MULTIPLE:
            return Silence()
        heartbeat = Heartbeat(self.comm.Dup(), patience_s)
        self.keep(heartbeat)
        return heartbeat

    def keep(self, thread: CallsMpi) -> None:
        """Note a thread that calls MPI."""
        self._threads.add(thread)

    def check_alike(self, settings: Mapping[str, Mapping[Any, Any]]) -> None:
        flat = {
            f"{section}.{key}": value
            for section, keys in settings.items()
            for key, value in keys.items()
        }
        everyones: list[dict[str, Any]] = self.comm.allgather(flat)
        first = everyones[0]
        for rank, theirs in enumerate(everyones):
            for key in sorted(
                key for key in first.keys() | theirs.keys() if first.get(key) != theirs.get(key)
            ):
                found = (
                    f"{key} is {first.get(key)!r} on rank 0 and {theirs.get(key)!r} on rank {rank}"
                )
                raise ConfigError(f"{found}; expected the same on every rank")

    def at_exit(self, close: Callable[[], None]) -> None:
        atexit.register(close)
        self._closes.add(close)
        self._has_left = False

    def not_at_exit(self, close: Callable[[], None]) -> None:
        atexit.unregister(close)
        self._closes.discard(close)

    def left(self) -> None:
        self._has_left = not self._closes

    def install_hooks(self) -> None:
        """Make an exception that nobody catches, in any thread, end the job instead of leaving
        others to wait.

        `os._exit(0)` counts as a failure until every engine has left in order: MPICH's mpirun would
        take it for success.
        """
        os._exit = self._exit_hook
        sys.excepthook = lambda kind, error, trace: self.fail(error)
        threading.excepthook = self._thread_failed

    def _exit_hook(self, status: int) -> NoReturn:
        if (
            status == 0 and not self._has_left and os.getpid() == self._pid
        ):  # a forked child may end as it likes
            text = (
                f"axrt: {self._here()} has called os._exit(0) at {self.where()}, and ends the job\n"
            )
            os.write(2, text.encode(errors="backslashreplace"))
            status = Exit.FAILED
            leave_code(Exit.FAILED)
        leaving.leave(status)

    def _thread_failed(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:  # which ends a thread and nothing else
            self.fail(arguments.exc_value or RuntimeError(f"thread {arguments.thread} has failed"))

    def fail(self, error: BaseException) -> NoReturn:
        if self._failed not in (None, threading.current_thread()):
            # another thread has failed before and is ending the job, with its code
            time.sleep(_ALL_AGREE_S)
        if self._failed is None:  # the first failure speaks; ending may raise others
            self._failed = threading.current_thread()
            leave_code(exit_code_of(error))
            said = False
            if isinstance(error, ConfigError | EmptyEvaluationError | StopIteration):
                said = self._leave_together(f"axrt: {error}", exit_code_of(error))
            if not said:
                self._speak(error)
            self.abort(exit_code_of(error))
        leaving.leave(Exit.FAILED)

    def abort(self, code: int) -> None:
        """End every rank at once."""
        self.comm.Abort(code)

    def _leave_together(self, text: str, code: Exit) -> bool:
        """Leave with an error that every rank has found: rank 0 prints it, and all leave once it
        has.

        It returns only if some rank does not come along; then the error is not everyone's, as on
        one node without a GPU.

        Returns:
            True if this rank has printed the text.
        """
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)
        request, deadline = self.comm.Ibarrier(), time.monotonic() + _ALL_AGREE_S
        while not request.Test():
            if time.monotonic() > deadline:
                return self.rank == 0
            time.sleep(0.01)
        time.sleep(leaving.LAST_WORDS_S)
        for thread in self._threads:
            thread.stop()
        self.end_mpi(code)
        if self.mpi.Is_finalized():
            leaving.leave_in_order(code)
        # Ranks are lost, and what the library does at its exit may wait for them.
        return leaving.leave(code)

    def end_mpi(self, code: int) -> None:
        """End MPI, with all other ranks."""
        self.mpi.Finalize()

    def _here(self) -> str:
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"

    def _speak(self, error: BaseException) -> None:
        here = self._here()
        if isinstance(error, KeyboardInterrupt):
            text = f"axrt: {here} was interrupted\n"
        elif isinstance(error, AxrtError):
            notes = "".join(f"\n    {note}" for note in getattr(error, "__notes__", []))
            text = f"axrt: {here}: {error}{notes}\n"
        else:
            text = f"axrt: {here} has failed at {self.where()} and ends the job\n" + "".join(
                traceback.format_exception(error)
            )
        sys.stderr.write(text)
        sys.stderr.flush()
        sys.stdout.flush()
        time.sleep(leaving.LAST_WORDS_S)
