"""What the runtime itself costs; see scripts/bench_runtime.

    task      time a task with empty layers, beside the same torch (and MPI) calls in a bare loop
    idle      CPU of a rank that waits for its first message
    reaction  from a message's sending to its hearing, while work flows
    tokens    tokens a second of the quickstart model on one rank with one and two threads, and on
              two ranks

Each part runs several times, interleaved with what it is compared with; medians are printed with
the extremes.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from torch import Tensor, nn

import axrt
from axrt.observe.observer import Observer
from axrt.scheduler.task import Task

if TYPE_CHECKING:  # another checkout may have it elsewhere
    from axrt.transport.control import News

ROOT = Path(__file__).resolve().parents[2]
MICROBATCHES, STEPS = 256, 20
SHAPE = (64, 64)  # 16 KiB


class Same(nn.Module):
    """A layer that does nothing, with a weight that it does not use: a model must have one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        return value


def first(value: Tensor, target: Tensor) -> Tensor:
    """An empty loss."""
    return value[0, 0]


def empty_engine(
    stages: int, observers: tuple[Observer, ...] = (), microbatches: int = MICROBATCHES
) -> axrt.Engine:
    model = axrt.PipelineModule([axrt.LayerSpec(Same) for _ in range(stages)], first)
    # gpipe: both ranks always have something to do, so that a task's time is the loop's and not the
    # other rank's.
    schedule = {"microbatches": microbatches, "policy": "gpipe"}
    return axrt.initialize(
        model, config={"schedule": schedule, "run": {"device": "cpu"}}, observers=observers
    )


def wanting() -> Iterator[tuple[Tensor, Tensor]]:
    value, target = torch.zeros(SHAPE, requires_grad=True), torch.zeros(1)
    while True:
        yield value, target


def ours_us() -> float:
    """Microseconds a task of an engine with empty layers, over all tasks of this rank (forward and
    backward)."""
    torch.set_num_threads(1)
    with empty_engine(int(os.environ.get("RANKS", "1"))) as engine:
        batches = wanting()
        engine.train_batch(batches)
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.train_batch(batches)
        return (time.perf_counter() - began) / (STEPS * MICROBATCHES * 2) * 1e6


def bare_us() -> float:
    """The same torch calls in a bare loop, and on two ranks MPI's: all forwards of a step, then all
    backwards."""
    torch.set_num_threads(1)
    ranks = int(os.environ.get("RANKS", "1"))
    bare = BareRank(ranks)
    bare.step()
    began = time.perf_counter()
    for _ in range(STEPS):
        bare.step()
    return (time.perf_counter() - began) / (STEPS * MICROBATCHES * 2) * 1e6


class BareRank:
    """What one rank must ask of torch and MPI for a step of empty layers, and nothing else."""

    def __init__(self, ranks: int) -> None:
        from axrt.model.inlet import Inflow, InletNode

        self._inlet, self._inflow = InletNode, Inflow
        self._anchor, self._value = torch.empty(0, requires_grad=True), torch.zeros(SHAPE)
        self._comm: Any = None
        if ranks > 1:
            from mpi4py import MPI

            self._comm = MPI.COMM_WORLD
        self._first = self._comm is None or self._comm.rank == 0
        self._last = self._comm is None or self._comm.rank == 1

    def step(self) -> None:
        graphs = [self._forward() for _ in range(MICROBATCHES)]
        for graph in graphs:
            self._backward(graph)

    def _forward(self) -> Tensor:
        arrived = self._value if self._first else self._received()
        (value,) = self._inlet.apply(self._inflow(arrived=(arrived.detach(),)), self._anchor)  # type: ignore[no-untyped-call]
        torch.default_generator.manual_seed(1)
        if self._last:
            loss: Tensor = value[0, 0]
            float(loss.detach())
            return loss / MICROBATCHES
        self._comm.Send(value.detach().requires_grad_().detach().numpy(), 1)
        return value  # type: ignore[no-any-return]

    def _backward(self, graph: Tensor) -> None:
        torch.autograd.backward(graph, None if self._last else self._received())
        if not self._first:
            self._comm.Send(self._value.numpy(), 0)

    def _received(self) -> Tensor:
        arrived = torch.empty(SHAPE)
        self._comm.Recv(arrived.numpy(), 1 - self._comm.rank)
        return arrived


