"""The idea of axrt in one file that uses nothing of axrt: a pipeline without a schedule.

Each rank holds a stage, some layers of the model, and runs one loop. A message that arrives makes a
task ready, the loop runs the most urgent one, and a task that ends sends messages. Nobody says in
which order: that forwards and backwards alternate (1F1B) follows from two rules, and that a late
message keeps nothing else back follows from the loop.

    python examples/loop_in_200_lines.py                 two ranks as threads of this process
    mpirun -n 2 python examples/loop_in_200_lines.py     two ranks as processes under MPI

The loop of axrt is axrt/runtime/loop.py, and its rules are in scheduler/rules/.
"""

import heapq
import os
import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

RANKS, STEPS, MICROBATCHES, SAMPLES, WIDTH = 2, 5, 8, 4, 32
BACKWARD, FORWARD = 0, 1  # how urgent a task is: the least comes first


class Message(NamedTuple):
    """What one rank tells another: an activation, or a gradient."""

    makes_ready: int
    microbatch: int
    payload: Tensor


class Queues:
    """A transport between threads: a queue for each rank."""

    def __init__(self, queues: "list[queue.Queue[Message]]", rank: int) -> None:
        self._queues, self.rank = queues, rank

    def send(self, rank: int, message: Message) -> None:
        self._queues[rank].put(message)

    def receive(self) -> Message:
        return self._queues[self.rank].get()

    def has_arrived(self) -> bool:
        return not self._queues[self.rank].empty()


class Mpi:
    """A transport between processes."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm, self._sent = MPI.COMM_WORLD, list[Any]()
        self.rank = self._comm.rank

    def send(self, rank: int, message: Message) -> None:
        # Never wait here: two ranks that wait for each other's sends would wait for ever.
        self._sent = [request for request in self._sent if not request.test()[0]]
        self._sent.append(self._comm.isend(message, rank))

    def receive(self) -> Message:
        return self._comm.recv()  # type: ignore[no-any-return]

    def has_arrived(self) -> bool:
        return bool(self._comm.iprobe())


class Stage:
    """Some layers of the model, and the graphs of the microbatches that are in flight."""

    def __init__(self, layers: nn.Sequential, is_last: bool) -> None:
        self._layers, self._is_last = layers, is_last
        self.optimizer = torch.optim.SGD(layers.parameters(), lr=2.0)
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}
        self.losses: dict[int, float] = {}

    def forward(self, number: int, x: Tensor, target: Tensor) -> Tensor:
        # A leaf of its own: the gradient of the input ends here, and goes to the rank before.
        x = x.detach().requires_grad_()
        out: Tensor = self._layers(x)
        if self._is_last:
            out = mse_loss(out, target) / MICROBATCHES
            self.losses[number] = out.item()
        self.graphs[number] = x, out
        return out.detach()

    def backward(self, number: int, gradient: Tensor | None) -> Tensor:
        x, out = self.graphs.pop(number)
        out.backward(gradient)
        assert x.grad is not None
        return x.grad


class Rank:
    """A rank and its loop."""

    def __init__(self, stage: Stage, transport: Queues | Mpi) -> None:
        self._stage, self._transport, self._rank = stage, transport, transport.rank
        self._ready: list[tuple[int, int]] = []  # a heap of (urgency, microbatch)
        self._payloads: dict[tuple[int, int], Tensor | None] = {}
        self._targets: list[Tensor] = []
        self._backwards = 0

    def train(self) -> list[float]:
        """Train some steps; on the last rank, the mean loss of each."""
        means = []
        for step in range(STEPS):
            self._run_step(step)
            # No barrier: this rank steps when its own backwards are done, whatever others do.
            self._stage.optimizer.step()
            self._stage.optimizer.zero_grad()
            losses = self._stage.losses
            means.append(sum(losses[number] for number in sorted(losses)))
        return means

    def _run_step(self, step: int) -> None:
        self._backwards = 0
        self._targets = [target for _, target in batches(step)]
        if self._rank == 0:  # the first rank reads: its forwards are ready at once
            for number, (x, _) in enumerate(batches(step)):
                self._make_ready(FORWARD, number, x)
        while self._backwards < MICROBATCHES:
            # It sleeps only where nothing can be done.
            while self._transport.has_arrived() or not self._may_start():
                self._make_ready(*self._transport.receive())
            self._run(*heapq.heappop(self._ready))

    def _may_start(self) -> bool:
        """The most urgent task may start. A backward always may; a forward only while few
        microbatches are in flight, else activations would pile up."""
        if not self._ready:
            return False
        urgency, _ = self._ready[0]
        return urgency == BACKWARD or len(self._stage.graphs) < RANKS - self._rank

    def _make_ready(self, urgency: int, number: int, payload: Tensor | None) -> None:
        self._payloads[urgency, number] = payload
        heapq.heappush(self._ready, (urgency, number))

    def _run(self, urgency: int, number: int) -> None:
        payload = self._payloads.pop((urgency, number))
        if urgency == BACKWARD:
            gradient = self._stage.backward(number, payload)
            self._backwards += 1
            if self._rank > 0:
                self._transport.send(self._rank - 1, Message(BACKWARD, number, gradient))
            return
        assert payload is not None
        out = self._stage.forward(number, payload, self._targets[number])
        if self._rank < RANKS - 1:
            self._transport.send(self._rank + 1, Message(FORWARD, number, out))
        else:
            self._make_ready(BACKWARD, number, None)


def model() -> nn.Sequential:
    """The whole model, with the same weights on every rank."""
    torch.manual_seed(0)
    body = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*body)


def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The microbatches of a step: inputs and targets."""
    random = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        x = torch.randn(SAMPLES, WIDTH, generator=random)
        yield x, x.roll(1, dims=1).tanh()


def rank_of(transport: Queues | Mpi) -> Rank:
    layers, rank = model(), transport.rank
    a_rank = len(layers) // RANKS
    return Rank(Stage(layers[rank * a_rank : (rank + 1) * a_rank], rank == RANKS - 1), transport)


def on_threads() -> list[float]:
    """The mean loss of each step, where ranks are threads."""
    queues: list[queue.Queue[Message]] = [queue.Queue() for _ in range(RANKS)]
    *others, last = [rank_of(Queues(queues, rank)) for rank in range(RANKS)]
    threads = [threading.Thread(target=rank.train) for rank in others]
    for thread in threads:
        thread.start()
    losses = last.train()
    for thread in threads:
        thread.join()
    return losses


if __name__ == "__main__":
    transport = Mpi() if {"PMI_RANK", "PMIX_RANK"} & set(os.environ) else None
    losses = rank_of(transport).train() if transport else on_threads()
    if transport is None or transport.rank == RANKS - 1:
        print("\n".join(map(repr, losses)))
