"""What a GPU does; see scripts/bench_gpu.

    tests      pytest -m gpu, two ranks that share the GPU among them
    product    the rate of an 8192 x 8192 x 8192 product in bfloat16, which is the limit
    training   a GPT of about 1.4 billion parameters in bfloat16 on one rank, plain and compiled:
               tokens a second, and the model's floating-point operations as a share of that rate

A forward and backward of a token count 6 operations for each weight of a matrix, the embedding left
out, and 6 x layers x context x width for causal attention, which reads half of the context.
Training runs in a process of its own, so that neither has the other's memory.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import axrt
from axrt.models.gpt import gpt

PARTS = ("tests", "product", "training")
ROOT = Path(__file__).resolve().parents[2]
_WARM = 2


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
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.microbatches * self.microbatch_size * self.context

    @property
    def operations(self) -> float:
        """Of a token."""
        matrices = 12 * self.layers * self.width**2 + self.vocab * self.width
        return 6 * matrices + 6 * self.layers * self.context * self.width


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
@click.option(
    "--rounds", default=3, show_default=True, help="Of training, plain and compiled in turn."
)
@click.option(
    "--tiny",
    is_flag=True,
    help="Tiny, and on the CPU: shows that this script works; the figures mean nothing.",
)
@click.option("--out", default="runs/gpu.json", show_default=True, help="Where the rows go.")
@click.option(
    "--train",
    default=None,
    hidden=True,
    help="Train with this value of run.compile, and print a row.",
)
def main(part: tuple[str, ...], rounds: int, tiny: bool, out: str, train: str | None) -> None:
    size = TINY if tiny else Size()
    if not tiny and not torch.cuda.is_available():
        raise click.ClickException(
            "torch sees no GPU here; expected a machine with one (--tiny shows on a CPU that the "
            "script works)"
        )
    if train is not None:
        print(json.dumps(trained(size, train)))
        return
    parts: tuple[str, ...] = part or PARTS
    rows: list[dict[str, Any]] = []
    if "tests" in parts:
        rows.append({"part": "tests", "said": tests(tiny)})
    if "product" in parts:
        rows.append({"part": "product", "tflops": product_rate(size) / 1e12})
    if "training" in parts:
        rows += [one_run(compile, tiny) for _ in range(rounds) for compile in ("", "inductor")]
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": machine(size), "size": asdict(size), "rows": rows}, indent=1)
    )
    print(table(size, rows))


def tests(tiny: bool) -> str:
    """The last line of pytest's."""
    only = ["-m", "not gpu", "tests/gpu"] if tiny else ["-m", "gpu"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *only], cwd=ROOT, capture_output=True, text=True
    )
    print(ended.stdout, file=sys.stderr)
    return ended.stdout.strip().splitlines()[-1] if ended.stdout.strip() else ended.stderr.strip()


def product_rate(size: Size, times: int = 50) -> float:
    """Operations a second."""
    n = size.product
    left, right = (torch.randn(n, n, device=size.device, dtype=torch.bfloat16) for _ in range(2))
    out, taken = torch.empty_like(left), []
    for _ in range(3):
        began = _now(size)
        for _ in range(times):
            torch.mm(left, right, out=out)
        taken.append(_now(size) - began)
    return times * 2 * n**3 / statistics.median(taken)


def trained(size: Size, compile: str) -> dict[str, Any]:
    """A row: seconds of the steps after the first few, what initialize took, the most memory, the
    last loss."""
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
            "precision": {"compute": "bfloat16"},
            "run": {"device": size.device, "compile": compile},
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
    memory = torch.cuda.max_memory_allocated() / 2**30 if size.device == "cuda" else float("nan")
    return {
        "part": "training",
        "compile": compile,
        "ready_s": ready_s,
        "steps_s": steps_s[_WARM:],
        "memory_gib": memory,
        "loss": loss,
    }


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


def one_run(compile: str, tiny: bool) -> dict[str, Any]:
    """In a process of its own."""
    ended = subprocess.run(
        [sys.executable, __file__, "--train", compile, *(["--tiny"] if tiny else [])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    row: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return row


def machine(size: Size) -> dict[str, Any]:
    """Which, and what is installed there."""
    on_gpu = size.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def table(size: Size, rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    text = [f"pytest: {row['said']}" for row in rows if row["part"] == "tests"]
    rates = [row["tflops"] for row in rows if row["part"] == "product"]
    text += [f"a {size.product}-cubed product in bfloat16: {rate:.3g} TFLOP/s" for rate in rates]
    runs = [row for row in rows if row["part"] == "training"]
    if runs:
        text.append(
            "\n| run.compile | tokens/s | TFLOP/s | of the product's rate | initialize | most "
            "memory | last loss |\n" + "|---" * 7 + "|"
        )
    for compile in dict.fromkeys(row["compile"] for row in runs):
        of = [row for row in runs if row["compile"] == compile]
        speeds = sorted(size.tokens / statistics.median(row["steps_s"]) for row in of)
        tflops = statistics.median(speeds) * size.operations / 1e12
        share = f"{tflops / rates[0]:.1%}" if rates else ""
        tokens = f"{statistics.median(speeds):,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})"
        ready_s, memory, loss = (
            statistics.median(row[key] for row in of) for key in ("ready_s", "memory_gib", "loss")
        )
        held = f"{memory:.1f} GiB" if size.device == "cuda" else ""
        text.append(
            f"| {compile or 'off'} | {tokens} | {tflops:.3g} | {share} | {ready_s:.1f} s | {held} "
            f"| {loss:.3f} |"
        )
    return "\n".join(text)


def _now(size: Size) -> float:
    if size.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
