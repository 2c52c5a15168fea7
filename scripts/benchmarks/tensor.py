"""A GPT on two ranks: as a team, a pipeline or replicas, beside one rank and torch's DTensor over
gloo; see scripts/bench_tensor.

Every way has a model of its own; they train a step of the same tokens in turn, in an order drawn
anew for each round. A figure is the median over the rounds of a ratio within the round, with the
extremes. DTensor's model is that of the layers as they are, without positions and with queries,
keys and values apart.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import click
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import axrt
from axrt.config import Config
from axrt.models.gpt import gpt
from axrt.observe.observer import Observer
from axrt.scheduler.message import Meaning
from axrt.transport.mpi import MpiTransport

WORLD = MPI.COMM_WORLD
VOCAB, HEADS, MICROBATCHES = 256, 4, 8
OF_BOTH = {"lr": 3e-4, "clip": 0.0, "warmup_steps": 0}
CUTS = {
    "*.query": "column",
    "*.key": "column",
    "*.given": "column",
    "*.out": "row",
    "*.heads": "divide",
    "*.up": "column",
    "*.down": "row",
}


class Attention(nn.Module):
    """Causal attention with matrices of its own for queries, keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.given, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads = HEADS

    def forward(self, value: Tensor) -> Tensor:
        samples, tokens, _ = value.shape
        query, key, given = (
            one(value).view(samples, tokens, self.heads, -1).transpose(1, 2)
            for one in (self.query, self.key, self.given)
        )
        made = functional.scaled_dot_product_attention(query, key, given, is_causal=True)
        out: Tensor = self.out(made.transpose(1, 2).reshape(samples, tokens, -1))
        return out


class Feed(nn.Module):
    """A feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(value), approximate="tanh"))
        return out


class Block(nn.Module):
    """A block as anybody writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed = Attention(width), Feed(width)

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.attention(self.attention_norm(value))
        out: Tensor = value + self.feed(self.feed_norm(value))
        return out


