"""Trainings under a cap that the system enforces: a memory cgroup, where one can be made, or else
the limit of a process on its own data.

A trial is `axrt train` in a process of its own:

    1. the process joins the cgroup, before it has loaded anything
    2. it trains a tiny model with the same settings, which loads all code
    3. the memory that it has now is the *base*: Python, torch and MPI
    4. the cap falls to what the trial may have, beside the base or with it
    5. it trains the model that is asked for; a process that the system kills had too little room

Page cache counts in a cgroup too, but the system takes that back before it kills.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ("train", "examples/quickstart.toml")
TINY = ("model.layers=1", "model.width=64", "run.steps=2", "model.heads=2", "schedule.chunks=0")
# The C library gives freed pieces back in a run without offload too: the two differ in nothing
# else. A run with offload to a disk asks for that itself.
GIVES_BACK = {
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}

# 'fetch', 'store' or 'step' of a bucket, number of the step, start and end in seconds
Copy = tuple[str, int, float, float]


class _Names(NamedTuple):
    """What files of a memory cgroup are called."""

    limit: str
    swap: tuple[str, str]  # file and what forbids swapping
    own_memory: str  # key of memory.stat
    kills: str
    peak: str


_VERSION_1 = _Names(
    "memory.limit_in_bytes",
    ("memory.swappiness", "0"),
    "rss",
    "memory.oom_control",
    "memory.max_usage_in_bytes",
)
_VERSION_2 = _Names("memory.max", ("memory.swap.max", "0"), "anon", "memory.events", "memory.peak")


@dataclass(frozen=True)
class Group:
    """A memory cgroup.

    Args:
        folder: directory of the cgroup.
        names: names of its files.
    """

    folder: Path
    names: _Names

    @classmethod
    @contextmanager
    def made(cls) -> Iterator["Group | None"]:
        """Context with a new cgroup; None where none can be made."""
        found = next((found for above, names in _mounts() if (found := _child(above, names))), None)
        try:
            yield found
        finally:
            if found:
                found.folder.rmdir()

    def join(self) -> None:
        """Let this process be in it."""
        (self.folder / "cgroup.procs").write_text("0")

    def limit(self, num_bytes: int) -> None:
        """Let its processes have so many bytes in all."""
        (self.folder / self.names.limit).write_text(str(num_bytes))

    @property
    def own_memory_bytes(self) -> int:
        """What its processes have, without page cache."""
        return self._number("memory.stat", self.names.own_memory)

    @property
    def kills(self) -> int:
        """How many processes the system has killed in it."""
        return self._number(self.names.kills, "oom_kill")

    @property
    def peak_bytes(self) -> int:
        """The most that it has had, page cache included."""
        with suppress(OSError):  # Linux 5.19 has the first memory.peak
            return int((self.folder / self.names.peak).read_text())
        return 0

    def _number(self, file: str, key: str) -> int:
        lines = (self.folder / file).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0] == key)


def _mounts() -> Iterator[tuple[Path, _Names]]:
    """The roots of memory cgroups, of version 1 and of version 2."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            yield Path(where), _VERSION_1
        if kind == "cgroup2":
            yield Path(where), _VERSION_2


def _child(above: Path, names: _Names) -> Group | None:
    """A new cgroup there; None where the rights or the controller are missing."""
    made = Group(above / f"axrt-bench-{os.getpid()}", names)
    try:
        made.folder.mkdir()
    except OSError:
        return None
    try:
        made.limit(1 << 40)
        with suppress(OSError):  # a kernel without swap has no such file
            (made.folder / names.swap[0]).write_text(names.swap[1])
    except OSError:
        made.folder.rmdir()
        return None
    return made


@dataclass(frozen=True)
class Trial:
    """A training under a cap.

    Args:
        settings: overrides of `axrt train`.
        cap_bytes: cap; 0 = none.
        beside_base: the cap is for what the training adds to the base; else for the whole process.
        stamps: the times of all copies are noted.
    """

    settings: Sequence[str]
    cap_bytes: int = 0
    beside_base: bool = True
    stamps: bool = False


@dataclass
class Found:
    """What a trial came to.

    Attributes:
        fits: it ended by itself.
        losses: loss of each step, to the bit.
        step_s: duration of each step but the first, in seconds.
        base_bytes: memory of the process before the model was built.
        peak_bytes: most that the process has had.
        copies: each copy of offloaded state, where they were asked for.
    """

    fits: bool = False
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    base_bytes: int = 0
    peak_bytes: int = 0
    copies: list[Copy] = field(default_factory=list)


