"""The engine: what a user calls. Every rank makes the same calls in the same order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from axrt.compute import compute_on
from axrt.config import Config
from axrt.device import device_of, visible_gpus
from axrt.errors import AxrtError, ConfigError, DataError
from axrt.hands import EvaluationHands, Hands, TrainingHands
from axrt.launch import World, join
from axrt.loop import Loop, Session
from axrt.mesh import Mesh
from axrt.model.layers import build, name_of
from axrt.model.module import PipelineModule
from axrt.model.seeds import BorrowedGenerator
from axrt.model.stage import Stage
from axrt.observe.diagnosis import WaitDiagnosis
from axrt.observe.observer import Observer
from axrt.optim.named import lr_schedule as named_schedule
from axrt.optim.named import optimizer_factory
from axrt.optim.step import OptimizerFactory, Schedule, StageOptimizer, constant
from axrt.reader import BatchReader
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import named as policy_named
from axrt.scheduler.state import RankState
from axrt.tally import Tally
from axrt.transport import Parcel, Transport

_MAIN = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step, as far as this rank is done with it.

    Args:
        step: counted from 0.
        lr: learning rate of the first parameter group on this rank; nan where the rank has no parameters.
        skipped: the step was not applied; never in float32.
    """

    step: int
    lr: float
    skipped: bool
    _loss: Callable[[], float] = field(repr=False)
    _grad_norm: Callable[[], float | None] = field(repr=False)

    @property
    def loss(self) -> float:
        """The mean over the step's microbatches, on every rank; reading it may wait for its message."""
        return self._loss()

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of all gradients, on the main rank; None elsewhere. Reading it may wait for its messages."""
        return self._grad_norm()


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One evaluation.

    Args:
        microbatches: how many there were.
    """

    microbatches: int
    _loss: Callable[[], float] = field(repr=False)

    @property
    def loss(self) -> float:
        """The mean over all microbatches, on every rank; nan where there were none. Reading it may wait for its message."""
        return self._loss()


