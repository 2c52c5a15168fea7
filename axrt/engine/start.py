"""Starts the engine of a rank: reads what the user has given, joins the job, and checks that all
ranks have been given the same."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

from axrt.config import Config
from axrt.device.device import CPU, choose
from axrt.errors import ConfigError
from axrt.model.module import PipelineModule
from axrt.model.preflight import (
    as_failure,
    check_arguments,
    check_backend,
    check_use,
    refuse_in_a_worker,
)
from axrt.observe.observer import Observer
from axrt.planning.schedule import digest_of_order
from axrt.store.bucket_settings import LrSchedule, OptimizerFactory, constant
from axrt.store.presets import lr_schedule as named_schedule
from axrt.store.presets import optimizer_factory
from axrt.store.recipe import Recipe
from axrt.transport import Transport
from axrt.world.joining import join
from axrt.world.world import World

from .engine import Engine


def initialize(
    model: PipelineModule,
    optimizer: OptimizerFactory | None = None,
    lr_schedule: LrSchedule | None = None,
    config: "str | Path | Mapping[str, Any] | Config | None" = None,
    *,
    transport: Transport | None = None,
    observers: Sequence[Observer] = (),
    sample: Any = None,
    world: World | None = None,
    **unknown: Never,
) -> Engine:
    """Make the engine of this rank; every rank calls it alike.

    Args:
        model: layers and loss.
        optimizer: function that makes the optimizer of a bucket. It is called with (name,
            parameter) pairs, one bucket of this rank's at a time, and must be pure; None takes
            `[optimizer]`.
        lr_schedule: function whose `lr_schedule(step)` is a factor on the learning rate; None takes
            that of `[optimizer]` along with its optimizer, and a constant one otherwise.
        config: path of a TOML file, a dict of the same sections, or a `Config`; None takes all
            defaults.
        transport: transport to the other ranks, instead of the one that the launcher's environment
            asks for. It is meant for tests, since a rank that fails then raises and does not end
            the others.
        observers: observers that are told of every event of this rank's loop.
        sample: a microbatch, (inputs, targets), like those of the training, on the main rank; that
            of others is ignored. The layers are measured with it where the policy is "auto" or none
            is named, and `run.compile` compiles them.
        world: the job as its ranks are now, where some were lost; None: as the launcher started it.
        **unknown: refused arguments; for those of DeepSpeed's initialize the error says what axrt
            takes instead.
    Raises:
        ConfigError: a setting cannot work. In a job of several ranks, rank 0 prints it and all
            leave with code 2.
        LaunchError: the ranks did not come up as the launcher meant.
    """
    refuse_in_a_worker()  # alone: this process is no rank, and must not start MPI
    try:
        check_arguments(unknown)
        check_use(model, optimizer, lr_schedule)
        settings = Config.read(config)
        check_backend(settings.run.compile)
    except ConfigError as error:
        world = world or (World(CPU) if transport else join())
        world.fail(error)
    run = settings.run
    if transport:
        world = world or World(choose(run.device, None))
    world = world or join(run.transport, run.device, run.patience_s)
    usual = constant if optimizer else named_schedule(settings.optimizer, run.steps)
    try:
        model.check_settings(settings)
        factory = optimizer or optimizer_factory(settings.optimizer, model)
        recipe = Recipe(model, factory, lr_schedule or usual, sample)
        _check_alike(world, settings, recipe)
        return Engine(recipe, settings, world, transport, observers)
    except BaseException as error:
        world.fail(as_failure(error))


def _check_alike(world: World, settings: Config, recipe: Recipe) -> None:
    layers = dict(enumerate(recipe.layers))
    order = {"order": digest_of_order(settings.schedule)}
    world.check_alike({**settings.as_dict(), "model layers": layers, "digest of schedule": order})
