"""`axrt generate`: let a trained model go on from a prompt, in one process."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch
from torch import nn

from axrt.checkpoint.folder import newest_undamaged
from axrt.checkpoint.in_memory import to_stderr
from axrt.checkpoint.layers import check_weights, take_weights, weights_of
from axrt.checkpoint.manifest import Manifest
from axrt.checkpoint.slices import SliceReader
from axrt.config import Config
from axrt.data.prepared import tokenizer_name
from axrt.data.tokenizer import Tokenizer, tokenizer_of
from axrt.errors import AxrtError, ConfigError, DataError
from axrt.exit_codes import exit_code_of
from axrt.generation import Choice, sample
from axrt.launch import told
from axrt.models.registry import model_of
from axrt.observe.metrics import TOKENIZER, kept_in_run


@click.command(short_help="Let a trained model go on from a prompt.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--prompt",
    default="\n",
    show_default="a new line",
    help="what to go on from; for a model of token files, numbers",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="a file with a prompt a line; a JSON object with prompt and text is written for each",
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
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True, max=1),
    help="choose among the likeliest with this much of the probability; 1 = all",
)
@click.option("--seed", default=0, show_default=True, type=int, help="of the choices")
@click.option("--speed", is_flag=True, help="say at the end how many tokens a second came")
def generate(
    run: Path,
    prompt: str,
    prompts: Path | None,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    speed: bool,
) -> None:
    """Go on from a prompt with the model of RUN, a directory that `axrt train` or `axrt import` has
    made, or a checkpoint in it. A text ends where the model ends it.

    \b
    axrt generate runs/quickstart --prompt "def " --tokens 300
    """
    said = told()
    if said is not None and said.rank > 0:
        return  # one process is enough, whatever has started more
    try:
        if not math.isfinite(temperature):
            raise ConfigError(f"--temperature {temperature}; expected a finite number, such as 0.8")
        speaker = _Speaker(run, Choice(temperature, top_k, top_p), tokens, seed)
        if prompts is None:
            click.echo(prompt, nl=False)
            for text in speaker.goes_on(prompt):
                click.echo(text, nl=False)
                sys.stdout.flush()
            click.echo()
        else:
            for line in _lines_of(prompts):
                text = "".join(speaker.goes_on(line))
                click.echo(json.dumps({"prompt": line, "text": text}, ensure_ascii=False))
        if speed:
            click.echo(speaker.speed(), err=True)
    except AxrtError as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error))


def _lines_of(prompts: Path) -> list[str]:
    try:
        return prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts {prompts}: {error}; expected a file of text") from None


class _Speaker:
    """Goes on from prompts with the model of a run."""

    def __init__(self, run: Path, choice: Choice, tokens: int, seed: int) -> None:
        self._config, self._model = newest_undamaged(run, _loaded, to_stderr)
        self._codec = _codec_for(self._config, run)
        self._choice, self._tokens, self._seed = choice, tokens, seed
        self._made, self._took_s = 0, 0.0

    def goes_on(self, prompt: str) -> Iterator[str]:
        """The text behind a prompt, bit by bit."""
        model = self._config.model
        given, decode = self._codec.encode(prompt), self._codec.decoder()
        _check(given, model.vocab)
        random, clock = torch.Generator().manual_seed(self._seed), time.perf_counter()
        keeps, of = not model.factory, (self._tokens, model.context, self._choice)
        for token in sample(self._model, given, *of, random, keeps=keeps):
            self._made += 1
            if token == self._codec.end:
                break
            yield decode(token)
        self._took_s += time.perf_counter() - clock

    def speed(self) -> str:
        """How fast it has been."""
        return f"{self._made} tokens, {self._made / self._took_s:,.1f} tokens/s"


class Numbers:
    """Tokens as numbers, for models whose tokenizer nobody says."""

    end: int | None = None

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
        self.decoder, self.end = tokenizer.decoder, tokenizer.end

    def encode(self, text: str) -> list[int]:
        found = [int(token) for token in self._tokenizer.encode([text])[0]]
        if not found:
            raise DataError("--prompt is empty; expected at least one character to go on from")
        return found


def _codec_for(config: Config, run: Path) -> Numbers | Text:
    """The map between text and tokens: that of the file in the directory of the run, or of the data
    that the run was trained on."""
    kept = kept_in_run(run, TOKENIZER)
    name = str(kept) if kept else tokenizer_name(config.data)
    return Text(tokenizer_of(name)) if name else Numbers()


def _check(tokens: list[int], vocab: int) -> None:
    unknown = [token for token in tokens if not 0 <= token < vocab]
    if unknown:
        raise DataError(
            f"--prompt has token {unknown[0]}; expected tokens from 0 to {vocab - 1}, which the "
            "model knows"
        )


def _loaded(checkpoint: Path) -> tuple[Config, nn.Sequential]:
    """The model of a checkpoint, with its configuration.

    Raises:
        DamagedError: it is damaged.
    """
    manifest = Manifest.read(checkpoint)
    config = Config.read(manifest.config)
    whole = model_of(config).sequential(config.run.seed)
    layers = {place: dict(weights_of(place, layer)) for place, layer in enumerate(whole)}
    take_weights(check_weights(checkpoint, manifest, layers, SliceReader()), layers)
    return config, whole.eval()