class Head(nn.Module):
    """Logits of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.logits(self.norm(value))
        return out


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def layers_of(layers: int, width: int) -> list[axrt.LayerSpec]:
    blocks = [axrt.LayerSpec(Block, width) for _ in range(layers)]
    return [axrt.LayerSpec(nn.Embedding, VOCAB, width), *blocks, axrt.LayerSpec(Head, width)]


def batches(context: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCAB, (MICROBATCHES, 1, context + 1), generator=generator)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


class Sent(Observer):
    """Counts elements of slices that this rank sends."""

    def __init__(self) -> None:
        self.elements = 0

    def sent(self, rank: int, message: Any, payload: Any) -> None:
        if getattr(message, "meaning", None) in (Meaning.SLICE, Meaning.SLICE_BACK):
            self.elements += sum(tensor.numel() for tensor in payload)


class Ours:
    """axrt with some layout, on both ranks or on the first alone."""

    def __init__(
        self, size: tuple[int, int, int], alone: bool, as_is: bool, policy: str, **keys: Any
    ) -> None:
        layers, width, context = size
        data = keys.get("parallel", {}).get("data", 1)
        own = MICROBATCHES // data
        first = WORLD.rank * own if data > 1 else 0
        self._given = batches(context)[first : first + own]
        self.sent = Sent()
        self._engine = None
        config = Config.read(
            {
                "model": {"layers": layers, "width": width, "heads": HEADS, "context": context},
                "schedule": {
                    "microbatches": len(self._given),
                    "policy": policy,
                    **keys.pop("schedule", {}),
                },
                "optimizer": OF_BOTH,
                "run": {"device": "cpu"},
                **keys,
            }
        )
        plain = axrt.PipelineModule(layers_of(layers, width), loss_of, tensor=CUTS)
        model = plain if as_is else gpt(config)
        if not alone or WORLD.rank == 0:
            transport = MpiTransport(MPI.COMM_SELF.Dup() if alone else WORLD.Dup())
            self._engine = axrt.initialize(
                model, config=config, transport=transport, observers=[self.sent]
            )

    def step(self) -> float:
        """Train a step; the loss."""
        if self._engine is None:
            return 0.0
        reads = iter(self._given) if self._engine.reads else None
        return self._engine.train_batch(reads).loss


class Theirs:
    """torch's DTensor over gloo.

    Args:
        sequence: norms and residuals see a rank's own tokens (SequenceParallel).
    """

    def __init__(self, size: tuple[int, int, int], mesh: Any, sequence: bool) -> None:
        layers, width, context = size
        built = axrt.PipelineModule(layers_of(layers, width), loss_of).sequential(0)
        between = Shard(1) if sequence else Replicate()
        plan: dict[str, Any] = {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            f"{layers + 1}.logits": ColwiseParallel(
                input_layouts=between, output_layouts=Replicate()
            ),
        }
        if sequence:
            plan[f"{layers + 1}.norm"] = SequenceParallel()
        for place in range(1, layers + 1):
            plan |= self._of_block(str(place), between, sequence)
            attention: Any = built[place].attention
            attention.heads //= 2
        self._model = parallelize_module(built, mesh, plan)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), OF_BOTH["lr"], (0.9, 0.95), weight_decay=0.1
        )
        self._given = batches(context)

    def _of_block(self, name: str, between: Any, sequence: bool) -> dict[str, Any]:
        plan: dict[str, Any] = {
            f"{name}.attention.out": RowwiseParallel(output_layouts=between),
            f"{name}.feed.up": ColwiseParallel(),
            f"{name}.feed.down": RowwiseParallel(output_layouts=between),
        }
        for one in ("query", "key", "given"):
            plan[f"{name}.attention.{one}"] = ColwiseParallel()
        if sequence:
            gathers = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
            plan |= {f"{name}.attention": gathers, f"{name}.feed": gathers}
            plan |= {
                f"{name}.{norm}": SequenceParallel() for norm in ("attention_norm", "feed_norm")
            }
        return plan

    def step(self) -> float:
        """Train a step; the loss."""
        total = 0.0
        for inputs, targets in self._given:
            loss = loss_of(self._model(inputs), targets) / MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def ways(size: tuple[int, int, int], folder: Path) -> Iterator[tuple[str, Ours | Theirs]]:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=WORLD.rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    yield "one rank", Ours(size, True, False, "1f1b")
    yield "one rank, layers as they are", Ours(size, True, True, "1f1b")
    yield "pipe = 2", Ours(size, False, False, "")
    yield "data = 2", Ours(size, False, False, "1f1b", parallel={"data": 2})
    for fill in ("always", "never"):
        team = {"parallel": {"tensor": 2}, "schedule": {"fill": fill}}
        yield f"tensor = 2, fill = {fill}", Ours(size, False, False, "zb-h2", **team)
    team = {"parallel": {"tensor": 2}, "schedule": {"fill": "always"}}
    yield "tensor = 2, layers as they are", Ours(size, False, True, "zb-h2", **team)
    yield "DTensor", Theirs(size, mesh, False)
    yield "DTensor, SequenceParallel", Theirs(size, mesh, True)


def taken_s(step: Callable[[], float]) -> tuple[float, float]:
    """The time that a step takes, and its loss."""
    WORLD.Barrier()
    began = time.perf_counter()
    loss = step()
    WORLD.Barrier()
    return time.perf_counter() - began, loss


def show(taken: dict[str, list[float]], made: dict[str, Ours | Theirs], steps: int) -> None:
    one = taken["one rank"]
    best = min((taken[name] for name in taken if name.startswith("DTensor")), key=statistics.median)
    print("| | ms a step | of twice one rank | of DTensor's best | MiB of slices sent |")
    print("|---|---|---|---|---|")
    for name, seconds in taken.items():
        way = made[name]
        twice = [alone / 2 / mine for alone, mine in zip(one, seconds, strict=True)]
        rate = [theirs / mine for theirs, mine in zip(best, seconds, strict=True)]
        sent = way.sent.elements * 4 / steps / 2**20 if isinstance(way, Ours) else 0
        print(
            f"| {name} | {1e3 * statistics.median(seconds):.0f} | {_told(twice)} | {_told(rate)} | "
            f"{f'{sent:.1f}' if sent else ''} |",
            flush=True,
        )


def _told(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


@click.command()
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1))
@click.option("--layers", default=8, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--context", default=256, show_default=True, help="tokens of a microbatch")
def main(rounds: int, layers: int, width: int, context: int) -> None:
    """Time steps of each way; the losses of its first steps are compared."""
    torch.set_num_threads(1)
    name = tempfile.mkdtemp() if WORLD.rank == 0 else ""
    made = dict(ways((layers, width, context), Path(WORLD.bcast(name))))
    losses: dict[str, list[float]] = {way: [] for way in made}
    taken: dict[str, list[float]] = {way: [] for way in made}
    random = Random(0)
    for number in range(rounds + 2):
        for way in random.sample(list(made), len(made)):
            took_s, loss = taken_s(made[way].step)
            losses[way].append(loss)
            if number > 1:  # the first rounds warm up
                taken[way].append(took_s)
    if WORLD.rank == 0:
        show(taken, made, rounds + 2)
        for way, of in losses.items():
            print(f"losses of {way}: {', '.join(f'{loss:.4f}' for loss in of[:3])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
