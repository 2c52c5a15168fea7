"""Jobs that go wrong, each in its own way: mpirun -n N python -m tests.mpi.victims NAME."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt import launch
from axrt.launch import told
from tests.engine.reference import configured, random_batches

BATCHES = random_batches((4, 8), classes=3, microbatches=4)


class FailsAt(nn.Module):
    """Raises at its forward number `number`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def forward(self, value: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the layer has had enough")
        return value


def model(*extra: Any) -> axrt.PipelineModule:
    return axrt.PipelineModule([axrt.LayerSpec(nn.Linear, 8, 8), *extra, axrt.LayerSpec(nn.Linear, 8, 3)], functional.cross_entropy)


def engine(*extra: Any, **sections: Any) -> axrt.Engine:
    return axrt.initialize(model(*extra), config=configured(4, **sections))


def train(engine: axrt.Engine, steps: int) -> None:
    for step in range(steps):
        engine.train_batch(iter(BATCHES(step)))


def a_layer_raises() -> None:
    with engine(axrt.LayerSpec(FailsAt, 6), parallel={"partition": [0, 1, 3]}) as e:
        train(e, 3)


def a_layer_raises_and_the_user_catches_it() -> None:
    with engine(axrt.LayerSpec(FailsAt, 6), parallel={"partition": [0, 1, 3]}) as e:
        try:
            train(e, 3)
        except RuntimeError:
            time.sleep(60)


def a_thread_raises() -> None:
    with engine() as e:
        train(e, 1)
        if e.rank == 1:
            threading.Thread(target=lambda: 1 // 0).start()
        train(e, 100_000)


def the_users_code_raises() -> None:
    e = engine()
    train(e, 1)
    if e.rank == 1:
        raise LookupError("the user's own mistake")
    train(e, 100_000)


def the_loss_is_not_a_number() -> None:
    with engine() as e:
        e.train_batch(iter(BATCHES(0)))
        items = BATCHES(1)
        items[2] = (torch.full((4, 8), float("nan")), items[2][1])
        e.train_batch(iter(items))


def a_rank_leaves_early() -> None:
    with engine() as e:
        train(e, 1 if e.rank == 1 else 2)


def a_rank_exits() -> None:
    e = engine()
    train(e, 1)
    if e.rank == 1:
        sys.exit(3)
    train(e, 2)


def a_rank_exits_inside() -> None:
    with engine() as e:
        train(e, 1)
        if e.rank == 1:
            sys.exit(3)
        train(e, 100_000)


def the_configuration_is_wrong() -> None:
    engine(schedule={"polcy": "1f1b"})


def my_rank() -> int:
    said = told()
    return said.rank if said else 0


def one_rank_disagrees() -> None:
    engine(run={"steps": 0} if my_rank() == 1 else {})


def configurations_differ() -> None:
    engine(schedule={"microbatches": 4 + my_rank()})


def models_differ() -> None:
    engine(axrt.LayerSpec(FailsAt, 6) if my_rank() == 1 else axrt.LayerSpec(nn.Linear, 8, 8))


def two_models_apart() -> None:
    engine(run={"transport": "local"})


def a_rank_evaluates() -> None:
    with engine() as e:
        train(e, 1)
        if e.rank == 0:
            e.eval_batch(iter(BATCHES(0)))
        train(e, 1)


def the_batches_end() -> None:
    with engine() as e:
        batches = iter(BATCHES(0) + BATCHES(1)[:2])
        for _ in range(3):
            e.train_batch(batches)


def more_stages_than_layers() -> None:
    axrt.initialize(axrt.PipelineModule([axrt.LayerSpec(nn.Linear, 8, 3)], functional.cross_entropy), config=configured(4))


def a_rank_dies_before_it_begins() -> None:
    launch._START_S = 3.0
    if my_rank() == 1:
        time.sleep(1)
        os._exit(0)
    engine()


def too_many_stages() -> None:
    engine(parallel={"pipe": 3})


def one_rank_saves() -> None:
    with engine() as e:
        train(e, 1)
        if e.rank == 0:
            e.save_checkpoint(Path(tempfile.mkdtemp()) / "a")
        train(e, 1)


def one_rank_broadcasts() -> None:
    with engine() as e:
        train(e, 1)
        if e.rank == 1:
            e.broadcast(None)
        train(e, 1)


def a_rank_forks() -> None:
    with engine() as e:
        if e.rank == 1 and os.fork() == 0:
            os._exit(0)
        subprocess.run(["true"], check=True)  # no fork in our sense: nothing of this process runs in it
        train(e, 1)


def all_is_well() -> None:
    with engine() as e:
        train(e, 2)
    print(f"rank {e.rank} is done")


def nobody_closes() -> None:
    e = engine()
    train(e, 2)
    print(f"rank {e.rank} is done")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
