"""`axrt generate`: let a trained model go on from prompts, with one process or a pipeline."""

import errno
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import click
from torch import nn

from axrt.checkpoint.folder import newest_undamaged
from axrt.checkpoint.in_memory import to_stderr
from axrt.config import Config
from axrt.data.prepared import tokenizer_name
from axrt.data.tokenizer import Tokenizer, tokenizer_of
from axrt.errors import AxrtError, ConfigError, DamagedError, DataError
from axrt.exit_codes import exit_code_of
from axrt.generation.generation import Choice, Stage
from axrt.generation.loading import layers_of_rank
from axrt.generation.pipelined_generation import PipelinedGeneration
from axrt.hugging_face.text_files import text_ends
from axrt.observe.metrics import TOKENIZER, kept_in_run
from axrt.scheduler.plural import plural
from axrt.scheduler.regular_file import MOST_BYTES, read_text
from axrt.world.joining import join
from axrt.world.mpi_world import MpiWorld
from axrt.world.world import World


@click.command(short_help="Let a trained model go on from a prompt.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--prompt",
    show_default="a new line",
    help="what to go on from; for a model of token files, numbers",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="a file with a prompt a line; each gets a JSON object with prompt and text, and empty "
    "lines are left out",
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
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**63 - 1),
    help="of the choices",
)
@click.option(
    "--model-factory",
    default="",
    help="model.factory of a run of somebody else's, whose code is run then",
)
@click.option("--speed", is_flag=True, help="say at the end how many tokens a second came")
def generate(
    run: Path,
    prompt: str | None,
    prompts: Path | None,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    model_factory: str,
    speed: bool,
) -> None:
    """Go on from a prompt with the model of RUN, a directory that `axrt train` or `axrt import` has
    made, or a checkpoint in it. A text ends where the model ends it.

    \b
    axrt generate runs/quickstart --prompt "def " --tokens 300
    """
    world = join()
    try:
        if not math.isfinite(temperature):
            raise ConfigError(f"--temperature {temperature}; expected a finite number, such as 0.8")
        if prompt is not None and prompts is not None:
            raise ConfigError("--prompt and --prompts are both given; expected one of them")
        lines = [] if prompts is None else _lines_of(prompts)
        writer = _Writer(run, world, Choice(temperature, top_k, top_p), tokens, seed, model_factory)
        if world.rank:
            writer.serve()
        elif prompts is None:
            _stream("\n" if prompt is None else prompt, writer)
        else:
            _write_lines(lines, writer)
        if speed and not world.rank:
            click.echo(writer.speed(), err=True)
        writer.close()
    except AxrtError as error:
        if world.size > 1:
            world.fail(error)
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error))


def _stream(prompt: str, writer: "_Writer") -> None:
    """Show a text as it comes; a prompt that is refused is not shown."""
    texts = writer.goes_on([prompt])
    first = next(texts)
    click.echo(prompt, nl=False)
    for _, text in chain([first], texts):
        click.echo(text, nl=False)
        sys.stdout.flush()
    click.echo()


def _write_lines(prompts: Sequence[str], writer: "_Writer") -> None:
    """Write each text as soon as it and those before it are whole."""
    parts: list[list[str]] = [[] for _ in prompts]
    whole, shown = set[int](), 0
    for index, text in writer.goes_on(prompts):
        if text is not None:
            parts[index].append(text)
            continue
        whole.add(index)
        while shown in whole:
            line = {"prompt": prompts[shown], "text": "".join(parts[shown])}
            click.echo(json.dumps(line, ensure_ascii=False))
            shown += 1


def _text_of(prompts: Path) -> str:
    # A shell gives a pipe by a name such as /dev/fd/63, which leads to no other name; a pipe that
    # has a name of its own may have no writer.
    is_pipe = stat.S_ISFIFO(prompts.stat().st_mode)
    if not is_pipe or os.path.exists(os.path.realpath(prompts)):
        return read_text(prompts)
    with prompts.open(encoding="utf-8") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has over {MOST_BYTES:,} characters")
    return text