class Engine:
    """Trains one model on the ranks of a job; made by `axrt.initialize`.

    Args:
        model: the same on every rank.
        factory: makes the optimizer of a stage.
        schedule: the factor on the learning rate.
        config: checked.
        world: the job.
        transport: to the other ranks; None: the world's own.
        observers: told of every event of this rank's loop.
    """

    def __init__(
        self,
        model: PipelineModule,
        factory: OptimizerFactory,
        schedule: Schedule,
        config: Config,
        world: World,
        transport: Transport | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        rank, size = (transport.rank, transport.size) if transport else (world.rank, world.size)
        self.config = config
        self.rank = rank
        self.step = 0
        self._world = world
        self._mesh = Mesh.of(rank, size, config.parallel.pipe, config.parallel.data)
        self._placement = Linear(self._mesh.pipe)
        self._policy = policy_named(config.schedule.policy, config.schedule.in_flight)
        cuts = model.boundaries(self._placement.stages, config.parallel.partition)
        _refuse_shared_parameters(model, cuts)
        self.device = device_of(
            config.run.device, world.node_rank, world.visible_on_node(visible_gpus(config.run.device)), config.run.share_gpu
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._generator = BorrowedGenerator(config.run.seed, self.device)
        self._stages = {stage: self._build(model, stage, cuts) for stage in self._placement.stages_of(self._mesh.pipe_rank)}
        self._optimizers = {index: StageOptimizer(stage.named_parameters(), factory, schedule) for index, stage in self._stages.items()}
        self._tally = Tally(stages=self._placement.stages if self.is_main else 0)
        self._transport = transport or world.transport(self.device, config.run.cuda_aware)
        watching = (*observers, WaitDiagnosis(rank))
        self._loop = Loop(self._transport, compute_on(self.device), self._mesh, self._hear_rank, watching)
        self._generation = 0
        self._training = self._new_training()
        self._closed = False
        world.at_exit(self.close)
        world.where = lambda: f"step {self.step}, task {self._loop.task or 'none yet'}"

    @property
    def is_main(self) -> bool:
        """One rank of the job: the one to print and write files."""
        return self.rank == _MAIN

    @property
    def reads(self) -> bool:
        """This rank draws the batches of its replica; the others ignore them."""
        return 0 in self._stages

    @property
    def pipe_size(self) -> int:
        """How many ranks a pipeline has."""
        return self._mesh.pipe

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank's replica reads."""
        return self._mesh.data_rank

    @property
    def data_size(self) -> int:
        """How many replicas there are."""
        return self._mesh.data

    def named_parameters(self) -> list[tuple[str, Any]]:
        """This rank's trained parameters by the names of `model.sequential(seed)`."""
        return [pair for stage in self._stages.values() for pair in stage.named_parameters()]

    def train_batch(self, batches: Iterable[Any] | None) -> StepResult:
        """Train one step.

        Args:
            batches: an iterator of this replica's microbatches, (inputs, targets); `schedule.microbatches` are drawn, on pipe
                rank 0 only, and the next call goes on where this one stopped. Other ranks ignore it.
        Returns:
            When this rank's tasks of the step are done, the optimizer included. There is no barrier.
        Raises:
            StopIteration: on every rank, if the iterator ended before the step was whole; that step is dropped (buffers, such
                as running means, keep what they have seen).
        """
        session, state = self._training, self._training.state
        with self._working():
            if self.reads and not isinstance(batches, Iterator):
                raise DataError(
                    f"batches is of type {type(batches).__name__}; expected an iterator, made once before the first step, such as "
                    "iter(loader): anything else would give the same first microbatches in every step"
                )
            state.ask_step()
            session.reader = self._reader(batches)
            self._loop.run(session, lambda: state.finished or state.cut_short)
            whole = not state.cut_short
            if not whole:
                self._drop_step()
        if not whole:
            assert state.end is not None
            microbatches = self.config.schedule.microbatches
            raise StopIteration(
                f"the batches ended after {state.end % microbatches} of the {microbatches} microbatches of step {self.step}, which was "
                "dropped. Catch StopIteration to go on with another iterator"
            )
        self.step += 1
        return self._step_result(session.generation, self.step - 1)

    def eval_batch(self, batches: Iterable[Any] | None) -> EvalResult:
        """Compute the mean loss over any number of microbatches, without gradients and with dropout off.

        Leaves step, weights and random state alone. Arguments as for `train_batch`; the iterator is drawn to its end.
        """
        self._generation += 1
        generation = self._generation
        last = self._placement.stages - 1
        hands = EvaluationHands(self._stages, last)
        state = RankState(self._placement, self._policy, self._mesh.pipe_rank, self.config.schedule.microbatches, trains=False)
        with self._working(), self._evaluating():
            self._loop.run(Session(generation, state, hands, self._reader(batches)), lambda: state.finished)
            if last in self._stages:
                self._tell_all(generation, Message(Meaning.LOSS, last, 0), hands.losses)
        outcome = self._tally.claim(generation, 0, norms=False)
        return EvalResult(state.end or 0, lambda: self._await(lambda: outcome.loss, "the loss of an evaluation"))

    def close(self) -> None:
        """Wait until every rank has made its last call, then leave. The engine cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self._world.not_at_exit(self.close)
        with self._ending_the_job_on_failure():
            self._loop.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        self._closed = True
        self._world.not_at_exit(self.close)
        self._world.fail(error)

    # Building.

    def _build(self, model: PipelineModule, index: int, cuts: list[int]) -> Stage:
        first, end = cuts[index], cuts[index + 1]
        layers = [build(model.layers[place], place, self.config.run.seed).to(self.device) for place in range(first, end)]
        loss_fn = model.loss_fn if index == self._placement.stages - 1 else None
        mesh = self._mesh
        return Stage(layers, first, loss_fn, self.config.schedule.microbatches, self._generator, mesh.data_rank, mesh.data)

    def _new_training(self) -> Session:
        microbatches, generation, last = self.config.schedule.microbatches, self._generation, self._placement.stages - 1
        hands: Hands = TrainingHands(
            self._stages,
            self._optimizers,
            microbatches,
            last,
            lambda step, losses: self._tell_all(generation, Message(Meaning.LOSS, last, step), losses),
            lambda step, stage, norms: self._loop.tell(_MAIN, Parcel(generation, Message(Meaning.NORM, stage, step), norms)),
        )
        state = RankState(self._placement, self._policy, self._mesh.pipe_rank, microbatches, first_step=self.step)
        return Session(generation, state, hands, self._reader(None))

    def _reader(self, batches: Iterable[Any] | None) -> BatchReader:
        return BatchReader(batches, self._placement, self.device, self._generator)

    def _drop_step(self) -> None:
        """Begin the step again under a new generation: what is still under way for the old one means nothing any more."""
        self._generation += 1
        self._loop.forget(older_than=self._generation)
        for stage in self._stages.values():
            stage.drop()
        self._training = self._new_training()

    # What concerns ranks, not sessions.

    def _tell_all(self, generation: int, message: Message, payload: Any) -> None:
        for rank in range(self._transport.size):
            self._loop.tell(rank, Parcel(generation, message, payload))

    def _hear_rank(self, source: int, parcel: Parcel) -> None:
        generation, (meaning, stage, step), payload = parcel
        if meaning is Meaning.LOSS:
            self._tally.hear_losses(generation, step, payload)
        else:
            self._tally.hear_norms(generation, step, stage, payload)

    def _step_result(self, generation: int, step: int) -> StepResult:
        rates = [optimizer.lr for optimizer in self._optimizers.values() if optimizer.lr is not None]
        outcome = self._tally.claim(generation, step, norms=True)
        return StepResult(
            step=step,
            lr=rates[0] if rates else float("nan"),
            skipped=False,
            _loss=lambda: self._await(lambda: outcome.loss, f"the loss of step {step}"),
            _grad_norm=lambda: self._await(lambda: outcome.grad_norm, f"the gradient norm of step {step}") if self.is_main else None,
        )

    def _await(self, value: Callable[[], float | None], what: str) -> float:
        if value() is None:
            with self._ending_the_job_on_failure():
                self._loop.listen(lambda: value() is not None, what)
        known = value()
        assert known is not None
        return known

    # Around every call.

    @contextmanager
    def _working(self) -> Iterator[None]:
        if self._closed:
            raise AxrtError("this engine is closed, or has failed; expected calls before close() or inside the with block")
        with self._ending_the_job_on_failure(), self._generator.borrowed():
            yield

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modules = [module for stage in self._stages.values() for module in stage.layers.modules()]
        modes = [module.training for module in modules]
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    @contextmanager
    def _ending_the_job_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._closed = True
            if not isinstance(error, AxrtError):  # ours say where by themselves
                error.add_note(f"on rank {self.rank}, {self._world.where()}")
            self._world.fail(error)


def initialize(
    model: PipelineModule,
    optimizer: OptimizerFactory | None = None,
    lr_schedule: Schedule | None = None,
    config: "str | Path | Mapping[str, Any] | Config | None" = None,
    *,
    transport: Transport | None = None,
    observers: Sequence[Observer] = (),
) -> Engine:
    """Make the engine of this rank; every rank calls it alike.

    Args:
        model: layers and loss.
        optimizer: called with this rank's (name, parameter) pairs, a stage at a time, and pure; None takes `[optimizer]`.
        lr_schedule: `lr_schedule(step)` is a factor on the learning rate; None takes that of `[optimizer]` along with its
            optimizer, and a constant one otherwise.
        config: a TOML file, a dict of the same sections, or a `Config`.
        transport: to the other ranks, instead of the one that the launcher's environment asks for; meant for tests, since a rank
            that fails then raises and does not end the others.
        observers: told of every event of this rank's loop.
    Raises:
        ConfigError: a setting that cannot work. In a job of several ranks, rank 0 prints it and all leave with code 2.
        LaunchError: the ranks did not come up as the launcher meant.
    """
    try:
        settings = Config.read(config)
    except ConfigError as error:
        world = World() if transport else join()
        world.fail(error)
    world = World() if transport else join(settings.run.transport, settings.run.device)
    factory = optimizer or optimizer_factory(settings.optimizer)
    schedule = lr_schedule or (constant if optimizer else named_schedule(settings.optimizer, settings.run.steps))
    try:
        world.check_alike({**settings.as_dict(), "model layers": dict(enumerate(map(name_of, model.layers)))})
        return Engine(model, factory, schedule, settings, world, transport, observers)
    except BaseException as error:
        world.fail(error)


def _refuse_shared_parameters(model: PipelineModule, cuts: list[int]) -> None:
    """Modules given as they are may share parameters within a stage; between stages each rank would train its own copy."""
    stage_of: dict[int, int] = {}
    for stage, (first, end) in enumerate(pairwise(cuts)):
        for layer in model.layers[first:end]:
            for parameter in getattr(layer, "parameters", list)():
                if stage_of.setdefault(id(parameter), stage) != stage:
                    raise ConfigError(
                        f"a parameter is shared between stage {stage_of[id(parameter)]} and stage {stage}; tied weights across stages "
                        "are not implemented yet. Set parallel.partition so that the layers that share it are in one stage"
                    )
