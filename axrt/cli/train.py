"""`axrt train`: train a model on text, alone or on the ranks of a job."""

import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from axrt.allocator import give_freed_memory_back, keep_freed_memory
from axrt.checkpoint.folder import check_writable, name_latest, prune
from axrt.checkpoint.manifest import Manifest
from axrt.config import Config, Data, described
from axrt.data.blend import blended
from axrt.data.corpus import check_prepared, identities, load
from axrt.data.loader import microbatches
from axrt.data.order import Share
from axrt.data.prepared import lost_tokenizer, tokenizer_name
from axrt.data.windows import Samples, Windows
from axrt.device import CPU
from axrt.engine import Engine, initialize
from axrt.errors import AxrtError, ConfigError, DataError, NonFiniteLossError, SaveError
from axrt.exit_codes import Exit, exit_code_of, leave_code
from axrt.flops import peak_flops, training_flops
from axrt.hugging_face.text_files import carry_text_files, check_tokens_stay
from axrt.known_costs import check_costs
from axrt.launch import join, leave_at_once, told
from axrt.ledger.prediction import Predictor
from axrt.ledger.skeleton import Skeletons
from axrt.model.precision import types_of
from axrt.models.registry import model_of
from axrt.observe.idle import Idle
from axrt.observe.metrics import TOKENIZER, RunFiles, in_its_directory, unwritable
from axrt.observe.origin import commit_of
from axrt.observe.progress import Progress, progress_for
from axrt.observe.trackers import check_trackers, trackers_of
from axrt.restarts.witness import witnessed
from axrt.schedule import few_microbatches
from axrt.scheduler.plural import plural
from axrt.store.presets import optimizer_factory
from axrt.survivors import SurvivingWorld
from axrt.threads import crowding, usable_cores

from .going_on import Attempt, train_with_survivors
from .interrupt import Interrupt
from .overrides import with_overrides
from .record import DATA, Record, Speeds
from .sample import sample_of

T = TypeVar("T")

_MOST_SKIPPED = 20