def _lines_of(prompts: Path) -> list[str]:
    try:
        lines = _text_of(prompts).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts {prompts}: {error}; expected a file of text") from None
    return [line for line in lines if line.strip()]


class _Writer:
    """Goes on from prompts with the layers that this rank has of a model.

    Args:
        factory: `model.factory` whose code may run; "": that of a run of this user's own.
    """

    def __init__(
        self, run: Path, world: World, choice: Choice, tokens: int, seed: int, factory: str
    ) -> None:
        self._config, layers = _newest(run, world, factory)
        tokenizer = _tokenizer_for(self._config, run)
        self._codec = ByTokenizer(tokenizer) if tokenizer else Numbers()
        self._ends = text_ends(
            run, self._config.data, lambda: tokenizer.end if tokenizer else None
        ).ends
        self._tokens, self._made, self._took_s = tokens, 0, 0.0
        stage = Stage(layers.to(world.device), self._config.model.context, world.device)
        self._transport = world.transport(world.device, self._config.run.cuda_aware)
        self._writes = PipelinedGeneration(self._transport, stage, choice, seed)

    def goes_on(self, prompts: Sequence[str]) -> Iterator[tuple[int, str | None]]:
        """The texts behind prompts, bit by bit, each with the index of its prompt; None at its
        end."""
        model = self._config.model
        given = [self._codec.encode(prompt) for prompt in prompts]
        for tokens in given:
            _check(tokens, model.vocab)
        decoders, clock = [self._codec.decoder() for _ in given], time.perf_counter()
        of = (self._tokens, model.context, not model.factory, self._ends)
        for index, token in self._writes.write(given, *of):
            self._made += token is not None
            yield index, None if token is None else decoders[index](token)
        self._took_s += time.perf_counter() - clock

    def serve(self) -> None:
        """Compute for the first rank, until all texts are written."""
        self._writes.serve()

    def speed(self) -> str:
        """How fast it has been."""
        return f"{plural(self._made, 'token')}, {self._made / self._took_s:,.1f} tokens/s"

    def close(self) -> None:
        """Leave the other ranks."""
        self._transport.close()


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


class ByTokenizer:
    """Text by a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoder = tokenizer.decoder

    def encode(self, text: str) -> list[int]:
        found = [int(token) for token in self._tokenizer.encode([text], specials=True)[0]]
        if not found:
            raise DataError("--prompt is empty; expected at least one character to go on from")
        return found


def _tokenizer_for(config: Config, run: Path) -> Tokenizer | None:
    """The tokenizer in the directory of the run, or of the data that the run was trained on; None
    where nobody says one."""
    kept = kept_in_run(run, TOKENIZER)
    name = str(kept) if kept else tokenizer_name(config.data)
    return tokenizer_of(name) if name else None


def _check(tokens: list[int], vocab: int) -> None:
    unknown = [token for token in tokens if not 0 <= token < vocab]
    if unknown:
        raise DataError(
            f"--prompt has token {unknown[0]}; expected tokens from 0 to {vocab - 1}, which the "
            "model knows"
        )


def _newest(run: Path, world: World, factory: str) -> tuple[Config, nn.Sequential]:
    """The layers that this rank has of the newest checkpoint that no rank finds damaged.

    Raises:
        ConfigError: there is none.
    """
    load = partial(layers_of_rank, rank=world.rank, ranks=world.size, factory=factory)
    if not isinstance(world, MpiWorld):
        return newest_undamaged(run, load, to_stderr)
    say = to_stderr if world.rank == 0 else _quietly

    def alike(checkpoint: Path) -> tuple[Config, nn.Sequential]:
        """The same checkpoint on every rank: a folder may change while they look at it."""
        place = Path(world.comm.bcast(str(checkpoint)))
        found, fault = None, ""
        try:
            found = load(place)
        except DamagedError as error:
            fault = str(error)
        faults = [of_rank for of_rank in world.comm.allgather(fault) if of_rank]
        if faults or found is None:
            raise DamagedError(faults[0])
        return found

    return newest_undamaged(run, alike, say)


def _quietly(text: str) -> None:
    """Say nothing: the first rank says it."""