def idle_percent() -> float:
    """CPU of rank 1, in percent of a core, while rank 0 thinks for three seconds before its first
    microbatch."""

    def slow() -> Iterator[tuple[Tensor, Tensor]]:
        for value in wanting():
            time.sleep(3)
            yield value

    with empty_engine(2, microbatches=1) as engine:
        engine.train_batch(wanting())
        wall, cpu = time.perf_counter(), time.process_time()
        engine.train_batch(slow())
        return (time.process_time() - cpu) / (time.perf_counter() - wall) * 100


class Stamps(Observer):
    """When messages were sent and heard; both ranks are on one node and share its clock."""

    def __init__(self) -> None:
        self.sent_at: dict[str, float] = {}
        self.heard_at: dict[str, float] = {}

    def sent(self, rank: int, message: "News", payload: object) -> None:
        self.sent_at[str(message)] = time.perf_counter()

    def arrived(self, source: int, message: "News") -> None:
        self.heard_at[str(message)] = time.perf_counter()

    def started(self, task: Task) -> None: ...


def reaction_us() -> list[float]:
    """From sending to hearing, for gradients and activations that a waiting rank gets while work
    flows: tasks of 1 to 15 ms."""
    from mpi4py import MPI

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, value: Tensor) -> Tensor:
            time.sleep(0.001 + 0.014 * torch.rand(()).item())
            return value * self.scale

    stamps = Stamps()
    model = axrt.PipelineModule([Slow(), Slow()], first)
    config = {
        "schedule": {"microbatches": 50, "policy": "axonn", "max_held": 1},
        "run": {"device": "cpu"},
    }
    with axrt.initialize(model, config=config, observers=[stamps]) as engine:
        for _ in range(4):
            engine.train_batch(wanting())
    sent: dict[str, float] = {}
    for part in MPI.COMM_WORLD.allgather(stamps.sent_at):
        sent.update(part)
    heard = MPI.COMM_WORLD.allgather(stamps.heard_at)
    return sorted(
        (at - sent[message]) * 1e6
        for part in heard
        for message, at in part.items()
        if message in sent and "target" not in message
    )


PARTS = {"ours": ours_us, "bare": bare_us, "idle": idle_percent, "reaction": reaction_us}