def _print_keys(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo("\n".join(described()))
        context.exit()


@click.command(short_help="Train a model, alone or on the ranks of a job.")
@click.option(
    "--keys",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_keys,
    help="Every key, its default and meaning.",
)
@click.option("-v", "--verbose", is_flag=True, help="Say why this schedule, and where memory goes.")
@click.argument("file", type=click.Path(dir_okay=False))
@with_overrides
def train(file: str, overrides: tuple[str, ...], verbose: bool) -> None:
    """Train what FILE (TOML) describes; values after it override single keys.

    \b
    alone:            axrt train examples/quickstart.toml
    on two ranks:     mpirun -n 2 axrt train examples/quickstart.toml
    something else:   axrt train examples/quickstart.toml run.steps=50 data.source=my.txt
    going on:         axrt train runs/quickstart/config.toml checkpoint.resume=auto

    Ctrl-C (or SIGUSR1) ends after the present step and saves a checkpoint; Ctrl-C once more ends at
    once. Open MPI's mpirun ends all ranks half a second after Ctrl-C: send it SIGUSR1 instead.
    """
    said = told()
    try:
        with witnessed(said.rank if said else 0):
            commit = "" if said and said.rank else commit_of(Path.cwd())
            code = _until_done(Attempt(file, overrides, commit=commit, verbose=verbose))
        sys.exit(code)
    except KeyboardInterrupt:
        click.echo("axrt: interrupted", err=True)
        leave_code(Exit.INTERRUPTED)
        sys.exit(Exit.INTERRUPTED)
    except (
        Exception
    ) as error:  # alone; in a job of several ranks a failure has ended the job already
        if isinstance(error, AxrtError):
            click.echo(f"axrt: {error}", err=True)
        else:
            traceback.print_exception(error)
        leave_code(exit_code_of(error))
        sys.exit(exit_code_of(error))


def _until_done(attempt: Attempt) -> Exit:
    """Train, and go on without ranks that are lost where that is asked for."""
    try:
        config = Config.read(attempt.file, attempt.overrides)
    except ConfigError:
        return _train(attempt)  # which says so
    if not config.run.survive:
        return _train(attempt)
    run = config.run
    world = join(run.transport, run.device, run.start_patience_s)
    code, left = train_with_survivors(config, attempt, world, _train)
    if isinstance(left, SurvivingWorld) and left.has_lost:
        leave_at_once(code)
    return code


def _train(attempt: Attempt) -> Exit:
    """Train to the end, or until it is interrupted.

    Args:
        attempt: what to begin with; it is told the directory of the run.
    Returns:
        The exit code of this rank. The main rank alone says that the run was interrupted: Open
        MPI's mpirun ends all ranks when one leaves with a code, and it would lose the main rank's
        last words.
    """
    try:
        read = Config.read(attempt.file, attempt.overrides)
        config = in_its_directory(attempt.file, read)
        model = model_of(config)
        check_prepared(config.data, config.model.vocab)
        check_trackers(config)
        check_costs(config)
    except (ConfigError, DataError) as error:
        (attempt.world or join()).fail(error)
    _settle_allocator(config)
    sample = sample_of(config)
    # before the engine, which changes modules that are given as they are
    predictor = Predictor(model, optimizer_factory(config.optimizer), sample)
    skeletons, idle = Skeletons(model.layers), Idle()
    with (
        nullcontext(attempt.interrupt) if attempt.interrupt else Interrupt() as interrupt,
        initialize(
            model, config=config, sample=sample, world=attempt.world, observers=[idle]
        ) as engine,
    ):
        interrupt.end_in_order()
        files = _on_main(engine, lambda: RunFiles(config))
        if files:
            attempt.when_lost = files.let_go
        resumed_from = _resume(engine)
        if resumed_from is not None and engine.step >= config.run.steps:
            return _nothing_left(engine, resumed_from, files.directory if files else None)
        # before there is a directory: a refusal of the data leaves nothing
        data = _Data.load(engine, interrupt) if engine.reads else None
        extra = {DATA: identities(config.data)} if data and engine.is_main else {}
        _on_main(engine, (lambda: _begin(files, config.data, resumed_from)) if files else None)
        show = progress_for(
            config.run.progress if engine.is_main else "off",
            config.run.steps,
            engine.step,
            config.run.log_every,
        )
        speeds = _speeds(engine, skeletons, sample) if engine.is_main else None
        record = _record(engine, show, files, idle, speeds, attempt.verbose)
        # a number may have been added to its name
        directory = Path(engine.broadcast(str(record.directory) if record else None))
        attempt.directory = directory
        engine.answer_in(directory)
        here = {"host": socket.gethostname(), "pid": os.getpid(), "cores": usable_cores()}
        places = engine.gathered(here)
        saves = _Saves(engine, record, directory, extra)
        if record:
            record.opened(engine, skeletons.num_parameters())
            _predict(engine, predictor, record)
            record.began(resumed_from, engine.step, extra)
            of_ranks = places or []
            hosts, pids = ([of[key] for of in of_ranks] for key in ("host", "pid"))
            record.start(hosts, pids, attempt.commit)
            for text in filter(None, _warnings(engine, of_ranks, directory)):
                record.warn(text)
        # what stands by now, torch above all, stays: scanning it again and again costs some 20
        # microseconds a task
        gc.freeze()
        with show, closing(record) if record else nullcontext():
            _steps(engine, data, record, saves, _StopRequest(engine, interrupt))
            saves.end()
            held = engine.gathered(engine.memory_bytes())
            if record and held:
                record.measured(held)
            if record:
                record.end(engine.step, saves.newest, not saves.failed)
    code = _code(engine, record, saves)
    if record:
        leave_code(code)
    return code


def _warnings(
    engine: Engine, places: Sequence[Mapping[str, Any]], directory: Path
) -> Iterator[str]:
    """What a person may want to change before the first step.

    Args:
        places: host and cores of each rank.
    """
    config = engine.config
    if engine.device == CPU:
        yield crowding([(of["host"], of["cores"]) for of in places])
    yield few_microbatches(engine.pipe_size, config.schedule.microbatches)
    if not (directory / TOKENIZER).exists():
        yield lost_tokenizer(config.data)


def _nothing_left(engine: Engine, checkpoint: Path, directory: Path | None) -> Exit:
    """Say that all steps are done, and write nothing but a name that was wrong; every rank calls
    it.

    Args:
        directory: directory of the run, on the main rank; None on the others.
    """
    config = engine.config
    if directory is not None:
        click.echo(
            f"axrt: nothing is left to do from {checkpoint} at step {engine.step}: step "
            f"{engine.step} of run.steps = {config.run.steps} is done already; set run.steps "
            "higher to go on",
            err=True,
        )
        folder = (directory / config.checkpoint.dir).resolve() if config.checkpoint.dir else None
        if checkpoint.parent.resolve() == folder:
            name_latest(checkpoint)
        leave_code(Exit.DONE)
    return Exit.DONE


def _record(
    engine: Engine,
    show: Progress,
    files: RunFiles | None,
    idle: Idle,
    speeds: Speeds | None,
    verbose: bool,
) -> Record | None:
    """The record of the main rank; None on the others. Every rank calls it, since a tracker may
    refuse."""
    trackers = _on_main(
        engine, partial(trackers_of, engine.config, files.directory) if files else None
    )
    if files is None:
        return None
    return Record(engine, show, files, idle, trackers or (), speeds, verbose)


def _speeds(engine: Engine, skeletons: Skeletons, sample: tuple[Any, Any]) -> Speeds | None:
    """Operations of the model and of the device; None where layers cannot be counted."""
    try:
        flops = training_flops(skeletons, sample)
    except (Exception, SystemExit):  # of the user's own layers: what trains says so
        return None
    if not flops:
        return None
    types = types_of(engine.config.precision)
    peak = peak_flops(engine.device, types.compute or types.weights or torch.float32)
    return Speeds(flops / engine.config.schedule.microbatch_size, peak)


def _predict(engine: Engine, predictor: Predictor, record: Record) -> None:
    """Show what ranks will hold under the schedule that the engine has."""
    config = replace(engine.config, schedule=engine.schedule)
    try:
        record.predicted(engine, predictor.predict(config, engine.pipe_size * engine.data_size))
    except Exception as error:  # of the user's own layers: training goes on without
        record.warn(f"memory is not predicted: {type(error).__name__}: {error}")


def _settle_allocator(config: Config) -> None:
    """Keep freed memory for the next step; with offload to a disk, which is there to save memory,
    give it back."""
    if config.memory.uses_scratch and config.memory.scratch_directory:
        give_freed_memory_back()
    else:
        keep_freed_memory()


def _code(engine: Engine, record: Record | None, saves: "_Saves") -> Exit:
    if record is None:
        return Exit.DONE
    if saves.failed or record.failed:
        return Exit.FAILED
    if engine.step >= engine.config.run.steps:
        return Exit.DONE
    return Exit.SAVED if saves.folder else Exit.INTERRUPTED


def _on_main(engine: Engine, act: Callable[[], T] | None) -> T | None:
    """Act on the main rank alone.

    Returns:
        The result of `act` on the main rank; None on the others.
    Raises:
        ConfigError: `act` has raised it; raised on every rank.
    """
    made, refusal = None, None
    if engine.is_main and act:
        try:
            made = act()
        except ConfigError as error:
            refusal = str(error)
    refusal = engine.broadcast(refusal)
    if refusal is not None:
        raise ConfigError(refusal)
    return made


def _resume(engine: Engine) -> Path | None:
    """Load the checkpoint to begin with. Returns its path; None where the run begins anew."""
    config = engine.config
    if config.checkpoint.goes_on and config.checkpoint.dir:
        engine.load_checkpoint(Path(config.run.out, config.checkpoint.dir), missing_ok=True)
    if engine.loaded_from is None and config.checkpoint.begins_from:
        engine.load_checkpoint(config.checkpoint.begins_from)
    where = engine.loaded_from
    if where is not None and not config.model.factory:
        _on_main(engine, lambda: _check_goes_on(where, config))
    return where


def _begin(files: RunFiles, data: Data, resumed_from: Path | None) -> None:
    """Make the directory of the run, on the main rank.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    files.begin()
    if resumed_from is not None:
        try:
            carry_text_files(resumed_from, files.directory, tokenizer_name(data))
        except OSError as error:
            raise unwritable(files.directory, error) from None


def _check_goes_on(where: Path, config: Config) -> None:
    """Check what no shape of a weight tells: the number of heads, and what tokens stand for."""
    check_tokens_stay(where, config.data)
    heads = Manifest.read(where).config.get("model", {}).get("heads", config.model.heads)
    if heads != config.model.heads:
        raise ConfigError(
            f"{where} is of a model with model.heads = {heads}, and it is {config.model.heads} "
            "here; expected the same"
        )


@dataclass(frozen=True, slots=True)
class _Data:
    """The data of a rank that reads."""

    training: Iterator[Any]  # microbatches to train on, without end until an end is asked for
    held_out: Samples | None  # samples to validate on; None where there are none
    engine: Engine  # engine of the run

    @classmethod
    def load(cls, engine: Engine, interrupt: Interrupt) -> "_Data":
        config, size = engine.config, engine.config.schedule
        corpus = load(config.data, config.model.context, config.model.vocab)
        of_row = partial(
            Windows,
            context=config.model.context,
            seed=config.run.seed,
            vocab=config.model.vocab,
            document_end=config.data.document_end,
            masked=config.data.masked,
        )
        training, held_out = (
            blended([of_row(row) for row in rows], config.data.weights, config.run.seed)
            for rows in (corpus.training, corpus.held_out)
        )
        share = Share(engine.data_rank, engine.data_size, size.microbatches, size.microbatch_size)
        stream = microbatches(
            training, size.microbatch_size, share.first_samples(engine.samples), config.data.workers
        )
        if engine.is_main:
            stream = interrupt.until(stream, size.microbatches)
        return cls(stream, held_out if config.data.validates else None, engine)

    def validation(self) -> Iterator[Any]:
        """This replica's share of the microbatches to validate on."""
        assert self.held_out is not None
        run, engine = self.engine.config.run, self.engine
        items = self.held_out.evenly(run.eval_microbatches, engine.config.schedule.microbatch_size)
        return (
            item
            for number, item in enumerate(items)
            if number % engine.data_size == engine.data_rank
        )


# A save that is due while another is under way is left out. Waiting was thought of: a disk that
# hangs would stop all ranks.
class _Saves:
    """The checkpoints that this run saves.

    A save that fails is told, and training goes on: the next one may succeed. Only that of the last
    step matters for how the run ends. One that is due while another is still being written is left
    out, and told.

    Args:
        record: record of the main rank; None on the others.
    Attributes:
        folder: folder of checkpoints; None where nothing is saved.
        newest: checkpoint that was saved last, or that the run has gone on from, on the main rank;
            None where there is none.
        failed: True if the save of the last step has failed.
    Raises:
        ConfigError: nothing can be written; raised on every rank, and before there is anything to
            lose.
    """

    def __init__(
        self, engine: Engine, record: Record | None, directory: Path, extra: Mapping[str, Any]
    ) -> None:
        self._engine, self._record, self._config = engine, record, engine.config.checkpoint
        self._extra = extra
        self.folder = directory / self._config.dir if self._config.dir else None
        self.newest: Path | None = None
        self.failed = False
        self._beside = engine.config.saves_beside
        loaded = engine.loaded_from
        if self.folder and loaded and loaded.parent.resolve() == self.folder.resolve():
            self.newest = loaded
        self._asked = self.newest  # on every rank
        if self.folder is not None:
            _on_main(engine, partial(check_writable, self.folder))
            # last: a refusal before this leaves the folder as it was
            engine.own_checkpoints(self.folder)
        if record and self.newest is not None:
            name_latest(self.newest)

    def after(self, done: int, last: bool) -> None:
        """Save if a checkpoint is due.

        Args:
            last: True for the end of the run.
        """
        every = self._config.memory_every
        if self.folder and every and done % every == 0 and not last:
            self._engine.keep_in_memory(self.folder, self._extra)
        if self.folder is None or not (
            last or (self._config.every and done % self._config.every == 0)
        ):
            return
        path = self.folder / f"step-{done:08}"
        if self._asked and self._asked.name == path.name and not (last and self._has_failed()):
            return  # it is written, or the run has gone on from there, and no step since
        beside = self._beside and not last
        try:
            begun = self._engine.save_checkpoint(
                path, self._extra, wait=not beside, then=partial(self._ended, path, done)
            )
        except SaveError as error:
            self._ended(path, done, str(error), last)
            return
        if not begun:
            self._warn(done, f"{self._asked} is still being written; save less often, or faster")
            return
        self._asked = path
        if self._record:
            self._record.saved(done)
        if not beside:
            self._ended(path, done, "")

    def end(self) -> None:
        """Let go of copies in memory, where a checkpoint has all steps."""
        if self.folder and not self._engine.broadcast(self.failed):
            self._engine.drop_memory(self.folder)

    def _has_failed(self) -> bool:
        """Wait for the save that is under way; True if it could not be written."""
        try:
            self._engine.finish_saving()
        except SaveError:
            return True
        return False

    def _ended(self, path: Path, done: int, fault: str, last: bool = False) -> None:
        """Note how a save has ended."""
        if fault:
            self.failed = last
            self._warn(done, fault, last)
            return
        self.newest = path
        if self._record and self.folder:
            try:
                prune(self.folder, self._config.keep, path)
            except OSError as error:
                self._record.warn(f"step {done}: older checkpoints are not removed: {error}")

    def _warn(self, done: int, why: str, last: bool = False) -> None:
        if self._record:
            what = "the last one" if last else "training goes on, and the next one will be tried"
            self._record.warn(f"step {done}: no checkpoint ({what}): {why}")


class _Drawing:
    """Writes the timeline of the traced steps, once; every rank takes part."""

    def __init__(self, engine: Engine, record: Record | None) -> None:
        self._engine, self._record, self._done = engine, record, False

    def after_step(self) -> None:
        if self._engine.traced and not self._done:
            self._done, line = True, self._engine.timeline()
            if self._record and line:
                self._record.timeline(line)


class _StopRequest:
    """Passes on to the main rank that somebody has asked this rank for an end: a signal may be sent
    to any of them.
    """

    def __init__(self, engine: Engine, interrupt: Interrupt) -> None:
        self._engine, self._interrupt = engine, interrupt
        self._is_told = engine.is_main
        if engine.is_main:
            engine.when_asked_to_stop(interrupt.ask)

    def after_step(self) -> None:
        """Tell the main rank, once."""
        if self._interrupt.asked and not self._is_told:
            self._is_told = True
            self._engine.ask_to_stop()


def _steps(
    engine: Engine,
    data: _Data | None,
    record: Record | None,
    saves: _Saves,
    stop_request: _StopRequest,
) -> None:
    run, validates = engine.config.run, engine.config.data.validates

    def validate(done: int) -> None:
        loss = engine.eval_batch(data.validation() if data else None).loss
        if record:
            record.validation(done, loss)

    if validates and engine.step == 0:
        validate(0)
    skipped, drawing = 0, _Drawing(engine, record)
    while engine.step < run.steps:
        try:
            result = engine.train_batch(data.training if data else None)
        except StopIteration:  # the stream is endless: an end was asked for
            break
        if record:
            record.step(result)
        drawing.after_step()
        stop_request.after_step()
        done = engine.step
        falls = result.loss_scale and engine.config.precision.loss_scale_backoff < 1
        skipped = skipped + 1 if result.skipped and not falls else 0  # a scale ends at its floor
        if skipped == _MOST_SKIPPED:
            raise NonFiniteLossError(
                f"the norm of the gradients was no finite number in {plural(skipped, 'step')} in a "
                f"row, the last {done - 1}; expected that to pass. Lower optimizer.lr or lengthen "
                "optimizer.warmup_steps, and go on from a checkpoint"
            )
        if validates and (done == run.steps or (run.eval_every and done % run.eval_every == 0)):
            validate(done)
        if done < run.steps:
            saves.after(done, last=False)
    saves.after(engine.step, last=True)
