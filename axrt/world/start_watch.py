"""Whether all ranks come up. Until MPI has started, a rank that dies leaves the others waiting
within its start, and most launchers do not tell them."""

# Two things do. The ranks of a node are processes of one parent, which is the launcher's: one that
# is missing there has ended. And where a job has witnesses (`axrt launch`), they write of ranks on
# other nodes.

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

import psutil

from axrt.exit_codes import Exit, leave_code
from axrt.restarts.witness import FOLDER, first_lost

_LOOK_S, _LATER_S = 0.5, 2.0  # between looks, in the first seconds and later
_FIRST_S = 10.0
_LOOKS = 3  # that find a rank gone which was there
_NEVER_SEEN_S = 5.0  # for which a rank is missing that nobody has seen: it may not have begun
_LAUNCHERS = ("hydra", "prte", "orted", "mpirun", "mpiexec", "slurmstepd", "jsm")
_JOBS = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_STEP_ID")  # what tells jobs of one launcher apart
# The variable with the number of ranks on this node, by the name that `launchers.told` has for
# whoever has set it.
_RANKS_HERE = {
    "mpirun (PMI)": "MPI_LOCALNRANKS",
    "Open MPI's mpirun": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MVAPICH's mpirun_rsh": "MV2_COMM_WORLD_LOCAL_SIZE",
}


class RankOfJob(Protocol):
    """What a launcher's variables say of a process."""

    @property
    def launcher(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int | None: ...


class StartWatch:
    """A context in which a rank waits for all others; a thread ends the process when that is in
    vain.

    Args:
        rank_of: function that says which rank a process is, from its variables; None: no rank.
        patience_s: seconds that ranks are waited for; 0: no limit.
    """

    def __init__(
        self, rank_of: Callable[[Mapping[str, str]], RankOfJob | None], patience_s: float
    ) -> None:
        self._patience_s = patience_s
        self._me = rank_of(os.environ)
        self._siblings = _Siblings(rank_of, self._me)
        self._up = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="axrt start", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._up.set()

    def _watch(self) -> None:
        began = time.monotonic()
        waited_s = 0.0
        while not self._up.wait(_LOOK_S if waited_s < _FIRST_S else _LATER_S):
            waited_s = time.monotonic() - began
            if gone := self._siblings.gone():
                self._end(f"{gone} ended before MPI was up")
            elif dead := _witnessed():
                self._end(f"rank {dead[0]} on {dead[1]} has ended before MPI was up")
            elif self._patience_s and waited_s > self._patience_s:
                self._end(
                    f"MPI is not up after {self._patience_s:g} s (run.patience_s), so not "
                    "all ranks have come this far"
                )

    def _end(self, what: str) -> None:
        if self._up.is_set():
            return
        who = "this process" if self._me is None else f"rank {self._me.rank}"
        sys.stderr.write(
            f"axrt: {who} on {socket.gethostname()} ends the job: {what}. Expected every rank to "
            "start; what it has said itself stands above, where it could\n"
        )
        sys.stderr.flush()
        leave_code(Exit.LOST_PEER)
        os._exit(Exit.LOST_PEER)


class _Siblings:
    """The other ranks of this node, as processes of the launcher's.

    Args:
        me: this process; None: no rank.
    """

    def __init__(
        self, rank_of: Callable[[Mapping[str, str]], RankOfJob | None], me: RankOfJob | None
    ) -> None:
        self._rank_of, self._me = rank_of, me
        name = _RANKS_HERE.get(me.launcher, "") if me else ""
        self._number = int(os.environ.get(name, 0))
        self._ranks: dict[int, int] = {}  # of processes that were seen, by pid
        self._others = set[int]()  # processes of other jobs that the launcher has
        self._missed, self._short_since = 0, 0.0

    def gone(self) -> str:
        """The ranks that have ended, as text; "" where all live, or that cannot be told."""
        living = self._living()
        if living is None:
            self._missed, self._short_since = 0, 0.0
            return ""
        ended = sorted(rank for pid, rank in self._ranks.items() if pid not in living)
        self._missed = self._missed + 1 if ended else 0
        if self._missed == _LOOKS:
            return _named(ended)
        if len(living) >= self._number:
            self._short_since = 0.0
            return ""
        now = time.monotonic()
        self._short_since = self._short_since or now
        if now - self._short_since < _NEVER_SEEN_S:
            return ""
        if self._me and self._me.size == self._number:  # all ranks of the job are on this node
            return _named(sorted(set(range(self._number)) - set(self._ranks.values())))
        short = self._number - len(living)
        return f"{short} of the {self._number} ranks on {socket.gethostname()}"

    def _living(self) -> set[int] | None:
        """The launcher's processes, by pid; those that are ranks are noted. None: a script stands
        between the launcher and each rank, or the system does not tell."""
        try:
            parent = psutil.Process().parent()
            if parent is None or not parent.name().startswith(_LAUNCHERS):
                return None
            living = [
                child for child in parent.children() if child.status() != psutil.STATUS_ZOMBIE
            ]
        except (psutil.Error, OSError):
            return None
        for child in living:
            if child.pid not in self._ranks and child.pid not in self._others:
                with suppress(psutil.Error, OSError, ValueError):
                    environment = child.environ()
                    if any(environment.get(name) != os.environ.get(name) for name in _JOBS):
                        self._others.add(child.pid)
                    elif found := self._rank_of(environment):
                        self._ranks[child.pid] = found.rank
        return {child.pid for child in living} - self._others


def _named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return f"rank{'s' * (len(ranks) > 1)} {names}"


def _witnessed() -> tuple[int, str] | None:
    folder = os.environ.get(FOLDER)
    return first_lost(Path(folder)) if folder else None
