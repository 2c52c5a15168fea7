"""A Slurm of two virtual nodes on this machine: its own munged, slurmctld and two slurmds, ports
and files."""

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import psutil
import pytest

NODES = ("n1", "n2")
_DAEMONS = ("munged", "slurmctld", "slurmd")
_START_S = 120.0

# cred_expire: a job that is requeued waits as long before it starts again, two minutes by default.
# FirstJobId: MPICH names its shared memory by the job, and there may be other clusters like this
# one on the machine. KillWait: from SIGTERM to SIGKILL, longer than tests wait for what must come
# without it. config_overrides: a node has the CPUs that stand here, whatever the machine has.
_CONF = """
ClusterName=axrt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
FirstJobId={first_job}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ReturnToService=2
KillWait=600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=grace Nodes=n1,n2 PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=first Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """Slurm, up while it is entered.

    Args:
        folder: for everything that it writes; a short name, since sockets of Unix have at most 108
            characters.
        environment: of its commands, and so of its jobs.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            name: value
            for name, value in environment.items()
            if not name.startswith(("SLURM_", "SBATCH_"))
        }
        self.environment |= {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": environment["PATH"] + ":/usr/sbin:/sbin",
        }

    def __enter__(self) -> Self:
        """Raises `pytest.skip` where Slurm cannot run."""
        missing = [
            name
            for name in (*_DAEMONS, "sbatch", "srun")
            if not shutil.which(name, path=self.environment["PATH"])
        ]
        if missing:
            pytest.skip(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")
        if os.geteuid() != 0:
            pytest.skip("not root: slurmd starts jobs as their users")
        host, first_job, ports = (
            socket.gethostname().split(".")[0],
            random.SystemRandom().randrange(1, 10**6),
            _free_ports("controller", *NODES),
        )
        (self._folder / "slurm.conf").write_text(
            _CONF.format(folder=self._folder, host=host, first_job=first_job, **ports)
        )
        for name in ("state", *(f"{kind}-{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self._folder / name).mkdir()
        (self._folder / "munge.key").write_bytes(os.urandom(1024))
        (self._folder / "munge.key").chmod(0o400)
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End jobs first, then daemons, and kill what is left: whatever carries this cluster's
        configuration in its environment."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.cancel_all()
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.pid != os.getpid()
                    and process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
                ):
                    process.kill()

    def cancel_all(self) -> None:
        """End all jobs at once, those that wait too."""
        self.run("scancel", "--signal=KILL", "--full", "--state=RUNNING", "--user=root")
        self.run("scancel", "--user=root")

    def _begin(self) -> None:
        munge = {
            name: f"{self._folder}/munge.{name}" for name in ("socket", "pid", "log", "seed", "key")
        }
        self._start(
            *(
                "munged",
                "--foreground",
                "--force",
                f"--socket={munge['socket']}",
                f"--pid-file={munge['pid']}",
            ),
            *(
                f"--log-file={munge['log']}",
                f"--seed-file={munge['seed']}",
                f"--key-file={munge['key']}",
            ),
        )
        self._until(lambda: (self._folder / "munge.socket").exists(), "munged makes its socket")
        self._start("slurmctld", "-D", "-i")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self._until(
            lambda: self.run("sinfo", "-h", "-p", "main", "-o", "%T %D") == f"idle {len(NODES)}",
            "all nodes are idle",
        )

    def _start(self, name: str, *arguments: str) -> None:
        log = (self._folder / f"log-{len(self._daemons)}-{name}").open("wb")
        command = [shutil.which(name, path=self.environment["PATH"]) or name, *arguments]
        with log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def _until(self, fact: Callable[[], bool], words: str) -> None:
        """Wait for a fact, and skip the tests where it does not come."""
        deadline = time.monotonic() + _START_S
        while True:
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            with contextlib.suppress(subprocess.TimeoutExpired):
                if not dead and fact():
                    return
            if dead or time.monotonic() > deadline:
                logs = "\n".join(
                    f"{path.name}: {path.read_text()[-400:]}"
                    for path in sorted(self._folder.glob("log-*"))
                )
                pytest.skip(f"Slurm does not come up here ({words}: no; ended: {dead})\n{logs}")
            time.sleep(0.1)

    def run(self, *command: str, cwd: Path | None = None, extra: Mapping[str, str] = {}) -> str:
        """What a command of Slurm prints, its errors included."""
        ended = subprocess.run(
            command,
            cwd=cwd,
            env={**self.environment, **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return ended.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job, `JobState` and `Restarts` for example."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", "-o", number)))


def _free_ports(*names: str) -> dict[str, int]:
    sockets = {name: socket.socket() for name in names}
    for each in sockets.values():
        each.bind(("127.0.0.1", 0))
    ports = {name: int(each.getsockname()[1]) for name, each in sockets.items()}
    for each in sockets.values():
        each.close()
    return ports
