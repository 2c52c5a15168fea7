"""Counts the calls that a task costs: of Python functions, and of functions in C that these call.

Numbers of calls are exact where microseconds are noise. As `cProfile` they count what Python's own
hook tells of; layers and loss are empty, so nearly all of it is the runtime's.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import axrt
from axrt.observe.idle import Idle
from axrt.observe.observer import Observer, Wait
from axrt.scheduler.task import AnyKind, Kind, Task
from axrt.transport import Transport

KINDS: dict[str, tuple[AnyKind, ...]] = {
    "gpipe": (Kind.FORWARD, Kind.BACKWARD),
    "1f1b": (Kind.FORWARD, Kind.BACKWARD),
    "zb-v": (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT),
}
MICROBATCHES = 32
SHAPE = (64, 64)  # 16 KiB, which fit an envelope


class Same(nn.Module):
    """A layer that does nothing, with a weight that it does not use: a model must have one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        return value


class Slices(nn.Module):
    """A piece of a team's layer that hands on slices, and does nothing else."""

    def forward(self, value: Tensor) -> Any:
        return axrt.Gathered(value[: SHAPE[0] // 2])


class Gathering(Slices):
    """The first piece, which is given a member's tokens; it has a matrix to cut that it does not
    use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)

    def forward(self, value: Tensor) -> Any:
        return axrt.Gathered(value)


class Ends(nn.Module):
    """The last piece, which hands on a member's tokens."""

    def forward(self, value: Tensor) -> Tensor:
        return value[: SHAPE[0] // 2]


class InSlices(axrt.InPieces):
    """A layer of a team, with several joints in a forward and in a backward."""

    def __init__(self) -> None:
        super().__init__([Gathering(), *[Slices() for _ in range(6)], Ends()])


def one_element(value: Tensor, target: Tensor) -> Tensor:
    """An empty loss."""
    return value[0, 0]


class Calls(Observer):
    """Counts calls from the start of each task to the start of the next one. Where the rank waits
    in between, how many they are depends on the machine's load, so they are left out.

    Attributes:
        between: counts, by the kind of the task that begins them.
    """

    def __init__(self) -> None:
        self.total = 0
        self.between: dict[AnyKind, list[int]] = {}
        self._last: tuple[AnyKind, int] | None = None
        self._counts = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which calls of this thread count."""
        self.total, self._last, self._counts = 0, None, True
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._counts = False

    def started(self, task: Task) -> None:
        if self._last is not None and self._counts:
            kind, then = self._last
            self.between.setdefault(kind, []).append(self.total - then)
        self._last = task.kind, self.total

    def waiting(self, wait: Wait) -> None:
        self._last = None

    def of_a_task(self, *kinds: AnyKind) -> float:
        """The mean over these kinds of the median count: tasks of the end of a step are no middle
        ones."""
        return sum(median(self.between[kind]) for kind in kinds) / len(kinds)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.total += 1


def counted(
    policy: str, ranks: int, transport: Transport | None = None, is_team: bool = False
) -> Calls:
    """Count two steps of empty layers on this rank, watched as `axrt train` watches.

    Args:
        is_team: the ranks hold each stage together; False: each holds stages of its own.
    """
    chunks = 2 if policy == "zb-v" else 1
    layers = [axrt.LayerSpec(InSlices if is_team else Same)] * (chunks * (1 if is_team else ranks))
    plan = {"*.up": "column", "loss": "token"} if is_team else None
    settings = {
        "schedule": {"microbatches": MICROBATCHES, "policy": policy},
        "parallel": {"tensor": ranks if is_team else 1},
        "run": {"device": "cpu"},
    }
    calls = Calls()
    engine = axrt.initialize(
        axrt.PipelineModule(layers, one_element, tensor=plan),
        config=settings,
        transport=transport,
        observers=[Idle(), calls],
    )
    with engine:
        batches = _wanting(SHAPE if is_team else (1,))
        engine.train_batch(batches)  # the first step makes what later ones find
        with calls.counting():
            engine.train_batch(batches)
            engine.train_batch(batches)
    return calls


def _wanting(of_targets: tuple[int, ...] = (1,)) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs that want a gradient, as activations do."""
    value, target = torch.zeros(SHAPE, requires_grad=True), torch.zeros(of_targets)
    while True:
        yield value, target


def main() -> None:
    """Print the counts: `python -m tests.engine.calls`, or under mpirun with the number of ranks
    behind it; and with `team` behind that those of pieces, where the ranks hold stages together."""
    ranks, is_team = int((sys.argv[1:] or ["1"])[0]), sys.argv[2:] == ["team"]
    for policy, kinds in KINDS.items():
        of = [kind for kind in kinds if not (is_team and kind is Kind.WEIGHT)]  # has none to make
        calls = counted(policy, ranks, is_team=is_team)
        print(f"{policy:6} {calls.of_a_task(*of):6.1f}", flush=True)


if __name__ == "__main__":
    main()
