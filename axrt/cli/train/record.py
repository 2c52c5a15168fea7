"""The display and the files of a run, on the main rank."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click

from axrt.checkpoint.manifest import Manifest
from axrt.config import Config
from axrt.device.device import CPU
from axrt.engine import Engine
from axrt.errors import ConfigError, SaveError
from axrt.ledger.ledger import Tier, Unit
from axrt.ledger.ownership import busiest_told, rows_of
from axrt.ledger.prediction import Prediction
from axrt.observe.idle import Idle
from axrt.observe.metrics import MEMORY, STARTS, RunFiles
from axrt.observe.origin import Origin
from axrt.observe.perfetto import ENDING, perfetto
from axrt.observe.picture import draw
from axrt.observe.progress import Progress, Shown
from axrt.observe.rate import Rate, TimeLeft
from axrt.observe.trackers import Tracker, theirs
from axrt.results import StepResult
from axrt.scheduler.plural import plural
from axrt.scheduler.simulation.timeline import Timeline

from . import outline

DATA = "data"  # key of what identifies the data, in `extra` of checkpoints
_MOST_RANKS = 1024  # in the file of predicted memory
_BATCH = (("parallel", "data"), ("schedule", "microbatches"), ("schedule", "microbatch_size"))


class Speeds(NamedTuple):
    """Operations."""

    of_model: float  # those of a sample, forward and backward
    of_device: float  # those that a device can do in a second


class Record:
    """Shows and writes the results of each step.

    Args:
        files: files of the run; where one cannot be written, a line says so and training goes on.
        trackers: what keeps metrics elsewhere.
        speeds: operations of the model, and of a device; None: they are not known.
        verbose: show more than four lines at the beginning and at the end.
    Attributes:
        failed: True if lines of metrics, or a timeline, could not be written by the end.
    """

    def __init__(
        self,
        engine: Engine,
        show: Progress,
        files: RunFiles,
        idle: Idle,
        trackers: Sequence[Tracker] = (),
        speeds: Speeds | None = None,
        verbose: bool = False,
    ) -> None:
        self._config, self._show = engine.config, show
        self._files, self._idle, self._trackers, self._speeds = files, idle, trackers, speeds
        self._memory, self._ranks = engine.memory_bytes, engine.size
        self._rates, self._last_shown = Rate(engine.step), Shown(engine.step, 0.0)
        self._left = TimeLeft(engine.config.run.steps)
        self._told = False  # that lines of metrics cannot be written
        self.failed = False
        self._launch = engine.launch_command
        self._schedule = {
            **asdict(engine.schedule),
            "placement": engine.placement,
            "cuts": list(engine.cuts),
            "members": engine.config.parallel.tensor,
            "fill": engine.fill,
        }
        self._not_written: dict[str, Any] | None = self._schedule
        self._last_s, self._last_step = time.perf_counter(), engine.step
        self._unwritten: StepResult | None = None
        self._last_loss: float | None = None
        self._prediction: Prediction | None = None
        self._what_is_measured = (
            "growth of the process since before its layers were built, with what torch and MPI "
            "load and keep for themselves: tens of MB or more beside a model of any size"
            if engine.device == CPU
            else "peak of the device's allocator"
        )
        self._skipped = 0
        self._verbose, self._began_s = verbose, time.perf_counter()
        self._validation: float | None = None

    def opened(self, engine: Engine, size: outline.Size | None) -> None:
        """Show what the run is, and the schedule that it follows."""
        self._show.say(outline.layout(engine, self.directory, size))
        if size and size.matrices:
            self._show.say(outline.optimizer(engine.config, size))
        self._show.say(outline.schedule(engine))
        self._detail(outline.details(engine))
        if engine.candidates:
            self._detail(outline.why(engine))

    def _detail(self, text: str) -> None:
        """Show a line that is for those who ask for more."""
        if self._verbose:
            self._show.say(text)

    @property
    def directory(self) -> Path:
        return self._files.directory

    def predicted(self, engine: Engine, prediction: Prediction) -> None:
        """Show what the fullest rank will hold by prediction."""
        self._show.say(outline.memory(engine, prediction))
        self._prediction, rank = prediction, prediction.fullest
        ledger, unit = prediction.of_rank(rank), prediction.unit
        self._detail(
            f"memory, predicted: at most {unit.text(ledger.total())} on a device, on rank {rank} "
            f"({ledger.told(unit)})"
        )
        for text in prediction.unknown:
            self._detail(f"memory, {text}")
        self._write_memory(())

    def _write_memory(self, measured: Sequence[Mapping[str, int]]) -> None:
        """Write bytes by rank: predicted ones as [purpose, tier, bytes], measured ones by tier."""
        assert self._prediction is not None
        ranks = range(min(self._prediction.size, _MOST_RANKS))
        entries = [self._prediction.of_rank(rank).entries for rank in ranks]
        told = {
            "predicted": [
                [[one.value, tier.value, size] for one, tier, size in of] for of in entries
            ],
            "measured": [dict(of) for of in measured],
            "of": self._what_is_measured,
            "owners": busiest_told(self._prediction.owned),
            "owned": [*rows_of(self._prediction.owned)],
        }
        try:
            self._files.write(MEMORY, json.dumps(told) + "\n")
        except SaveError as error:
            self.warn(f"{error}; training goes on")

    def measured(self, held: Sequence[Mapping[str, int]]) -> None:
        """Show the prediction beside what was measured.

        Args:
            held: bytes of each rank by tier, see `Engine.memory_bytes`.
        """
        if self._prediction is None:
            return
        self._write_memory(held)
        peaks = [of.get(Tier.DEVICE.value, 0) for of in held]
        rank = peaks.index(max(peaks))
        predicted = self._prediction.of_rank(rank).total()
        unit = Unit.of(max(peaks[rank], predicted))
        self._detail(
            f"memory, measured: at most {unit.text(peaks[rank])}, on rank {rank}; predicted for "
            f"it: {unit.text(predicted)} ({self._what_is_measured})"
        )

    def began(self, resumed_from: Path | None, done: int, extra: Mapping[str, Any]) -> None:
        """Record that the run begins, or goes on from a checkpoint.

        Args:
            resumed_from: checkpoint that the run goes on from; None where it begins.
        """
        if resumed_from is not None:
            self._append(step=done, resumed_from=str(resumed_from))
            self._show.say(f"going on from {resumed_from} at step {done}")
            before = Manifest.read(resumed_from)
            changes = changed(before.config, self._config) + changed_data(before.extra, extra)
            if changes:
                self._show.say(f"changed since then: {', '.join(changes)}")
        elif self._config.checkpoint.goes_on:
            self._show.say(f"no checkpoint in {self.directory}: beginning anew")
        self._last_s, self._last_step = time.perf_counter(), done
        self._left.begin(done, self._last_s)

    def start(self, hosts: Sequence[str], pids: Sequence[int], commit: str) -> None:
        """Write where this start comes from.

        Args:
            hosts, pids: host of each rank, and the number of its process there.
        """
        seed, done = self._config.run.seed, self._last_step
        origin = Origin.now(self._launch, commit, hosts, pids, done, self._schedule, seed)
        try:
            self._files.append(STARTS, origin.line())
        except SaveError as error:
            self.warn(f"{error}; training goes on")

    def step(self, result: StepResult) -> None:
        """Show a step; every `run.log_every` steps write a line of metrics."""
        done = result.step + 1
        self._unwritten, self._last_loss = result, result.loss
        if done % self._config.run.log_every == 0 or done == self._config.run.steps:
            self._write(result)
        self._skipped = self._skipped + 1 if result.skipped else 0
        if result.loss_scale and result.skipped:
            self._show.say(
                f"step {done}: skipped, a gradient overflows at scale {result.loss_scale:g}"
            )
        elif self._skipped == 1:
            self._show.say(f"step {done}: skipped, the norm of the gradients is {result.grad_norm}")
        shown = self._last_shown._replace(
            done=done,
            loss=result.loss,
            lr=result.lr,
            # Without a vote reading it may wait for messages: there it is that of the last line.
            grad_norm=result.grad_norm if self._config.votes else self._last_shown.grad_norm,
            tokens_per_s=self._rates.at(done) * self._tokens_a_step(),
            ranks=self._ranks,
            left_s=self._left.at(done, time.perf_counter()),
        )
        self._show.step(shown)

    def _tokens_a_step(self) -> int:
        return self._config.global_batch * self._config.model.context

    def validation(self, done: int, loss: float) -> None:
        """Show and write a validation loss."""
        self._append(step=done, val_loss=loss)
        self._show.say(f"step {done}: validation loss {loss:.4f} nats a token")
        self._validation = loss
        self._skip(done)

    def _skip(self, done: int) -> None:
        """Leave out the time since the last step, which was not training's."""
        self._last_s, self._last_step = time.perf_counter(), done
        self._rates.skip()
        self._idle.shares()

    def timeline(self, line: Timeline) -> None:
        """Write and draw the timeline of the traced steps."""
        try:
            self._files.write("timeline.json", line.to_json())
            self._files.write("timeline.svg", draw(line))
            self._files.write(f"timeline{ENDING}", perfetto(line))
        except SaveError as error:
            self.failed = True
            self.warn(str(error))
            return
        except ConfigError as error:
            self._show.say(f"no trace for ui.perfetto.dev: {error}")
        self._show.say(
            f"timeline of {plural(self._config.run.trace_steps, 'step')} in "
            f"{self.directory / 'timeline.svg'}"
        )

    def saved(self, done: int) -> None:
        """Write the metrics of the last step that has no line yet, since a checkpoint was saved
        after it."""
        if self._unwritten is not None:
            self._write(self._unwritten)
        self._skip(done)

    def close(self) -> None:
        """Let trackers write what they have."""
        for tracker in self._trackers:
            tracker.close()

    def warn(self, text: str) -> None:
        """Print a line to stderr, whatever the display shows."""
        click.echo(f"axrt: {text}", err=True)

    def end(self, done: int, checkpoint: Path | None, is_saved: bool) -> None:
        """Record that the run ends.

        Args:
            checkpoint: newest checkpoint; None where there is none.
            is_saved: True if that checkpoint has all steps.
        """
        if self._unwritten is not None:
            self._write(self._unwritten)
        try:
            self._files.catch_up()
        except SaveError as error:
            self.failed = True
            self.warn(str(error))
        if self._last_loss is not None and done >= self._config.run.steps and is_saved:
            took_s = time.perf_counter() - self._began_s
            losses = outline.Losses(self._last_loss, self._validation)
            self._show.say(outline.last(self._config, self.directory, took_s, losses))
            self._detail(self._ended(done, checkpoint, is_saved))
            return
        self._show.say(self._ended(done, checkpoint, is_saved))
        if checkpoint and (done < self._config.run.steps or not is_saved):
            self._show.say(
                f"go on with: {self._launch}axrt train {self.directory / 'config.toml'} "
                "checkpoint.resume=auto"
            )

    def _ended(self, done: int, checkpoint: Path | None, is_saved: bool) -> str:
        what = "done" if done >= self._config.run.steps else f"interrupted after step {done}"
        what += "" if is_saved else ", but not saved"
        newest = (
            f", {'the' if is_saved else 'the newest'} checkpoint in {checkpoint}"
            if checkpoint
            else ""
        )
        return f"{what}; configuration and metrics are in {self.directory}{newest}"

    def _append(self, **values: Any) -> None:
        for tracker in self._trackers:
            tracker.record(values["step"], theirs(values))
        try:
            self._files.record(**values)
        except SaveError as error:
            if not self._told:
                self.warn(f"{error}; training goes on")
            self._told = True
        else:
            self._told = False

    def _write(self, result: StepResult) -> None:
        done = result.step + 1
        grad_norm, samples_per_s = result.grad_norm, self._rate(done)
        tokens_per_s = samples_per_s * self._config.model.context
        flops = self._speeds.of_model * samples_per_s / self._ranks if self._speeds else None
        mfu = flops / self._speeds.of_device if flops and self._speeds else None
        idle, memory = self._idle.shares(), self._memory()
        self._unwritten = None
        schedule, self._not_written = self._not_written, None
        self._last_shown = self._last_shown._replace(
            grad_norm=grad_norm, mfu=mfu, idle=idle, memory=memory
        )
        self._append(
            step=done,
            loss=_number(result.loss),
            lr=_number(result.lr),
            grad_norm=None if grad_norm is None else _number(grad_norm),
            **({"skipped": True} if result.skipped else {}),
            **({"loss_scale": result.loss_scale} if result.loss_scale else {}),
            tokens_per_s=round(tokens_per_s, 1),
            samples_per_s=round(samples_per_s, 2),
            tokens_per_s_device=round(tokens_per_s / self._ranks, 1),
            step_s=round(self._config.global_batch / samples_per_s, 6) if samples_per_s else None,
            **({"tflops": round(flops / 1e12, 6), "mfu": round(mfu, 5)} if flops and mfu else {}),
            idle={cause: round(share, 4) for cause, share in idle.items()},
            memory_bytes=memory,
            **({"schedule": schedule} if schedule else {}),
        )

    def _rate(self, done: int) -> float:
        now = time.perf_counter()
        rate = (
            (done - self._last_step) * self._config.global_batch / (now - self._last_s)
            if done > self._last_step
            else 0.0
        )
        self._last_s, self._last_step = now, done
        return rate


