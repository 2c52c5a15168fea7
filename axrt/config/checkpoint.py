"""`[checkpoint]`: what is saved, and where a run goes on."""

from collections.abc import Iterator
from dataclasses import dataclass

from .schedule import AUTO
from .section import Section, key


@dataclass(frozen=True, slots=True)
class Checkpoint(Section):
    """The checkpoints that a run saves and goes on from."""

    dir: str = key(
        "checkpoints",
        "directory, relative to that of the run; all ranks must share it; '' = nothing is saved",
        is_path=True,
    )
    every: int = key(
        0,
        "steps between checkpoints; one at the end and when interrupted comes anyway; 0 = only "
        "those",
        least=0,
    )
    background: str = key(
        "auto",
        "training goes on while a checkpoint is written, from a copy of the state in the host's "
        "memory; auto = unless memory.scratch is a disk; the last one is waited for",
        choices=("auto", "on", "off"),
    )
    keep: int = key(2, "how many to keep, the newest; 0 = all", least=0)
    memory_every: int = key(
        0,
        "steps between copies of each rank's state in the memory of its host and of another one, "
        "from which a job that is started again goes on without a disk; 0 = none",
        least=0,
    )
    memory_dir: str = key(
        "/dev/shm", "directory in memory for these copies, on every host", is_path=True
    )
    resume: str = key(
        "",
        "a run or checkpoint to go on from; 'auto' = this run's own, in run.out, where there is "
        "one; 'auto:PATH' = else the one at PATH; '' = begin anew",
        is_path=True,
    )

    @property
    def goes_on(self) -> bool:
        """The run goes on from its own newest checkpoint, where there is one."""
        return self.resume.partition(":")[0] == AUTO

    @property
    def begins_from(self) -> str:
        """The run or checkpoint to begin from where this run has none; "" is none."""
        return self.resume.partition(":")[2] if self.goes_on else self.resume

    # A run says what it begins from, until it has saved: `checkpoint.resume = "auto:PATH"`. Starts
    # set plain `"auto"`, and a run that had lost a rank before its first checkpoint began anew with
    # random weights.
    @property
    def going_on(self) -> str:
        """The same key for a start that goes on with this run: "auto", or "auto:PATH"."""
        return f"{AUTO}:{self.begins_from}" if self.begins_from else AUTO

    def _of_all(self) -> Iterator[str]:
        if self.memory_every and not self.dir:
            yield (
                f"checkpoint.memory_every = {self.memory_every} and checkpoint.dir = '': the "
                "folder of checkpoints says whose the copies are; expected a directory"
            )
        if self.goes_on and not self.dir:
            yield (
                f"checkpoint.resume = {self.resume!r} and checkpoint.dir = '': nothing is saved "
                "that the run could go on from; expected a directory, "
                "or checkpoint.resume = ''"
            )
