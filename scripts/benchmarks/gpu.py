"""What a GPU does; see scripts/bench_gpu.

    tests      pytest -m gpu, two ranks that share the GPU among them
    product    the rate of an 8192 x 8192 x 8192 product in bfloat16, which is the limit
    training   a GPT of about 1.4 billion parameters in bfloat16: on one rank, by autocast and with
               narrow weights, plain and compiled; and in two stages on two ranks that share the
               GPU, through pinned memory and, where the MPI library can, from device to device.
               Tokens a second, the model's floating-point operations as a share of that rate, and
               where the host has waited for the GPU within a step

A forward and backward of a token count 6 operations for each weight of a matrix, the embedding left
out, and 6 x layers x context x width for causal attention, which reads half of the context.
Training runs in processes of its own, so that no run has another's memory. torch tells of waits
of the host on CUDA alone.
"""

import json
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

import axrt
from axrt.device.device import accelerator, names
from axrt.models.gpt import gpt

PARTS = ("tests", "product", "training")
Rows = Iterator[dict[str, Any]]
ROOT = Path(__file__).resolve().parents[2]
_WARM = 2
_IS_DEVICE_AWARE = """
import sys
from mpi4py import MPI
from axrt.world.mpi_library import is_device_aware
print(is_device_aware(sys.argv[1]))
"""


@dataclass(frozen=True)
class Size:
    """Of the GPT, of a step, and of the product."""

    layers: int = 24
    width: int = 2048
    heads: int = 16
    context: int = 2048
    vocab: int = 50304
    microbatches: int = 8
    microbatch_size: int = 4
    steps: int = 10
    product: int = 8192
    device: str = "auto"

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.microbatches * self.microbatch_size * self.context

    @property
    def operations(self) -> float:
        """Of a token."""
        matrices = 12 * self.layers * self.width**2 + self.vocab * self.width
        return 6 * matrices + 6 * self.layers * self.context * self.width


class Way(NamedTuple):
    """To train.

    Args:
        what: in words.
        precision: what layers compute with, as [precision] says it.
        compile: value of run.compile.
        stages: number of stages, and of ranks that share the GPU.
        cuda_aware: value of run.cuda_aware.
    """

    what: str
    precision: dict[str, str]
    compile: str = ""
    stages: int = 1
    cuda_aware: str = "false"


AUTOCAST = {"compute": "bfloat16"}
NARROW = {"weights": "bfloat16"}
ALONE = (
    Way("autocast", AUTOCAST),
    Way("autocast, compiled", AUTOCAST, "inductor"),
    Way("narrow weights", NARROW),
    Way("narrow weights, compiled", NARROW, "inductor"),
)
PINNED = Way("narrow weights, two stages, pinned memory", NARROW, stages=2)
DIRECT = Way("narrow weights, two stages, device to device", NARROW, stages=2, cuda_aware="true")

TINY = Size(
    layers=2,
    width=64,
    heads=2,
    context=64,
    vocab=256,
    microbatch_size=1,
    steps=4,
    product=256,
    device="cpu",
)


@click.command()
@click.option(
    "--part", type=click.Choice(PARTS), multiple=True, help="Only this; may be given several times."
)
@click.option("--rounds", default=3, show_default=True, help="Of training, all ways in turn.")
@click.option(
    "--tiny",
    is_flag=True,
    help="Tiny, and on the CPU: shows that this script works; the figures mean nothing.",
)
@click.option("--out", default="runs/gpu.json", show_default=True, help="Where the rows go.")
@click.option("--mpirun", default="mpirun", hidden=True, help="The launcher of the MPI library.")
@click.option("--train", default=None, hidden=True, help="Train in this way, and print a row.")
def main(
    part: tuple[str, ...], rounds: int, tiny: bool, out: str, mpirun: str, train: str | None
) -> None:
    size = TINY if tiny else Size()
    if size.on_gpu and accelerator() is None:
        raise click.ClickException(
            "torch sees no GPU here; expected a machine with one (--tiny shows on a CPU that the "
            "script works)"
        )
    if train is not None:
        trained(size, Way(*json.loads(train)))
        return
    rows: list[dict[str, Any]] = []
    path, about = Path(out), {"machine": machine(size), "size": asdict(size)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for one in part or PARTS:
        for row in _MEASURE[one](size, rounds, mpirun):
            rows.append(row)
            path.write_text(json.dumps({**about, "rows": rows}, indent=1))  # a lease may end
    print(table(size, rows))
    sys.exit(any(row.get("failed") for row in rows))


def tests(size: Size, rounds: int, mpirun: str) -> Rows:
    """The last line of pytest's."""
    only = ["-m", "gpu"] if size.on_gpu else ["-m", "not gpu", "tests/gpu"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *only], cwd=ROOT, capture_output=True, text=True
    )
    print(ended.stdout, file=sys.stderr)
    said = ended.stdout.strip().splitlines() or [ended.stderr.strip()]
    yield {"part": "tests", "said": said[-1], "failed": ended.returncode != 0}


def product(size: Size, rounds: int, mpirun: str) -> Rows:
    """The rate of a product."""
    yield {"part": "product", "tflops": product_rate(size) / 1e12}


def training(size: Size, rounds: int, mpirun: str) -> Rows:
    """Each way in a process of its own for each stage, all ways in turn."""
    direct = (DIRECT,) if _may_touch_the_device() else ()
    for _ in range(rounds):
        for way in (*ALONE, PINNED, *direct):
            yield one_run(way, size, mpirun)


