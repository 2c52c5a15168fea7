"""What launchers are called, how they are told on which hosts to run, and how they say that a rank
has died."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from axrt.errors import ConfigError

from .hosts import Host

_COUNTS = ("-n", "-np", "--n", "--np", "--ntasks", "-c", "-ntasks")
_PROGRAMS = ("axrt", "python", "python3")
_HOSTS = ("-hosts", "-host", "--host", "-H", "-f", "-hostfile", "--hostfile", "-machinefile")
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun")


@dataclass(frozen=True, slots=True)
class Launcher:
    """A kind of launcher.

    Args:
        name: name that people know it by.
        says_lost: patterns of its messages, whose group is the host on which a rank has died.
    """

    name: str
    says_lost: tuple[re.Pattern[str], ...]

    def on(self, hosts: Sequence[Host]) -> list[str]:
        """The arguments that let the job run on some hosts."""
        if self.name == "srun":
            names = ",".join(host.name for host in hosts)
            return [f"--nodelist={names}", f"--nodes={len(hosts)}"]
        separator = "-hosts" if self.name == "MPICH" else "--host"
        return [separator, ",".join(f"{host.name}:{host.slots}" for host in hosts)]

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

    Args:
        program: first word of the command.
        version: what it prints for `--version`.
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
    """A command that starts a job, in parts.

    Args:
        launcher: the launcher with its arguments, without the number of ranks; () where the job is
            one process.
        count: argument that gives the number of ranks; "" where none does.
        ranks: number of ranks; 0 where the launcher chooses.
        program: what each rank runs.
        file: configuration of `axrt train`; "" where the program is another.
        overrides: what is laid over it.
    """

    launcher: tuple[str, ...]
    count: str
    ranks: int
    program: tuple[str, ...]
    file: str
    overrides: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Command":
        """The parts of a command.

        Raises:
            ConfigError: it sets what the restarts have to set.
        """
        begin = next(
            (at for at, word in enumerate(words) if PurePath(word).name in _PROGRAMS), len(words)
        )
        launcher, program = list(words[:begin]), list(words[begin:])
        count, ranks = "", 0
        for at, word in enumerate(launcher[:-1]):
            if word in _COUNTS and launcher[at + 1].isdigit():
                count, ranks = word, int(launcher[at + 1])
                del launcher[at : at + 2]
                break
        file = ""
        overrides: tuple[str, ...] = ()
        if "train" in program[:4]:
            at = program.index("train") + 1
            file, overrides = "".join(program[at : at + 1]), tuple(program[at + 1 :])
            program = program[:at]
        for override in overrides:
            if override.startswith("checkpoint.resume=") and override != "checkpoint.resume=auto":
                raise ConfigError(
                    f"{override}: axrt launch goes on from the newest checkpoint at every start "
                    "(checkpoint.resume=auto); expected no such key, and `axrt train` once to go "
                    "back"
                )
        return cls(tuple(launcher), count, ranks, tuple(program), file, overrides)

    @property
    def names_hosts(self) -> str:
        """The argument that says on which hosts the launcher is to run; "" where none does."""
        names = (*_HOSTS, "--machinefile", "-w", "--nodelist", "-N", "--nodes")
        return next((word for word in self.launcher if word.partition("=")[0] in names), "")

    def words(self, ranks: int, placed: Sequence[str], settings: Sequence[str]) -> list[str]:
        """The command with a number of ranks, arguments for the launcher, and settings of a
        start."""
        head = list(self.launcher)
        if head:
            head += [self.count or "-n", str(ranks)] if ranks else []
            head += placed
        file = [self.file] * bool(self.file)
        return [*head, *self.program, *file, *self.overrides, *settings]
