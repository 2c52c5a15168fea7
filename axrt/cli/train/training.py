"""A training from its configuration to its end, on every rank."""

import gc
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from axrt.checkpoint.folder import name_latest
from axrt.checkpoint.manifest import Manifest
from axrt.config import Config, Data
from axrt.data.corpus import check_prepared, identities
from axrt.data.prepared import lost_tokenizer, tokenizer_name
from axrt.device.allocator import give_freed_memory_back, keep_freed_memory
from axrt.device.device import CPU
from axrt.device.threads import crowding, usable_cores
from axrt.engine import Engine, initialize
from axrt.errors import ConfigError, DataError
from axrt.exit_codes import Exit, leave_code
from axrt.hugging_face.text_files import carry_text_files, check_tokens_stay
from axrt.ledger.prediction import Predictor
from axrt.ledger.skeleton import Skeletons
from axrt.model.module import PipelineModule
from axrt.model.precision import types_of
from axrt.models.registry import model_of
from axrt.observe.flops import peak_flops, training_flops
from axrt.observe.idle import Idle
from axrt.observe.metrics import TOKENIZER, RunFiles, in_its_directory, unwritable
from axrt.observe.progress import Progress, progress_for
from axrt.observe.trackers import check_trackers, trackers_of
from axrt.planning.known_costs import check_costs
from axrt.planning.schedule import few_microbatches
from axrt.store.bucket_settings import OptimizerFactory
from axrt.store.presets import optimizer_factory
from axrt.world.joining import join

from ..sample import sample_of
from .batches import Batches
from .going_on import Attempt
from .interrupt import Interrupt
from .main_rank import on_main
from .outline import Size
from .record import DATA, Record, Speeds
from .saves import Saves
from .steps import StopRequest, train_steps


def train_once(attempt: Attempt) -> Exit:
    """Train to the end, or until it is interrupted.

    Args:
        attempt: what to begin with; it is told the directory of the run.
    Returns:
        The exit code of this rank. The main rank alone says that the run was interrupted: Open
        MPI's mpirun ends all ranks when one leaves with a code, and it would lose the main rank's
        last words.
    """
    config, model = _read(attempt)
    _settle_allocator(config)
    sample = sample_of(config)
    # before the engine, which changes modules that are given as they are
    factory = optimizer_factory(config.optimizer, model)
    predictor, skeletons = Predictor(model, factory, sample), Skeletons(model.layers)
    idle = Idle()
    with (
        nullcontext(attempt.interrupt) if attempt.interrupt else Interrupt() as interrupt,
        initialize(
            model, config=config, sample=sample, world=attempt.world, observers=[idle]
        ) as engine,
    ):
        interrupt.end_in_order()
        files = on_main(engine, lambda: RunFiles(config))
        if files:
            attempt.when_lost = files.let_go
        resumed_from = _resume(engine)
        if resumed_from is not None and engine.step >= config.run.steps:
            return _nothing_left(engine, resumed_from, files.directory if files else None)
        # before there is a directory: a refusal of the data leaves nothing
        data = Batches.load(engine, interrupt) if engine.reads else None
        extra = {DATA: identities(config.data)} if data and engine.is_main else {}
        on_main(engine, (lambda: _begin(files, config.data, resumed_from)) if files else None)
        show = _progress(engine)
        speeds = _speeds(engine, skeletons, sample) if engine.is_main else None
        record = _record(engine, show, files, idle, speeds, attempt.verbose)
        # a number may have been added to its name
        directory = Path(engine.broadcast(str(record.directory) if record else None))
        attempt.directory = directory
        engine.answer_in(directory)
        here = {"host": socket.gethostname(), "pid": os.getpid(), "cores": usable_cores()}
        places = engine.gathered(here)
        saves = Saves(engine, record, directory, extra)
        if record:
            record.opened(engine, _size(skeletons, factory))
            _predict(engine, predictor, record)
            record.began(resumed_from, engine.step, extra)
            _note_ranks(engine, record, places or [], attempt.commit)
        # what stands by now, torch above all, stays: scanning it again and again costs some 20
        # microseconds a task
        gc.freeze()
        with show, closing(record) if record else nullcontext():
            train_steps(engine, data, record, saves, StopRequest(engine, interrupt))
            saves.end()
            _end(engine, record, saves)
    code = _code(engine, record, saves)
    if record:
        leave_code(code)
    return code


