"""Two hosts on one machine: network namespaces, joined by a link that is slow and loses packets.

Each has a name of its own, so MPI, the launcher and axrt take them for two machines. They share the
disk, as hosts of a cluster do.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("10.77.31.1", "10.77.31.2")
_DEVICE = "axrt0"
_ENTER = """#!/bin/bash
# As ssh: options, a host, and a command for it.
while [[ "$1" == -* ]]; do shift; done
host=$1; shift
case $host in {first}) on={names[0]} ;; {second}) on={names[1]} ;; *) exit 1 ;; esac
exec ip netns exec $on unshare --uts sh -c "hostname $on; $*"
"""


class TwoHosts:
    """Two hosts with a link between them.

    Args:
        folder: directory for what the launcher needs.
        mbit: bandwidth of each direction, in Mbit/s.
        lost: packets of a hundred that are lost.
    """

    def __init__(self, folder: Path, mbit: int, lost: int) -> None:
        self.names = tuple(f"axrt-{os.getpid()}-{side}" for side in "ab")
        self._enter = folder / "enter"
        self._enter.write_text(
            _ENTER.format(names=self.names, first=ADDRESSES[0], second=ADDRESSES[1])
        )
        self._enter.chmod(0o755)
        for name in self.names:
            _run("ip", "netns", "add", name)
        first, second = self.names
        link = ["type", "veth", "peer", "name", _DEVICE, "netns", second]
        _run("ip", "link", "add", _DEVICE, "netns", first, *link)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            self._on(name, "ip", "addr", "add", f"{address}/24", "dev", _DEVICE)
            self._on(name, "ip", "link", "set", "lo", "up")
            self._on(name, "ip", "link", "set", _DEVICE, "up")
            shape = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"]
            self._on(name, "tc", "qdisc", "add", "dev", _DEVICE, "root", *shape)
            self._on(name, "nft", "add", "table", "ip", "t")
            hook = "add chain ip t c { type filter hook input priority 0 ; }"
            self._on(name, "nft", hook)
            rule = f"add rule ip t c iifname {_DEVICE} numgen random mod 100 < {lost} drop"
            self._on(name, "nft", rule)

    def _on(self, name: str, *command: str) -> None:
        _run("ip", "netns", "exec", name, *command)

    def cut(self) -> None:
        """Cut the link."""
        self._on(self.names[0], "ip", "link", "set", _DEVICE, "down")

    def join(self) -> None:
        """Let the link be there again."""
        self._on(self.names[0], "ip", "link", "set", _DEVICE, "up")

    def command(self, *of_rank: str) -> list[str]:
        """The command that starts one rank on each host, from the first one, under MPICH."""
        launcher = str(Path(sys.executable).parent / "mpirun")
        tcp = ["UCX_TLS=tcp,self", f"UCX_NET_DEVICES={_DEVICE}", "MPIR_CVAR_NOLOCAL=1"]
        hosts = ["-launcher", "ssh", "-launcher-exec", str(self._enter), "-iface", _DEVICE]
        hosts += ["-hosts", ",".join(ADDRESSES), "-n", "2"]
        inside = ["ip", "netns", "exec", self.names[0], "env", *tcp, launcher, *hosts]
        return [*inside, sys.executable, *of_rank]

    def bytes_sent(self) -> int:
        """Bytes that the first host has sent over the link."""
        said = subprocess.run(
            [
                "ip",
                "netns",
                "exec",
                self.names[0],
                "cat",
                f"/sys/class/net/{_DEVICE}/statistics/tx_bytes",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(said.stdout)

    def remove(self) -> None:
        """Remove the hosts."""
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


@contextmanager
def two_hosts(folder: Path, mbit: int = 100, lost: int = 1) -> Iterator[TwoHosts]:
    """Context with two hosts.

    Raises:
        RuntimeError: there are none here, for want of a tool or a right.
    """
    if missing := [tool for tool in ("ip", "tc", "nft", "unshare") if shutil.which(tool) is None]:
        raise RuntimeError(f"there is no {missing[0]}")
    hosts: TwoHosts | None = None
    try:
        hosts = TwoHosts(folder, mbit, lost)
        yield hosts
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
    finally:
        if hosts is not None:
            hosts.remove()


def _run(*command: str) -> Sequence[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
