"""What launchers are called, how they are told on which hosts to run, and how they say that a rank
has died."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from axrt.exit_codes import FILE

from .hosts import Host
from .witness import FOLDER

_COUNT = re.compile(r"(--?(?:n|np|ntasks))(?:=?(\d+))?")
_PROGRAM = re.compile(r"axrt|python[\d.]*")
_HOSTS = ("-hosts", "-host", "--host", "-H", "-f", "-hostfile", "--hostfile", "-machinefile")
TOLD = (FILE, FOLDER)  # variables that ranks are told by
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun")


@dataclass(frozen=True, slots=True)
class Launcher:
    """A kind of launcher."""

    name: str  # name that people know it by
    # patterns of its messages, whose group is the host on which a rank has died
    says_lost: tuple[re.Pattern[str], ...]

    def on(self, hosts: Sequence[Host]) -> list[str]:
        """The arguments that let the job run on some hosts; on those that it chooses where there
        are none, and with what `axrt launch` tells its ranks."""
        names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        if self.name == "srun":
            # without it the others wait for a rank that was killed
            ends = ["--kill-on-bad-exit=1"]
            plain = ",".join(host.name for host in hosts)
            return [*ends, f"--nodelist={plain}", f"--nodes={len(hosts)}"] if hosts else ends
        if self.name == "MPICH":
            return ["-hosts", names] if hosts else []
        passed = [word for name in TOLD for word in ("-x", name)]  # it passes its own on alone
        return [*passed, "--host", names] if hosts else passed

    def lost(self, text: str) -> list[str]:
        """The hosts on which a rank has died, as a line of the launcher says."""
        return [match[1] for pattern in self.says_lost for match in pattern.finditer(text)]


MPICH = Launcher("MPICH", (re.compile(r"^=\s+PID \d+ RUNNING AT (\S+)"),))
OPEN_MPI = Launcher(
    "Open MPI", (re.compile(r"process rank \d+ with PID \d+ on node (\S+) exited on signal"),)
)
SRUN = Launcher("srun", (re.compile(r"srun: error: ([\w.-]+): tasks? [\d,-]+: (?!Exited)"),))


def launcher_of(program: str, version: str) -> Launcher | None:
    """The launcher of a command.

    Returns:
        None where it is none of these.
    """
    if PurePath(program).name == "srun":
        return SRUN
    if "HYDRA" in version:
        return MPICH
    return OPEN_MPI if re.search(r"Open MPI|PRRTE|OpenRTE", version) else None


@dataclass(frozen=True, slots=True)
class Command:
    """A command that starts a job."""

    # all of its words up to the settings that are laid over a configuration
    before: tuple[str, ...]
    count_at: int | None  # index of the word with the number of ranks; None where there is none
    ranks: int  # number of ranks; 0 where the launcher chooses
    own: int  # number of its first words that are the launcher's own, as far as it is known
    file: str  # configuration of `axrt train`; "" where the program is another
    overrides: tuple[str, ...]  # what is laid over it

    @classmethod
    def of(cls, words: Sequence[str]) -> "Command":
        """The parts of a command."""
        names = [PurePath(word).name for word in words]
        program = next(
            (at for at, name in enumerate(names) if _PROGRAM.fullmatch(name)), len(words)
        )
        own = program if names[0] in LAUNCHERS else 0
        count_at, ranks = _count(words[:own])
        after = _after_train(names)
        if after is None:
            return cls(tuple(words), count_at, ranks, own, "", ())
        file = "".join(words[after : after + 1])
        return cls(tuple(words[: after + 1]), count_at, ranks, own, file, tuple(words[after + 1 :]))

    @property
    def launcher(self) -> str:
        """The launcher; "" where the job is one process."""
        return self.before[0] if self.own else ""

    @property
    def names_hosts(self) -> str:
        """The argument that says on which hosts the launcher is to run; "" where none does."""
        names = (*_HOSTS, "--machinefile", "-w", "--nodelist", "-N", "--nodes")
        return next(
            (word for word in self.before[: self.own] if word.partition("=")[0] in names), ""
        )

    def words(self, ranks: int, placed: Sequence[str], settings: Sequence[str]) -> list[str]:
        """The command with a number of ranks, arguments for the launcher, and settings of a
        start."""
        words = list(self.before)
        if self.count_at is not None:
            words[self.count_at] = words[self.count_at].replace(str(self.ranks), str(ranks))
        if self.own:
            words[1:1] = placed
        return [*words, *self.overrides, *settings]


def _count(launcher: Sequence[str]) -> tuple[int | None, int]:
    """The index of the word with the number of ranks, and that number."""
    for at, word in enumerate(launcher):
        found = _COUNT.fullmatch(word)
        if found and found[2]:
            return at, int(found[2])
        after = launcher[at + 1] if at + 1 < len(launcher) else ""
        is_count = found is not None or (word == "-c" and PurePath(launcher[0]).name != "srun")
        if is_count and after.isdigit():
            return at + 1, int(after)
    return None, 0


def _after_train(names: Sequence[str]) -> int | None:
    """The index of the configuration of `axrt train`; None where that is not the program."""
    for at, name in enumerate(names[:-1]):
        if name == "axrt" and names[at + 1] == "train":
            return at + 2
    return None
