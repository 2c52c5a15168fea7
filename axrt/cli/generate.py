"""`axrt generate`: let a trained model go on from a prompt, in one process."""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch
from torch import Tensor, nn

from axrt.checkpoint.folder import candidates_at, none_in
from axrt.checkpoint.layers import check_weights, take_weights, weights_of
from axrt.checkpoint.manifest import Manifest
from axrt.checkpoint.slices import SliceReader
from axrt.config import Config
from axrt.data.prepared import tokenizer_name
from axrt.data.tokenizer import Tokenizer, tokenizer_of
from axrt.errors import AxrtError, ConfigError, DamagedError, DataError
from axrt.exit_codes import exit_code_of
from axrt.launch import told
from axrt.models.registry import model_of
from axrt.observe.metrics import TOKENIZER, is_run


@click.command(short_help="Let a trained model go on from a prompt.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--prompt",
    default="\n",
    show_default="a new line",
    help="what to go on from; for a model of token files, numbers",
)
@click.option(
    "--tokens", default=200, show_default=True, type=click.IntRange(1), help="how many to add"
)
@click.option(
    "--temperature",
    default=0.8,
    show_default=True,
    type=click.FloatRange(0),
    help="0 takes the likeliest token each time",
)
@click.option(
    "--top-k",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="choose among so many tokens; 0 = all",
)
@click.option("--seed", default=0, show_default=True, type=int, help="of the choices")
def generate(
    run: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int
) -> None:
    """Go on from a prompt with the model of RUN, a directory that `axrt train` has made, or a
    checkpoint in it.

    \b
    axrt generate runs/quickstart --prompt "def " --tokens 300
    """
    said = told()
    if said is not None and said.rank > 0:
        return  # one process is enough, whatever has started more
    try:
        if not math.isfinite(temperature):
            raise ConfigError(f"--temperature {temperature}; expected a finite number, such as 0.8")
        config, model = _loaded(run)
        codec = _codec_for(config, run)
        given = codec.encode(prompt)
        _check(given, config.model.vocab)
        decode = codec.decoder()
        click.echo(prompt, nl=False)
        for token in sample(
            model,
            given,
            tokens,
            config.model.context,
            temperature,
            top_k,
            torch.Generator().manual_seed(seed),
        ):
            click.echo(decode(token), nl=False)
            sys.stdout.flush()
        click.echo()
    except AxrtError as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error))


class Numbers:
    """Tokens as numbers, for models whose tokenizer nobody says."""

    def encode(self, text: str) -> list[int]:
        try:
            numbers = [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            numbers = []
        if not numbers:
            raise DataError(
                f"--prompt {text!r}: the model was trained on token files; expected numbers of "
                "tokens, such as --prompt '464 2068'"
            )
        return numbers

    def decoder(self) -> Callable[[int], str]:
        return lambda token: f" {token}"


class Text:
    """Text by a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoder = tokenizer.decoder

    def encode(self, text: str) -> list[int]:
        found = [int(token) for token in self._tokenizer.encode([text])[0]]
        if not found:
            raise DataError("--prompt is empty; expected at least one character to go on from")
        return found


def _codec_for(config: Config, run: Path) -> Numbers | Text:
    """The map between text and tokens: that of the file in the directory of the run, or of the data
    that the run was trained on."""
    folders = [folder for folder in (run, *run.absolute().parents[:2]) if is_run(folder)]
    kept = [str(folder / TOKENIZER) for folder in folders if (folder / TOKENIZER).is_file()]
    name = kept[0] if kept else tokenizer_name(config.data)
    return Text(tokenizer_of(name)) if name else Numbers()


def _check(tokens: list[int], vocab: int) -> None:
    unknown = [token for token in tokens if not 0 <= token < vocab]
    if unknown:
        raise DataError(
            f"--prompt has token {unknown[0]}; expected tokens from 0 to {vocab - 1}, which the "
            "model knows"
        )


def _loaded(run: Path) -> tuple[Config, nn.Sequential]:
    """The model of the newest undamaged checkpoint that a path means, with its configuration.

    It prints a line where that is not the newest.
    """
    faults: list[str] = []
    for one in candidates_at(run):
        try:
            manifest = Manifest.read(one.path)
            config = Config.read(manifest.config)
            whole = model_of(config).sequential(config.run.seed)
            layers = {place: dict(weights_of(place, layer)) for place, layer in enumerate(whole)}
            take_weights(check_weights(one.path, manifest, layers, SliceReader()), layers)
        except DamagedError as error:
            faults.append(str(error))
            continue
        if faults:
            click.echo(
                f"axrt: damaged, and not taken: {'; '.join(faults)}. Taken is {one.path}", err=True
            )
        return config, whole.eval()
    raise DamagedError("; ".join(faults)) if faults else none_in(run)


@torch.inference_mode()
def sample(
    model: nn.Module,
    prompt: list[int],
    number: int,
    context: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> Iterator[int]:
    """Choose tokens, one after the other.

    Args:
        model: network from tokens, shape (1, length), int64, to logits, shape (1, length, vocab).
        prompt: tokens to go on from, at least one.
        number: number of tokens to choose.
        context: number of last tokens that the model looks at.
        temperature: number that logits are divided by, at least 0; 0 takes the likeliest token.
        top_k: number of likeliest tokens to choose among; 0: all.
        generator: random numbers of the choices, on the CPU.
    """
    tokens = list(prompt)
    for _ in range(number):
        logits = model(torch.tensor([tokens[-context:]]))[0, -1].float()
        tokens.append(_chosen(logits, temperature, top_k, generator))
        yield tokens[-1]


def _chosen(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        least = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
