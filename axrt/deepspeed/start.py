"""`deepspeed.initialize`: its arguments and its JSON configuration, as an engine of axrt's."""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from axrt.config import Config
from axrt.engine import Engine
from axrt.engine import initialize as axrt_initialize
from axrt.errors import ConfigError
from axrt.scheduler.plural import plural
from axrt.store.bucket_settings import OptimizerFactory, constant
from axrt.world.joining import join
from axrt.world.world import World

from .engine import PipelineEngine
from .learning_rate import LearningRates, learning_rate
from .monitors import Monitors
from .muon import MuonFactory
from .optimizers import (
    Make,
    Options,
    alone_by_adam,
    factory_of,
    given_optimizer,
    groups_of,
    optimizer_class,
    rate_of,
    schedule_of_given,
)
from .pipe import PipelineModule
from .settings import Settings, read, refuse, settings_of
from .utils import RepeatingLoader

T = TypeVar("T")


def initialize(
    args: Namespace | None = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: "Dataset[Any] | None" = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: "str | Path | Mapping[str, Any] | None" = None,
    mesh_param: None = None,
    config_params: "str | Path | Mapping[str, Any] | None" = None,
) -> "tuple[PipelineEngine, None, Iterable[Any] | None, None]":
    """Make the engine of this rank, from DeepSpeed's arguments.

    Args:
        args: options of the command line, with `deepspeed_config`.
        model: a `PipelineModule` of `axrt.deepspeed`.
        optimizer: function of parameters that makes an optimizer, or an optimizer whose class and
            options are taken; None: that of the JSON configuration.
        model_parameters: parameters to step, or groups of them; None: all that are trained.
        training_data: dataset of (inputs, targets) for `train_batch()`; None: that is given
            iterators.
        lr_scheduler: function of an optimizer that makes a scheduler of torch's; None: that of the
            JSON configuration.
        collate_fn: function that makes a microbatch of samples; None: torch's.
        config, config_params: JSON file, or its values; one of them, or `args.deepspeed_config`.
        distributed_port, dist_init_required: change nothing; the launcher says it.
        mpu, mesh_param: only None is accepted.
    Returns:
        The engine, None, the loader of `training_data` or None, and None: optimizers and learning
        rates belong to the engine.
    Raises:
        ConfigError: something has no counterpart. In a job of several ranks, rank 0 prints it and
            all leave with code 2.
    """
    values = _read(getattr(args, "deepspeed_config", None), config, config_params)
    world = _joined(values)
    try:
        layout = _layout(model, world.size, mpu or mesh_param)
        to_step = _to_step(model_parameters, optimizer)
        settings, stepping, factory, whole = _translated(
            values, model, layout, optimizer, lr_scheduler, to_step
        )
        if model.base_seed is None and "seed" not in settings.config["run"]:
            seed = {"initial_seed(), which torch.manual_seed(...) sets,": torch.initial_seed()}
            world.check_alike({"torch": seed})
    except ConfigError as error:
        world.fail(error)
    engine = axrt_initialize(model, factory, stepping.rates.factor, whole, world=world)
    monitors = _monitors(settings, engine, world)
    if engine.is_main:
        for text in _told(settings, engine):
            print(f"axrt: {text}", file=sys.stderr)
    loader, every = _loader(engine, training_data, collate_fn, settings), settings.prints_every
    made = PipelineEngine(engine, world, loader, stepping.rates, every, monitors, model)
    return made, None, loader, None


def _read(*given: Any) -> Mapping[str, Any]:
    """The values of a configuration, which is given in one of several ways."""
    try:
        return read(_one_of(*given))
    except ConfigError as error:
        join().fail(error)


