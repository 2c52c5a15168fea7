"""What saves cost, in axrt and with torch's distributed checkpoints (`async_save`), in one job; see
scripts/bench_checkpoint.

A window is some steps of training; in some windows the first step comes after the call of a save.
Windows of all ways take turns, in an order drawn anew for each round, and a figure is the median
over the rounds of the ratio to the window without a save of the same runtime and round.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from memory.model import LARGE, QUICK, Sizes, adamw, batches_of, config_of, layers_of
from mpi4py import MPI
from peers.arena import join
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard

import axrt
from axrt.model import cross_entropy
from axrt.models.gpt import gpt
from axrt.transport.mpi import MpiTransport

_SLICE_BYTES = 4 << 20
Finish = Callable[[], None]  # waits for the end of a save
Save = Callable[[Path], Finish]


class Runtime(NamedTuple):
    """A runtime that trains the model.

    Args:
        name: its name.
        step: trains a step.
        ways: how it saves, by name.
        load: loads a checkpoint of its own.
    """

    name: str
    step: Callable[[], None]
    ways: dict[str, Save]
    load: Callable[[Path], None]


def nothing() -> None:
    pass


def ours(sizes: Sizes) -> Runtime:
    config = config_of(sizes, ["schedule.policy=1f1b"])
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    engine = axrt.initialize(gpt(config), config=config, transport=transport)
    batches = batches_of(sizes, 0, 1)

    def step() -> None:
        engine.train_batch(batches if engine.reads else None)

    def waited(path: Path) -> Finish:
        engine.save_checkpoint(path)
        return nothing

    def beside(path: Path) -> Finish:
        assert engine.save_checkpoint(path, wait=False), "a save takes longer than a window"
        return engine.finish_saving

    def load(path: Path) -> None:
        engine.load_checkpoint(path)

    return Runtime("axrt", step, {"waited for": waited, "beside": beside}, load)


def torchs(sizes: Sizes) -> Runtime:
    module = layers_of(sizes)
    ranks = dist.get_world_size()
    # of its own: a save's collectives on that of the training come in another order on each rank
    group = dist.new_group(backend="gloo")
    if ranks > 1:
        for layer in module:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, reshard_after_forward=False)
        fully_shard(module, reshard_after_forward=False)
    optimizer = adamw(module.parameters())
    batches, number = batches_of(sizes, dist.get_rank(), ranks), sizes.microbatches // ranks

    def step() -> None:
        for _ in range(number):
            inputs, targets = next(batches)
            loss = cross_entropy(module(inputs), targets) / number
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(module, optimizer)
        return {"weights": weights, "moments": moments}

    def waited(path: Path) -> Finish:
        save(state(), checkpoint_id=path)
        return nothing

    def beside(path: Path) -> Finish:
        future: Any = async_save(state(), checkpoint_id=path, process_group=group)
        return lambda: future.result()

    def load(path: Path) -> None:
        load_state(state(), checkpoint_id=path)  # into the tensors themselves

    return Runtime("torch", step, {"waited for": waited, "beside": beside}, load)


class Window(NamedTuple):
    """What a window took.

    Args:
        call_s: the call that saves.
        all_s: that and the steps.
        rest_s: what was left of the save afterwards.
    """

    call_s: float
    all_s: float
    rest_s: float


def window(runtime: Runtime, way: str, steps: int, path: Path) -> Window:
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    finish = runtime.ways[way](path) if way else nothing
    called = time.perf_counter()
    for _ in range(steps):
        runtime.step()
    MPI.COMM_WORLD.Barrier()
    trained = time.perf_counter()
    finish()
    MPI.COMM_WORLD.Barrier()
    ended = time.perf_counter()
    return Window(called - began, trained - began, ended - trained)


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def let_go_of(path: Path) -> None:
    """Have files on the disk alone."""
    for file in files_of(path) if MPI.COMM_WORLD.rank == 0 else ():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    MPI.COMM_WORLD.Barrier()


def read_plainly(path: Path) -> None:
    """Read all bytes once, over all ranks, and do nothing with them."""
    mine = files_of(path)[MPI.COMM_WORLD.rank :: MPI.COMM_WORLD.size]
    memory = bytearray(_SLICE_BYTES)

    def read(file: Path) -> None:
        buffer = bytearray(memory)
        with file.open("rb", buffering=0) as of:
            while of.readinto(buffer):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, mine))


def taken_s(act: Callable[[], None], path: Path) -> float:
    let_go_of(path)
    began = time.perf_counter()
    act()
    MPI.COMM_WORLD.Barrier()
    return time.perf_counter() - began


def told(values: Sequence[float], digits: int = 3) -> str:
    """The median with the extremes."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def say(line: str) -> None:
    if MPI.COMM_WORLD.rank == 0:
        print(line, flush=True)


