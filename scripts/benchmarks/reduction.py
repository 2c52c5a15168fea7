"""What replicas cost; see scripts/bench_reduction.

    cost     a step of two replicas with one large bucket, by parts and by the library, against the
             same step alone and against raw calls: the exchange of parts by hand, MPI's Allreduce
             and gloo's
    many, one, apart
             a step of two replicas of pipelines of sleeping layers, in many buckets a stage and in
             one; and of the same pipelines alone. Each has processes of its own, since the engines
             would share a heap.
    levels   a step of many replicas whose gradients are tiny, so that messages are all they cost:
             added up at once, and in groups
    scaling  tokens a second of the quickstart model on one rank, and on two as a pipeline and as
             replicas

Everything runs on the ranks of one node, interleaved; medians are printed with the extremes. With
--tcp RATE two ranks talk over TCP at that rate in each direction, in a network namespace of their
own, and only what is hidden is measured. That wants root, iproute2 and Open MPI.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

import axrt
from axrt.device.allocator import keep_freed_memory
from axrt.device.queues import wait_for
from axrt.scheduler.planning.shards import usual_group
from axrt.transport.collectives import LibraryCollectives
from axrt.transport.local import LocalWorld

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
SIZES_MIB = (1, 16, 64)
STEPS, WARM = 12, 3
TASK = "AXRT_BENCH_TASK_S"  # of the environment: --task-ms, for the ranks
TASK_S, MICROBATCHES, STAGE_MIB, LAYERS = 0.02, 8, 16, 8


# from a number of ranks and the words of a command to those that run it there
Launch = Callable[[int, list[str]], list[str]]


def one(value: Tensor, target: Tensor) -> Tensor:
    return value.sum()


class Weighs(nn.Module):
    """So many MiB of weights, whose gradient costs next to nothing to compute, and so much sleep in
    each direction."""

    def __init__(self, mib: float, sleep_s: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(int(mib * MIB) // 4))
        self.sleep_s = sleep_s

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.sleep_s)
        out: Tensor = Sleeps.apply(value, self.weight, self.sleep_s)  # type: ignore[no-untyped-call]
        return out


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, sleep_s: float) -> Tensor:
        ctx.sleep_s, ctx.shape = sleep_s, weight.shape
        return value + 0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.sleep_s)
        return gradients[0], gradients[0].new_zeros(1).expand(ctx.shape).contiguous(), None


def engine(
    layers: list[Any],
    data: int,
    microbatches: int,
    alone: bool = False,
    bucket_mb: float = 1000,
    collectives: str = "parts",
    group: int = 0,
) -> axrt.Engine:
    """SGD without momentum: the step itself costs little."""
    config = {
        "schedule": {"microbatches": microbatches},
        "parallel": {"data": data, "collectives": collectives, "group": group},
        "run": {"device": "cpu"},
        "memory": {"bucket_mb": bucket_mb},
    }
    sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.0)  # noqa: E731
    return axrt.initialize(
        axrt.PipelineModule(layers, one),
        sgd,
        config=config,
        transport=LocalWorld(1).alone() if alone else None,
    )


def items(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    return repeat((torch.full((4,), float(rank), requires_grad=True), torch.zeros(1)))


def timed(call: Callable[[], object], comm: Any) -> float:
    """Seconds, of ranks that begin together."""
    comm.Barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def cost() -> dict[str, list[float]]:
    """For each size the medians, in ms: what reduction adds to a step, by parts and by the library,
    the exchange by hand, and the Allreduce of MPI and of gloo."""
    from mpi4py import MPI

    comm, result = MPI.COMM_WORLD, {}
    told = LibraryCollectives(comm.rank, torch.device("cpu"), comm.bcast)
    gloo = told.group(range(comm.size))
    for mib in SIZES_MIB:
        with (
            engine([axrt.LayerSpec(Weighs, mib)], 2, 1) as both,
            engine([axrt.LayerSpec(Weighs, mib)], 2, 1, collectives="library") as library,
            engine([axrt.LayerSpec(Weighs, mib)], 1, 1, alone=True) as single,
        ):
            batches, by_hand, allreduce, flat = (
                items(comm.rank),
                ByHand(comm, mib),
                np.zeros(mib * MIB // 4, np.float32),
                torch.zeros(mib * MIB // 4),
            )
            calls: dict[str, Callable[[], object]] = {
                "both": lambda: both.train_batch(batches),  # noqa: B023
                "library": lambda: library.train_batch(batches),  # noqa: B023
                "single": lambda: single.train_batch(batches),  # noqa: B023
                "by hand": by_hand.exchange,
                "Allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, allreduce),  # noqa: B023
                "gloo": lambda: wait_for(gloo.all_reduce(flat, "zeros")),  # noqa: B023
            }
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(STEPS):
                for name, call in calls.items():
                    times[name].append(timed(call, comm))
        ms = {name: statistics.median(values[WARM:]) * 1e3 for name, values in times.items()}
        added = [ms[name] - ms["single"] for name in ("both", "library")]
        result[str(mib)] = [*added, ms["by hand"], ms["Allreduce"], ms["gloo"]]
    return result


class ByHand:
    """What a reduction between two ranks must do: halves exchanged, added up, exchanged back."""

    def __init__(self, comm: Any, mib: int) -> None:
        self._comm, self._flat = comm, np.zeros(mib * MIB // 4, np.float32)
        half = len(self._flat) // 2
        self._mine, self._theirs = (
            (self._flat[:half], self._flat[half:])
            if comm.rank == 0
            else (self._flat[half:], self._flat[:half])
        )
        self._part = np.zeros(len(self._mine), np.float32)

    def exchange(self) -> None:
        peer = 1 - self._comm.rank
        self._comm.Sendrecv(self._theirs, peer, recvbuf=self._part, source=peer)
        np.add(self._mine, self._part, out=self._mine)
        self._comm.Sendrecv(self._mine, peer, recvbuf=self._theirs, source=peer)


def step_of(replicas: int, bucket_mb: float) -> float:
    """The median step of these pipelines in ms, on the slowest rank."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    stages = comm.size // 2
    task_s = float(os.environ.get(TASK, TASK_S))
    layers = [
        axrt.LayerSpec(Weighs, STAGE_MIB / LAYERS, task_s / LAYERS) for _ in range(LAYERS * stages)
    ]
    if replicas == 2:
        of = engine(layers, 2, MICROBATCHES, bucket_mb=bucket_mb)
    else:
        of = pipeline_of(comm.Split(comm.rank // stages), layers)
    batches = items(comm.rank)
    with of:
        times = [timed(lambda: of.train_batch(batches), comm) for _ in range(STEPS)]
    return float(comm.allreduce(statistics.median(times[WARM:]), MPI.MAX)) * 1e3


def pipeline_of(comm: Any, layers: list[Any]) -> axrt.Engine:
    """The same pipeline without replicas, on ranks of its own."""
    from axrt.transport.mpi import MpiTransport

    config = {"schedule": {"microbatches": MICROBATCHES}, "run": {"device": "cpu"}}
    sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.0)  # noqa: E731
    return axrt.initialize(
        axrt.PipelineModule(layers, one), sgd, config=config, transport=MpiTransport(comm)
    )


def levels() -> dict[str, Any]:
    """The median step of one stage in ms, on the slowest rank, by the replicas of a group; and the
    messages that a rank sends in it."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    groups = [1, usual_group(comm.size, 1)]
    layers = [axrt.LayerSpec(Weighs, 4 / 1024)]
    batches = items(comm.rank)
    with engine(layers, comm.size, 1, group=1) as flat, engine(layers, comm.size, 1) as grouped:
        times: list[list[float]] = [[], []]
        for _ in range(4 * STEPS):
            for of, found in zip((flat, grouped), times, strict=True):
                found.append(timed(lambda: of.train_batch(batches), comm))  # noqa: B023
    ms = [comm.allreduce(statistics.median(of[WARM:]) * 1e3, MPI.MAX) for of in times]
    of_group = groups[1]
    messages = [2 * (comm.size - 1), 2 * (of_group - 1 + comm.size // of_group - 1)]
    return {"groups": groups, "ms": ms, "messages": messages}


PARTS: dict[str, Callable[[], Any]] = {
    "levels": levels,
    "cost": cost,
    "many": lambda: step_of(2, STAGE_MIB / LAYERS),
    "one": lambda: step_of(2, 1000),
    "apart": lambda: step_of(1, 1000),
}
LAYOUTS = {
    "one rank": (1, []),
    "two ranks, a pipeline": (2, []),
    "two ranks, replicas": (2, ["parallel.data=2", "schedule.microbatches=4"]),
}


def measure(part: str, ranks: int, launch: Launch) -> Any:
    """Run a part on so many ranks; what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, __file__, "--part", part, "--out", str(out)]
        subprocess.run(launch(ranks, command), check=True, cwd=ROOT, timeout=300)
        return json.loads(out.read_text())