def measure(part: str, ranks: int, mpirun: str, checkout: Path = ROOT) -> Any:
    """Run a part in processes of its own, with the code of a checkout; what rank 0 (idle: rank 1)
    found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, __file__, "--part", part, "--out", str(out)]
        launch = [mpirun, "-n", str(ranks)] if ranks > 1 else []
        subprocess.run(
            [*launch, *command],
            check=True,
            cwd=checkout,
            env={**os.environ, "RANKS": str(ranks), "PYTHONPATH": str(checkout)},
            timeout=300,
        )
        return json.loads((out.with_suffix(".1" if part == "idle" else ".0")).read_text())


def tokens_per_s(ranks: int, threads: int, mpirun: str) -> float:
    """The median over the logged steps of one short run of the quickstart model, the first ones
    left out."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "train",
            "examples/quickstart.toml",
            "run.steps=24",
            "run.log_every=4",
            "run.progress=off",
            "data.held_out=0",
        ]
        command = [sys.executable, "-m", "axrt", *arguments, f"run.out={folder}/run"]
        launch = [mpirun, "-n", str(ranks)] if ranks > 1 else []
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([*launch, *command], check=True, cwd=ROOT, env=environment, timeout=300)
        lines = [
            json.loads(line)
            for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        return statistics.median([float(line["tokens_per_s"]) for line in lines[2:]])


def spread(values: list[float], unit: str) -> str:
    return (
        f"{statistics.median(values):,.1f} {unit} ({min(values):,.1f} to {max(values):,.1f}, "
        f"{len(values)} runs)"
    )


def report_beside(rounds: int, mpirun: str, other: Path) -> None:
    """A task's time in this state of the code and in another one, in turn."""
    states = (ROOT, other)
    found = {(state, ranks): list[float]() for state in states for ranks in (1, 2)}
    for _ in range(rounds):
        for (state, ranks), values in found.items():
            values.append(measure("ours", ranks, mpirun, state))
    for ranks in (1, 2):
        here, there = (found[state, ranks] for state in states)
        ratios = [mine / of_other for mine, of_other in zip(here, there, strict=True)]
        print(f"a task, {ranks} rank(s): {spread(here, 'us')}; there: {spread(there, 'us')};")
        print(
            f"    ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


def report(rounds: int, mpirun: str) -> None:
    tasks: dict[tuple[str, int], list[float]] = {
        (part, ranks): [] for part in ("ours", "bare") for ranks in (1, 2)
    }
    idle: list[float] = []
    medians: list[float] = []
    nineties: list[float] = []
    rates: dict[tuple[int, int], list[float]] = {(1, 1): [], (1, 2): [], (2, 1): []}
    for _ in range(rounds):
        for (part, ranks), values in tasks.items():
            values.append(measure(part, ranks, mpirun))
        idle.append(measure("idle", 2, mpirun))
        reactions = measure("reaction", 2, mpirun)
        medians.append(statistics.median(reactions))
        nineties.append(reactions[len(reactions) * 9 // 10])
        for (ranks, threads), values in rates.items():
            values.append(tokens_per_s(ranks, threads, mpirun))
    for ranks in (1, 2):
        ours, bare = tasks["ours", ranks], tasks["bare", ranks]
        print(
            f"a task, {ranks} rank(s): {spread(ours, 'us')}; torch and MPI alone: "
            f"{spread(bare, 'us')};"
        )
        print(
            f"    the loop's own: {spread([a - b for a, b in zip(ours, bare, strict=True)], 'us')}"
        )
    print(f"an idle rank: {spread(idle, '% of a core')}")
    print(f"reaction: median {spread(medians, 'us')}; nine in ten within {spread(nineties, 'us')}")
    for (ranks, threads), values in rates.items():
        print(
            f"quickstart on {ranks} rank(s) with {threads} thread(s): {spread(values, 'tokens/s')}"
        )


@click.command()
@click.option("--mpirun", default="mpirun", help="the launcher")
@click.option("--rounds", default=5, help="interleaved repetitions")
@click.option(
    "--beside",
    type=click.Path(path_type=Path, exists=True),
    help="another checkout: a task's time there and here, in turn, and nothing else",
)
@click.option(
    "--freeze/--no-freeze",
    default=True,
    help="take what stands at the start out of garbage collection, as `axrt train` does",
)
@click.option(
    "--part",
    type=click.Choice(list(PARTS)),
    help="run one part here and write its figure to --out.RANK",
)
@click.option("--out", type=click.Path(path_type=Path))
def main(
    mpirun: str,
    rounds: int,
    beside: Path | None,
    freeze: bool,
    part: str | None,
    out: Path | None,
) -> None:
    """Measure what the runtime itself costs."""
    if part is None:
        os.environ["FREEZE"] = str(int(freeze))
        if beside:
            report_beside(rounds, mpirun, beside.resolve())
        else:
            report(rounds, mpirun)
        return
    if os.environ.get("FREEZE") == "1":
        gc.freeze()
    figure = PARTS[part]()
    rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    assert out is not None
    out.with_suffix(f".{rank}").write_text(json.dumps(figure))


if __name__ == "__main__":
    main()
