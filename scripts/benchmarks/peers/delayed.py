"""A network namespace whose loopback device holds up every packet: MPI over TCP and gloo meet the
same delay in it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SAME_FOR_ALL = ("UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo", "MPIR_CVAR_NOLOCAL=1")
_AT_ONCE = "UCX_RNDV_THRESH=1m"  # a message is sent without asking first


@contextmanager
def delayed(delay_s: float) -> Iterator[list[str]]:
    """Context with what comes before a command that is to run in such a world: nothing, where there
    is no delay.

    Raises:
        RuntimeError: there is none here, for want of a tool or a right.
    """
    if not delay_s:
        yield []
        return
    name = f"axrt-delay-{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    shape = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "limit", "100000"]
    try:
        _run("ip", "netns", "add", name)
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, *shape, "delay", f"{1e6 * delay_s:.0f}us")
        yield [*inside, "env", *_SAME_FOR_ALL, _AT_ONCE]
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise RuntimeError(f"messages cannot be delayed here: {said.strip()}") from None
    finally:
        with suppress(OSError, subprocess.CalledProcessError):
            _run("ip", "netns", "del", name)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
