"""Jobs that go wrong, each in its own way: mpirun -n N python -m tests.mpi.victims NAME, or several
in one job, see `trials.py`."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt import deepspeed
from axrt.transport.control import Topic
from axrt.world import mpi_world
from axrt.world.launchers import told
from tests.engine.reference import configured, random_batches

BATCHES = random_batches((4, 8), classes=3, microbatches=4)
MEET = "AXRT_TEST_MEET"  # variable: a directory in which the ranks of a job meet
LONG_S = 5.0  # longer than any patience here
PATIENCE_S = 2.0  # twenty times as long as a rank that is well goes without a sign


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
    return axrt.PipelineModule(
        [axrt.LayerSpec(nn.Linear, 8, 8), *extra, axrt.LayerSpec(nn.Linear, 8, 3)],
        functional.cross_entropy,
    )


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


def the_loss_has_no_gradient() -> None:
    layers = axrt.PipelineModule(
        [axrt.LayerSpec(nn.Linear, 8, 8), lambda value: value.detach()], functional.cross_entropy
    )
    with axrt.initialize(layers, config=configured(4)) as e:
        train(e, 3)


def nothing_is_evaluated() -> None:
    with engine() as e:
        e.eval_batch(iter([]))


def two_threads_call() -> None:
    with engine() as e:
        inside = threading.Event()

        def batches() -> Iterator[Any]:
            inside.set()
            threading.Event().wait()  # as a reader that hangs
            yield None

        threading.Thread(
            target=lambda: e.train_batch(batches()), name="the trainer", daemon=True
        ).start()
        assert e.rank > 0 or inside.wait(60)
        e.eval_batch(None)


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
    """It waits for the other rank to come along, which does not."""
    mpi_world._ALL_AGREE_S = 0.5
    engine(run={"steps": 0} if my_rank() == 1 else {})


def configurations_differ() -> None:
    engine(schedule={"microbatches": 4 + my_rank()})


def models_differ() -> None:
    engine(axrt.LayerSpec(FailsAt, 6) if my_rank() == 1 else axrt.LayerSpec(nn.Linear, 8, 8))


def seeds_of_torch_differ() -> None:
    """A script that seeds each rank on its own, and gives DeepSpeed no seed for the layers."""
    torch.manual_seed(my_rank())
    deepspeed.initialize(
        model=deepspeed.PipelineModule([nn.Linear(8, 8), nn.Linear(8, 3)], num_stages=2),
        config={
            "train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "optimizer": {"type": "Adam"},
        },
    )


def two_models_apart() -> None:
    engine(run={"transport": "local"})


def a_rank_evaluates() -> None:
    with engine() as e:
        train(e, 1)
        if e.rank == 0:
            e.eval_batch(iter(BATCHES(0)))
        train(e, 1)


def a_reader_is_slow_after_an_evaluation() -> None:
    """Longer than a rank may be in another call before it is missed. The other rank has heard of
    the evaluation before its own step is done."""

    def slowly(number: int) -> Iterator[Any]:
        time.sleep(3)
        yield from BATCHES(number)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_pre_hook(lambda *_: time.sleep(my_rank()))
        return made

    with axrt.initialize(model(), optimizer, config=configured(4)) as e:
        train(e, 1)
        e.eval_batch(iter(BATCHES(0)))
        e.train_batch(slowly(1) if e.rank == 0 else None)
        e.eval_batch(slowly(1) if e.rank == 0 else None)


def a_rank_that_is_asked_to_share_is_stopped() -> None:
    """Rank 1 has none left when rank 0 stops."""
    shares = {"schedule": {"policy": "1f1b", "microbatches": 8, "share": True}}
    act = (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if my_rank() == 0 else lambda: None
    layers = model(axrt.LayerSpec(DoesAt, 6, act))
    config = configured(8, **shares, parallel={"data": 2}, run={"patience_s": PATIENCE_S})
    batches = random_batches((4, 8), classes=3, microbatches=8)
    with axrt.initialize(layers, config=config) as e:
        for step in range(3):
            e.train_batch(iter(batches(step)))


def the_batches_end() -> None:
    with engine() as e:
        batches = iter(BATCHES(0) + BATCHES(1)[:2])
        for _ in range(3):
            e.train_batch(batches)


def the_batches_end_while_a_thread_calls_mpi() -> None:
    """The thread that looks after large messages is within MPI when everyone leaves."""
    from axrt.transport.mpi import MpiTransport  # which needs an MPI library

    takes = MpiTransport._take_envelopes

    def often(self: MpiTransport) -> None:
        until_s = time.monotonic() + 0.1
        takes(self)
        while threading.current_thread() is not threading.main_thread() and (
            time.monotonic() < until_s
        ):
            takes(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MpiTransport, "_take_envelopes", often)
        patch.setattr(MpiTransport, "_tell_progress", lambda self: self._progress.wanted(True))
        the_batches_end()


def _train_by_a_library(number: signal.Signals) -> None:
    """Rank 1 of two sends itself a signal where it would issue its first collective."""
    from axrt.workers.collectives import CollectiveWorker

    parallel = {"data": 2, "collectives": "library"}
    with pytest.MonkeyPatch.context() as patch:
        if my_rank() == 1:
            ends = lambda self, task: os.kill(os.getpid(), number)  # noqa: E731
            patch.setattr(CollectiveWorker, "_collect", ends)
        with engine(parallel=parallel, run={"patience_s": PATIENCE_S}) as e:
            for _ in range(3):
                e.train_batch(iter(BATCHES(e.rank)))


def a_rank_dies_when_it_is_its_turn() -> None:
    """The other one has issued its collective, or is about to."""
    _train_by_a_library(signal.SIGKILL)


def a_rank_stops_within_a_collective() -> None:
    """It is there, and will never come."""
    _train_by_a_library(signal.SIGSTOP)


def a_rank_dies_while_the_library_carries() -> None:
    """The other one has sent, or waits for what was to come."""
    from axrt.transport.lines import Lines

    receive = Lines.receive

    def dying(lines: Lines, rank: int, tensors: Any) -> Any:
        if tensors[0].nbytes > 1:  # not when lines are tried
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(lines, rank, tensors)

    if my_rank() == 1:
        Lines.receive = dying  # type: ignore
    batches = random_batches((4000, 8), classes=3, microbatches=4)
    with engine(parallel={"activations": "library"}, run={"patience_s": PATIENCE_S}) as e:
        for step in range(3):
            e.train_batch(iter(batches(step)))


def more_stages_than_layers() -> None:
    axrt.initialize(
        axrt.PipelineModule([axrt.LayerSpec(nn.Linear, 8, 3)], functional.cross_entropy),
        config=configured(4),
    )


def a_rank_dies_before_it_begins() -> None:
    if my_rank() == 1:
        os._exit(0)
    engine()


def a_rank_leaves_before_it_begins() -> None:
    if my_rank() == 1:
        os._exit(1)
    engine()


def a_rank_comes_too_late() -> None:
    if my_rank() == 1:
        time.sleep(60)
    engine(run={"patience_s": 1})


def too_many_stages() -> None:
    engine(parallel={"pipe": 3})


def one_rank_saves() -> None:
    with engine() as e:
        train(e, 1)
        if e.rank == 0:
            e.save_checkpoint(Path.cwd() / "a")
        train(e, 1)


def one_rank_broadcasts() -> None:
    with engine() as e:
        train(e, 1)
        if e.rank == 1:
            e.broadcast(None)
        train(e, 1)


def a_rank_forks() -> None:
    with engine() as e:
        train(e, 1)
        if e.rank == 1 and os.fork() == 0:
            os._exit(0)
        # no fork in our sense: nothing of this process runs in it
        subprocess.run(["true"], check=True)
        train(e, 1)
    print(f"rank {e.rank} is done")


def all_is_well() -> None:
    with engine() as e:
        train(e, 2)
    print(f"rank {e.rank} is done")


def nobody_closes() -> None:
    e = engine()
    train(e, 2)
    print(f"rank {e.rank} is done")


def large_messages_come() -> None:
    from . import large_messages  # which needs an MPI library

    large_messages.main()


class DoesAt(nn.Module):
    """Does something at its forward number `number`."""

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.left, self.act = number, act

    def forward(self, value: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.act()
        return value


def _on_rank_1(act: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Rank 1 of two does something at its sixth forward, in the second step."""
    does = axrt.LayerSpec(DoesAt, 6, act)
    with engine(
        does,
        parallel={"partition": [0, 1, 3]},
        schedule={"policy": "1f1b"},
        run={"patience_s": patience_s},
    ) as e:
        train(e, 3)
    print(f"rank {e.rank} is done")


