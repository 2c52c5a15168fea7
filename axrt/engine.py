"""The engine: what a user calls. Every rank makes the same calls in the same order."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Never, NoReturn, Self

import torch

from axrt.ahead import compile_ahead
from axrt.checkpoint.job import JobCheckpoints
from axrt.checkpoint.manifest import Manifest
from axrt.choice import settled
from axrt.compute import compute_on
from axrt.config import Config
from axrt.device import device_of, visible_gpus
from axrt.errors import AxrtError, ConfigError, DataError, EmptyEvaluationError, ModelError, SaveError
from axrt.hands import EvaluationHands, TrainingHands
from axrt.holding import hold
from axrt.launch import World, join
from axrt.loop import Loop, Session
from axrt.losses import Losses
from axrt.mesh import Mesh
from axrt.model.compiler import Compiler
from axrt.model.layers import name_of
from axrt.model.module import PipelineModule
from axrt.model.seeds import BorrowedGenerator
from axrt.observe.diagnosis import WaitDiagnosis
from axrt.observe.observer import Observer
from axrt.observe.trace import Trace
from axrt.one_call import OneCall, one_at_a_time
from axrt.optim.bucket import LrSchedule, Norms, OptimizerFactory, constant, total_norm
from axrt.optim.named import lr_schedule as named_schedule
from axrt.optim.named import optimizer_factory
from axrt.reader import BatchReader
from axrt.refusals import (
    as_failure,
    check_arguments,
    check_backend,
    check_use,
    checked_sample,
    refuse_in_a_worker,
    warn_of_equal_readers,
)
from axrt.reports import Collected, Reports
from axrt.results import EvalResult, StepResult
from axrt.schedule import digest_of_order
from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.state import RankState
from axrt.scheduler.timeline import Timeline
from axrt.threads import threads_of, usable_cores
from axrt.transport import Parcel, Transport

_MAIN = 0


class Engine:
    """Trains one model on the ranks of a job; made by `axrt.initialize`.

    Args:
        model: the same on every rank.
        factory: makes the optimizer of a bucket.
        lr_schedule: the factor on the learning rate.
        config: checked.
        world: the job.
        transport: to the other ranks; None: the world's own.
        observers: told of every event of this rank's loop.
        sample: a microbatch, for policy "auto" to measure with and `run.compile` to compile with.
    Attributes:
        config: of the run.
        schedule: with the policy that it came to.
        rank: of this process in the job.
        step: how many steps are done.
        samples: how many of the data they have used up, over all replicas, counting `schedule.microbatch_size` a microbatch.
        device: that this rank computes on.
        candidates: what policy "auto" has found, the chosen one first; empty under any other.
    """

    def __init__(
        self,
        model: PipelineModule,
        factory: OptimizerFactory,
        lr_schedule: LrSchedule,
        config: Config,
        world: World,
        transport: Transport | None = None,
        observers: Sequence[Observer] = (),
        sample: Any = None,
    ) -> None:
        rank, size = (transport.rank, transport.size) if transport else (world.rank, world.size)
        self.config = config
        self.rank = rank
        self.step = 0
        self.samples = 0
        self._calls = OneCall()
        self._layers = [name_of(layer) for layer in model.layers]
        self._world = world
        self._mesh = Mesh.of(rank, size, config.parallel.pipe, config.parallel.data, config.parallel.order)
        self.device = device_of(
            config.run.device, world.node_rank, world.gathered_on_node(visible_gpus(config.run.device)), config.run.share_gpu
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if world.size > 1:
            usable = world.gathered_on_node(usable_cores())
            torch.set_num_threads(threads_of(torch.get_num_threads(), world.node_rank, usable, os.environ))
        self._generator = BorrowedGenerator(config.run.seed, self.device)
        self._transport = transport or world.transport(self.device, config.run.cuda_aware)
        self._trace = Trace(self._mesh.data_rank * self._mesh.pipe + self._mesh.pipe_rank, config.run.trace_steps)
        watching = (*observers, WaitDiagnosis(rank), *((self._trace,) * (config.run.trace_steps > 0)))
        self._compute = compute_on(self.device)
        self._heartbeat = world.heartbeat(config.run.patience_s)
        self._loop = Loop(self._transport, self._compute, self._mesh, self._hear_rank, self._heartbeat, watching)
        self._reports = Reports(self._loop, rank, size)
        self._checkpoints = JobCheckpoints(self._reports, rank, self._layers)
        compiler = Compiler(config.run.compile) if config.run.compile else None
        self.schedule, self._job, self.candidates = settled(config, model, self._mesh, sample, self._reports, self._generator, compiler)
        self._evaluation = self._job.evaluation()
        self._holding = hold(model, self._job, self._mesh, config, self._generator, factory, lr_schedule, compiler)
        self._generation = 0
        self._training = self._new_training()
        self._closed = False
        world.at_exit(self.close)
        world.where = lambda: f"step {self.step}, task {self._loop.task or 'none yet'}"
        self._read_first: dict[int, str] = {}
        self._first_read: Callable[[str], None] | None = self._tell_first_read if self._mesh.data > 1 else None
        if self._job.pipes > 1:
            self._share_given_weights([place for place, layer in enumerate(model.layers) if isinstance(layer, torch.nn.Module)])
        trained = self._reports.gathered(bool(self._holding.named_parameters()))
        self._trains_nothing = trained is not None and not any(trained)  # the main rank knows; an evaluation needs nothing trained
        if compiler:
            self._compile_ahead(model, sample)  # last: a faster rank may be training, and tells this one

    @property
    def is_main(self) -> bool:
        """One rank of the job: the one to print and write files."""
        return self.rank == _MAIN

    @property
    def reads(self) -> bool:
        """This rank draws the batches of its replica; the others ignore them."""
        return self._mesh.pipe_rank == self._job.placement.rank_of(0)

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
        """This rank's trained parameters by the names of `model.sequential(seed)`; those of all ranks are what that lists.

        A tied weight is listed on every rank that holds a copy, by the name of its first layer, and once on each.
        """
        return list(self._holding.named_parameters())

    @one_at_a_time
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
            ModelError: no weight is trained, or the loss depends on none.
        """
        session, state = self._training, self._training.state
        with self._working():
            if self._trains_nothing:
                raise ModelError("no weight of the model is trained; expected a layer whose parameters have requires_grad = True")
            if self.reads and not isinstance(batches, Iterator):
                raise DataError(
                    f"batches is of type {type(batches).__name__}; expected an iterator, made once before the first step, such as "
                    "iter(loader): anything else would give the same first microbatches in every step"
                )
            state.ask_step()
            session.reader = self._reader(self._job, batches, self._first_read)
            with self._trace.step():
                self._loop.run(session, lambda: state.finished or state.cut_short)
            whole = not state.cut_short
            if not whole:
                self._trace.drop_step()
                self._begin_again()
        if not whole:
            assert state.end is not None
            _, ended = self._job.step_of(state.end)
            raise StopIteration(
                f"the batches ended after {ended} of the {self._job.microbatches} microbatches of step {self.step}, which was "
                "dropped. Catch StopIteration to go on with another iterator"
            )
        self.step += 1
        self.samples += self.config.global_batch
        return self._step_result(self.step - 1)

    @one_at_a_time
    def eval_batch(self, batches: Iterable[Any] | None, outputs: bool = False) -> EvalResult:
        """Compute the mean loss over any number of microbatches, without gradients and with dropout off.

        Leaves step, weights and random state alone.

        Args:
            batches: an iterable of this replica's microbatches, drawn to its end on pipe rank 0; replicas may have different
                numbers, and some none.
            outputs: keep what the last layer returns, for the main rank.
        Raises:
            DataError: on every rank, if no replica has a microbatch; the engine goes on.
        """
        self._generation += 1
        generation, mesh = self._generation, self._mesh
        job, last = self._evaluation, self._evaluation.last_stage
        hands = EvaluationHands(job, self._holding.stages, keeps_outputs=outputs)
        state = RankState(job, mesh.pipe_rank, replica=mesh.data_rank)
        reader = self._reader(job, batches)
        with self._working(), self._holding.evaluating():
            self._loop.run(Session(generation, state, hands, reader), lambda: state.finished)
            if mesh.pipe_rank == job.placement.rank_of(last):
                message = Message(Meaning.EVALUATED, last, 0, mesh.data_rank)
                for rank in range(self._transport.size):
                    self._reports.tell(rank, message, (*hands.losses, hands.outputs * (rank == _MAIN)), generation)
        last_ranks = [mesh.rank_of(replica, job.placement.rank_of(last)) for replica in range(mesh.data)]
        reports = self._reports.claim(Meaning.EVALUATED, 0, last_ranks, generation=generation)
        what = "the results of an evaluation"
        if state.end == 0 and not any(losses for losses, *_ in self._await(reports, what)):
            raise EmptyEvaluationError("eval_batch got no microbatch on any replica; expected one or more")
        return EvalResult(lambda: [(Losses(*losses), kept) for *losses, kept in self._await_later(reports, what)])

    @property
    def traced(self) -> bool:
        """The steps of `run.trace_steps` have been trained."""
        return self.config.run.trace_steps > 0 and self._trace.whole

    @one_at_a_time
    def timeline(self) -> Timeline | None:
        """What ran when in the steps of `run.trace_steps`, in seconds, on the main rank; every rank calls it.

        A row is a rank: those of the first replica's pipeline, then those of the next. Clocks of different nodes are taken as they are.
        """
        mine = Timeline(
            self._job.ranks * self._job.replicas,
            self._job.microbatches,
            unit="s",
            title=f"measured: {self._job}",
            schedule=self._scheduled_as(),
            spans=self._trace.spans,
            pauses=self._trace.pauses,
        )
        with self._working():
            parts = self._reports.gathered(mine.to_json())
        return Timeline.merged([Timeline.from_json(part) for part in parts]) if parts else None

    def _scheduled_as(self) -> dict[str, Any]:
        of, job = self.schedule, self._job
        return {
            "name": of.policy,
            "ranks": job.ranks,
            "microbatches": job.microbatches,
            "placement": job.placement.name,
            "chunks": of.chunks,
            "in_flight": of.in_flight,
            "order": of.order,
            "replicas": job.replicas,
            "clips": job.votes,
            "recompute": self.config.memory.recompute,
        }

    @one_at_a_time
    def broadcast(self, value: Any) -> Any:
        """What the main rank gives, on every rank; every rank calls it.

        Args:
            value: a tensor, None, bool, int, float, str, or tuples, lists and dicts of these; only the main rank's counts.
        """
        with self._working():
            return self._reports.broadcast(value)

    @one_at_a_time
    def save_checkpoint(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Save weights, optimizer state, step and data position; every rank calls it.

        When this returns the checkpoint is whole. If the job ends within, what was saved before stands. Whoever has gone back to an
        older checkpoint in the same directory saves anew from there: what came after it is set aside, and that is told.

        Args:
            path: a directory that does not exist yet, in one that all ranks share.
            extra: anything of the user's that JSON can hold.
        Raises:
            ConfigError: on every rank, if the directory exists, another process writes to the one that it is in, or `extra` is not
                JSON. Nothing is written.
            SaveError: on every rank, if the files cannot be written: the disk is full, say. Training may go on, and save later.
            DataError: there is state that is neither a tensor nor a plain value.
        """
        path = Path(path)
        with self._agreeing():
            # Replicas but the first hold the same, and so do pipes but the first.
            mine = self._holding.of_pipe(0) if self._mesh.data_rank == 0 else None
            of = self.step, self.samples, self._holding.lr, self._layers, self.config, extra or {}
            self._checkpoints.save(path, lambda: Manifest.of(*of), mine, self._ranks_of_replica(0))

    @one_at_a_time
    def load_checkpoint(self, path: str | Path, missing_ok: bool = False) -> dict[str, Any] | None:
        """Take weights, optimizer state, step and data position from a checkpoint; every rank calls it, and any number may have saved it.

        Args:
            path: a checkpoint; or a directory of some, or that of a run: then the newest undamaged one, by the step in its manifest.
            missing_ok: return None, and change nothing, where the directory holds no checkpoint or does not exist; by default that is
                an error.
        Returns:
            The user's `extra`.
        Raises:
            ConfigError: on every rank, if there is no checkpoint, it is of another model or optimizer, or (a `DamagedError`) it is
                damaged. Nothing is changed.
        """
        path = Path(path)
        with self._agreeing():
            if missing_ok and not self._reports.agreed(path.exists):
                return None
            manifest = self._checkpoints.load(path, self._holding, missing_ok)
            if manifest is None:
                return None
            self.step, self.samples = manifest.step, manifest.samples
            self._begin_again()
        return manifest.extra

    @one_at_a_time
    def own_checkpoints(self, folder: str | Path) -> None:
        """Make a directory of checkpoints this run's own; every rank calls it. Saving does the same with less haste.

        No other run may write there until `close`, and what comes after the present step there is set aside now.

        Raises:
            ConfigError: on every rank, if another run writes there.
            SaveError: on every rank, if it cannot be written to.
        """
        with self._agreeing():
            self._checkpoints.own(Path(folder), self.step)

    @property
    def loaded_from(self) -> Path | None:
        """The checkpoint that `load_checkpoint` has taken last; None before."""
        return self._checkpoints.loaded

    @one_at_a_time
    def close(self) -> None:
        """Wait until every rank has made its last call, then leave. The engine cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self._world.not_at_exit(self.close)
        with self._ending_the_job_on_failure():
            self._loop.leave()
        self._heartbeat.free()
        self._world.left()
        self._checkpoints.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        self._closed = True
        self._world.not_at_exit(self.close)
        self._world.fail(error)

    def _compile_ahead(self, model: PipelineModule, sample: Any) -> None:
        given = self._reports.agreed(
            lambda: checked_sample(sample, f"run.compile = {self.config.run.compile!r} compiles before the first step")
        )
        if self.is_main:
            print(f"axrt: compiling layers with {self.config.run.compile} ...", file=sys.stderr, flush=True)
        with self._compute.current(), self._generator.borrowed():
            compile_ahead(self._holding, model, self.config, given, self._generator)
        # The main rank alone waits here: what it tells of the first step's speed is not to count how long others compile.
        self._reports.gathered(None)

    # Sessions.

    def _new_training(self) -> Session:
        job, mesh = self._job, self._mesh
        hands = self._training_hands = TrainingHands(job, self._holding, self.config.optimizer.clip, self._tell_norms)
        state = RankState(job, mesh.pipe_rank, replica=mesh.data_rank, buckets=self._holding.holders, first_step=self.step)
        return Session(self._generation, state, hands, self._reader(job, None))

    def _reader(self, job: Job, batches: Iterable[Any] | None, first: Callable[[str], None] | None = None) -> BatchReader:
        return BatchReader(batches, job, self._mesh.data_rank, self.device, self._generator, first)

    def _begin_again(self) -> None:
        """Begin the present step under a new generation: what is still under way for the old one means nothing any more."""
        self._generation += 1
        self._loop.forget(older_than=self._generation)
        self._holding.drop()
        self._training = self._new_training()

    # What concerns ranks, not sessions.

    def _hear_rank(self, source: int, parcel: Parcel) -> None:
        if parcel.message.meaning is Meaning.READ:
            self._read_first[parcel.message.pipe] = parcel.payload
            warn_of_equal_readers(self._read_first, parcel.message.pipe)
        else:
            self._reports.hear(source, parcel)

    def _tell_norms(self, step: int, stage: int, norms: Norms) -> None:
        self._reports.tell(_MAIN, Message(Meaning.STEPPED, stage, step), norms, self._generation)

    def _tell_first_read(self, digest: str) -> None:
        self._first_read = None
        self._reports.tell(_MAIN, Message(Meaning.READ, 0, 0, self._mesh.data_rank), digest)

    def _share_given_weights(self, given: Sequence[int]) -> None:
        """Modules that are given as they are may differ between processes: every pipe takes the values of the first."""
        pipes = range(1, self._job.pipes)
        mine = [(stage, int(place), layer) for stage, of in self._holding.stages.items() for place, layer in of.layers.items()]
        mine = [(stage, place, layer) for stage, place, layer in mine if place in given]
        for stage, place, layer in mine:
            for pipe in pipes if self._holding.pipes[stage] == 0 else ():
                # Copies: a forward may change buffers while the network still reads them.
                copies = [value.detach().clone() for value in _values(layer)]
                self._reports.tell(self._rank_of(pipe, stage), Message(Meaning.VALUES, 0, place), copies)
        for stage, place, layer in mine:
            if self._holding.pipes[stage] > 0:
                from_first = self._reports.claim(Meaning.VALUES, place, [self._rank_of(0, stage)])
                (theirs,) = self._await(from_first, f"the weights of layer {place}")
                with torch.no_grad():
                    for value, its in zip(_values(layer), theirs, strict=True):
                        value.copy_(its)

    def _step_result(self, step: int) -> StepResult:
        outcome = self._training_hands.outcome(step)
        norm: Callable[[], float | None] = lambda: outcome.norm  # noqa: E731
        if outcome.norm is None and self.is_main:
            stages = self._job.stages
            norms = self._reports.claim(Meaning.STEPPED, step, self._ranks_of_replica(0), wanted=stages, generation=self._generation)
            norm = lambda: float(total_norm(self._await_later(norms, f"the gradient norm of step {step}")))  # noqa: E731
        return StepResult(step=step, loss=outcome.loss, lr=self._holding.lr, skipped=outcome.skipped, _grad_norm=norm)

    def _rank_of(self, pipe: int, stage: int) -> int:
        return self._mesh.rank_of(*self._job.placement.place_of(pipe, stage))

    def _ranks_of_replica(self, replica: int) -> list[int]:
        return [self._mesh.rank_of(replica, pipe_rank) for pipe_rank in range(self._mesh.pipe)]

    def _await(self, collected: Collected, what: str) -> list[Any]:
        if collected.whole:
            return collected.in_order()
        with self._ending_the_job_on_failure():
            return self._reports.wait(collected, what)

    def _await_later(self, collected: Collected, what: str) -> list[Any]:
        """The same for a result, which is read when its call has returned."""
        if collected.whole:
            return collected.in_order()
        with self._calls.of(f"for {what}"):
            return self._await(collected, what)

    # Around every call.

    def _check_open(self) -> None:
        if self._closed:
            raise AxrtError("this engine is closed, or has failed; expected calls before close() or inside the with block")

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._check_open()
        with self._ending_the_job_on_failure(), self._generator.borrowed():
            yield

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Around what every rank refuses alike: that leaves the engine as it is, and anything else ends the job."""
        self._check_open()
        try:
            with self._generator.borrowed():
                yield
        except (ConfigError, SaveError):
            raise
        except BaseException as error:
            self._end_the_job(error)

    @contextmanager
    def _ending_the_job_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._end_the_job(error)

    def _end_the_job(self, error: BaseException) -> NoReturn:
        self._closed = True
        error = as_failure(error)
        if not isinstance(error, AxrtError):  # ours say where by themselves
            error.add_note(f"on rank {self.rank}, {self._world.where()}")
        self._world.fail(error)


def _values(layer: torch.nn.Module) -> list[torch.Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def initialize(
    model: PipelineModule,
    optimizer: OptimizerFactory | None = None,
    lr_schedule: LrSchedule | None = None,
    config: "str | Path | Mapping[str, Any] | Config | None" = None,
    *,
    transport: Transport | None = None,
    observers: Sequence[Observer] = (),
    sample: Any = None,
    **unknown: Never,
) -> Engine:
    """Make the engine of this rank; every rank calls it alike.

    Args:
        model: layers and loss.
        optimizer: called with (name, parameter) pairs, a bucket of this rank's at a time, and pure; None takes `[optimizer]`.
        lr_schedule: `lr_schedule(step)` is a factor on the learning rate; None takes that of `[optimizer]` along with its
            optimizer, and a constant one otherwise.
        config: a TOML file, a dict of the same sections, or a `Config`.
        transport: to the other ranks, instead of the one that the launcher's environment asks for; meant for tests, since a rank
            that fails then raises and does not end the others.
        observers: told of every event of this rank's loop.
        sample: a microbatch, (inputs, targets), like those of the training, on the main rank: policy "auto" measures the layers with
            it, `run.compile` compiles them; ignored elsewhere.
        **unknown: refused, those of DeepSpeed's initialize with what axrt takes instead.
    Raises:
        ConfigError: a setting that cannot work. In a job of several ranks, rank 0 prints it and all leave with code 2.
        LaunchError: the ranks did not come up as the launcher meant.
    """
    refuse_in_a_worker()  # alone: this process is no rank, and must not start MPI
    try:
        check_arguments(unknown)
        check_use(model, optimizer)
        settings = Config.read(config)
        check_backend(settings.run.compile)
    except ConfigError as error:
        world = World() if transport else join()
        world.fail(error)
    world = World() if transport else join(settings.run.transport, settings.run.device, settings.run.start_patience_s)
    factory = optimizer or optimizer_factory(settings.optimizer)
    schedule = lr_schedule or (constant if optimizer else named_schedule(settings.optimizer, settings.run.steps))
    try:
        layers, order = dict(enumerate(map(name_of, model.layers))), {"order": digest_of_order(settings.schedule)}
        world.check_alike({**settings.as_dict(), "model layers": layers, "digest of schedule": order})
        return Engine(model, factory, schedule, settings, world, transport, observers, sample)
    except BaseException as error:
        world.fail(as_failure(error))
