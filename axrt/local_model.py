"""The part of the model that a rank holds: its stages, and their parameters in buckets."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from axrt.config import Config
from axrt.loss_scale import LossScale
from axrt.mesh import Mesh
from axrt.model.compiler import Compiler
from axrt.model.layers import build
from axrt.model.module import PipelineModule
from axrt.model.precision import NarrowLayers, Place, place_of, types_of
from axrt.model.seeds import BorrowedGenerator
from axrt.model.stage import Stage
from axrt.scheduler.bucket import BucketCopy, Copies
from axrt.scheduler.job import Job
from axrt.store.assign import buckets_of
from axrt.store.bucket import Bucket, LrSchedule, OptimizerFactory

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The part of the model that a rank holds.

    Args:
        stages: stages of this rank, by number.
        buckets: buckets of each stage, by stage.
        pipes: pipe whose copy of a stage this is, by stage; numbered over all replicas.
        narrow: layers in a narrow type (mixed precision); None: they are as they are.
        loss_scale: scale of the losses of each step; None: they are as they are.
    """

    stages: dict[int, Stage]
    buckets: dict[int, tuple[Bucket, ...]]
    pipes: dict[int, int]
    narrow: NarrowLayers | None = None
    loss_scale: LossScale | None = None

    def of_pipe(self, pipe: int) -> "LocalModel":
        """The stages and buckets that belong to one pipe."""
        mine = [stage for stage in self.stages if self.pipes[stage] == pipe]
        return LocalModel(
            {stage: self.stages[stage] for stage in mine},
            {stage: self.buckets[stage] for stage in mine},
            dict.fromkeys(mine, pipe),
            self.narrow,
            self.loss_scale,
        )

    @property
    def copies(self) -> dict[int, tuple[Copies, ...]]:
        """The copies of each bucket of a stage, by stage."""
        return {
            stage: tuple(bucket.copies for bucket in buckets)
            for stage, buckets in self.buckets.items()
        }

    @property
    def all_buckets(self) -> list[Bucket]:
        """The buckets of all stages."""
        return [bucket for buckets in self.buckets.values() for bucket in buckets]

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group on this rank; nan where the rank has no
        parameters."""
        return next(
            (bucket.lr for bucket in self.all_buckets if bucket.lr is not None), float("nan")
        )

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters here as plain torch lists them; masters where weights are narrow.

        A tied weight is listed once, by the name that the first of its layers gives it.
        """
        called = {
            id(p): (name, master)
            for bucket in self.all_buckets
            for name, (_, p), (_, master) in zip(
                bucket.called, bucket.named, bucket.trained, strict=True
            )
        }
        listed: dict[str, nn.Parameter] = {}
        for stage in self.stages.values():
            for _, parameter in stage.named_parameters():
                listed.setdefault(*called[id(parameter)])
        return list(listed.items())

    def full(self) -> Callable[[Tensor], Tensor]:
        """A function that gives, for a parameter or buffer of a layer, what stands for it in its
        full type: the master of a trained parameter, the original of another narrow tensor, or the
        tensor itself.

        What is written there counts when it is published.
        """
        if self.narrow is None:
            return lambda tensor: tensor
        wide: dict[Place, Tensor] = self.narrow.originals()
        for bucket in self.all_buckets:
            for (_, parameter), (_, master) in zip(bucket.named, bucket.trained, strict=True):
                wide[place_of(parameter)] = master
        return lambda tensor: wide.get(place_of(tensor), tensor) if tensor.numel() else tensor

    def publish_masters(self) -> None:
        """Give layers what was written to masters, in the layers' type."""
        for bucket in self.all_buckets:
            bucket.publish_if_changed()

    def publish(self) -> None:
        """Give layers what was written to masters and originals, in the layers' type."""
        self.publish_masters()
        if self.narrow is not None:
            self.narrow.publish()

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Each layer with its index in the model."""
        for stage in self.stages.values():
            for place, layer in stage.layers.items():
                yield int(place), layer

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context with every module in evaluation mode; afterwards each is in its former mode."""
        modules = [module for _, layer in self.layers() for module in layer.modules()]
        modes = [module.training for module in modules]
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def release(self) -> None:
        """Give the user's own modules back as they were, with their new weights."""
        for stage in self.stages.values():
            stage.release()
        for bucket in self.all_buckets:
            bucket.release()
        if self.narrow is not None:
            self.narrow.release()

    def drop(self) -> None:
        """Forget every microbatch under way, and all gradients."""
        for stage in self.stages.values():
            stage.drop()
        for bucket in self.all_buckets:
            bucket.forget()


def local_model(
    model: PipelineModule,
    job: Job,
    mesh: Mesh,
    config: Config,
    generator: BorrowedGenerator,
    factory: OptimizerFactory,
    lr_schedule: LrSchedule,
    compiler: Compiler | None,
) -> LocalModel:
    """Build the part of the model that this rank holds.

    Args:
        model: layers and loss of the whole model.
        job: schedule that says where the model is cut, and which rank holds what.
        mesh: coordinates of this rank.
        config: settings of the run.
        generator: random numbers of the device that this rank computes on.
        factory: function that makes the optimizer of a bucket.
        lr_schedule: function that gives the factor on the learning rate for a step.
        compiler: compiler that runs the layers; None: they run as they are.
    """
    stages, buckets, pipes = {}, {}, {}
    types = types_of(config.precision)
    narrow = NarrowLayers(types) if types.weights else None
    loss_scale = LossScale(config.precision) if config.precision.scales else None
    for stage in job.placement.stages_of(mesh.pipe_rank):
        pipes[stage] = job.pipe_of(mesh.data_rank, mesh.pipe_rank, stage)
        first, end = job.cuts[stage], job.cuts[stage + 1]
        layers = [
            build(model.layers, place, config.run.seed).to(generator.device)
            for place in range(first, end)
        ]
        if narrow is not None:
            for layer in layers:
                narrow.add(layer)
        stages[stage] = Stage(
            layers,
            first,
            model.loss_fn if stage == job.last_stage else None,
            job,
            generator,
            mesh.data_rank,
            types,
            compiler,
            job.recomputed.get(stage, 0),
            loss_scale.of if loss_scale else None,
        )
        trained = stages[stage].named_parameters()
        specs = buckets_of(
            model.layers, job.cuts, stage, trained, job.pipes, config.memory.bucket_mb * _MIB
        )
        places = _places_of(trained)
        buckets[stage] = tuple(
            Bucket(
                spec,
                [places[name] for name, _ in spec.named],
                BucketCopy(pipes[stage], stage, number),
                factory,
                lr_schedule,
                generator.device,
                [narrow.type_of(parameter) for _, parameter in spec.named] if narrow else (),
                config.precision.gradients == "float32",
                types.weights,
            )
            for number, spec in enumerate(specs)
        )
        stages[stage].cut_at({bucket.first_layer for bucket in buckets[stage]})
    return LocalModel(stages, buckets, pipes, narrow, loss_scale)


def _places_of(named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, int]:
    """Numbers that order parameters as the whole model does, by name: by layer, then as the layer
    lists them."""
    return {
        name: (int(name.partition(".")[0]) << 32) + ordinal
        for ordinal, (name, _) in enumerate(named)
    }