def a_rank_is_stopped() -> None:
    _on_rank_1(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def a_rank_is_stopped_while_it_sends() -> None:
    """Rank 0, in its third forward, with large activations of the first two on their way."""
    does = axrt.LayerSpec(DoesAt, 3, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    whole = axrt.PipelineModule(
        [axrt.LayerSpec(nn.Linear, 8, 20_000), does, axrt.LayerSpec(nn.Linear, 20_000, 3)],
        functional.cross_entropy,
    )
    config = configured(
        4,
        parallel={"partition": [0, 2, 3]},
        schedule={"policy": "gpipe"},
        run={"patience_s": PATIENCE_S},
    )
    batches = random_batches((200, 8), classes=3, microbatches=4)
    with axrt.initialize(whole, config=config) as e:
        for step in range(3):
            e.train_batch(iter(batches(step)))


def a_rank_holds_the_interpreter() -> None:
    _on_rank_1(lambda: ctypes.PyDLL(None).sleep(100))


def a_rank_waits_for_itself() -> None:
    lock = threading.Lock()
    _on_rank_1(lambda: lock.acquire() and lock.acquire())


def two_ranks_wait_for_each_other() -> None:
    with engine(run={"patience_s": PATIENCE_S}) as e:
        train(e, 1)
        owed = e._exchange.claim(Topic.VALUES, 999, [1 - e.rank])
        e._exchange.wait(owed, "what nobody sends")


def one_replica_saves() -> None:
    with engine(parallel={"data": 2}) as e:
        train(e, 1)
        if e.is_main:
            e.save_checkpoint(Path.cwd() / "a", wait=False)
        train(e, 1)


def one_rank_finishes_a_save() -> None:
    folder = Path.cwd()
    with engine(parallel={"data": 2}) as e:
        for number in range(3):
            train(e, 1)
            e.save_checkpoint(folder / f"{number}", wait=False)
            if e.is_main:
                e.finish_saving()


def ranks_save_to_other_places() -> None:
    with engine(parallel={"data": 2}) as e:
        train(e, 1)
        e.save_checkpoint(Path.cwd() / f"{e.rank}")


def a_rank_is_stopped_in_a_save() -> None:
    with engine(run={"patience_s": PATIENCE_S}) as e:
        train(e, 1)
        if e.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        e.save_checkpoint(Path.cwd() / "a")


def a_rank_is_stopped_at_the_end() -> None:
    with engine(run={"patience_s": PATIENCE_S}) as e:
        train(e, 1)
        if e.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


def _compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)


def a_rank_computes_for_long() -> None:
    _on_rank_1(lambda: _compute(LONG_S))


def a_rank_waits_for_a_child_that_computes() -> None:
    code = f"import time; until = time.monotonic() + {LONG_S}\nwhile time.monotonic() < until: pass"
    _on_rank_1(lambda: subprocess.run([sys.executable, "-c", code], check=True))


def a_rank_is_stopped_for_a_while() -> None:
    def stop() -> None:
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    _on_rank_1(stop, patience_s=20)


def a_rank_leaves_by_the_back_door() -> None:
    _on_rank_1(lambda: os._exit(0))


def a_thread_leaves_by_the_back_door() -> None:
    with engine() as e:
        train(e, 1)
        if e.rank == int(os.environ.get("WHO", "1")):
            threading.Thread(target=lambda: os._exit(0)).start()
        train(e, 100_000)


def a_rank_leaves_by_the_back_door_when_all_is_done() -> None:
    """In a job of its own: how its launcher takes that is the question."""
    from mpi4py import MPI

    with engine() as e:
        train(e, 1)
    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()
    os._exit(0)


def meet() -> None:
    """Wait until all ranks have come as far: the patience is shorter than what a busy machine may
    take to start a second one."""
    said, folder = told(), os.environ.get(MEET)
    if said is None or said.size is None or folder is None:
        return
    (Path(folder) / str(said.rank)).touch()
    while len(os.listdir(folder)) < said.size:
        time.sleep(0.01)


if __name__ == "__main__":
    meet()
    globals()[sys.argv[1]]()
