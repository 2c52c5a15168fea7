"""What the main rank shows and writes of a run."""

import math
import time
from pathlib import Path

from axrt.checkpoint.manifest import Manifest, checkpoint_in
from axrt.engine import Engine, StepResult
from axrt.observe.metrics import RunFiles
from axrt.observe.progress import Progress


class Record:
    """Shows and writes what each step has given.

    Args:
        engine: of the main rank.
        show: the display.
    """

    def __init__(self, engine: Engine, show: Progress) -> None:
        self._config, self._show = engine.config, show
        self._files = RunFiles(engine.config)
        self._last_s, self._last_step = time.perf_counter(), engine.step
        self._tokens_per_s = 0.0
        show.say(f"{_describe(engine)}\nfiles in {self.directory}")

    @property
    def directory(self) -> Path:
        return self._files.directory

    def resumed(self, checkpoint: Path, done: int) -> None:
        self._files.record(step=done, resumed_from=str(checkpoint))
        self._show.say(f"going on from {checkpoint} at step {done}")
        seed = Manifest.read(checkpoint_in(checkpoint)).seed
        if seed != self._config.run.seed:
            self._show.say(f"run.seed was {seed} and is {self._config.run.seed}: samples come in another order from here on")
        self._last_s, self._last_step = time.perf_counter(), done

    def step(self, result: StepResult) -> None:
        done = result.step + 1
        if done % self._config.run.log_every == 0 or done == self._config.run.steps:
            grad_norm, samples_per_s = result.grad_norm, self._rate(done)
            self._tokens_per_s = samples_per_s * self._config.model.context
            self._files.record(
                step=done,
                loss=result.loss,
                lr=_number(result.lr),
                grad_norm=None if grad_norm is None else _number(grad_norm),
                **({"skipped": True} if result.skipped else {}),
                tokens_per_s=round(self._tokens_per_s, 1),
                samples_per_s=round(samples_per_s, 2),
            )
        if result.skipped:
            self._show.say(f"step {done}: skipped, the norm of the gradients is {result.grad_norm}")
        self._show.step(done, result.loss, self._tokens_per_s)

    def validation(self, done: int, loss: float) -> None:
        self._files.record(step=done, val_loss=loss)
        self._show.say(f"step {done}: validation loss {loss:.4f} nats a token")
        self._last_s, self._last_step = time.perf_counter(), done  # its time is not training's

    def saved(self, done: int) -> None:
        self._last_s, self._last_step = time.perf_counter(), done

    def end(self, done: int, checkpoints: Path | None) -> None:
        what = "done" if done >= self._config.run.steps else f"interrupted after step {done}"
        where = f"configuration and metrics are in {self.directory}" + (f", the checkpoint in {checkpoints}" if checkpoints else "")
        self._show.say(f"{what}; {where}")
        if done < self._config.run.steps and checkpoints:
            self._show.say(f"go on with: axrt train {self.directory / 'config.toml'} checkpoint.resume=auto")

    def _rate(self, done: int) -> float:
        now = time.perf_counter()
        rate = (done - self._last_step) * self._config.global_batch / (now - self._last_s) if done > self._last_step else 0.0
        self._last_s, self._last_step = now, done
        return rate


def _number(value: float) -> float | None:
    """JSON has no infinity and no nan."""
    return value if math.isfinite(value) else None


def _describe(engine: Engine) -> str:
    config, size = engine.config, engine.config.schedule
    batch = f"{size.microbatches} microbatches of {size.microbatch_size} x {config.model.context} tokens a step"
    layout = f"ranks in the pipeline: {engine.pipe_size}" + (f", replicas: {engine.data_size}" if engine.data_size > 1 else "")
    return f"axrt: {layout}, policy {size.policy}, {batch}, {config.run.steps} steps on {engine.device}"
