"""A split backward against a whole one, of one GPT block; see scripts/bench_backward.

Both blocks have the same weights and meet the same microbatch in turn, so that what disturbs one
disturbs the other; each figure is the median over the rounds of a ratio within a round, with the
quarters around it.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import click
import torch
from torch import Tensor, nn

from axrt.config import Model
from axrt.device.allocator import keep_freed_memory
from axrt.model.deferral import Deferral
from axrt.model.linear import with_deferral
from axrt.models.gpt import Block

WIDTH, HEADS, CONTEXT, SEQUENCES = 256, 4, 256, 4
SHAPE = Model(width=WIDTH, heads=HEADS, context=CONTEXT)


@dataclass(slots=True)
class Round:
    """Seconds of one round."""

    plain_forward: float
    forward: float
    whole: float
    input: float
    weight: float


class Pair:
    """A plain block, and one that defers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.plain, self.split = Block(SHAPE), Block(SHAPE)
        for parameter in self.plain.parameters():
            if parameter.dim() > 1:
                # fresh blocks end in zeros, which no training has for long
                nn.init.normal_(parameter, std=WIDTH**-0.5)
        self.split.load_state_dict(self.plain.state_dict())
        self.deferral = Deferral(with_deferral(self.split).parameters())
        self.features, self.gradient = (
            torch.randn(SEQUENCES, CONTEXT, WIDTH),
            torch.randn(SEQUENCES, CONTEXT, WIDTH),
        )

    def run(self, split_first: bool) -> Round:
        halves: list[Callable[[], tuple[float, ...]]] = [self._whole, self._in_two]
        done = {half: half() for half in (reversed(halves) if split_first else halves)}
        return Round(
            done[self._whole][0],
            done[self._in_two][0],
            done[self._whole][1],
            *done[self._in_two][1:],
        )

    def check(self) -> None:
        """Both have the same gradients."""
        for (name, one), other in zip(
            self.plain.named_parameters(), self.split.parameters(), strict=True
        ):
            if one.grad is None or other.grad is None or not torch.equal(one.grad, other.grad):
                raise click.ClickException(
                    f"the gradient of {name} differs between whole and split backward; expected "
                    "the same bits"
                )

    def _whole(self) -> tuple[float, float]:
        forward_s, out = timed(lambda: self.plain(self._inlet()))
        whole_s, _ = timed(lambda: torch.autograd.backward(out, self.gradient))
        return forward_s, whole_s

    def _in_two(self) -> tuple[float, float, float]:
        forward_s, out = timed(lambda: self.split(self._inlet()))
        with self.deferral.collecting(0):
            input_s, _ = timed(lambda: torch.autograd.backward(out, self.gradient))
        weight_s, _ = timed(self._all_pieces)
        return forward_s, input_s, weight_s

    def _all_pieces(self) -> None:
        while self.deferral.pieces(0):
            self.deferral.run_piece(0)

    def _inlet(self) -> Tensor:
        return self.features.detach().requires_grad_()


def timed(run: Callable[[], Tensor | None]) -> tuple[float, Tensor]:
    began = time.perf_counter()
    made = run()
    return time.perf_counter() - began, made  # type: ignore[return-value]


def said(name: str, ratios: list[float], goal: str = "") -> None:
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {goal} |")


@click.command()
@click.option("--rounds", default=200, show_default=True, type=click.IntRange(4))
def main(rounds: int) -> None:
    """Time it on one thread."""
    torch.set_num_threads(1)
    keep_freed_memory()
    pair = Pair()
    for first in (True, False) * 5:
        pair.run(first)
    pair.check()
    found = [pair.run(bool(number % 2)) for number in range(rounds)]
    pair.check()
    whole_ms = statistics.median(one.whole for one in found) * 1e3
    forward_ms = statistics.median(one.plain_forward for one in found) * 1e3
    print(
        f"A GPT block of width {WIDTH}, context {CONTEXT}, {SEQUENCES} sequences, one thread, "
        f"{rounds} rounds, torch {torch.__version__}:"
    )
    print(
        f"plain forward {forward_ms:.2f} ms, whole backward {whole_ms:.2f} ms; gradients have the "
        "same bits.\n"
    )
    print("| of the plain one | median | quarters | goal |\n|---|---|---|---|")
    said("forward that may defer", [one.forward / one.plain_forward for one in found], "1.02")
    said(
        "I + W, of the whole backward",
        [(one.input + one.weight) / one.whole for one in found],
        "1.05",
    )
    said("I alone", [one.input / one.whole for one in found])
    said("W alone", [one.weight / one.whole for one in found])


if __name__ == "__main__":
    main()
