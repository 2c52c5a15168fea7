"""What optimizers take of a step: on two replicas, beside DDP over gloo with torch's Muon on every
rank, and on two stages, where refreshes fill idle time; see scripts/bench_optimizers.

Every way has a model of its own; they train a step of the same tokens in turn, in an order drawn
anew for each round. Times are medians over the rounds; ratios are medians of those within a round,
with the extremes. The optimizer's part is that of the rank that has most.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from mpi4py import MPI
from tensor import MICROBATCHES, OF_BOTH, batches, layers_of, loss_of, taken_s
from torch.nn.parallel import DistributedDataParallel

import axrt
from axrt.config import Config
from axrt.model.matrices import Matrices, trained_in
from axrt.models.registry import model_of
from axrt.observe.observer import Observer
from axrt.scheduler.task import Kind, Task
from axrt.transport.mpi import MpiTransport

WORLD = MPI.COMM_WORLD
PEER = "DDP, torch's Muon on every rank, patched to float32"
NEVER = 1_000_000  # steps


class Spent(Observer):
    """Adds up the seconds of tasks, by kind."""

    def __init__(self) -> None:
        self.seconds: defaultdict[object, float] = defaultdict(float)

    def finished(self, task: Task, began_s: float, ended_s: float) -> None:
        self.seconds[task.kind] += ended_s - began_s

    def taken(self) -> dict[object, float]:
        """What was added up since this was asked for last."""
        found = dict(self.seconds)
        self.seconds.clear()
        return found


class Took(NamedTuple):
    """What a step took."""

    step: float  # seconds
    optimizer: float  # seconds of steps of the optimizer, of changes before them, and of refreshes
    refresh: float  # seconds of refreshes
    idle: float  # share of the step in which the rank has run nothing
    loss: float


class Ours:
    """axrt with an optimizer."""

    def __init__(self, layers: int, width: int, context: int, optimizer: Any, **keys: Any) -> None:
        data = keys.get("parallel", {}).get("data", 1)
        own = MICROBATCHES // data
        first = WORLD.rank * own if data > 1 else 0
        self._given = batches(context)[first : first + own]
        self._spent = Spent()
        config = Config.read(
            {
                "schedule": {"microbatches": own, "policy": "1f1b"},
                "optimizer": {**OF_BOTH, **optimizer},
                "run": {"device": "cpu"},
                **keys,
            }
        )
        self._engine = axrt.initialize(
            axrt.PipelineModule(layers_of(layers, width), loss_of),
            config=config,
            transport=MpiTransport(WORLD.Dup()),
            observers=[self._spent],
        )

    def step(self) -> Took:
        """Train a step."""
        self._spent.taken()
        reads = iter(self._given) if self._engine.reads else None
        took_s, loss = taken_s(lambda: self._engine.train_batch(reads).loss)
        seconds = self._spent.taken()
        refresh = seconds.get(Kind.REFRESH, 0.0)
        changes = seconds.get(Kind.PRECONDITION, 0.0) + seconds.get(Kind.STEP, 0.0)
        idle = 1 - sum(seconds.values()) / took_s
        return Took(took_s, refresh + changes, refresh, idle, loss)


class Ddp:
    """DDP over gloo, with torch's Muon for matrices and its AdamW for the rest on every rank.

    Args:
        in_float32: products are in float32, though torch's Muon has them in bfloat16 alone: what it
            calls to get that type is another function meanwhile.
    """

    def __init__(self, layers: int, width: int, context: int, in_float32: bool) -> None:
        self._in_float32 = in_float32
        model = axrt.PipelineModule(layers_of(layers, width), loss_of).sequential(0)
        own = MICROBATCHES // 2
        self._given = batches(context)[WORLD.rank * own : (WORLD.rank + 1) * own]
        self._model = DistributedDataParallel(model)
        named = list(model.named_parameters())
        ends = "0.", f"{layers + 1}."
        matrices = [p for name, p in named if p.dim() == 2 and not name.startswith(ends)]
        rest = [p for name, p in named if p.dim() != 2 or name.startswith(ends)]
        lr: Any = OF_BOTH["lr"]
        self._optimizers = [torch.optim.Muon(matrices, lr), torch.optim.AdamW(rest, lr)]

    def step(self) -> Took:
        """Train a step."""
        self._optimizer_s = 0.0
        took_s, loss = taken_s(self._step)
        return Took(took_s, self._optimizer_s, 0.0, 0.0, loss)

    def _step(self) -> float:
        total = 0.0
        for number, (inputs, targets) in enumerate(self._given):
            self._model.require_backward_grad_sync = number == len(self._given) - 1
            loss = loss_of(self._model(inputs), targets) / len(self._given)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        narrow: Any = torch.Tensor.bfloat16
        if self._in_float32:
            torch.Tensor.bfloat16 = torch.Tensor.clone  # type: ignore[method-assign]
        began = time.perf_counter()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._optimizer_s = time.perf_counter() - began
        torch.Tensor.bfloat16 = narrow  # type: ignore[method-assign]
        return float(WORLD.allreduce(total)) / 2


Way = Ours | Ddp


def replicas(size: tuple[int, int, int], bfloat16: bool) -> Iterator[tuple[str, Way]]:
    for name in ("adamw", "muon", "soap"):
        of_matrices = {} if name == "adamw" else {"rest_lr": OF_BOTH["lr"]}
        for zero, told in ((0, "each replica steps all"), (1, "one owner each")):
            keys: dict[str, Any] = {"parallel": {"data": 2}, "memory": {"zero": zero}}
            yield f"{name}, {told}", Ours(*size, {"name": name, **of_matrices}, **keys)
    for sample in (1, 10):
        of_kfac = {"name": "kfac", "rest_lr": OF_BOTH["lr"], "sample": sample}
        keys = {"parallel": {"data": 2}, "memory": {"zero": 1}}
        yield f"kfac, one owner each, samples of {_told(sample)}", Ours(*size, of_kfac, **keys)
    yield PEER, Ddp(*size, in_float32=True)
    if bfloat16:
        yield "DDP, torch's Muon on every rank", Ddp(*size, in_float32=False)


def stages(size: tuple[int, int, int]) -> Iterator[tuple[str, Way]]:
    yield "adamw", Ours(*size, {"name": "adamw"})
    for name, refresh in (
        ("soap", 10),
        ("soap", 5),
        ("soap", NEVER),
        ("kfac", 10),
        ("kfac", NEVER),
    ):
        of_it = {"name": name, "rest_lr": OF_BOTH["lr"], "refresh": refresh}
        sampled = {"sample": 10} if name == "kfac" else {}
        told = "never" if refresh == NEVER else _told(refresh)
        yield f"{name}, refreshed {told}", Ours(*size, {**of_it, **sampled})


def _told(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def rounds_of(made: dict[str, Way], rounds: int, seed: int) -> dict[str, list[Took]]:
    taken: dict[str, list[Took]] = {way: [] for way in made}
    random = Random(seed)
    for number in range(rounds + 2):
        for way in random.sample(list(made), len(made)):
            found = made[way].step()
            every = WORLD.allgather(found)
            busiest = max(of.optimizer for of in every), max(of.refresh for of in every)
            idle = statistics.mean(of.idle for of in every)
            if number > 1:  # the first rounds warm up
                taken[way].append(Took(found.step, *busiest, idle, found.loss))
    return taken


def show_replicas(taken: dict[str, list[Took]], context: int) -> None:
    print("| two replicas | ms a step | tokens/s | optimizer, ms | of DDP's in float32 |")
    print("|---|---|---|---|---|")
    for name, found in taken.items():
        step = statistics.median(one.step for one in found)
        part = 1e3 * statistics.median(one.optimizer for one in found)
        of_peer = _ratios(found, taken[PEER], lambda one: one.optimizer)
        tokens = MICROBATCHES * context / step
        print(f"| {name} | {1e3 * step:.0f} | {tokens:.0f} | {part:.1f} | {of_peer} |", flush=True)


def show_stages(taken: dict[str, list[Took]]) -> None:
    print("\n| two stages, 1f1b | ms a step | of AdamW's | refreshes, ms | idle |")
    print("|---|---|---|---|---|")
    for name, found in taken.items():
        step = 1e3 * statistics.median(one.step for one in found)
        of_adamw = _ratios(found, taken["adamw"], lambda one: one.step)
        refresh = 1e3 * statistics.mean(one.refresh for one in found)
        idle = 100 * statistics.median(one.idle for one in found)
        print(f"| {name} | {step:.0f} | {of_adamw} | {refresh:.1f} | {idle:.1f} % |", flush=True)


def _ratios(found: Sequence[Took], other: Sequence[Took], figure: Callable[[Took], float]) -> str:
    ratios = [figure(one) / figure(beside) for one, beside in zip(found, other, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def show_sent(replicas: int) -> None:
    """What ranks send in a step: of a GPT of 12 blocks of width 768, by the sizes of its matrices.

    A ring's all-reduce of P numbers sends 2 (n - 1) / n P from each of n ranks, a broadcast from
    owners, or an all-gather, half of that.
    """
    sizes = {"vocab": 50304, "width": 768, "heads": 12, "layers": 12, "context": 1024}
    config = Config.read({"model": sizes, "optimizer": {"name": "kfac"}})
    model = model_of(config)
    matrices = Matrices(model)
    named = [one for place, layer in enumerate(model.layers) for one in trained_in(layer, place)]
    weights = sum(parameter.numel() for _, parameter in named)
    of_matrices, factors, inverses = 0, 0, 0
    for name, parameter in named:
        blocks, columns = matrices.blocks_of(name, parameter), parameter.shape[-1]
        if blocks:
            of_matrices += parameter.numel()
            factors += columns**2 + sum(rows**2 for rows in blocks)
            inverses += sum(columns**2 + rows**2 for rows in blocks)
    half = 4 * (replicas - 1) / replicas / 1e6
    print(f"| {replicas} replicas, MB a rank sends | each step | with a refresh, besides |")
    print("|---|---|---|")
    for name, each, at_refresh in (
        ("all-reduce of gradients, as any optimizer", 2 * weights, 0),
        ("axrt: owners step, and send weights", 2 * weights, 0),
        ("DP-KFAC as published: changes are broadcast, too", 2 * weights + of_matrices, 0),
        ("D-KFAC: factors are added up, inverses broadcast", 2 * weights, 2 * factors + inverses),
    ):
        print(f"| {name} | {half * each:.0f} | {half * at_refresh:.0f} |")


@click.command()
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(1))
@click.option("--layers", default=8, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--context", default=128, show_default=True, help="tokens of a microbatch")
@click.option("--bfloat16", is_flag=True, help="torch's Muon as it is, too")
@click.option("--stages", "only_stages", is_flag=True, help="leave replicas out")
@click.option("--sent", is_flag=True, help="only count what is sent, of 8 replicas")
def main(
    rounds: int,
    layers: int,
    width: int,
    context: int,
    bfloat16: bool,
    only_stages: bool,
    sent: bool,
) -> None:
    """Time steps of each way."""
    if sent:
        if WORLD.rank == 0:
            show_sent(8)
        return
    torch.set_num_threads(1)
    size = layers, width, context
    of_replicas = {} if only_stages else rounds_of(_beside_ddp(size, bfloat16), rounds, 0)
    of_stages = rounds_of(dict(stages(size)), rounds, 1)
    if WORLD.rank == 0:
        if of_replicas:
            show_replicas(of_replicas, context)
        show_stages(of_stages)
        for way, found in of_replicas.items():
            print(f"losses of {way}: {', '.join(f'{one.loss:.4f}' for one in found[:3])}")
    if of_replicas:
        dist.destroy_process_group()


def _beside_ddp(size: tuple[int, int, int], bfloat16: bool) -> dict[str, Way]:
    name = tempfile.mkdtemp() if WORLD.rank == 0 else ""
    store = Path(WORLD.bcast(name)) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=WORLD.rank, world_size=2)
    return dict(replicas(size, bfloat16))


if __name__ == "__main__":
    main()