def _may_touch_the_device() -> bool:
    found = accelerator()
    if found is None:
        return False
    # In a process of its own: MPICH is asked after its start, and ranks are started here later.
    asked = subprocess.run(
        [sys.executable, "-c", _IS_DEVICE_AWARE, found], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    return asked.returncode == 0 and asked.stdout.strip() == "True"


_MEASURE = {"tests": tests, "product": product, "training": training}


def product_rate(size: Size) -> float:
    """Operations a second, once the clocks have risen."""
    n, device = size.product, (accelerator() if size.on_gpu else None) or "cpu"
    left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out, times, taken = torch.empty_like(left), 300 if size.on_gpu else 50, []
    for _ in range(9):
        began = _now(size)
        for _ in range(times):
            torch.mm(left, right, out=out)
        taken.append(_now(size) - began)
    return times * 2 * n**3 / statistics.median(taken)


def trained(size: Size, way: Way) -> None:
    """Print a row, on the main rank: seconds of the steps after the first few, what initialize
    took, the most memory, the last loss, and where the host waits."""
    config = axrt.Config.read(
        {
            "model": {
                name: getattr(size, name)
                for name in ("layers", "width", "heads", "context", "vocab")
            },
            "schedule": {
                "microbatches": size.microbatches,
                "microbatch_size": size.microbatch_size,
            },
            "precision": way.precision,
            "run": {
                "device": size.device,
                "compile": way.compile,
                "cuda_aware": way.cuda_aware,
                "share_gpu": way.stages > 1,
            },
        }
    )
    began = time.perf_counter()
    engine = axrt.initialize(gpt(config), adamw, config=config, sample=next(samples(size)))
    ready_s, batches, steps_s = time.perf_counter() - began, samples(size), []
    with engine:
        for _ in range(_WARM + size.steps):
            began = _now(size)
            loss = engine.train_batch(batches).loss
            steps_s.append(_now(size) - began)
        waits = host_waits(engine, batches)
        row = {
            "part": "training",
            "way": way.what,
            "ready_s": ready_s,
            "steps_s": steps_s[_WARM:],
            "memory_gib": torch.accelerator.max_memory_allocated() / 2**30 if size.on_gpu else None,
            "loss": loss,
            "waits": waits,
        }
        if engine.is_main:
            print(json.dumps(row), flush=True)


def host_waits(engine: axrt.Engine, batches: Iterator[Any]) -> dict[str, int] | None:
    """Where the host waits for the device in a step, by file and line, and how often; None where
    torch does not tell."""
    if accelerator() != "cuda":
        engine.train_batch(batches)
        return None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        engine.train_batch(batches)
        torch.cuda.set_sync_debug_mode("default")
    return dict(
        Counter(f"{one.filename}:{one.lineno}" for one in heard if "synchroniz" in str(one.message))
    )


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-4, fused=True)


def samples(size: Size) -> Iterator[tuple[Tensor, Tensor]]:
    """One microbatch of random tokens, again and again: a loss that falls shows that it trains."""
    rows = torch.randint(
        size.vocab,
        (size.microbatch_size, size.context + 1),
        generator=torch.Generator().manual_seed(0),
    )
    return repeat((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))


def one_run(way: Way, size: Size, mpirun: str) -> dict[str, Any]:
    """In a process of its own for each stage."""
    ended = subprocess.run(
        [
            *([mpirun, "-n", str(way.stages)] if way.stages > 1 else []),
            *(sys.executable, __file__, "--train", json.dumps(way)),
            *([] if size.on_gpu else ["--tiny"]),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    rows = [line for line in ended.stdout.splitlines() if line.startswith('{"part"')]
    if ended.returncode or not rows:
        return {"part": "training", "way": way.what, "failed": True}
    row: dict[str, Any] = json.loads(rows[-1])
    return row


def machine(size: Size) -> dict[str, Any]:
    """Which, and what is installed there."""
    return {
        "device": names()[0] if size.on_gpu else "cpu",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def table(size: Size, rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    text = [f"pytest: {row['said']}" for row in rows if row["part"] == "tests"]
    rates = [row["tflops"] for row in rows if row["part"] == "product"]
    text += [f"a {size.product}-cubed product in bfloat16: {rate:.3g} TFLOP/s" for rate in rates]
    text += [f"failed: {row.get('way', 'a test')}" for row in rows if row.get("failed")]
    runs = [row for row in rows if row["part"] == "training" and not row.get("failed")]
    if runs:
        text.append(
            "\n| | tokens/s | TFLOP/s | of the product's rate | initialize | most memory of the "
            "main rank | last loss | waits of the host in a step |\n" + "|---" * 8 + "|"
        )
    text += [_row(size, way, runs, rates) for way in dict.fromkeys(row["way"] for row in runs)]
    if runs and DIRECT.what not in {row["way"] for row in runs}:
        text.append("\nNot from device to device: the MPI library here does not touch its memory.")
    return "\n".join(text)


def _row(size: Size, way: str, runs: list[dict[str, Any]], rates: list[float]) -> str:
    of = [row for row in runs if row["way"] == way]
    speeds = sorted(size.tokens / statistics.median(row["steps_s"]) for row in of)
    tflops = statistics.median(speeds) * size.operations / 1e12
    share = f"{tflops / rates[0]:.1%}" if rates else ""
    tokens = f"{statistics.median(speeds):,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})"
    ready_s, loss = (statistics.median(row[key] for row in of) for key in ("ready_s", "loss"))
    held = f"{max(row['memory_gib'] for row in of):.1f} GiB" if size.on_gpu else ""
    waits = "" if of[-1]["waits"] is None else str(sum(of[-1]["waits"].values()))
    return (
        f"| {way} | {tokens} | {tflops:.3g} | {share} | {ready_s:.1f} s | {held} | {loss:.3f} "
        f"| {waits} |"
    )


def _now(size: Size) -> float:
    if size.on_gpu:
        torch.accelerator.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
