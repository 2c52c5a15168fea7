"""Where a run comes from: a line of JSON for each of its starts."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from axrt.scheduler.regular_file import opened

from .json_lines import (
    Fits,
    are_counts,
    are_named_texts,
    is_count,
    is_text,
    is_texts,
    object_of,
    whole_lines,
)
from .metrics import STARTS

START: Fits = {  # what may stand in a line
    **dict.fromkeys(("began", "command", "commit"), is_text),
    "hosts": is_texts,
    "pids": are_counts,
    "step": is_count,
    "schedule": lambda value: isinstance(value, dict) and is_text(value.get("policy")),
    "versions": are_named_texts,
}
_GIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Origin:
    """A start of a run."""

    began: str  # time of day in UTC, ISO 8601
    command: str  # command line that does the same again
    directory: str  # directory in which it ran
    # git commit of that directory, with "+" where files have changed since; "": it has none
    commit: str
    hosts: tuple[str, ...]  # host of each rank
    pids: tuple[int, ...]  # number of each rank's process there
    step: int  # number of steps that were done before
    schedule: dict[str, object]  # settings of the schedule that it came to
    seed: int  # run seed
    versions: dict[str, str]  # versions of python, torch, numpy and axrt

    @classmethod
    def now(
        cls,
        launcher: str,
        commit: str,
        hosts: Sequence[str],
        pids: Sequence[int],
        step: int,
        schedule: dict[str, object],
        seed: int,
    ) -> "Origin":
        """That of this process; arguments are the fields of that name."""
        versions = {name: metadata.version(name) for name in ("torch", "numpy", "axrt")}
        return cls(
            datetime.now(UTC).isoformat(timespec="seconds"),
            f"{launcher}axrt {shlex.join(sys.argv[1:])}",
            os.getcwd(),
            commit,
            tuple(hosts),
            tuple(pids),
            step,
            schedule,
            seed,
            {"python": platform.python_version(), **versions, "torch": str(torch.__version__)},
        )

    def line(self) -> str:
        """It as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def processes_of(run: Path) -> list[str]:
    """The process of each rank of a run's last start, as "process 4711 on node-3"; [] where they
    are not known."""
    try:
        with opened(run / STARTS) as file:
            *_, (line, _) = whole_lines(file)
        last = object_of(line, START)
    except (OSError, ValueError):
        return []
    if len(last["pids"]) != len(last["hosts"]):
        return []
    return [
        f"process {pid} on {host}" for pid, host in zip(last["pids"], last["hosts"], strict=True)
    ]


def commit_of(directory: Path) -> str:
    """The git commit of a directory, see `Origin.commit`. It starts a process, so it must be called
    before MPI has started."""
    commit = _git(directory, "rev-parse", "HEAD")
    return f"{commit}+" if commit and _git(directory, "status", "--porcelain", "-uno") else commit


def _git(directory: Path, *words: str) -> str:
    try:
        said = subprocess.run(
            ["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=_GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""
