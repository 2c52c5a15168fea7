"""`deepspeed.initialize`, and the engine that it returns."""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from axrt.engine import Engine
from axrt.engine import initialize as axrt_initialize
from axrt.errors import AxrtError, ConfigError
from axrt.launch import World, join
from axrt.results import StepResult
from axrt.store.bucket import LrSchedule, OptimizerFactory, constant

from .learning_rate import learning_rate
from .optimizers import factory_of, factory_of_given, groups_of, optimizer_class, schedule_of_given
from .pipe import PipelineModule
from .settings import Settings, read, settings_of
from .utils import RepeatingLoader

_TAG = "global_step{}"
_LOADS = {  # defaults of DeepSpeed's load_checkpoint
    "load_module_strict": True,
    "load_optimizer_states": True,
    "load_lr_scheduler_states": True,
    "load_module_only": False,
}
_PIPELINE_ONLY = "a pipeline's engine has no {}; expected train_batch() and eval_batch(iterator)"


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
    try:
        values = read(_one_of(getattr(args, "deepspeed_config", None), config, config_params))
    except ConfigError as error:
        join().fail(error)
    world = _joined(values)
    try:
        pipe, replicas = _layout(model, world.size, mpu or mesh_param)
        settings = _settings(values, replicas)
        groups = groups_of(model, _to_step(model_parameters, optimizer))
        factory, lr = _optimizer(settings, optimizer, groups)
        factory, rate = _schedule(settings, optimizer, factory, lr, lr_scheduler, groups)
    except ConfigError as error:
        world.fail(error)
    engine = axrt_initialize(
        model, factory, rate.factor, _config(settings, model, pipe, replicas), world=world
    )
    if settings.unused and engine.is_main:
        print(f"axrt: changes nothing here: {', '.join(settings.unused)}", file=sys.stderr)
    loader = _loader(engine, training_data, collate_fn, settings)
    return PipelineEngine(engine, world, loader, rate, settings.prints_every), None, loader, None


def _joined(values: Mapping[str, Any]) -> World:
    """The job, as axrt's own section `run` wants it, where there is one."""
    own = values.get("axrt", {})
    run = own.get("run", {}) if isinstance(own, Mapping) else {}
    run = run if isinstance(run, Mapping) else {}  # which is refused later
    keys = {"transport": "transport", "device": "device", "start_patience_s": "patience_s"}
    return join(**{name: run[key] for key, name in keys.items() if key in run})


def _settings(values: Mapping[str, Any], replicas: int) -> Settings:
    try:
        return settings_of(values, replicas)
    except (TypeError, ValueError, AttributeError) as error:  # values of other types
        raise ConfigError(f"DeepSpeed's configuration: {error}; expected its types") from None


class LearningRates(NamedTuple):
    """Learning rates by step.

    Args:
        highest: rate of the first parameter group.
        factor: factor on it by step.
    """

    highest: float
    factor: LrSchedule


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
            f"{ranks} ranks for pipelines of {pipe}; expected a multiple of it, as many as the "
            "topology says where there is one"
        )
    return pipe, replicas


def _to_step(parameters: Any, optimizer: Any) -> Any:
    """The parameters to step, or groups of them; None: all that are trained."""
    if parameters is None and isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.param_groups
    return parameters


def _optimizer(
    settings: Settings, given: Any, groups: Mapping[str, Mapping[str, Any]]
) -> tuple[OptimizerFactory, float]:
    """The function that makes optimizers, and their learning rate."""
    if given is not None:
        factory = factory_of_given(given, groups)
    elif settings.optimizer is not None:
        factory = factory_of(*optimizer_class(settings.optimizer), groups)
    else:
        raise ConfigError("there is no optimizer; expected one in the configuration, or optimizer=")
    alone = _tried(factory, given is None)
    return factory, float(alone.param_groups[0]["lr"])


def _tried(factory: OptimizerFactory, by_configuration: bool) -> torch.optim.Optimizer:
    """An optimizer of one element. Options of the configuration that its class does not take are
    refused; errors of the user's own function are raised as they are."""
    try:
        return factory([("", torch.nn.Parameter(torch.zeros(1)))])
    except (TypeError, ValueError) as error:
        if not by_configuration:
            raise
        raise ConfigError(f"optimizer.params: {error}") from None


