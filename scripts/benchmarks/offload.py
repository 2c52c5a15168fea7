"""What offload to a disk is for and what it costs; see scripts/bench_offload.

    capacity  the largest GPT that trains under a cap, with and without offload, found by search,
              beside what the formulas say
    parameters  how many times as many parameters train under the same cap where weights are on the
              disk, too; the losses of ten times as many beside those without cap
    billion   a GPT of a billion parameters that trains ten steps under a cap that its weights,
              gradients, masters and moments exceed, with the time a step beside what the disk
              allows; the losses of a smaller one beside those of the same run without cap
    overlap   a step beside its copies and its computing, at stated bandwidths; the rate of copies
              without bound beside plain reads and writes of a file; tokens a second

Each training is a trial of `capped.py`: `axrt train` in a process of its own.
"""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import capped
import click
import torch
from capped import GIVES_BACK, Copy, Found, Group, Trial
from xxhash import xxh3_64_intdigest

from axrt.device.device import CPU
from axrt.offload.arena import PAGE_BYTES, Stretch
from axrt.offload.memory import MemoryArena

GB, MIB, VOCAB = 1e9, 2**20, 256
NARROW = ("precision.weights=bfloat16", "precision.gradients=weights")


class Gpt(NamedTuple):
    """The sizes of a GPT, which trains on short sequences: memory is for parameters alone."""

    layers: int
    width: int
    heads: int = 4
    context: int = 4
    microbatches: int = 1
    bucket_mb: float = 25.0

    @property
    def parameters(self) -> int:
        block = 12 * self.width**2 + 2 * self.width
        return self.layers * block + 2 * VOCAB * self.width + self.width

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.context * self.microbatches

    @property
    def settings(self) -> list[str]:
        sizes = [f"model.{name}={getattr(self, name)}" for name in self._fields[:4]]
        schedule = [f"schedule.microbatches={self.microbatches}", "schedule.microbatch_size=1"]
        return [*sizes, *schedule, f"memory.bucket_mb={self.bucket_mb}"]

    @property
    def bucket_parameters(self) -> int:
        """The parameters of the largest bucket: cut at tensors, as `memory.bucket_mb` says."""
        most, largest, size = self.bucket_mb * MIB / 4, 0, 0
        width = self.width
        block = [width, width, 3 * width**2, width**2, 4 * width**2, 4 * width**2]
        for tensor in [VOCAB * width, *block * self.layers, width, VOCAB * width]:
            size = tensor if size + tensor > most else size + tensor
            largest = max(largest, size)
        return largest


@dataclass(frozen=True)
class Bench:
    """What all parts share.

    Args:
        disk: directory for scratch files.
        text: file to train on.
        group: cgroup for the trials; None: the limit on a process's data is the cap.
        quick: everything is small, to see that it runs.
    """

    disk: Path
    text: Path
    group: Group | None
    quick: bool

    def train(
        self,
        gpt: Gpt,
        steps: int,
        settings: Sequence[str] = (),
        offload: bool = True,
        cap_bytes: float = 0,
        beside_base: bool = True,
        stamps: bool = False,
        gives_back: bool = True,
    ) -> Found:
        """Train in a process of its own; without offload it gives freed memory back, too, unless
        that is not wanted."""
        scratch = ["memory.offload=stream", f"memory.scratch=disk:{self.disk}"] if offload else []
        common = [
            f"data.source={self.text}",
            f"run.steps={steps}",
            "optimizer.lr=2e-4",
            "optimizer.schedule=constant",
            "optimizer.warmup_steps=0",
        ]
        trial = Trial(
            [*common, *gpt.settings, *scratch, *settings], int(cap_bytes), beside_base, stamps
        )
        return capped.run(trial, self.group, {} if offload or not gives_back else GIVES_BACK)


