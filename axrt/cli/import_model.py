"""`axrt import`: a model of `transformers` as a run to train on or to speak with."""

from pathlib import Path

import click

from axrt.hugging_face.importing import GOES_ON, import_model
from axrt.scheduler.plural import plural

from .refusal import errors_as_lines


@click.command(short_help="Make a run of a model of transformers.")
@click.option(
    "--hf",
    "theirs",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="directory with config.json and safetensors files",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="directory to make")
@click.option(
    "--context",
    default=0,
    type=click.IntRange(0),
    help="tokens of a sequence; 0: those of config.json, and 4096 at most where it can be chosen",
)
def import_command(theirs: Path, out: Path, context: int) -> None:
    """Make a run that has done no step of GPT-2, Llama, Qwen2 or Qwen3.

    \b
    axrt import --hf models/Qwen3-0.6B --out runs/qwen
    axrt generate runs/qwen --prompt "The sea"
    axrt train runs/qwen/config.toml checkpoint.resume=runs/qwen run.out=runs/tuned \\
        data.source=my.bin
    """
    with errors_as_lines():
        config = import_model(theirs, out, context)
    model = config.model
    click.echo(
        f"{out}: {model.layers} blocks of width {model.width}, context {model.context}, "
        f"{plural(model.vocab, 'token')}. Train it with `axrt train {out / 'config.toml'} "
        f"checkpoint.resume={out} run.out=NEW data.source=YOURS.bin`, which axrt prepare makes of "
        "text"
    )
    settings = ", ".join(f"optimizer.{key} = {value:g}" for key, value in GOES_ON.items())
    click.echo(f"{out / 'config.toml'} has settings for going on: {settings}")