def _read(attempt: Attempt) -> tuple[Config, PipelineModule]:
    """The settings and the model; what cannot work is refused on all ranks, before an engine."""
    try:
        config = in_its_directory(attempt.file, Config.read(attempt.file, attempt.overrides))
        model = model_of(config)
        check_prepared(config.data, config.model.vocab)
        check_trackers(config)
        check_costs(config)
    except (ConfigError, DataError) as error:
        (attempt.world or join()).fail(error)
    return config, model


def _progress(engine: Engine) -> Progress:
    run = engine.config.run
    kind = run.progress if engine.is_main else "off"
    return progress_for(kind, run.steps, engine.step, run.log_every)


def _note_ranks(
    engine: Engine, record: Record, places: Sequence[Mapping[str, Any]], commit: str
) -> None:
    """Write down where ranks are, and say what a person may want to change.

    Args:
        places: host, process and cores of each rank.
    """
    hosts, pids = ([of[key] for of in places] for key in ("host", "pid"))
    record.start(hosts, pids, commit)
    for text in filter(None, _warnings(engine, places, record.directory)):
        record.warn(text)


def _end(engine: Engine, record: Record | None, saves: Saves) -> None:
    """Say what came of the training; every rank calls it."""
    held = engine.gathered(engine.memory_bytes())
    if record and held:
        record.measured(held)
    if record:
        record.end(engine.step, saves.newest, not saves.failed)


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
            f"axrt: nothing is left to do from {checkpoint} at step {engine.step}: run.steps = "
            f"{config.run.steps} is reached; set run.steps higher to go on",
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
    trackers = on_main(
        engine, partial(trackers_of, engine.config, files.directory) if files else None
    )
    if files is None:
        return None
    return Record(engine, show, files, idle, trackers or (), speeds, verbose)


def _size(skeletons: Skeletons, factory: OptimizerFactory) -> Size | None:
    """The size of the model; None where its layers cannot be built to count parameters."""
    try:
        return Size.of(factory, skeletons.parameters())
    except (Exception, SystemExit):  # of the user's own layers, which are built a second time here
        return None


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
        record.predicted(engine, predictor.predict(config, engine.size))
    except Exception as error:  # of the user's own layers: training goes on without
        record.warn(f"memory is not predicted: {type(error).__name__}: {error}")


def _settle_allocator(config: Config) -> None:
    """Keep freed memory for the next step; with offload to a disk, which is there to save memory,
    give it back."""
    if config.memory.uses_scratch and config.memory.scratch_directory:
        give_freed_memory_back()
    else:
        keep_freed_memory()


def _code(engine: Engine, record: Record | None, saves: Saves) -> Exit:
    if record is None:
        return Exit.DONE
    if saves.failed or record.failed:
        return Exit.FAILED
    if engine.step >= engine.config.run.steps:
        return Exit.DONE
    return Exit.SAVED if saves.folder else Exit.INTERRUPTED


def _resume(engine: Engine) -> Path | None:
    """Load the checkpoint to begin with. Returns its path; None where the run begins anew."""
    config = engine.config
    if config.checkpoint.goes_on and config.checkpoint.dir:
        engine.load_checkpoint(Path(config.run.out, config.checkpoint.dir), missing_ok=True)
    if engine.loaded_from is None and config.checkpoint.begins_from:
        engine.load_checkpoint(config.checkpoint.begins_from)
    where = engine.loaded_from
    if where is not None and not config.model.factory:
        on_main(engine, lambda: _check_goes_on(where, config))
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