def spread(values: Sequence[float], unit: str, digits: int = 2) -> str:
    low, middle, high = (
        f"{value:,.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} {unit} ({low} to {high})"


# One run to remember.


def billion(bench: Bench, layers: int, cap_gb: float) -> None:
    gpt = Gpt(layers, 2048, 16, context=16, microbatches=2, bucket_mb=65)
    small = Gpt(6, 512, 4, context=16, microbatches=2, bucket_mb=4.5)
    if bench.quick:
        gpt, small = Gpt(3, 256, bucket_mb=3.1), Gpt(2, 128, bucket_mb=1)
    _same_losses(bench, small)
    states = 16 * gpt.parameters
    cap = cap_gb * GB if not bench.quick else 0
    print(
        f"{gpt.parameters / 1e6:,.0f} M parameters, {layers} blocks of width {gpt.width}; weights, "
        f"gradients, masters and moments: {states / GB:.2f} GB"
    )
    raw = _raw_step_s(bench, 12 * gpt.bucket_parameters, 12 * gpt.parameters)
    steps = 10
    found = bench.train(gpt, steps, NARROW, cap_bytes=cap, beside_base=False, stamps=True)
    if not found.fits:
        print(f"does not fit {cap / GB:.2f} GB")
        return
    print(f"    cap of the whole process {cap / GB:.2f} GB: {states / (cap or states):.2f} times")
    print(f"    Python and torch alone {found.base_bytes / GB:.2f} GB of it")
    print(f"    losses {', '.join(f'{loss:.4f}' for loss in found.losses)}")
    print(f"    falling at each step: {all(b < a for a, b in pairwise(found.losses))}")
    print(f"    a step {spread(found.step_s, 's')}")
    print(
        f"    the disk's own time for {12 * gpt.parameters / GB:.1f} GB in each direction: "
        f"{raw.plain_s:.1f} s; with the checksum {raw.checked_s:.1f} s"
    )
    print(f"    from a step's first copy to its last: {spread(_copying_s(found), 's')}")


def _same_losses(bench: Bench, gpt: Gpt) -> None:
    """Print whether offload under a cap changes a bit of the losses of a model that fits
    without."""
    formula = 4 * gpt.parameters + 16 * 3 * gpt.bucket_parameters
    cap = 0 if bench.quick else formula + 40e6
    offloaded = bench.train(gpt, 10, NARROW, cap_bytes=cap)
    plain = bench.train(gpt, 10, NARROW, offload=False)
    equal = offloaded.losses == plain.losses if offloaded.fits else "it does not fit"
    print(
        f"{gpt.parameters / 1e6:,.1f} M parameters, ten steps, with offload under "
        f"{cap / GB:.3f} GB beside the base and without both: losses equal to the bit: {equal}"
    )


def _copying_s(found: Found) -> list[float]:
    """The time of each step from its first copy's start to its last one's end; the first step has
    less to copy."""
    return [
        max(end for *_, end in copies) - min(start for _, _, start, _ in copies)
        for copies in _copies_by_step(found)[1:]
    ]


def _copies_by_step(found: Found) -> list[list[Copy]]:
    return [[copy for copy in of if copy[0] != "step"] for of in _by_step(found)]


def _by_step(found: Found) -> list[list[Copy]]:
    steps = range(len(found.losses))
    return [[copy for copy in found.copies if copy[1] == step] for step in steps]


# The disk alone.


class Raw(NamedTuple):
    """Seconds that plain reads and writes of a step's bytes take, at once, on two threads."""

    plain_s: float
    checked_s: float


def _raw_step_s(bench: Bench, piece_bytes: int, whole_bytes: int) -> Raw:
    """What a file takes for so many bytes in each direction, in pieces as large as a bucket's
    state; 3 GB are measured at most."""
    piece = -(-piece_bytes // PAGE_BYTES) * PAGE_BYTES
    number = max(3, min(whole_bytes, int(3 * GB)) // piece)
    with _file(bench.disk, number * piece) as file:
        _both_s(file, number, piece, False)  # blocks that were never written are written slower
        took = [_both_s(file, number, piece, checked) for checked in (False, True)]
    return Raw(*(seconds * whole_bytes / (number * piece) for seconds in took))


@contextmanager
def _file(disk: Path, num_bytes: int) -> Iterator[int]:
    """A file without a name, past the page cache where that is possible."""
    flags = os.O_TMPFILE | os.O_RDWR
    try:
        file = os.open(disk, flags | os.O_DIRECT, 0o600)
    except OSError:
        file = os.open(disk, flags, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
        yield file
    finally:
        os.close(file)


def _both_s(file: int, number: int, piece: int, checked: bool) -> float:
    """Seconds for reading and writing so many pieces, each direction on a thread."""

    def moving(call: Callable[[int, list[Any], int], int], writes: bool) -> Callable[[], None]:
        memory = _memory(piece)

        def move() -> None:
            for place in range(number):
                if checked and writes:
                    xxh3_64_intdigest(memory)
                assert call(file, [memory], place * piece) == piece
                if checked and not writes:
                    xxh3_64_intdigest(memory)

        return move

    threads = [
        threading.Thread(target=moving(os.preadv, False)),
        threading.Thread(target=moving(os.pwritev, True)),
    ]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began_s


def _memory(num_bytes: int) -> memoryview:
    """Memory from a page on, with some bytes in it."""
    memory = MemoryArena(num_bytes, CPU).bytes_of(Stretch(0, num_bytes))
    memory.random_(generator=torch.Generator().manual_seed(0))
    return memory.numpy().data


# Capacity.


class Kind(NamedTuple):
    """A type of training, and device bytes for P parameters.

    Args:
        settings: overrides.
        offloaded: bytes a parameter that stay with offload, and that a slot has.
    """

    settings: Sequence[str]
    offloaded: tuple[int, int]


KINDS = {"float32": Kind((), (8, 8)), "bfloat16": Kind(NARROW, (4, 16))}
SLOTS = 3


def formula_bytes(gpt: Gpt, kind: Kind, offload: bool) -> int:
    """Device bytes by the formulas of docs/memory.md, with AdamW."""
    if not offload:
        return 16 * gpt.parameters
    stays, slot = kind.offloaded
    return stays * gpt.parameters + slot * gpt.bucket_parameters * SLOTS


def capacity(bench: Bench, cap_gb: float, kinds: Sequence[str]) -> None:
    """Print the most parameters that train under a cap."""
    cap = (0.1 if bench.quick else cap_gb) * GB
    print(f"capacity under {cap / GB:.2f} GB beside Python and torch, {_what_caps(bench)}")
    for name in kinds:
        most = {offload: _most(bench, KINDS[name], offload, cap) for offload in (False, True)}
        for offload, (gpt, base_bytes) in most.items():
            predicted = _by_formula(KINDS[name], offload, cap)
            print(
                f"    {name}, {'offload to disk' if offload else 'no offload'}: "
                f"{gpt.parameters / 1e6:.1f} M parameters, {gpt.layers} blocks; by the formula "
                f"{predicted.parameters / 1e6:.1f} M "
                f"({gpt.parameters / predicted.parameters - 1:+.1%}); base "
                f"{base_bytes / GB:.3f} GB"
            )
        times = most[True][0].parameters / most[False][0].parameters
        print(f"    {name}: {times:.2f} times the parameters")


def _gpt_of(layers: int) -> Gpt:
    """One of the GPTs that are searched. Smaller blocks would have more tensors a byte, whose own
    objects no formula counts; larger buckets more moments at a time that the optimizer makes in its
    first step."""
    return Gpt(layers, 384, bucket_mb=3.4)


def _by_formula(kind: Kind, offload: bool, cap_bytes: float) -> Gpt:
    """The largest GPT that fits by the formula."""
    fits = (n for n in count(1) if formula_bytes(_gpt_of(n + 1), kind, offload) > cap_bytes)
    return _gpt_of(next(fits))


def _most(bench: Bench, kind: Kind, offload: bool, cap_bytes: float) -> tuple[Gpt, int]:
    """The largest GPT that trains three steps under a cap, and the base of its process; found by
    halving the distance between one that does and one that does not."""
    predicted = _by_formula(kind, offload, cap_bytes).layers
    base_bytes = 0

    def fits(layers: int) -> bool:
        nonlocal base_bytes
        found = bench.train(_gpt_of(layers), 3, kind.settings, offload, cap_bytes=cap_bytes)
        base_bytes = found.base_bytes or base_bytes
        return found.fits

    low, high = max(1, predicted * 9 // 10), predicted + max(1, predicted // 100)
    while low > 1 and not fits(low):
        low, high = low * 9 // 10, low
    while fits(high):
        low, high = high, high + max(1, high // 50)
    while high - low > max(1, predicted // 200):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return _gpt_of(low), base_bytes


# Parameters.


def parameters(bench: Bench, cap_gb: float) -> None:
    """Print how many times the parameters that train under a cap on the device train there with all
    of them on the disk, a block at a time on the device."""
    cap, kind = (0.1 if bench.quick else cap_gb / 4) * GB, KINDS["bfloat16"]
    plain, base_bytes = _most(bench, kind, False, cap)
    print(
        f"parameters under {cap / GB:.2f} GB beside Python and torch ({base_bytes / GB:.3f} GB), "
        f"{_what_caps(bench)}, bfloat16\n"
        f"    all on the device: {plain.parameters / 1e6:.1f} M, {plain.layers} blocks"
    )
    for times in (10,) if bench.quick else (10, 20, 40):
        least = times * plain.parameters
        gpt = next(one for one in map(_gpt_of, count(1)) if one.parameters >= least)
        settings = [*kind.settings, *_away(gpt)]
        found = bench.train(gpt, 3, settings, cap_bytes=cap)
        if not found.fits:
            print(f"    {times} times the blocks: does not fit")
            return
        num_bytes = 16 * gpt.parameters  # state, and weights twice; a little less is written
        raw = _raw_step_s(bench, 12 * gpt.bucket_parameters, num_bytes)
        print(
            f"    {gpt.layers} blocks on the disk: {gpt.parameters / 1e6:.1f} M parameters, "
            f"{gpt.parameters / plain.parameters:.1f} times; a step {spread(found.step_s, 's')}; "
            f"the disk's own time for {num_bytes / GB:.1f} GB in each direction, with a checksum: "
            f"{raw.checked_s:.1f} s"
        )
        if times == 10:
            free = bench.train(gpt, 3, kind.settings, offload=False)
            same = found.losses == free.losses
            print(f"    losses equal to the bit those without offload and cap: {same}")


def _away(gpt: Gpt) -> list[str]:
    return [
        "memory.offload_parameters=true",
        "schedule.policy=breadth-first",
        f"schedule.chunks={gpt.layers}",
    ]


def _what_caps(bench: Bench) -> str:
    return "enforced by a memory cgroup" if bench.group else "enforced by RLIMIT_DATA"


# Overlap.


def overlap(bench: Bench, rounds: int) -> None:
    """Print how well copies hide behind computing, how fast they are, and what they cost."""
    _bounded(bench, rounds)
    _unbounded(bench, rounds)
    _tokens(bench, rounds)


def _bounded(bench: Bench, rounds: int) -> None:
    """Print an optimizer step, from its first copy's start to its last one's end, beside the larger
    of its copies' time and its computing's, at stated bandwidths."""
    steps = 4 if bench.quick else 6
    gpt = Gpt(8, 512, context=16, bucket_mb=4.5)
    state_bytes = 8 * gpt.parameters
    print(
        f"{gpt.parameters / 1e6:.1f} M parameters; {state_bytes / GB:.3f} GB in each direction a "
        "step"
    )
    computing: list[float] = []
    took: dict[float, list[float]] = {rate: [] for rate in (0.1, 0.2, 0.4, 0.8)}
    for _ in range(rounds):
        computing += map(_taken_s, _by_step(bench.train(gpt, steps, (), False, stamps=True))[1:])
        for rate, values in took.items():
            bound = [f"memory.scratch_gb_s={rate}"]
            values += _copying_s(bench.train(gpt, steps, bound, stamps=True))
    compute_s = statistics.median(computing)
    print(f"    computing alone {spread(computing, 's')}")
    for rate, values in took.items():
        copy_s = state_bytes / GB / rate
        shares = [value / max(copy_s, compute_s) for value in values]
        print(
            f"    {rate} GB/s: copies {copy_s:.2f} s, a step {spread(values, 's')}, "
            f"{spread(shares, 'of the larger')}"
        )


def _unbounded(bench: Bench, rounds: int) -> None:
    """Print the rate of copies beside that of plain transfers of the same sizes, in both directions
    together.

    SGD with momentum does little between copies, so that they are what a step waits for.
    """
    gpt = Gpt(2, 256, bucket_mb=3.1) if bench.quick else Gpt(8, 1024, bucket_mb=18)
    sgd = [*NARROW, "optimizer.name=sgd"]
    moved = 16 * gpt.parameters
    rates: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in ("disk, with a checksum", "memory")
    }
    for _ in range(rounds):
        for name, (ours, raws) in rates.items():
            in_memory = name == "memory"
            where = ["memory.scratch=host"] if in_memory else []
            found = bench.train(gpt, 5, [*sgd, *where], stamps=True)
            if in_memory:
                ours += [moved / _taken_s(copies) / GB for copies in _copies_by_step(found)[1:]]
                raws.append(_memory_gb_s(8 * gpt.bucket_parameters))
            else:
                ours += [moved / took / GB for took in _copying_s(found)]
                raw = _raw_step_s(bench, 8 * gpt.bucket_parameters, moved // 2)
                raws.append(moved / raw.checked_s / GB)
    print(f"unbound, {gpt.parameters / 1e6:.1f} M parameters, {moved / GB:.2f} GB a step")
    for name, (ours, raws) in rates.items():
        share = statistics.median(ours) / statistics.median(raws)
        print(
            f"    {name}: {spread(ours, 'GB/s')}; plain {spread(raws, 'GB/s')}; share {share:.2f}"
        )


def _taken_s(copies: Sequence[Copy]) -> float:
    """What copies, or steps, have taken, one after the other."""
    return sum(end - start for _, _, start, end in copies)


def _memory_gb_s(piece_bytes: int) -> float:
    """The rate of plain copies between pieces of memory, each one used once."""
    pairs = [
        (MemoryArena(piece_bytes, CPU), MemoryArena(piece_bytes, CPU))
        for _ in range(max(2, int(0.5 * GB) // piece_bytes))
    ]
    whole = Stretch(0, piece_bytes)
    began_s = time.perf_counter()
    for source, target in pairs:
        target.bytes_of(whole).copy_(source.bytes_of(whole))
    return len(pairs) * piece_bytes / (time.perf_counter() - began_s) / GB


def _tokens(bench: Bench, rounds: int) -> None:
    """Print tokens a second of one model with and without offload."""
    gpt = Gpt(2, 256, context=64, microbatches=4, bucket_mb=3.1)
    if not bench.quick:
        gpt = Gpt(8, 512, context=256, microbatches=8, bucket_mb=4.5)
    ways = {
        "no offload": (False, ()),
        "offload to memory": (True, ("memory.scratch=host",)),
        "offload to disk": (True, ()),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (offload, settings) in ways.items():
            found = bench.train(gpt, 5, settings, offload, gives_back=False)
            rates[name] += [gpt.tokens / took for took in found.step_s[1:]]
    print(f"tokens a second, {gpt.parameters / 1e6:.1f} M parameters, {gpt.tokens} tokens a step")
    for name, values in rates.items():
        print(f"    {name}: {spread(values, 'tokens/s', 0)}")


PARTS = ("capacity", "parameters", "billion", "overlap")


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option(
    "--disk",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(tempfile.gettempdir()),
    help="directory for scratch files",
)
@click.option(
    "--cap-gb",
    default=1.0,
    help="cap of capacity, beside Python and torch; parameters has a quarter",
)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="of capacity")
@click.option("--billion-layers", default=20, help="blocks of width 2048")
@click.option("--billion-gb", default=5.8, help="cap of that run, Python and torch included")
@click.option("--rounds", default=3, help="interleaved repetitions of overlap")
@click.option("--cgroup/--no-cgroup", default=True, help="the cap is a memory cgroup, if possible")
@click.option("--quick", is_flag=True, help="all of it with tiny models, to see that it runs")
def main(
    parts: Sequence[str],
    disk: Path,
    cap_gb: float,
    kinds: Sequence[str],
    billion_layers: int,
    billion_gb: float,
    rounds: int,
    cgroup: bool,
    quick: bool,
) -> None:
    """Measure what offload is for and what it costs; PARTS are capacity, parameters, billion and
    overlap."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Group.made() if cgroup else nullcontext() as group,
    ):
        text = Path(folder, "text")
        text.write_text("ab" * 4096)
        bench = Bench(disk, text, group, quick)
        for part in parts or PARTS:
            if part == "capacity":
                capacity(bench, cap_gb, kinds or list(KINDS))
            elif part == "parameters":
                parameters(bench, cap_gb)
            elif part == "billion":
                billion(bench, billion_layers, billion_gb)
            else:
                overlap(bench, 1 if quick else rounds)


if __name__ == "__main__":
    main()