def run(trial: Trial, group: Group | None, environment: Mapping[str, str] | None = None) -> Found:
    """Run a trial in a process of its own.

    Args:
        trial: what to run.
        group: cgroup that caps it; None: the limit on a process's data does.
        environment: variables that the process gets besides those of this one.
    Raises:
        RuntimeError: it failed, and not for want of memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        told, out = Path(folder, "trial.json"), Path(folder, "found.json")
        told.write_text(json.dumps({**asdict(trial), "group": str(group.folder) if group else ""}))
        kills = group.kills if group else 0
        ended = subprocess.run(
            [sys.executable, __file__, str(told), str(out)],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if ended.returncode == 0:
            return Found(**json.loads(out.read_text()))
        if _was_too_little(ended, group is not None and group.kills > kills):
            return Found()
        raise RuntimeError(f"the trial ended with {ended.returncode}:\n{ended.stderr}")


def _was_too_little(ended: "subprocess.CompletedProcess[str]", killed: bool) -> bool:
    if killed:
        return ended.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    texts = ("MemoryError", "can't allocate memory", "not enough memory", "Cannot allocate memory")
    return any(text in ended.stderr for text in texts)


# In the process of the trial.


def _train(settings: Sequence[str]) -> None:
    from axrt.cli.train.command import train

    try:
        train.main([*TRAIN[1:], *settings], standalone_mode=False)
    except SystemExit as left:
        if left.code:
            raise


def _act(trial: dict[str, Any], out: Path) -> None:
    group = _joined(trial["group"])
    common = ["run.progress=off", "data.held_out=0", "checkpoint.dir=", "run.log_every=1"]
    wanted = [*common, *trial["settings"], f"run.out={out.parent / 'run'}"]
    _train([*wanted, *TINY, f"run.out={out.parent / 'tiny'}"])
    base_bytes = group.own_memory_bytes if group else _data_bytes()
    _cap(trial, group, base_bytes)
    copies = _stamped() if trial["stamps"] else []
    _train(wanted)
    lines = [json.loads(line) for line in (out.parent / "run/metrics.jsonl").open()]
    steps = [line for line in lines if "loss" in line]
    peak_bytes = group.peak_bytes if group else 0
    found = Found(
        True,
        [line["loss"] for line in steps],
        [after["time_s"] - before["time_s"] for before, after in pairwise(steps)],
        base_bytes,
        peak_bytes,
        copies,
    )
    out.write_text(json.dumps(asdict(found)))


def _joined(folder: str) -> Group | None:
    if not folder:
        return None
    names = _VERSION_2 if Path(folder, _VERSION_2.limit).exists() else _VERSION_1
    group = Group(Path(folder), names)
    group.limit(1 << 40)
    with suppress(OSError):
        (group.folder / names.peak).write_text("0")
    group.join()
    return group


def _cap(trial: dict[str, Any], group: Group | None, base_bytes: int) -> None:
    if not trial["cap_bytes"]:
        return
    whole = trial["cap_bytes"] + base_bytes * trial["beside_base"]
    if group:
        group.limit(whole)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (whole, whole))


def _data_bytes() -> int:
    """What the limit on data counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def _stamped() -> list[Copy]:
    """A list that gets each copy of offloaded state from now on, and each step of a bucket."""
    from axrt.scheduler.task import Task
    from axrt.store.bucket import Bucket
    from axrt.workers.offload import OffloadWorker

    copies: list[Copy] = []
    plain, plain_step = OffloadWorker.run, Bucket.step

    def run(worker: OffloadWorker, task: Task) -> Any:
        began_s = time.perf_counter()
        made = plain(worker, task)
        copies.append((str(task.kind.value), task.microbatch, began_s, time.perf_counter()))
        return made

    def stepped(bucket: Bucket, step: int) -> None:
        began_s = time.perf_counter()
        plain_step(bucket, step)
        copies.append(("step", step, began_s, time.perf_counter()))

    Bucket.step = stepped  # type: ignore[method-assign, assignment]
    OffloadWorker.run = run  # type: ignore[method-assign, assignment]
    return copies


if __name__ == "__main__":
    _act(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
