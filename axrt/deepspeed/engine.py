"""The engine that `deepspeed.initialize` returns."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from axrt.engine import Engine
from axrt.errors import AxrtError, ConfigError
from axrt.results import StepResult
from axrt.world.world import World

from .grid import Grid
from .learning_rate import LearningRates
from .monitors import Monitors
from .pipe import PipelineModule
from .utils import RepeatingLoader

_TAG = "global_step{}"
_LOADS = {  # defaults of DeepSpeed's load_checkpoint
    "load_module_strict": True,
    "load_optimizer_states": True,
    "load_lr_scheduler_states": True,
    "load_module_only": False,
}
_PIPELINE_ONLY = "a pipeline's engine has no {}; expected train_batch() and eval_batch(iterator)"


class PipelineEngine:
    """Trains a pipeline, with the names of DeepSpeed's engine; made by `initialize`.

    Args:
        engine: axrt's own engine.
        world: the job.
        loader: microbatches of this rank's replica; None: `train_batch` is given iterators.
        rates: learning rates.
        prints_every: steps between lines about the loss; 0: none.
        monitors: what keeps losses elsewhere; None on all ranks but the main one.
        module: the model, as the script has made it.
    Attributes:
        axrt: axrt's own engine.
        module: the model, as the script has made it. Its layers that are modules have the trained
            weights on the rank that holds them.
        grid: where this rank stands, with the names of DeepSpeed's grid.
    """

    def __init__(
        self,
        engine: Engine,
        world: World,
        loader: Iterable[Any] | None,
        rates: LearningRates,
        prints_every: int,
        monitors: Monitors | None,
        module: PipelineModule,
    ) -> None:
        self.axrt, self.module = engine, module
        self.grid = Grid(engine)
        self._monitors = monitors
        self._world, self._rates = world, rates
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
        if self._monitors:
            self._monitors.record(self.global_samples, self._last.loss, self._last.lr)
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
            tag: name of the checkpoint; None: that of the step. One that has the name is replaced.
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
        return self.axrt.save_checkpoint(Path(save_dir) / name, client_state, replace=True)

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

    def is_last_stage(self) -> bool:
        """This rank computes the loss of its replica."""
        return self.grid.holds_last_stage

    @property
    def num_stages(self) -> int:
        """Ranks of a pipeline."""
        return self.grid.get_pipe_parallel_world_size()

    @property
    def stage_id(self) -> int:
        """The number of this rank within its pipeline."""
        return self.grid.get_stage_id()

    def get_lr(self) -> list[float]:
        """The learning rate of the next step, of the first parameter group."""
        return [self._rates.highest * self._rates.factor(self.global_steps)]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients; None where it is not known on this rank."""
        return self._last.grad_norm if self._last else None

    def destroy(self) -> None:
        """Leave the other ranks; nothing can be trained afterwards."""
        self.axrt.close()
        if self._monitors:
            self._monitors.close()

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