def changed(before: Mapping[str, Mapping[str, Any]], now: Config) -> list[str]:
    """The settings that shape the result of training and have other values now, one text each."""
    sections = {
        name: keys
        for name, keys in now.as_dict().items()
        if name in ("model", "data", "optimizer", "precision")
    }
    sections["parallel"] = {"collectives": now.parallel.collectives}
    sections["run"] = {
        "seed": now.run.seed,
        "steps": now.run.steps,
        "deterministic": now.run.deterministic,
    }
    found = [
        f"{section}.{key} {before[section][key]!r} -> {value!r}"
        for section, keys in sections.items()
        for key, value in keys.items()
        if key in before.get(section, {}) and before[section][key] != value
    ]
    sizes = [before.get(section, {}).get(key, 0) for section, key in _BATCH]
    return found + (
        [f"samples a step {math.prod(sizes)} -> {now.global_batch}"]
        if math.prod(sizes) != now.global_batch
        else []
    )


def changed_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The sources of data that are named as before and have other content, one text each.

    Args:
        before: `extra` of the checkpoint; one of a script says nothing of data.
    """
    was = before.get(DATA)
    if not isinstance(was, dict):
        return []
    return [
        f"{name} {was[name]} -> {identity}"
        for name, identity in now.get(DATA, {}).items()
        if was.get(name, identity) != identity
    ]


def _number(value: float) -> float | None:
    """The value, or None for infinity and nan, which JSON does not have."""
    return value if math.isfinite(value) else None
