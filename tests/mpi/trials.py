"""What ranks do, and how that ends their job: many trials on the ranks of one job.

mpirun -n N python -m tests.mpi.trials FOLDER

A job takes seconds to start, and a failure ends it. Here all that ends a job runs as it is, up to
its last call: MPI's Abort, the end of MPI, or the end of the process. In place of that call every
rank is let out of whatever it is in, one that is stopped too, and all begin the next trial with
communicators of their own. That those calls do end a job is tried in jobs of their own, see
`test_failures.py`.

FOLDER has `trials.json`, a list of trials, and gets `RANK.json`: how each of them ended there.
"""

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from axrt.cli import main as axrt
from axrt.device.device import CPU
from axrt.world import leaving, mpi_world, survivors  # noqa: F401 - knows the class of a job
from axrt.world.heartbeat import Silence

from . import victims

TRIALS = "trials.json"
_LETS_OUT = signal.SIGUSR2  # a signal that nothing else here listens to
_LOOK_S = 0.005
# A hang: ten times what the longest trial takes.
_LIMIT_S = 150.0


# Tests of failures share a job. Each had one, since a failure ends it, and most of its time went
# into the start of ranks. Now all that ends a job runs up to its last call. Then it lets every rank
# out by a signal, a stopped one too (`tests/mpi/trials.py`). Abort, an orderly leave, `exit`,
# `os._exit` and a death before MPI have jobs of their own. A warm process that forks ranks before
# MPI starts was thought of, and is not sound: the launcher knows another process than the one that
# is killed or stopped. Its signals, exit codes, the wish to die with it and the descriptor of PMI
# would have to be passed on, and these are what such tests are about.
@dataclass(frozen=True)
class Trial:
    """What ranks do.

    Args:
        name: name of the trial; that of a function of `victims.py` where there are no words.
        words: a command line of axrt, without its first word.
        folder: directory that the ranks are in; "": a new one.
        variables: variables of their environment.
        cores: number of cores that a rank may use; 0: all.
    """

    name: str
    words: tuple[str, ...] = ()
    folder: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    cores: int = 0

    def act(self) -> None:
        if self.words:
            sys.argv = ["axrt", *self.words]
            axrt()
        else:
            getattr(victims, self.name)()


@dataclass
class Told:
    """How a trial ended on one rank.

    Args:
        how: "returns", "exits", "aborts", "leaves" or "is let out".
        code: exit code of the process, and of the job where it aborts.
        out, err: what the process has printed.
    """

    how: str = "is let out"
    code: int = 0
    out: str = ""
    err: str = ""


class Out(BaseException):
    """A rank is out of its trial: it has ended the job, or somebody else has."""


@dataclass
class Ending:
    """The last call of a rank in a trial.

    Args:
        others: processes of the other ranks.
        told: how the trial ended here.
        is_inside: the rank is in the trial.
        before: threads of earlier trials, which end nothing but themselves.
    """

    others: list[int]
    told: Told = field(default_factory=Told)
    is_inside: bool = False
    before: list[threading.Thread] = field(default_factory=threading.enumerate)

    def ends(self, how: str, code: int) -> NoReturn:
        """What the rank does in place of its end."""
        thread, main = threading.current_thread(), threading.main_thread()
        if thread is not main and thread in self.before:
            sys.exit()
        if self.told.how == "is let out":
            self.told.how, self.told.code = how, int(code)
        if how in ("aborts", "leaves"):  # whereby a launcher ends all others
            for other in self.others:
                os.kill(other, _LETS_OUT)
                os.kill(other, signal.SIGCONT)
        if thread is not main:
            os.kill(os.getpid(), _LETS_OUT)
            sys.exit()  # the thread
        self.is_inside = False
        raise Out

    def heard(self) -> None:
        """Let the rank out of its trial."""
        if self.is_inside:
            self.is_inside = False
            raise Out


class TriedWorld(mpi_world.MpiWorld):
    """The job of a trial.

    Args:
        mpi, device: as the launcher's job gets them.
        comm: communicator of the ranks.
        ending: the last call of this rank.
    """

    def __init__(self, mpi: Any, device: torch.device, comm: Any, ending: Ending) -> None:
        super().__init__(mpi, device, comm)
        self._ending = ending

    def heartbeat(self, patience_s: float) -> Silence:
        made = super().heartbeat(patience_s)
        # Not freed: who gets the number of its communicator next would get questions of this one
        # that nobody has heard.
        made.free = made.stop  # type: ignore[method-assign]
        return made

    def fail(self, error: BaseException) -> NoReturn:
        # Out may strike where a context is about to hear of an error. Its generator then stays
        # until it is collected, maybe in a later trial, whose job this would end.
        if isinstance(error, Out | GeneratorExit):
            raise error
        super().fail(error)

    def abort(self, code: int) -> None:
        self._ending.ends("aborts", code)

    def end_mpi(self, code: int) -> None:
        self._ending.ends("leaves with all", code)

    def ends_in_order(self) -> None:
        """Do what the interpreter does at its exit."""
        for close in list(self._closes):
            close()

    def let_go(self) -> list[Any]:
        """Stop what calls MPI. Returns it, since MPI may still read from its memory."""
        for close in self._closes:
            atexit.unregister(close)
        threads = list(self._threads)
        for thread in threads:
            thread.stop()
        return threads


