"""`axrt train`: train a model on text, alone or on the ranks of a job."""

import gc
import importlib
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from axrt.config import Config
from axrt.data.text import load
from axrt.data.windows import Windows
from axrt.engine import Engine, StepResult, initialize
from axrt.errors import AxrtError, ConfigError
from axrt.launch import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, join
from axrt.model import PipelineModule
from axrt.models.gpt import gpt
from axrt.observe.metrics import RunFiles
from axrt.observe.progress import Progress, progress_for


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
def train(file: str, overrides: tuple[str, ...]) -> None:
    """Train what FILE (TOML) describes; values after it override single keys.

    \b
    alone:            axrt train examples/quickstart.toml
    on two ranks:     mpirun -n 2 axrt train examples/quickstart.toml
    something else:   axrt train examples/quickstart.toml run.steps=50 data.source=my.txt
    """
    try:
        _train(file, overrides)
    except KeyboardInterrupt:
        click.echo("axrt: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except AxrtError as error:  # alone; in a job of several ranks a failure has ended the job already
        click.echo(f"axrt: {error}", err=True)
        sys.exit(EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED)


def _train(file: str, overrides: tuple[str, ...]) -> None:
    try:
        config = Config.read(file, overrides)
        model = _model(config)
    except ConfigError as error:
        join().fail(error)
    with initialize(model, config=config) as engine:
        data = _Data.load(config) if engine.reads else None
        show = progress_for(config.run.progress if engine.is_main else "off", config.run.steps)
        record = _Record(engine, show) if engine.is_main else None
        gc.freeze()  # what stands by now, torch above all, stays: scanning it again and again costs some 20 microseconds a task
        with show:
            _steps(engine, data, record)


@dataclass(frozen=True, slots=True)
class _Data:
    """What the rank that reads has: an endless stream to train on, and what is held out, None where nothing is."""

    training: Iterator[Any]
    held_out: Windows | None
    config: Config

    @classmethod
    def load(cls, config: Config) -> "_Data":
        corpus = load(config.data, config.model.context, config.model.vocab)
        training = Windows(corpus.training, config.model.context, config.run.seed)
        held_out = Windows(corpus.held_out, config.model.context, config.run.seed) if config.data.held_out else None
        return cls(training.batches(config.schedule.microbatches, config.schedule.microbatch_size), held_out, config)

    def validation(self) -> Iterator[Any]:
        assert self.held_out is not None
        return self.held_out.evenly(self.config.run.eval_microbatches, self.config.schedule.microbatch_size)


class _Record:
    """What the main rank shows and writes of each step."""

    def __init__(self, engine: Engine, show: Progress) -> None:
        self._config, self._show = engine.config, show
        self._files = RunFiles(engine.config)
        self._samples = engine.data_size * engine.config.schedule.microbatches * engine.config.schedule.microbatch_size
        self._last_s, self._last_step = time.perf_counter(), 0
        self._tokens_per_s = 0.0
        show.say(f"{_describe(engine)}\nfiles in {self._files.directory}")

    def step(self, result: StepResult) -> None:
        done = result.step + 1
        if done % self._config.run.log_every == 0 or done == self._config.run.steps:
            loss, grad_norm, samples_per_s = result.loss, result.grad_norm, self._rate(done)
            self._tokens_per_s = samples_per_s * self._config.model.context
            self._files.record(
                step=done,
                loss=loss,
                lr=result.lr if math.isfinite(result.lr) else None,
                grad_norm=grad_norm,
                tokens_per_s=round(self._tokens_per_s, 1),
                samples_per_s=round(samples_per_s, 2),
            )
        self._show.step(done, result.loss, self._tokens_per_s)

    def validation(self, done: int, loss: float) -> None:
        self._files.record(step=done, val_loss=loss)
        self._show.say(f"step {done}: validation loss {loss:.4f} nats a byte")
        self._last_s, self._last_step = time.perf_counter(), done  # its time is not training's

    def end(self) -> None:
        self._show.say(f"done; configuration and metrics are in {self._files.directory}")

    def _rate(self, done: int) -> float:
        now = time.perf_counter()
        rate = (done - self._last_step) * self._samples / (now - self._last_s) if done > self._last_step else 0.0
        self._last_s, self._last_step = now, done
        return rate


def _steps(engine: Engine, data: _Data | None, record: _Record | None) -> None:
    run, held_out = engine.config.run, engine.config.data.held_out > 0

    def validate(done: int) -> None:
        loss = engine.eval_batch(data.validation() if data else None).loss
        if record:
            record.validation(done, loss)

    if held_out:
        validate(0)
    for done in range(1, run.steps + 1):
        result = engine.train_batch(data.training if data else None)
        if record:
            record.step(result)
        if held_out and (done == run.steps or (run.eval_every and done % run.eval_every == 0)):
            validate(done)
    if record:
        record.end()


def _model(config: Config) -> PipelineModule:
    if not config.model.factory:
        return gpt(config)
    module_name, colon, name = config.model.factory.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        if not colon:
            raise ConfigError(f"model.factory = {config.model.factory!r}; expected 'package.module:function'")
        factory = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.factory = {config.model.factory!r}: {error}; expected one that can be imported from {os.getcwd()}"
        ) from None
    model = factory(config) if callable(factory) else None
    if not isinstance(model, PipelineModule):
        found = f"returned {type(model).__name__}" if callable(factory) else f"is not in {module_name}"
        raise ConfigError(f"model.factory = {config.model.factory!r}: {name} {found}; expected a function that returns a PipelineModule")
    return model


def _describe(engine: Engine) -> str:
    config, size = engine.config, engine.config.schedule
    batch = f"{size.microbatches} microbatches of {size.microbatch_size} x {config.model.context} tokens a step"
    return f"axrt: ranks in the pipeline: {engine.pipe_size}, policy {size.policy}, {batch}, {config.run.steps} steps on {engine.device}"