def compare_saves(runtimes: Sequence[Runtime], rounds: int, steps: int, folder: Path) -> None:
    cases = [(of, way) for of in runtimes for way in ("", *of.ways)]
    taken: dict[tuple[str, str], list[Window]] = {(of.name, way): [] for of, way in cases}
    random = Random(0)
    for number in range(rounds):
        for of, way in random.sample(cases, len(cases)):
            path = folder / f"{of.name}-{way.replace(' ', '-')}-{number}"
            taken[of.name, way].append(window(of, way, steps, path))
            if MPI.COMM_WORLD.rank == 0 and way and number < rounds - 1:
                shutil.rmtree(path)
    say(
        f"| {steps} steps | s, with the call | against no save | the call, s | left at the end, s |"
    )
    say("|---|---|---|---|---|")
    for (name, way), windows in taken.items():
        plain = taken[name, ""]
        ratios = [mine.all_s / its.all_s for mine, its in zip(windows, plain, strict=True)]
        say(
            f"| {name}, {way or 'no save'} | {told([one.all_s for one in windows], 2)} | "
            f"{told(ratios)} | {told([one.call_s for one in windows], 2)} | "
            f"{told([one.rest_s for one in windows], 2)} |"
        )


def compare_loads(runtimes: Sequence[Runtime], rounds: int, last: int, folder: Path) -> None:
    say("\n| load from the disk | GB | s | of the rate of plain reads | from the page cache, s |")
    say("|---|---|---|---|---|")
    for of in runtimes:
        path = folder / f"{of.name}-waited-for-{last}"
        num_bytes = sum(file.stat().st_size for file in files_of(path))
        loads, ratios, warm = [], [], []
        for _ in range(rounds):
            loads.append(taken_s(lambda of=of, path=path: of.load(path), path))  # type: ignore[misc]
            plain = taken_s(lambda path=path: read_plainly(path), path)  # type: ignore[misc]
            ratios.append(plain / loads[-1])
            began = time.perf_counter()
            of.load(path)
            warm.append(time.perf_counter() - began)
        say(
            f"| {of.name} | {num_bytes / 1e9:.2f} | {told(loads, 2)} | {told(ratios, 2)} | "
            f"{told(warm, 2)} |"
        )


@click.command()
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=10, show_default=True, help="of a window")
@click.option("--microbatches", default=8, show_default=True, help="of 64 tokens, a step")
@click.option("--disk", default="/tmp", show_default=True, help="directory to save to")
@click.option("--quick", is_flag=True, help="a tiny model, to see that it runs")
def main(rounds: int, steps: int, microbatches: int, disk: str, quick: bool) -> None:
    """Time windows with and without saves, and loads. `--ranks N` comes first and is one by
    default."""
    torch.set_num_threads(1)
    folder = Path(MPI.COMM_WORLD.bcast(tempfile.mkdtemp(dir=disk)))
    join(str(folder / "store"))
    sizes = QUICK if quick else LARGE._replace(microbatches=microbatches)
    runtimes = [ours(sizes), torchs(sizes)]
    for of in runtimes:
        of.step()
        of.step()
    try:
        compare_saves(runtimes, rounds, steps, folder)
        compare_loads(runtimes, rounds, rounds - 1, folder)
    finally:
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == 0:
            shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
