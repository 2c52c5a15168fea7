"""`axrt export`: a trained model as a directory that `transformers` loads."""

from pathlib import Path

import click
import torch

from axrt.checkpoint.folder import newest_undamaged
from axrt.checkpoint.in_memory import to_stderr
from axrt.hugging_face.exporting import export_model
from axrt.observe.metrics import TOKENIZER, kept_in_run

from .refusal import errors_as_lines


@click.command(short_help="Write a trained model for transformers.")
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--hf", "out", required=True, type=click.Path(path_type=Path), help="directory to make"
)
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="type of the weights there",
)
def export_command(run: Path, out: Path, dtype: str) -> None:
    """Write the model of RUN, a directory that `axrt train` has made, or of a checkpoint in it, as
    GPT-2, Llama, Qwen2 or Qwen3.

    \b
    axrt export runs/mine --hf models/mine
    python -c "import transformers as t; t.AutoModelForCausalLM.from_pretrained('models/mine')"
    """
    with errors_as_lines():
        tokenizer = kept_in_run(run, TOKENIZER)

        def export(checkpoint: Path) -> Path:
            export_model(checkpoint, out, getattr(torch, dtype), tokenizer, run)
            return checkpoint

        checkpoint = newest_undamaged(run, export, to_stderr)
    without = "" if tokenizer else f", without a tokenizer: {run} has no {TOKENIZER}"
    click.echo(f"{out}: the model of {checkpoint}{without}")