def _translated(
    values: Mapping[str, Any],
    model: PipelineModule,
    layout: tuple[int, int],
    optimizer: Any,
    scheduler: Any,
    to_step: Any,
) -> "tuple[Settings, _Stepping, OptimizerFactory, Config]":
    """What a configuration of DeepSpeed's comes to; all mistakes in it are told at once.

    Args:
        layout: numbers of ranks of a pipeline, and of replicas.
    Raises:
        ConfigError: something has no counterpart.
    """
    pipe, replicas = layout
    settings, mistakes = settings_of(values, replicas)
    stepping = _stepping(settings, optimizer, scheduler, mistakes)
    groups = _attempt(mistakes, lambda: groups_of(model, to_step))
    own = _config(settings, model, pipe, replicas)
    whole = _attempt(mistakes, lambda: Config.read(own))
    refuse(mistakes)
    assert stepping is not None
    assert groups is not None
    assert whole is not None
    factory: OptimizerFactory = stepping.factory(groups)
    if stepping.make is alone_by_adam:
        is_scheduled = scheduler is not None or settings.scheduler is not None
        factory = _muon(settings, stepping.options, groups, model, is_scheduled)
    return settings, stepping, factory, whole


def _monitors(settings: Settings, engine: Engine, world: World) -> Monitors | None:
    """The monitors, on the main rank; every rank calls it, since one may refuse."""
    made, fault = None, ""
    if engine.is_main and settings.monitors:
        try:
            made = Monitors(settings.monitors)
        except ConfigError as error:
            fault = str(error)
    if settings.monitors and (told := engine.broadcast(fault)):
        world.fail(ConfigError(told))
    return made


def _muon(
    settings: Settings,
    options: Options,
    groups: Mapping[str, Options],
    model: PipelineModule,
    is_scheduled: bool,
) -> MuonFactory:
    if any(groups.values()):
        raise ConfigError(
            "optimizer.type = 'Muon' with parameters in groups that have options; expected "
            "model_parameters without options: use_muon of each says which Muon steps"
        )
    rates = options["muon_lr"], options["adam_lr"]
    if is_scheduled and rates[0] != rates[1]:
        raise ConfigError(
            f"optimizer.params of Muon with rates of {rates[0]:g} and {rates[1]:g}, and a schedule "
            "of one rate; expected optimizer.params.lr alone, or no schedule"
        )
    if settings.scheduler is not None:  # which has put its highest rate there
        options = {**options, "muon_lr": options["lr"], "adam_lr": options["lr"]}
    return MuonFactory(options, model)


def _told(settings: Settings, engine: Engine) -> Iterator[str]:
    """Lines about what the configuration came to."""
    if settings.unused:
        yield f"changes nothing here: {', '.join(settings.unused)}"
    schedule, replicas = engine.config.schedule, engine.data_size
    yield (
        f"{plural(engine.pipe_size, 'stage')} x {plural(replicas, 'replica')}, "
        f"{plural(schedule.microbatches, 'microbatch')} of {schedule.microbatch_size} a step and "
        f"replica, policy {engine.schedule.policy}"
    )
    held = engine.num_trained
    if replicas > 1 and settings.bucket_elements >= held:
        yield (
            f"zero_optimization.reduce_bucket_size = {settings.bucket_elements:g} puts all "
            f"{held:,} gradients of a stage in one bucket, so no backward hides its sum over "
            f"replicas; expected fewer elements than that, such as {max(1, held // 4):,}, or no "
            "such key"
        )


def _joined(values: Mapping[str, Any]) -> World:
    """The job, as axrt's own section `run` wants it, where there is one."""
    own = values.get("axrt", {})
    run = own.get("run", {}) if isinstance(own, Mapping) else {}
    run = run if isinstance(run, Mapping) else {}  # which is refused later
    return join(**{key: run[key] for key in ("transport", "device", "patience_s") if key in run})


def _attempt(mistakes: list[str], part: Callable[[], T]) -> T | None:
    """What the part gives, or None where it is refused, which is added to the mistakes."""
    try:
        return part()
    except ConfigError as error:
        mistakes.append(str(error))
        return None


def _one_of(*given: Any) -> Any:
    found = [one for one in given if one is not None]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} configurations are given; expected one of args.deepspeed_config "
            "(--deepspeed_config FILE), config and config_params"
        )
    return found[0]


def _layout(model: Any, ranks: int, others: object) -> tuple[int, int]:
    """The ranks of a pipeline, and the number of replicas."""
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"model is of type {type(model).__name__}; expected a PipelineModule of "
            "axrt.deepspeed.pipe: modules that are no list of layers are not trained"
        )
    if others is not None:
        raise ConfigError("mpu and mesh_param have no counterpart; expected None")
    pipe = model.pipe_ranks or ranks
    replicas = model.replicas or ranks // pipe
    if pipe * replicas != ranks:
        raise ConfigError(
            f"{plural(ranks, 'rank')} for pipelines of {pipe}; expected a multiple of it, as many "
            "as the topology says where there is one"
        )
    return pipe, replicas