@contextmanager
def printed(told: Told, folder: Path) -> Iterator[None]:
    """Context in which all that the process prints goes to what is told of a trial."""
    files = [folder / f"{os.getpid()}.{name}" for name in ("out", "err")]
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    for descriptor, file in zip((1, 2), files, strict=True):
        with file.open("wb") as opened:
            os.dup2(opened.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
        told.out, told.err = (file.read_text(errors="replace") for file in files)


@contextmanager
def placed(trial: Trial) -> Iterator[None]:
    """Context in the directory of a trial, with its environment."""
    here, variables, path = Path.cwd(), dict(os.environ), list(sys.path)
    cores, modules, hooks = os.sched_getaffinity(0), set(sys.modules), (os._exit, sys.excepthook)
    os.chdir(trial.folder)
    os.environ.update(trial.variables)
    if trial.cores:
        os.sched_setaffinity(0, sorted(cores)[: trial.cores])
    try:
        yield
    finally:
        os._exit, sys.excepthook = hooks
        threading.excepthook = threading.__excepthook__
        os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(here)
        sys.path[:] = path
        for name in set(sys.modules) - modules:  # a user's own, which the next one has, too
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == Path(
                trial.folder
            ):
                del sys.modules[name]


def settled(request: Any) -> None:
    """Wait without a core for what all ranks begin."""
    while not request.Test():
        time.sleep(_LOOK_S)


class Ranks:
    """This rank, trial by trial.

    Args:
        folder: for what is printed.
    """

    def __init__(self, folder: Path) -> None:
        from mpi4py import MPI

        self._all, self._folder, self._pid = MPI.COMM_WORLD.Dup(), folder, os.getpid()
        self._others = [pid for pid in self._all.allgather(self._pid) if pid != self._pid]
        self._comm, self._ending = self._all, Ending(self._others)
        self._worlds: list[TriedWorld] = []  # of the trial
        self._kept: list[Any] = []
        ranks = self

        class Here(TriedWorld):
            def __init__(self, mpi: Any, device: torch.device = CPU) -> None:
                super().__init__(mpi, device, ranks._comm, ranks._ending)
                ranks._worlds.append(self)

        # Once: what is imported in a trial, such as a command, knows the class from then on.
        mpi_world.MpiWorld, leaving.leave = Here, self._leaves  # type: ignore[assignment, misc]
        signal.signal(_LETS_OUT, lambda *_: self._ending.heard())

    def _leaves(self, code: int) -> NoReturn:
        if os.getpid() != self._pid:
            leaving._EXIT(code)
        self._ending.ends("leaves", code)

    def told_of(self, trial: Trial) -> Told:
        """How a trial ends here, once it has ended on all ranks."""
        self._comm, self._ending, self._worlds = self._all.Dup(), Ending(self._others), []
        settled(self._all.Ibarrier())
        with placed(trial), printed(self._ending.told, self._folder):
            _tries(trial, self._ending, self._worlds)
            for world in self._worlds:
                self._kept += world.let_go()
            settled(self._all.Ibarrier())
        return self._ending.told


def _tries(trial: Trial, ending: Ending, worlds: list[TriedWorld]) -> None:
    def tried(act: Callable[[], object]) -> None:
        try:
            ending.is_inside = True
            act()
            ending.is_inside = False
        except Out:
            pass
        except SystemExit as error:
            ending.is_inside = False
            ending.told.how, ending.told.code = "exits", int(error.code or 0)
        except BaseException as error:
            failure = error  # the interpreter tells its hook
            ending.told.how, ending.told.code = ("is let out", 0) if worlds else ("exits", 1)
            tried(lambda: sys.excepthook(type(failure), failure, failure.__traceback__))

    def whole() -> None:
        trial.act()
        for world in worlds:
            world.ends_in_order()
        ending.told.how = "returns"

    tried(whole)


def _ends_a_hang(trial: Trial, ended: threading.Event, to: int) -> None:
    """End the job if a trial hangs, and say which on the launcher's own stream: what a trial prints
    goes to a file."""
    if not ended.wait(_LIMIT_S):
        os.write(to, f"{trial.name} hangs\n".encode())
        faulthandler.dump_traceback(to)
        leaving._EXIT(1)


def main(folder: Path) -> None:
    from mpi4py import MPI

    torch.set_num_threads(1)
    trials = [Trial(**one) for one in json.loads((folder / TRIALS).read_text())]
    ranks, told, to = Ranks(folder), dict[str, Any](), os.dup(2)
    for trial in trials:
        ended = threading.Event()
        threading.Thread(target=_ends_a_hang, args=(trial, ended, to), daemon=True).start()
        told[trial.name] = asdict(ranks.told_of(trial))
        ended.set()
        (folder / f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(told))
    settled(MPI.COMM_WORLD.Ibarrier())
    with suppress(OSError):
        sys.stdout.flush()
    MPI.COMM_WORLD.Abort(0)  # what a trial has left on its way is of no interest to its receiver


if __name__ == "__main__":
    main(Path(sys.argv[1]))