def _schedule(
    settings: Settings,
    optimizer: Any,
    factory: OptimizerFactory,
    lr: float,
    given: Any,
    groups: Mapping[str, Mapping[str, Any]],
) -> tuple[OptimizerFactory, LearningRates]:
    """The learning rate by step, and the optimizers that it is for."""
    if given is not None:
        return factory, LearningRates(lr, schedule_of_given(given, lr))
    if settings.scheduler is None:
        return factory, LearningRates(lr, constant)
    if optimizer is not None or settings.optimizer is None:
        raise ConfigError(
            "scheduler goes with the optimizer of the configuration; expected lr_scheduler= beside "
            "optimizer="
        )
    highest, schedule = learning_rate(settings.scheduler, lr)
    if settings.scheduler["type"] != "WarmupCosineLR":  # all groups get the rate of the schedule
        groups = {
            name: {key: value for key, value in of.items() if key != "lr"}
            for name, of in groups.items()
        }
    params = {**settings.optimizer.get("params", {}), "lr": highest}
    its = optimizer_class({**settings.optimizer, "params": params})
    return factory_of(*its, groups), LearningRates(highest, schedule)


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


class PipelineEngine:
    """Trains a pipeline, with the names of DeepSpeed's engine; made by `initialize`.

    Args:
        engine: axrt's own engine.
        world: the job.
        loader: microbatches of this rank's replica; None: `train_batch` is given iterators.
        rate: learning rates.
        prints_every: steps between lines about the loss; 0: none.
    Attributes:
        axrt: axrt's own engine.
    """

    def __init__(
        self,
        engine: Engine,
        world: World,
        loader: Iterable[Any] | None,
        rate: LearningRates,
        prints_every: int,
    ) -> None:
        self.axrt = engine
        self._world, self._rate = world, rate
        self._prints_every = prints_every
        self._batches = iter(loader) if loader is not None else None
        self._transform: Callable[[Any], Any] | None = None
        self._last: StepResult | None = None
        self._since_s = time.monotonic()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train one step.

        Args:
            data_iter: iterator of this replica's microbatches, (inputs, targets); None: the last
                one that was given, or the training data. Only ranks of the first stage draw from
                it.
        Returns:
            The mean loss over all microbatches of all replicas, on every rank, a float32 scalar.
        Raises:
            ConfigError: there is no iterator and no training data.
        """
        if data_iter is not None:  # which counts from now on, as DeepSpeed has it
            self._batches = data_iter
        batches = self._batches if self.axrt.reads else None
        if self.axrt.reads and batches is None:
            raise ConfigError("train_batch() without training_data; expected an iterator")
        if self._transform and batches is not None:
            batches = map(self._transform, batches)
        self._last = self.axrt.train_batch(batches)
        self._print()
        return torch.tensor(self._last.loss)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss over some microbatches, with dropout off.

        Args:
            data_iter: iterator of this replica's microbatches.
            num_micro_batches: number of microbatches; None: those of a step.
            return_logits: True to return what the last layer returns, too, on the main rank.
            compute_loss, reduce_output, bcast_loss: only the defaults are accepted.
        Returns:
            The loss, a float32 scalar, on every rank; with `return_logits` a pair with a list of
            outputs by microbatch.
        """
        if (compute_loss, reduce_output, bcast_loss) != (True, "avg", True):
            raise ConfigError(
                "eval_batch: compute_loss, reduce_output and bcast_loss have no counterpart; "
                "expected True, 'avg' and True"
            )
        number = num_micro_batches or self.gradient_accumulation_steps()
        drawn = islice(data_iter, number) if self.axrt.reads else None
        mapped = map(self._transform, drawn) if self._transform and drawn is not None else drawn
        result = self.axrt.eval_batch(mapped, outputs=return_logits)
        loss = torch.tensor(result.loss)
        return (loss, result.outputs) if return_logits else loss

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take microbatches from a loader, again and again."""
        self._batches = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take microbatches from an iterator."""
        self._batches = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Have a function make (inputs, targets) of what iterators give."""
        self._transform = fn

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save to `save_dir/tag`; every rank calls it.

        Args:
            save_dir: directory that all ranks share.
            tag: name of the checkpoint; None: that of the step.
            client_state: values of yours that JSON can hold.
            save_latest: True; with False a line says that it may be loaded without its tag.
            exclude_frozen_parameters: changes nothing.
        Returns:
            True.
        """
        if not save_latest and self.axrt.is_main:
            print(
                "axrt: save_latest = False: load_checkpoint without a tag takes the newest all the "
                "same",
                file=sys.stderr,
            )
        name = _TAG.format(self.global_steps) if tag is None else str(tag)
        return self.axrt.save_checkpoint(Path(save_dir) / name, client_state)

    def load_checkpoint(
        self, load_dir: str | Path, tag: object = None, **options: object
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of axrt's; every rank calls it.

        Args:
            load_dir: directory of checkpoints.
            tag: name of one; None: the newest undamaged one, whatever the file `latest` says.
            **options: DeepSpeed's other options, of which only the defaults are accepted: all of a
                checkpoint is taken.
        Returns:
            Its path and the `client_state`; (None, None) where there is none.
        """
        for name, value in options.items():
            if name not in _LOADS or value != _LOADS[name]:
                raise ConfigError(f"load_checkpoint: {name} = {value!r} has no counterpart")
        path = Path(load_dir) if tag is None else Path(load_dir) / str(tag)
        extra = self.axrt.load_checkpoint(path, missing_ok=tag is None)
        return (None, None) if extra is None else (str(self.axrt.loaded_from), extra)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.axrt.device

    @property
    def global_rank(self) -> int:
        """The number of this rank."""
        return self.axrt.rank

    @property
    def local_rank(self) -> int:
        """The number of this rank on its host."""
        return self._world.node_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world.size

    @property
    def dp_world_size(self) -> int:
        """Number of replicas."""
        return self.axrt.data_size

    @property
    def global_steps(self) -> int:
        """Number of steps that are done."""
        return self.axrt.step

    @property
    def global_samples(self) -> int:
        """Number of samples that the steps have used up."""
        return self.axrt.samples

    def train_batch_size(self) -> int:
        """Samples of a step."""
        return self.axrt.config.global_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a microbatch."""
        return self.axrt.config.schedule.microbatch_size

    def gradient_accumulation_steps(self) -> int:
        """Microbatches of a step and replica."""
        return self.axrt.config.schedule.microbatches

    def is_first_stage(self) -> bool:
        """This rank draws the microbatches of its replica."""
        return self.axrt.reads

    def get_lr(self) -> list[float]:
        """The learning rate of the next step, of the first parameter group."""
        return [self._rate.highest * self._rate.factor(self.global_steps)]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients; None where it is not known on this rank."""
        return self._last.grad_norm if self._last else None

    def destroy(self) -> None:
        """Leave the other ranks; nothing can be trained afterwards."""
        self.axrt.close()

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("forward", "backward", "step"):
            raise AttributeError(_PIPELINE_ONLY.format(name))
        known = [name for name in vars(type(self)) if not name.startswith("_")]
        raise AttributeError(
            f"axrt.deepspeed's engine has no {name}; it has {', '.join(known)}, and axrt's own "
            "engine as `axrt`"
        )

    def __call__(self, *args: object, **keywords: object) -> NoReturn:
        raise AxrtError(_PIPELINE_ONLY.format("forward"))

    def _print(self) -> None:
        assert self._last is not None
        if not self._prints_every or self.global_steps % self._prints_every:
            return
        now_s = time.monotonic()
        took_s, self._since_s = (now_s - self._since_s) / self._prints_every, now_s
        if self.axrt.is_main:
            print(
                f"steps: {self.global_steps} loss: {self._last.loss:.4f} iter time (s): "
                f"{took_s:.3f} samples/sec: {self.train_batch_size() / took_s:.3f}",
                flush=True,
            )