def _to_step(parameters: Any, optimizer: Any) -> Any:
    """The parameters to step, or groups of them; None: all that are trained."""
    if parameters is None and isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.param_groups
    return parameters


class _Stepping(NamedTuple):
    """How parameters are stepped: a function that makes optimizers and its options, and the rates
    by step."""

    make: Make
    options: Options
    rates: LearningRates
    rates_of_groups: bool  # groups keep learning rates of their own

    def factory(self, groups: Mapping[str, Options]) -> OptimizerFactory:
        """The function that makes the optimizer of a bucket, see `factory_of`."""
        if not self.rates_of_groups:
            groups = {
                name: {key: value for key, value in of.items() if key != "lr"}
                for name, of in groups.items()
            }
        return factory_of(self.make, self.options, groups)


def _stepping(
    settings: Settings, optimizer: Any, scheduler: Any, mistakes: list[str]
) -> _Stepping | None:
    """How parameters are stepped; None if something is refused, which is added to the mistakes."""
    made = _attempt(mistakes, lambda: _optimizer(settings, optimizer))
    make, options, lr = made or (torch.optim.SGD, {}, 1e-3)  # the scheduler is looked at anyway
    is_given = optimizer is not None
    rates = _attempt(mistakes, lambda: _rates(settings, is_given, scheduler, lr))
    if made is None or rates is None:
        return None
    if scheduler is not None or settings.scheduler is None:
        return _Stepping(make, options, rates, rates_of_groups=True)
    # Of DeepSpeed's schedules all but this one give all groups the same rate.
    keeps = settings.scheduler["type"] == "WarmupCosineLR"
    return _Stepping(make, {**options, "lr": rates.highest}, rates, rates_of_groups=keeps)


def _optimizer(settings: Settings, given: Any) -> tuple[Make, Options, float]:
    """What makes an optimizer, its options, and its learning rate."""
    if given is not None:
        make, options = given_optimizer(given)
    elif settings.optimizer is not None:
        make, options = optimizer_class(settings.optimizer)
    else:
        raise ConfigError("there is no optimizer; expected one in the configuration, or optimizer=")
    return make, options, rate_of(make, options, by_configuration=given is None)


def _rates(settings: Settings, has_own_optimizer: bool, scheduler: Any, lr: float) -> LearningRates:
    """The learning rates by step."""
    if scheduler is not None:
        return LearningRates(lr, schedule_of_given(scheduler, lr))
    if settings.scheduler is None:
        return LearningRates(lr, constant)
    if has_own_optimizer:
        raise ConfigError(
            "scheduler goes with the optimizer of the configuration; expected lr_scheduler= beside "
            "optimizer="
        )
    return learning_rate(settings.scheduler, lr)


def _config(
    settings: Settings, model: PipelineModule, pipe: int, replicas: int
) -> dict[str, dict[str, Any]]:
    config = {name: dict(of) for name, of in settings.config.items()}
    config["parallel"] = {"pipe": pipe, "data": replicas, **config["parallel"]}
    if model.recomputes:
        config["memory"] = {"recompute": "full", **config["memory"]}
    seed = torch.initial_seed() if model.base_seed is None else model.base_seed
    config["run"] = {"seed": seed % 2**63, **config["run"]}
    return config


def _loader(
    engine: Engine,
    data: "Dataset[Any] | None",
    collate: Callable[[Any], Any] | None,
    settings: Settings,
) -> Iterable[Any] | None:
    """The microbatches of this rank's replica, again and again, in the order of the dataset, as
    DeepSpeed's pipeline has them. Whoever iterates goes on where the others are."""
    if data is None:
        return None
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=engine.data_size, rank=engine.data_rank, shuffle=False
    )
    return RepeatingLoader(
        DataLoader(
            data,
            engine.config.schedule.microbatch_size,
            sampler=sampler,
            collate_fn=collate,
            drop_last=settings.drop_last,
        )
    )
