"""Two stages of two members whose layers sleep, behind a link that takes a part of a piece for each
slice: a step that fills that time, or waits, beside what the simulator says; and what policy "auto"
chooses, beside a run that names no policy; see scripts/bench_joints.

A stage is one layer of eight pieces. Each sleeps as long in its forward, its input gradient and its
weight gradient. The link holds each message with slices back, and those that time it, in a thread
of its own, and leaves all others alone.
"""

import json
import statistics
import threading
import time
from collections.abc import Iterator
from itertools import product
from queue import SimpleQueue
from random import Random
from typing import Any

import click
import torch
from click.testing import CliRunner
from mpi4py import MPI
from torch import Tensor, nn

import axrt
from axrt.cli import main as axrt_command
from axrt.device.queues import NOW, Moment
from axrt.scheduler.message import Meaning
from axrt.transport import Parcel
from axrt.transport.control import Topic
from axrt.transport.mpi import MpiTransport

WORLD = MPI.COMM_WORLD
STAGES, MEMBERS, PIECES, TOKENS, WIDTH = 2, 2, 8, 4, 4
POLICIES = ("eager-1f1b", "zb-h2")
FILLS = ("always", "never")
WAYS = [*product(POLICIES, FILLS), ("auto", "auto"), ("", "auto")]


class Sleep(torch.autograd.Function):
    """Sleeps in its forward and in both halves of its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        def weight_gradient() -> Tensor:
            time.sleep(seconds)
            return torch.zeros(1)

        seconds = ctx.seconds
        time.sleep(seconds)
        return gradient, axrt.defer_weight_gradient(ctx.weight, weight_gradient), None


class Piece(nn.Module):
    """A piece between two joints: it hands on a member's part of all tokens, to be put together."""

    def __init__(self, seconds: float, is_last: bool) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(2, 2, bias=False), nn.Parameter(torch.zeros(1))
        self._seconds, self._is_last = seconds, is_last

    def forward(self, value: Tensor) -> Any:
        value = Sleep.apply(value, self.weight, self._seconds)[: TOKENS // MEMBERS]  # type: ignore[no-untyped-call]
        return value if self._is_last else axrt.Gathered(value)


class Layer(axrt.InPieces):
    """The layer of a stage."""

    def __init__(self, seconds: float) -> None:
        super().__init__([Piece(seconds, place == PIECES - 1) for place in range(PIECES)])


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


class SlowLink(MpiTransport):
    """Messages with slices, and those within a team that time the link, leave some time after they
    are sent, in their order.

    Args:
        seconds: that time.
    """

    def __init__(self, comm: Any, seconds: float) -> None:
        super().__init__(comm)
        self._seconds = seconds
        self._later: SimpleQueue[tuple[float, int, Parcel, Moment]] = SimpleQueue()
        threading.Thread(target=self._send_later, daemon=True).start()

    def send(self, rank: int, parcel: Parcel, after: Moment = NOW) -> None:
        says, is_mate = parcel.message[0], rank // MEMBERS == self.rank // MEMBERS
        is_timed = says is Topic.EXCHANGED and is_mate
        if says in (Meaning.SLICE, Meaning.SLICE_BACK) or is_timed:
            self._later.put((time.monotonic() + self._seconds, rank, parcel, after))
        else:
            super().send(rank, parcel, after)

    def _send_later(self) -> None:
        while True:
            due_s, rank, parcel, after = self._later.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            super().send(rank, parcel, after)


class Way:
    """A policy that fills, or waits; "auto", which chooses; or none, "".

    Attributes:
        engine: the engine that follows it.
    """

    def __init__(self, policy: str, fill: str, microbatches: int, piece_s: float, slow: float):
        self._microbatches = microbatches
        layers = [axrt.LayerSpec(Layer, piece_s) for _ in range(STAGES)]
        model = axrt.PipelineModule(layers, loss_of, tensor={"*.up": "column", "loss": "token"})
        settings = {
            "schedule": {"microbatches": microbatches, "policy": policy, "fill": fill},
            "parallel": {"tensor": MEMBERS},
            "run": {"device": "cpu"},
        }
        self.engine = axrt.initialize(
            model,
            config=settings,
            transport=SlowLink(WORLD.Dup(), slow * piece_s),
            sample=next(self._batches()) if policy == "auto" else None,
        )

    def step_s(self) -> float:
        """The time that a step takes."""
        WORLD.Barrier()
        began = time.perf_counter()
        self.engine.train_batch(self._batches() if self.engine.reads else None).loss  # noqa: B018
        WORLD.Barrier()
        return time.perf_counter() - began

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        value = torch.zeros(TOKENS, WIDTH, requires_grad=True)
        return iter([(value, torch.zeros(TOKENS))] * self._microbatches)


def simulated(policy: str, fill: str, microbatches: int, slow: float) -> float:
    """A step by `axrt simulate`, in pieces."""
    cost = ",".join([str(PIECES)] * 3)
    words = [
        *("--policy", policy, "--ranks", str(STAGES), "--microbatches", str(microbatches)),
        *("--tensor", str(MEMBERS), "--joints", str(PIECES - 1), "--costs", cost, "--json"),
        *("--exchange", str(slow), f"world.fill={fill}"),
    ]
    found = CliRunner().invoke(axrt_command, ["simulate", *words], catch_exceptions=False)
    return float(json.loads(found.output)["makespan"])


@click.command()
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--microbatches", default=8, show_default=True, type=click.IntRange(1))
@click.option("--piece-ms", default=40.0, show_default=True, help="that a piece sleeps")
@click.option("--slow", default=0.5, show_default=True, help="pieces that slices take")
def main(rounds: int, microbatches: int, piece_ms: float, slow: float) -> None:
    """Time steps of each way in turn, and print them beside what the simulator says."""
    ways = {
        (policy, fill): Way(policy, fill, microbatches, piece_ms / 1e3, slow)
        for policy, fill in WAYS
    }
    taken: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    random = Random(0)
    for number in range(rounds + 1):
        for way in random.sample(list(ways), len(ways)):
            took_s = ways[way].step_s()
            if number:  # the first round warms up
                taken[way].append(1e3 * took_s / piece_ms)
    if WORLD.rank == 0:
        print("| policy | fill | simulated, pieces | measured | simulated / measured |")
        print("|---|---|---|---|---|")
        for (policy, fill), took in taken.items():
            engine, median = ways[policy, fill].engine, statistics.median(took)
            name = engine.schedule.policy
            expected = simulated(name, engine.fill, microbatches, slow)
            spread = f"{median:.1f} ({min(took):.1f} to {max(took):.1f})"
            told = name if policy == name else f"{policy or 'none named'}: {name}"
            ratio = f"{expected / median:.3f}"
            print(f"| {told} | {engine.fill} | {expected:.1f} | {spread} | {ratio} |")


if __name__ == "__main__":
    main()