def by(mpirun: str) -> Launch:
    """Launch a command on the ranks of this node."""
    return lambda ranks, command: [mpirun, "-n", str(ranks), *command]


def tokens_per_s(ranks: int, overrides: list[str], mpirun: str) -> float:
    """The median over the logged steps of one short run of the quickstart model, the first ones
    left out."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            "run.steps=24",
            "run.log_every=4",
            "run.progress=off",
            "data.held_out=0",
            "checkpoint.dir=",
            f"run.out={folder}/run",
        ]
        command = [
            sys.executable,
            "-m",
            "axrt",
            "train",
            "examples/quickstart.toml",
            *fixed,
            *overrides,
        ]
        subprocess.run([mpirun, "-n", str(ranks), *command], check=True, cwd=ROOT, timeout=300)
        lines = [
            json.loads(line)
            for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        return statistics.median([float(line["tokens_per_s"]) for line in lines[2:]])


def spread(values: list[float], unit: str, digits: int = 1) -> str:
    low, middle, high = (
        f"{value:,.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} {unit} ({low} to {high})"


def report(rounds: int, mpirun: str) -> None:
    costs = [measure("cost", 2, by(mpirun)) for _ in range(rounds)]
    print(
        "a reduction between two ranks: what it adds to a step, by parts; by the library; the "
        "exchange of parts by hand; MPI's Allreduce; gloo's"
    )
    for mib in map(str, SIZES_MIB):
        print(
            f"    {mib} MiB: "
            + "; ".join(spread([of[mib][which] for of in costs], "ms", 2) for which in range(5))
        )
        rates = [
            int(mib) * MIB / (statistics.median(of[mib][which] for of in costs) / 1e3) / 1e9
            for which in range(5)
        ]
        print("        in GB/s of gradient: " + ", ".join(f"{rate:.2f}" for rate in rates))
        for name, raw, of_ours in (
            ("MPI's Allreduce that parts reach", 3, 0),
            ("gloo's that the library reaches", 4, 1),
        ):
            shares = [of[mib][raw] / of[mib][of_ours] for of in costs]
            print(f"        share of the rate of {name}: {spread(shares, '', 2)}")
    for ranks in (12, 16):
        report_levels(rounds, by(mpirun), ranks)
    for ranks in (2, 4, 8):
        report_hidden(rounds, by(mpirun), ranks)
    rates_of: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for _ in range(rounds):
        for name, (ranks, overrides) in LAYOUTS.items():
            rates_of[name].append(tokens_per_s(ranks, overrides, mpirun))
    for name, values in rates_of.items():
        print(f"quickstart, {name}: {spread(values, 'tokens/s', 0)}")


def report_levels(rounds: int, launch: Launch, ranks: int) -> None:
    """Print what a step of replicas with tiny gradients takes, at once and in groups."""
    found = [measure("levels", ranks, launch) for _ in range(rounds)]
    for level in range(2):
        group, messages = found[0]["groups"][level], found[0]["messages"][level]
        ms = spread([of["ms"][level] for of in found], "ms", 2)
        how = f"in groups of {group}" if group > 1 else "at once"
        print(f"{ranks} replicas with tiny gradients, {how}, {messages} messages a rank: {ms}")
    shares = [of["ms"][1] / of["ms"][0] for of in found]
    print(f"    groups take {spread(shares, 'of it', 2)}")


def report_hidden(rounds: int, launch: Launch, ranks: int) -> None:
    """Print what replicas add to a step, in many buckets a stage and in one."""
    found = [
        {part: measure(part, ranks, launch) for part in ("many", "one", "apart")}
        for _ in range(rounds)
    ]
    added = {name: [of[name] - of["apart"] for of in found] for name in ("many", "one")}
    alone = spread([of["apart"] for of in found], "ms")
    print(f"a pipeline of {ranks // 2}, {STAGE_MIB} MiB a stage: {alone} a step without replicas;")
    print(f"    two replicas add {spread(added['one'], 'ms')} with one bucket a stage,")
    print(f"    and {spread(added['many'], 'ms')} with {LAYERS}")
    hidden = [1 - many / one for many, one in zip(added["many"], added["one"], strict=True)]
    print(f"    hidden: {spread(hidden, '', 2)}")


@contextmanager
def over_tcp(mpirun: str, rate: str) -> Iterator[Launch]:
    """A network namespace with an address for each of two ranks, what each sends limited to this
    rate, and a way to launch both there under Open MPI.

    What a rank sends to its own host goes through the loopback, whatever its address; Open MPI
    takes no loopback address.
    """
    name = "axrt-bench"
    inside = ["ip", "netns", "exec", name]
    os.environ.update(OMPI_MCA_pml="ob1", OMPI_MCA_btl="tcp,self")
    commands = ["ip link set lo up", "tc qdisc add dev lo root handle 1: htb"]
    for rank in range(2):
        commands += [
            f"ip link add v{rank} type veth peer name w{rank}",
            f"ip addr add 10.9.{rank}.1/24 dev v{rank}",
            f"ip link set v{rank} up",
            f"ip link set w{rank} up",
            f"tc class add dev lo parent 1: classid 1:1{rank} htb rate {rate} burst 1mb "
            "quantum 60000",
            f"tc filter add dev lo parent 1: protocol ip u32 match ip src 10.9.{rank}.1 "
            f"flowid 1:1{rank}",
        ]

    def launch(ranks: int, command: list[str]) -> list[str]:
        assert ranks == 2, "there are two addresses"
        of_rank = [
            ["-n", "1", "env", f"OMPI_MCA_btl_tcp_if_include=v{rank}", *command]
            for rank in range(2)
        ]
        return [*inside, mpirun, *of_rank[0], ":", *of_rank[1]]

    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for words in commands:
            subprocess.run([*inside, *words.split()], check=True)
        yield launch
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@click.command()
@click.option("--mpirun", default="mpirun", help="the launcher")
@click.option("--rounds", default=5, help="interleaved repetitions")
@click.option(
    "--part",
    type=click.Choice(list(PARTS)),
    help="run one part here and write its figures to --out",
)
@click.option("--levels", "only_levels", is_flag=True, help="only what groups of replicas gain")
@click.option("--out", type=click.Path(path_type=Path))
@click.option("--tcp", help="what is hidden over TCP at this rate, such as 4gbit")
@click.option("--task-ms", type=float, help="sleep of a stage in each direction, in ms")
def main(
    mpirun: str,
    rounds: int,
    part: str | None,
    out: Path | None,
    tcp: str | None,
    task_ms: float | None,
    only_levels: bool,
) -> None:
    """Measure what replicas cost."""
    if task_ms is not None:
        os.environ[TASK] = str(task_ms / 1e3)
    if only_levels:
        for ranks in (12, 16):
            report_levels(rounds, by(mpirun), ranks)
        return
    if part is None and tcp is not None:
        with over_tcp(mpirun, tcp) as launch:
            report_hidden(rounds, launch, 2)
        return
    if part is None:
        report(rounds, mpirun)
        return
    torch.set_num_threads(1)
    keep_freed_memory()  # as `axrt train` does
    figures = PARTS[part]()
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0":
        assert out is not None
        out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
