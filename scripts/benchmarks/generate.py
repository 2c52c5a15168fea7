"""Tokens a second of a model of transformers, by their own generate and by a pipeline of axrt; see
scripts/bench_generate.

One thread a rank. The first rank runs transformers beside the pipeline, in turn, while the others
wait. Both take the likeliest token each time and keep keys and values, and must write the same.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
import transformers
from click.testing import CliRunner

from axrt.cli import main as axrt
from axrt.generation.generation import Choice, Stage
from axrt.generation.loading import layers_of_rank
from axrt.generation.pipelined_generation import PipelinedGeneration
from axrt.world.joining import join
from axrt.world.mpi_world import MpiWorld
from axrt.world.world import World

_LIKELIEST = Choice(0.0)


def _theirs(width: int, layers: int, vocab: int, context: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=vocab,
        max_position_embeddings=context,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]


def _shared_folder(world: World, made: str) -> Path:
    return Path(world.comm.bcast(made) if isinstance(world, MpiWorld) else made)


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--width", default=512, show_default=True, help="a multiple of 64")
@click.option("--layers", default=8, show_default=True)
@click.option("--vocab", default=8192, show_default=True)
@click.option("--prompt", default=64, show_default=True, help="tokens")
@click.option("--tokens", default=128, show_default=True, help="to add")
@click.option("--texts", default=1, show_default=True)
def main(
    rounds: int, width: int, layers: int, vocab: int, prompt: int, tokens: int, texts: int
) -> None:
    """Write texts with transformers and with axrt, round after round."""
    world = join()
    context = prompt + tokens
    with TemporaryDirectory() as made:
        folder = _shared_folder(world, made)
        theirs = _theirs(width, layers, vocab, context) if world.rank == 0 else None
        if theirs is not None:
            theirs.save_pretrained(folder / "theirs")
            given = ["import", "--hf", str(folder / "theirs"), "--out", str(folder / "run")]
            result = CliRunner().invoke(axrt, given)
            assert result.exit_code == 0, result.output
        if isinstance(world, MpiWorld):
            world.comm.barrier()
        checkpoint = next((folder / "run" / "checkpoints").glob("step-*"))
        _, mine = layers_of_rank(checkpoint, world.rank, world.size)
        stage = Stage(mine, context)
        transport = world.transport(world.device, "auto")
        prompts = torch.randint(vocab, (texts, prompt), generator=torch.Generator().manual_seed(1))
        times: dict[str, list[float]] = {"transformers": [], "axrt": []}
        for _ in range(rounds + 1):
            rank = PipelinedGeneration(transport, stage, _LIKELIEST, 0)
            if theirs is None:
                rank.serve()
                continue
            expected, took_s = _timed(partial(_written_by_theirs, theirs, prompts, tokens))
            times["transformers"].append(took_s)
            found, took_s = _timed(partial(_written, rank, prompts.tolist(), tokens, context))
            times["axrt"].append(took_s)
            assert found == expected, "the same is written"
        transport.close()
    if theirs is not None:
        _tell(times, tokens * texts, world.size)


def _written_by_theirs(theirs: Any, prompts: torch.Tensor, tokens: int) -> list[list[int]]:
    options = {"max_new_tokens": tokens, "do_sample": False, "use_cache": True}
    return [
        theirs.generate(one[None], attention_mask=torch.ones_like(one[None]), **options)[
            0, len(one) :
        ].tolist()
        for one in prompts
    ]


def _written(
    rank: PipelinedGeneration, prompts: list[list[int]], tokens: int, context: int
) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for text, token in rank.write(prompts, tokens, context, True, ()):
        if token is not None:
            found[text].append(token)
    return found


def _timed(run: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
    began = time.perf_counter()
    return run(), time.perf_counter() - began


def _tell(times: dict[str, list[float]], tokens: int, ranks: int) -> None:
    """Print rates, and the ratio of each round; the first round is left out."""
    rates = {name: [tokens / one for one in of[1:]] for name, of in times.items()}
    ratios = [
        mine / other for mine, other in zip(rates["axrt"], rates["transformers"], strict=True)
    ]
    print(f"\n| {ranks} ranks | tokens/s |\n|---|---|")
    for name, of in rates.items():
        print(f"| {name} | {statistics.median(of):.1f} ({min(of):.1f} to {max(of):.1f}) |")
    middle = statistics.median(ratios)
    print(f"| axrt / transformers | {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")


if __name__ == "__main__":
    main()
