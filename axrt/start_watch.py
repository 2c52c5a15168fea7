"""Whether all ranks come up. Until MPI has started, a rank that dies leaves the others waiting
within its start, and most launchers do not tell them.

Two things do. The ranks of a node are processes of one parent, which is the launcher's: one that is
missing there has ended. And where a job has witnesses (`axrt launch`), they write of ranks on other
nodes.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self

import psutil

from axrt.exit_codes import Exit, leave_code
from axrt.restarts.witness import FOLDER, first_lost

_LOOK_S, _LOOKS = 0.25, 3  # a process that begins another program may be hidden for a moment
_LAUNCHERS = ("hydra", "prte", "orted", "mpirun", "mpiexec", "slurmstepd", "jsm")
_RANKS_HERE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


class RankOfJob(Protocol):
    """What a launcher's variables say of a process."""

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
        self._rank_of, self._patience_s = rank_of, patience_s
        self._me = rank_of(os.environ)
        self._most = next((int(os.environ[n]) for n in _RANKS_HERE if n in os.environ), 0)
        self._up = threading.Event()

    def __enter__(self) -> Self:
        if self._me is not None:
            threading.Thread(target=self._watch, name="axrt start", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._up.set()

    def _watch(self) -> None:
        began, missed = time.monotonic(), 0
        while not self._up.wait(_LOOK_S):
            ranks = self._ranks_here()
            missed = missed + 1 if ranks and len(ranks) < self._most else 0
            self._most = max(self._most, len(ranks))
            if missed == _LOOKS:
                self._end(f"{self._missing(ranks)} before MPI was up")
            elif dead := _witnessed():
                self._end(f"rank {dead[0]} on {dead[1]} has ended before MPI was up")
            elif self._patience_s and time.monotonic() - began > self._patience_s:
                self._end(
                    f"MPI is not up after {self._patience_s:g} s (run.start_patience_s), so not "
                    "all ranks have come this far"
                )

    def _ranks_here(self) -> set[int]:
        """The ranks of this node that live; none where that cannot be told."""
        try:
            parent = psutil.Process().parent()
            if parent is None or not parent.name().startswith(_LAUNCHERS):
                return set()  # a script between the launcher and each rank
            found = [
                self._rank_of(child.environ())
                for child in parent.children()
                if child.status() != psutil.STATUS_ZOMBIE
            ]
        except (psutil.Error, OSError):
            return set()
        return {one.rank for one in found if one is not None}

    def _missing(self, ranks: set[int]) -> str:
        assert self._me is not None
        if self._me.size == self._most:  # all ranks of the job are on this node
            gone = sorted(set(range(self._most)) - ranks)
            return (
                f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone[:8]))} of {self._most} ended"
            )
        return (
            f"{self._most - len(ranks)} of the {self._most} ranks on {socket.gethostname()} ended"
        )

    def _end(self, what: str) -> None:
        if self._up.is_set():
            return
        assert self._me is not None
        sys.stderr.write(
            f"axrt: rank {self._me.rank} on {socket.gethostname()} ends the job: {what}. Expected "
            "every rank to start; what it has said itself stands above, where it could\n"
        )
        sys.stderr.flush()
        leave_code(Exit.LOST_PEER)
        os._exit(Exit.LOST_PEER)


def _witnessed() -> tuple[int, str] | None:
    folder = os.environ.get(FOLDER)
    return first_lost(Path(folder)) if folder else None
