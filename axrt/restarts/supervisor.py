"""Starts a job, looks after it, and starts it again: the elastic agent of `axrt launch`. What
follows from how a start has ended is `decide`'s."""

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from axrt.checkpoint.folder import candidates_at
from axrt.checkpoint.memory_run import MemoryRun
from axrt.config import AUTO, Config
from axrt.errors import ConfigError
from axrt.exit_codes import Exit
from axrt.observe.metrics import in_its_directory, residencies
from axrt.scheduler.plural import plural
from axrt.scheduler.regular_file import open_regular

from .decision import decide
from .history import History, Start
from .hosts import Host, host_of, left_out, placed, read_hosts
from .launcher import Command, Launcher, launcher_of
from .layout import Layout, smaller_layouts, whole_layout
from .process import JobProcess
from .witness import first_lost

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_HOSTS_AGAIN_S = 60.0  # between two looks at the host file, where the job runs on fewer ranks
_NAP_S = 0.1


class Supervisor:
    """A job and its starts.

    Args:
        restarts: most times that it is started again.
        hosts: host file; None: the launcher chooses, or the allocation.
        directory: directory of the run; None: that of the configuration.
    Raises:
        ConfigError: the command has no configuration and no directory, or takes no hosts.
    """

    def __init__(
        self,
        command: Command,
        restarts: int,
        hosts: Path | None,
        spares: int,
        directory: Path | None,
    ) -> None:
        self._command, self._restarts, self._hosts, self._spares = command, restarts, hosts, spares
        self._config = Config.read(command.file, command.overrides) if command.file else None
        if self._config is None and directory is None:
            raise ConfigError(
                "the command has no `axrt train FILE`; expected one, or --run DIR with the "
                "directory that a script of yours saves to and goes on from"
            )
        self._directory = directory or self._directory_of_the_run()
        self._resume = self._going_on()
        self._launcher = _launcher(command)
        if hosts and self._launcher is None:
            raise ConfigError(
                f"--hosts {hosts} with {command.before[0]!r}: how that takes hosts is "
                "not known; expected mpirun of MPICH or Open MPI, or srun"
            )
        if hosts and not command.ranks:
            raise ConfigError("--hosts without a number of ranks; expected mpirun -n RANKS ...")
        if hosts and command.names_hosts:
            raise ConfigError(
                f"--hosts {hosts} and {command.names_hosts} of the launcher; expected one of them"
            )
        if spares and not hosts:
            raise ConfigError(f"--spares {spares} without --hosts; expected a host file, too")
        if self._directory.exists() and not self._directory.is_dir():
            raise ConfigError(f"{self._directory} is no directory; expected that of the run")
        self._history = History(self._directory)
        self._known: list[Host] = []  # as the host file has said last
        self._starts: list[Start] = []
        self._out = set[str]()  # hosts that were told to be left out
        self._asked = 0
        self._whole: Layout | None = None
        self._process: JobProcess | None = None
        self._is_small, self._grows = False, False
        self._looked = 0.0

    def _directory_of_the_run(self) -> Path:
        assert self._config is not None
        checkpoint = replace(
            self._config.checkpoint, resume=AUTO if self._config.checkpoint.dir else ""
        )
        going_on = replace(self._config, checkpoint=checkpoint)
        return Path(in_its_directory(self._command.file, going_on).run.out)

    def _going_on(self) -> list[str]:
        """The setting with which each start goes on, also from what the run is to begin from.

        Raises:
            ConfigError: it is to go back within the same run.
        """
        if self._config is None:
            return []
        checkpoint = self._config.checkpoint
        if not checkpoint.goes_on and residencies(self._config, self._directory):
            raise ConfigError(
                f"checkpoint.resume = {checkpoint.resume!r} goes back within the run, and axrt "
                "launch would do that at every start; expected no such key, and `axrt train` once "
                "to go back"
            )
        return [f"checkpoint.resume={checkpoint.going_on}"]

    def until_done(self) -> int:
        """Start the job until it is done or given up. Returns its last exit code."""
        with self._alone(), self._hearing_signals():
            while True:
                if self._asked:
                    return self._end("it was asked to end")
                try:
                    self._starts.append(self._start())
                except ConfigError as error:
                    if not self._starts:
                        raise
                    return self._end(str(error))
                self._keep(self._starts[-1])
                decision = decide(self._starts, self._restarts, self._asked > 0)
                if not decision.again:
                    return self._end(decision.reason)
                when = f"in {decision.pause_s:g} s" if decision.pause_s else "at once"
                _say(f"{decision.reason}; starting again {when}")
                until = time.monotonic() + decision.pause_s
                while time.monotonic() < until and not self._asked:
                    time.sleep(_NAP_S)

    def _start(self) -> Start:
        """Run the job once."""
        hosts, ranks, settings = self._placed()
        where = self._launcher.on(hosts) if self._launcher else []
        words = self._command.words(ranks, where, settings)
        step, began, clock = self._step(), datetime.now(UTC), time.monotonic()
        _say(f"start {len(self._starts) + 1} from step {step}: {shlex.join(words)}")
        with self._shared_folder() as folder:
            code, said, lost = self._run(words, folder, hosts)
        return Start(
            began.isoformat(timespec="seconds"),
            round(time.monotonic() - clock, 1),
            ranks,
            tuple(host.name for host in hosts),
            tuple(settings),
            code,
            said,
            lost,
            step,
            0 if said == Exit.BAD_INPUT else self._step() - step,
        )

    def _run(
        self, words: Sequence[str], folder: Path, hosts: Sequence[Host]
    ) -> tuple[int, int | None, tuple[str, ...]]:
        """Run a command. Returns the launcher's code, that of the first rank to end, and the hosts
        on which a rank has died."""
        told: list[str] = []

        def hear(line: str) -> None:
            told.extend(self._launcher.lost(line) if self._launcher else ())

        try:
            self._process = JobProcess(words, folder, hear)
        except OSError as error:
            raise ConfigError(
                f"{words[0]}: {error.strerror}; expected a launcher, such as mpirun"
            ) from None
        if self._asked:  # before there was anybody to pass it on to
            self._process.send(signal.SIGUSR1)
        self._looked = time.monotonic()
        try:
            code, said = self._process.wait(self._look), self._process.said
        except BaseException:
            self._process.send(signal.SIGTERM)  # nobody would look after it
            raise
        self._process = None
        names = {host.name for host in hosts}
        lost = [host for host in dict.fromkeys(told) if not names or host in names]
        first = first_lost(folder)
        if first and not lost:
            rank, where = first
            lost = [where if where in names else host_of(rank, hosts) or where]
        if said is None and code == Exit.DONE and self._config is None and not lost:
            said = Exit.DONE  # a script of the user's says it by its code alone
        # A launcher that a signal has ended takes its ranks along, and no host is to blame. Where a
        # rank has ended the job since another was silent, those that died did so after that.
        is_blamed = code >= 0 and said is None
        return code, said, tuple(lost) if is_blamed else ()

    @contextmanager
    def _shared_folder(self) -> Iterator[Path]:
        """A directory beside that of the run, which its hosts share."""
        parent, prefix = self._directory.parent, f".{self._directory.name}-"
        try:
            # a witness of another host may write to it in the end
            made = tempfile.TemporaryDirectory(
                prefix=prefix, dir=parent, ignore_cleanup_errors=True
            )
        except OSError as error:
            raise ConfigError(
                f"{parent}: {error.strerror}; expected a place for the run that can be written to"
            ) from None
        with made as folder:
            yield Path(folder).resolve()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Context in which no other `axrt launch` starts this run.

        Raises:
            ConfigError: another one does, or nothing can be written beside the run.
        """
        beside = self._directory.parent / f".{self._directory.name}.launch"
        try:
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            was_there = os.path.lexists(beside)
            file = open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{beside}: {error.strerror}; expected a place for the run that can be written to"
            ) from None
        with closing(os.fdopen(file, "w")):
            owner = os.fstat(file).st_uid
            if was_there and owner != os.geteuid():
                raise ConfigError(
                    f"{beside} belongs to user {owner}, and this process to user {os.geteuid()}; "
                    "expected a place for the run that nobody else makes files in"
                )
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"another axrt launch starts {self._directory}; expected that one to end first"
                ) from None
            try:
                yield
            finally:
                beside.unlink(missing_ok=True)

    # Hosts and layouts.

    def _placed(self) -> tuple[list[Host], int, list[str]]:
        """The hosts of a start, its number of ranks, and its settings."""
        wanted = self._command.ranks
        settings = self._resume
        self._is_small = self._grows = False
        if self._hosts is None:
            return [], wanted, settings
        there = self._there()
        if _slots(there) >= wanted:
            return there, wanted, settings
        self._is_small = True
        layout = self._smaller(_slots(there))
        return placed(there, layout.ranks, set()), layout.ranks, [*settings, *layout.settings]

    def _there(self) -> list[Host]:
        assert self._hosts is not None
        try:
            self._known = read_hosts(self._hosts)
        except ConfigError as error:  # it may be being written
            if not self._known:
                raise
            _say(f"{error}: going on with the hosts that it had before")
        out = left_out(self._starts)
        for host in sorted(out - self._out):
            _say(f"{host} is left out: a rank has died there in two starts")
        self._out = out
        return placed(self._known, self._command.ranks, out, self._spares)

    def _smaller(self, slots: int) -> Layout:
        """The layout for fewer ranks than the command has."""
        wanted = self._command.ranks
        if self._config is None:
            raise ConfigError(
                f"hosts have {plural(slots, 'slot')} for {plural(wanted, 'rank')}; expected as "
                "many, since the layout of a script is its own"
            )
        self._whole = self._whole or whole_layout(self._config, wanted)
        found = smaller_layouts(self._config, self._whole, slots)
        if not found:
            raise ConfigError(
                f"hosts have {plural(slots, 'slot')}, on which no layout has the same "
                f"{plural(self._config.global_batch, 'sample')} a step; expected more hosts"
            )
        best = found[0]
        kept_back = (
            f", {plural(self._spares, 'host')} being kept back (--spares)" if self._spares else ""
        )
        out = f", without {', '.join(sorted(self._out))}" if self._out else ""
        _say(
            f"{self._hosts} has {plural(slots, 'slot')} for "
            f"{plural(wanted, 'rank')}{out}{kept_back}. Replicas: {best.data}, ranks of each: "
            f"{best.ranks_of_a_replica}, microbatches of each: {best.microbatches}. A step has the "
            f"same samples, at {self._whole.step / best.step:.2f} of the speed by simulation"
        )
        return best

    def _look(self) -> None:
        """Let a job on fewer ranks end, and save, when there are more hosts again."""
        if not self._is_small or self._grows or time.monotonic() - self._looked < _HOSTS_AGAIN_S:
            return
        self._looked = time.monotonic()
        if _slots(self._there()) >= self._command.ranks and self._process:
            self._grows = True
            _say("there are hosts for all ranks again: the job saves, and goes on there")
            self._process.send(signal.SIGUSR1)

    # The run.

    def _step(self) -> int:
        """The step of the newest checkpoint whose manifest is sound, or of copies in memory."""
        try:
            found = candidates_at(self._directory)
        except ConfigError:
            return 0
        steps = [one.step for one in found if one.manifest is not None]
        folder = self._directory / (self._config.checkpoint.dir if self._config else "")
        kept = MemoryRun.read(folder)
        return max([*steps, kept.step if kept and not kept.is_void else 0])

    def _keep(self, start: Start) -> None:
        try:
            self._history.add(start)
        except OSError as error:
            _say(f"{self._directory}: {error.strerror}: this start is not kept there")

    def _end(self, reason: str) -> int:
        if not self._starts:
            _say(reason)
            return Exit.INTERRUPTED
        last = self._starts[-1]
        code = last.code if last.said is None else last.said
        is_done = last.code == last.said == Exit.DONE
        _say(reason if is_done else f"{reason}. All starts:")
        for start in self._starts if not is_done or len(self._starts) > 1 else ():
            print(f"  {start}", file=sys.stderr, flush=True)
        if self._asked and code < 0:  # the signal came before anybody could save
            return Exit.INTERRUPTED
        return code if code > 0 else Exit.DONE if is_done else Exit.LOST_PEER

    # Signals.

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._hear)
            for number in _SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN  # as SIGHUP is under nohup
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Let the job save and end; the second signal ends it at once."""
        self._asked += 1
        if self._process:
            # mpirun of Open MPI ends all ranks soon after any other signal
            self._process.send(signal.SIGUSR1 if self._asked == 1 else signal.SIGTERM)


def _slots(hosts: Sequence[Host]) -> int:
    return sum(host.slots for host in hosts)


def _launcher(command: Command) -> Launcher | None:
    """The kind of launcher; None where the job is one process, or it is none that is known."""
    program = command.launcher
    if not program:
        return None
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return launcher_of(program, "")
    return launcher_of(program, said.stdout + said.stderr)


def _say(text: str) -> None:
    print(f"axrt launch: {text}", file=sys.stderr, flush=True)
