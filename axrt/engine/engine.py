"""The engine: what a user calls. Every rank makes the same calls in the same order."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Never, NoReturn, Self

import torch

from axrt.autoschedule import resolve
from axrt.checkpoint.in_memory import JobMemory
from axrt.checkpoint.job import JobCheckpoints
from axrt.checkpoint.keepers import host_name
from axrt.checkpoint.layers import check_savable
from axrt.checkpoint.manifest import Manifest
from axrt.checkpoint.pieces import cut_of
from axrt.checkpoint.snapshot import Snapshot, SnapshotArena
from axrt.checkpoint.writing import Records, keep_layers, save_layers, save_shards
from axrt.config import Config, Schedule
from axrt.device import CPU, choose
from axrt.errand import Put, Steps
from axrt.errors import (
    AxrtError,
    ConfigError,
    DataError,
    EmptyEvaluationError,
    ModelError,
    PeerLostError,
    SaveError,
)
from axrt.exchange import Collected
from axrt.given_weights import share_given_weights
from axrt.groups import neighbours
from axrt.launch import World, join
from axrt.ledger.advice import check_fits
from axrt.ledger.ledger import Tier
from axrt.ledger.measured import in_scratch
from axrt.ledger.peak import Peak
from axrt.ledger.prediction import Predictor
from axrt.local_model import LocalModel, local_model
from axrt.model.compiler import Compiler
from axrt.model.given import GivenElsewhere
from axrt.model.hidden import check_loss_stays_with_its_stage
from axrt.model.layers import TiedLayerSpec, name_of
from axrt.model.module import PipelineModule
from axrt.note import MAIN, Note, Topic
from axrt.observe.asking import asked, table
from axrt.observe.observer import Observer
from axrt.observe.origin import processes_of
from axrt.one_call import OneCall, one_at_a_time
from axrt.precompile import precompile
from axrt.preflight import (
    as_failure,
    check_arguments,
    check_backend,
    check_kept,
    check_optimizers,
    check_tied,
    check_use,
    checked_sample,
    digests_of_tied,
    refuse_in_a_worker,
)
from axrt.rank import Rank
from axrt.results import EvalResult, StepResult
from axrt.schedule import digest_of_order
from axrt.scheduler.policies import FIXED, AlongPlan
from axrt.scheduler.schedules import LOOSELY, STRICTLY
from axrt.scheduler.timeline import Timeline
from axrt.shard_exchange import ShardExchange
from axrt.store.bucket import LrSchedule, OptimizerFactory, constant
from axrt.store.presets import lr_schedule as named_schedule
from axrt.store.presets import optimizer_factory
from axrt.store.saved_piece import wholes_of
from axrt.store.scratch import scratch_tier
from axrt.trainer import Trainer
from axrt.transport import Transport

_ANSWERS_S = 3.0  # in which ranks say what they do, before the job ends


class Engine:
    """Trains one model on the ranks of a job; made by `axrt.initialize`.

    Args:
        model: layers and loss, the same on every rank.
        factory: function that makes the optimizer of a bucket.
        lr_schedule: function that gives the factor on the learning rate for a step.
        config: settings of the run.
        world: the job that this process belongs to.
        transport: transport to the other ranks; None: the world's own.
        observers: observers that are told of every event of this rank's loop.
        sample: a microbatch, (inputs, targets), to measure where the settings leave the schedule
            open, and for `run.compile` to compile; only the main rank's counts.
    Attributes:
        config: settings of the run.
        candidates: schedules that were simulated, one text each, the chosen one first; empty where
            nothing was measured.
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
        self.config = config
        self._step = self._samples = 0
        self._calls = OneCall()
        self._closed = False
        self._snapshot: Snapshot | None = None
        self._world = world
        self._layers = [name_of(layer) for layer in model.layers]
        self._rank = Rank(config, world, transport, observers)
        self._exchange = self._rank.exchange
        self._exchange.calls = self._calls
        self._memory = JobMemory(
            self._exchange,
            self.rank,
            self._rank.size,
            host_name(config.run, world.launched_as(self.rank)),
            Path(config.checkpoint.memory_dir),
        )
        if config.checkpoint.memory_every:
            self._memory.check(must=not world.has_lost)
        self._checkpoints = JobCheckpoints(
            self._exchange, self.rank, self._layers, memory=self._memory
        )
        compiler = Compiler(config.run.compile) if config.run.compile else None
        resolved = resolve(config, model, self._rank, sample, compiler)
        self._schedule, self._job = resolved.schedule, resolved.job
        self.candidates = list(resolved.candidates)
        if config.memory.device_gb or config.memory.scratch_gb:
            self._check_memory(model, factory, sample)
        self._peak = Peak(self._rank.device)
        if self._job.pipes > 1:
            share_given_weights(self._rank, self._job, model.layers)
        self._check_tied(model)
        first = self._job.cuts[self._job.last_stage]
        check_loss_stays_with_its_stage(model.loss_fn, model.layers, first)
        build = partial(self._build, model, factory, lr_schedule, compiler)
        offloads = config.memory.uses_scratch
        self._model = self._exchange.made_by_all(build) if offloads else build()
        check_savable(self._model)
        pipes = self._model.pipes
        self._shards = ShardExchange(self._exchange, self._job, self._rank.mesh, pipes)
        self._gives_out_weights = bool(self._model.given)  # whose weights the user has already
        self._elsewhere = GivenElsewhere(model.layers, [p for p, _ in self._model.layers()])
        if config.parallel.activations == "library":
            self._rank.transport.open_lines(self._rank.device, neighbours(self._rank, self._job))
        self._trainer = Trainer(
            self._rank, self._job, self._model, config.optimizer, self._shards, self._await_later
        )
        # Not before: another rank may be training, and while this one listens it hears of that.
        of_main = resolved.notes if self.is_main else ()
        self._tell_once([*of_main, *self._model.notes(config.memory)])
        world.at_exit(self.close)
        world.where = lambda: f"step {self.step}, task {self._rank.loop.task or 'none yet'}"
        if self._model.narrow is not None and config.precision.keep:
            found = self._exchange.gathered(sorted(self._model.narrow.classes))
            classes = {name for of_rank in found or () for name in of_rank}
            self._exchange.agreed(lambda: check_kept(config.precision.keep, classes))
        if self._job.replicas > 1 or self._job.pipes > 1:
            optimizers = self._exchange.gathered(self._model.optimizers())
            self._exchange.agreed(lambda: check_optimizers(optimizers or ()))
        trained = self._exchange.gathered(bool(self._model.named_parameters()))
        # the main rank knows; an evaluation needs nothing trained
        self._trains_nothing = trained is not None and not any(trained)
        if compiler:
            # last: a faster rank may be training, and tells this one
            self._precompile(model, sample)

    def _check_tied(self, model: PipelineModule) -> None:
        if any(isinstance(layer, TiedLayerSpec) for layer in model.layers):
            of_ranks = self._exchange.gathered(digests_of_tied(model.layers))
            self._exchange.agreed(lambda: check_tied(of_ranks or ()))

    @property
    def rank(self) -> int:
        """This process's rank in the job, 0 <= rank < number of ranks."""
        return self._rank.number

    @property
    def step(self) -> int:
        """Number of steps that are done."""
        return self._step

    @property
    def samples(self) -> int:
        """Number of samples of the data that the steps have used up, over all replicas.

        A microbatch counts as `schedule.microbatch_size` samples.
        """
        return self._samples

    @property
    def schedule(self) -> Schedule:
        """The settings of the schedule, with the policy that was chosen where they left it open."""
        return self._schedule

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self._rank.device

    @property
    def is_main(self) -> bool:
        """True on one rank of the job: the one to print and write files."""
        return self._rank.is_main

    @property
    def reads(self) -> bool:
        """True if this rank draws the batches of its replica; the other ranks ignore them."""
        return self._rank.mesh.pipe_rank == self._job.placement.rank_of(0)

    @property
    def num_trained(self) -> int:
        """Number of elements of the parameters that this rank's buckets train."""
        buckets = self._model.all_buckets
        return sum(one.numel() for bucket in buckets for _, one in bucket.named)

    @property
    def pipe_rank(self) -> int:
        """Index of this rank in its pipeline."""
        return self._rank.mesh.pipe_rank

    @property
    def computes_loss(self) -> bool:
        """True if this rank computes the loss of its replica; the last stage may be on any."""
        return self._job.last_stage in self._job.placement.stages_of(self._rank.mesh.pipe_rank)

    @property
    def pipe_size(self) -> int:
        """Number of ranks of a pipeline."""
        return self._job.ranks

    @property
    def data_rank(self) -> int:
        """Index of this rank's replica, and so of the part of the data that it reads."""
        return self._rank.mesh.data_rank

    @property
    def data_size(self) -> int:
        """Number of replicas of the pipeline (data parallelism)."""
        return self._job.replicas

    @property
    def launch_command(self) -> str:
        """The beginning of a command line that starts such a job, such as "mpirun -n 4 ", a space
        at its end; "" for one process alone."""
        return self._world.command

    def named_parameters(self) -> list[tuple[str, Any]]:
        """This rank's trained parameters by the names of `model.sequential(seed)`.

        All ranks together list what that lists. A tied weight is listed once on every rank that
        holds a copy, by the name of its first layer; what is written to it there reaches all layers
        of that rank. The parameters are the engine's own, not copies. Where `precision.weights` is
        narrow they are the float32 masters, and what is written to them in place counts from the
        next call on.

        With `memory.zero` they are the weights as layers have them. Narrow ones may not be written
        to then. With `memory.zero = 3` their values are elsewhere between calls: they have names
        and shapes, all values are nan, and none may be written to.

        Of masters that are offloaded these are copies on the CPU. What is written to them before
        the next call counts, and after it they are copies of the past.
        """
        if self._snapshot:
            self._snapshot.end()  # before anybody writes to them
        self._gives_out_weights = True
        if not self._closed:
            self._model.note_given_out()
        if self._model.scratch is None or self._closed:
            return list(self._model.named_parameters())
        with self._ending_the_job_on_failure():
            self._trainer.settle()
            return list(self._model.shown_parameters())

    @one_at_a_time
    def train_batch(self, batches: Iterable[Any] | None) -> StepResult:
        """Train one step: forwards and backwards of all its microbatches, and the optimizer.

        Args:
            batches: iterator of this replica's microbatches, (inputs, targets). Each call draws
                `schedule.microbatches` of them, on pipe rank 0 only, and the next call goes on
                where this one stopped. Other ranks ignore it.
        Returns:
            The result, once this rank's tasks of the step are done, the optimizer included. There
            is no barrier.
        Raises:
            StopIteration: the iterator ended before the step was whole; raised on every rank. The
                step is dropped, but buffers, such as running means, keep what they have seen. The
                engine goes on.
            DataError: `batches` is no iterator, or gave no pair.
            ModelError: no weight is trained, or the loss depends on none.
            NonFiniteLossError: a loss is infinite or not a number.
        """
        with self._working():
            if self._trains_nothing:
                raise ModelError(
                    "no weight of the model is trained; expected a layer whose parameters have "
                    "requires_grad = True"
                )
            if self.reads and not isinstance(batches, Iterator):
                raise DataError(
                    f"batches is of type {type(batches).__name__}; expected an iterator, made once "
                    "before the first step, such as "
                    "iter(loader): anything else would give the same first microbatches in every "
                    "step"
                )
            self._publish()
            if self._model.listed:
                self._model.listed.check()
            if text := self._elsewhere.told():
                print(f"axrt: rank {self.rank}: {text}", file=sys.stderr, flush=True)
            whole = self._trainer.train(batches)
            if not whole:
                ended = self._trainer.ended_after
                self._rank.trace.drop_step()
                self._trainer.begin_again(self.step)
        if not whole:
            raise StopIteration(
                f"the batches ended after {ended} of the {self._job.drawn_a_step} microbatches of "
                f"step {self.step}, which was "
                "dropped. Catch StopIteration to go on with another iterator"
            )
        self._step += 1
        self._samples += self.config.global_batch
        return self._trainer.step_result(self.step - 1)

    @one_at_a_time
    def eval_batch(self, batches: Iterable[Any] | None, outputs: bool = False) -> EvalResult:
        """Compute the mean loss over any number of microbatches, without gradients and with dropout
        off.

        Step, weights and random state stay as they are.

        Args:
            batches: iterable of this replica's microbatches, (inputs, targets), drawn to its end on
                pipe rank 0; replicas may have different numbers, and some none.
            outputs: True to keep what the last layer returns, for the main rank.
        Raises:
            DataError: no replica has a microbatch; raised on every rank. The engine goes on.
        """
        with self._working():
            self._publish()
            result = self._trainer.evaluate(batches, outputs)
        if result is None:
            raise EmptyEvaluationError(
                "eval_batch got no microbatch on any replica; expected one or more"
            )
        return result

    @property
    def along_a_plan(self) -> bool:
        """The schedule follows a plan that was made from costs."""
        return isinstance(self._job.policy, AlongPlan)

    @property
    def placement(self) -> str:
        """The name of the placement of stages on ranks."""
        return self._job.placement.name

    @property
    def cuts(self) -> tuple[int, ...]:
        """The indices of the layers at which stages begin, then the number of layers."""
        return tuple(self._job.cuts)

    @property
    def traced(self) -> bool:
        """True once the steps of `run.trace_steps` have been trained."""
        return self.config.run.trace_steps > 0 and self._rank.trace.whole

    @one_at_a_time
    def timeline(self) -> Timeline | None:
        """The timeline of the steps of `run.trace_steps`, in seconds; every rank calls it.

        A row is a rank: those of the first replica's pipeline, then those of the next. Clocks of
        different nodes are taken as they are.

        Returns:
            The timeline on the main rank; None on the others.
        """
        mine = Timeline(
            self._job.ranks * self._job.replicas,
            self._job.microbatches,
            unit="s",
            title=f"measured: {self._job}",
            schedule=self._scheduled_as(),
            reductions=self._job.reductions,
            stays=self._job.stays_a_step,
            spans=self._rank.trace.spans,
            pauses=self._rank.trace.pauses,
            messages=self._rank.trace.messages,
        )
        with self._working():
            parts = self._exchange.gathered(mine.to_json())
        return Timeline.merged([Timeline.from_json(part) for part in parts]) if parts else None

    def _scheduled_as(self) -> dict[str, Any]:
        of, job = self.schedule, self._job
        along = job.policy if isinstance(job.policy, AlongPlan) else None
        return {
            "name": FIXED if along else of.policy,
            "ranks": job.ranks,
            "microbatches": job.drawn_a_step,
            **({"share": True} if job.drawn else {}),
            "placement": job.placement.name,
            "chunks": of.chunks,
            "cuts": list(job.cuts),
            "microbatch_size": of.microbatch_size,
            "max_held": along.cap if along else of.max_held,
            "order": str(along.order) if along else of.order,
            **({"along": STRICTLY if along.strict else LOOSELY} if along else {}),
            "replicas": job.replicas,
            "clips": job.votes,
            "recompute": self.config.memory.recompute,
            "slots": job.slots,
            "held_on_device": job.held_on_device,
            "host_rooms": job.host_rooms,
            "zero": self.config.memory.zero * job.shards,
            "reductions": job.reductions,
            "gathered": self.config.memory.gathered,
            "offloads_weights": job.offloads_weights,
            "group": job.group // job.placement.pipes,
        }

    @one_at_a_time
    def peak_bytes(self) -> list[int] | None:
        """The most memory that each rank has had since just before it built its layers; every rank
        calls it.

        Returns:
            By rank, bytes on the accelerator, or the growth of the process where there is none; on
            the main rank. None on the others.
        """
        with self._working():
            return self._exchange.gathered(self._peak.num_bytes())

    def memory_bytes(self) -> dict[str, int]:
        """The memory of this rank: at most so far on its device, see `peak_bytes`; and now in
        scratch, by tier ("host", "disk"). Tiers without any are left away."""
        found = {Tier.DEVICE.value: self._peak.num_bytes()}
        for _, tier, size in in_scratch(self._model):
            found[tier.value] = found.get(tier.value, 0) + size
        return {tier: size for tier, size in found.items() if size}

    @one_at_a_time
    def broadcast(self, value: Any) -> Any:
        """The main rank's value, on every rank; every rank calls it.

        Args:
            value: a tensor, None, bool, int, float, str, or tuples, lists and dicts of these; only
                the main rank's counts.
        """
        with self._working():
            return self._rank.handover.given(self._exchange.broadcast(value))

    @one_at_a_time
    def gathered(self, value: Any) -> list[Any] | None:
        """The values of all ranks, in order, on the main rank; None on the others. Every rank calls
        it.

        Args:
            value: what `broadcast` takes.
        """
        with self._working():
            return self._exchange.gathered(value)

    @one_at_a_time
    def save_checkpoint(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        wait: bool = True,
        then: Callable[[str], None] | None = None,
        replace: bool = False,
    ) -> bool:
        """Save weights, optimizer state, step and data position; every rank calls it.

        By default the checkpoint is whole when this returns. With `wait=False` the state is copied
        to the host's memory and written from there, while later calls train: a bucket's next step
        waits for its own copy. `finish_saving` and `close` wait for the end. If the job ends
        within, earlier checkpoints stand.

        A run that has gone back to an older checkpoint in the same directory saves anew from there:
        later checkpoints are set aside, and a message says so.

        Args:
            path: directory of the checkpoint, which does not exist yet, in one that all ranks
                share.
            extra: any values of the user's that JSON can hold; None saves {}.
            wait: False to let training go on.
            then: function that is called on the main rank when a save that was not waited for has
                ended, within some later call: with "", or with what has gone wrong. None: that is
                printed.
            replace: True to remove a checkpoint that has the name, once the new one is whole.
        Returns:
            True; False where `wait` is False and an earlier save is still under way. Then nothing
            is saved.
        Raises:
            ConfigError: the directory exists, another process writes to the one that it is in, or
                `extra` is not JSON; raised on every rank. Nothing is written.
            SaveError: the files cannot be written, as on a full disk; raised on every rank.
                Training may go on, and save later.
            DataError: the optimizer or a module has state that is neither a tensor nor a plain
                value. The job ends.
        """
        path = Path(path)
        with self._agreeing():
            self._trainer.settle()
            self._publish()
            make_manifest, writers = self._manifest(extra), self._writers
            if wait:
                self._checkpoints.save(
                    path, make_manifest, self._writing(), writers, replaces=replace
                )
                return True
            snapshot = Snapshot(self._arena)
            writing = self._writing_beside(snapshot)
            told = then or self._tell_fault
            has_begun = self._checkpoints.begin_to_save(
                path, make_manifest, writing, writers, told, replace
            )
            if has_begun:  # else the one before is still under way
                self._snapshot = snapshot
            return has_begun

    @one_at_a_time
    def finish_saving(self) -> None:
        """Wait for the end of a save and of copies in memory that are under way, if there are any;
        every rank calls it.

        Raises:
            SaveError: its files could not be written; raised on every rank. Training may go on.
        """
        with self._agreeing():
            self._memory.finish()
            if fault := self._checkpoints.finish():
                raise SaveError(fault)

    @one_at_a_time
    def keep_in_memory(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Keep a copy of each rank's state in the memory of its host and of another one, while
        later calls train; every rank calls it. It waits for the end of the copy before.

        The copies outlive the job. A job that is started again on the same hosts, and loads
        `folder`, goes on from them where they are newer than every checkpoint there. Where a host
        was lost its ranks get theirs from the other one.

        Args:
            folder: folder of the run's checkpoints, which all ranks share.
            extra: those of `save_checkpoint`.
        Raises:
            ConfigError: all ranks are on one host, or `extra` is not JSON; raised on every rank.
            SaveError: memory cannot be written to.
        """
        with self._agreeing():
            self._trainer.settle()
            self._publish()
            make = self._manifest(extra)
            self._memory.keep(
                Path(folder),
                cut_of(self._model),
                make,
                lambda path, queue: keep_layers(path, self._model, queue),
            )

    @one_at_a_time
    def drop_memory(self, folder: str | Path) -> None:
        """Remove what `keep_in_memory` has kept of a run, as when it is done; every rank calls
        it."""
        with self._agreeing():
            self._memory.drop(Path(folder))

    def _manifest(self, extra: Mapping[str, Any] | None) -> Callable[[], Manifest]:
        """What makes the manifest of the state of now, without files."""
        scale = self._model.loss_scale.saved(self.step) if self._model.loss_scale else None
        lr, layers = self._model.lr, self._layers
        of = (self.step, self.samples, lr, layers, self.config, extra or {}, scale)
        return partial(Manifest.of, *of)

    @one_at_a_time
    def load_checkpoint(self, path: str | Path, missing_ok: bool = False) -> dict[str, Any] | None:
        """Take weights, optimizer state, step and data position from a checkpoint; every rank calls
        it.

        Any number of ranks may have saved it.

        Args:
            path: a checkpoint, a directory of checkpoints, or the directory of a run. Of several,
                the newest undamaged one is taken, by the step in its manifest.
            missing_ok: True to return None, and change nothing, where the directory holds no
                checkpoint or does not exist; by default that is an error.
        Returns:
            The user's `extra`; None where `missing_ok` allows that there is no checkpoint.
        Raises:
            ConfigError: there is no checkpoint, it is of another model or optimizer, or it is
                damaged (a `DamagedError`); raised on every rank. Nothing is changed.
            AxrtError: a file has changed while it was loaded. The job ends.
        """
        path = Path(path)
        with self._agreeing():
            self._trainer.settle()
            if missing_ok and not self._exchange.agreed(path.exists):
                return None
            self._model.shown.clear()  # what was written to copies is of before
            manifest = self._checkpoints.load(path, self._model, missing_ok)
            if manifest is None:
                return None
            self._step, self._samples = manifest.step, manifest.samples
            if self._model.loss_scale:
                self._model.loss_scale.restore(self.step, manifest.loss_scale)
            self._trainer.begin_again(self.step)
        return manifest.extra

    @one_at_a_time
    def own_checkpoints(self, folder: str | Path) -> None:
        """Make a directory of checkpoints this run's own; every rank calls it.

        No other run may write there until `close`, and checkpoints of later steps than the present
        one are set aside now. Saving does the same when it is needed.

        Args:
            folder: directory of checkpoints.
        Raises:
            ConfigError: another run writes there; raised on every rank.
            SaveError: the directory cannot be written to; raised on every rank.
        """
        with self._agreeing():
            self._checkpoints.own(Path(folder), self.step)

    def answer_in(self, run: str | Path) -> None:
        """Answer `axrt inspect RUN` from now on: what this rank does, what it lacks and from whom.

        Args:
            run: directory that all ranks and whoever asks can see; it need not exist yet.
        """
        self._rank.inspection.begin(Path(run))

    def ask_to_stop(self) -> None:
        """Tell the main rank that somebody has asked this one to end the run."""
        self._exchange.tell(MAIN, Note(Topic.STOPS, self._rank.number), None)

    def when_asked_to_stop(self, hear: Callable[[], None]) -> None:
        """Have a function called whenever a rank does `ask_to_stop`; on the main rank alone."""
        self._rank.hears[Topic.STOPS] = lambda note, payload: hear()

    @property
    def loaded_from(self) -> Path | None:
        """The checkpoint that `load_checkpoint` has taken last; None before."""
        return self._checkpoints.loaded

    @one_at_a_time
    def close(self) -> None:
        """Wait until every rank has made its last call, then leave. The engine cannot be used
        afterwards."""
        if self._closed:
            return
        self._closed = True
        self._world.not_at_exit(self.close)
        with self._ending_the_job_on_failure():
            self._checkpoints.finish()
            self._memory.finish()
            self._trainer.settle()
            self._publish()
            if self._job.shards and (self._job.stays or self._model.narrow is not None):
                self._gather_masters()
            self._rank.leave(self._calls.last.number)
        self._model.release()
        self._world.left()
        self._checkpoints.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        self._closed = True
        self._world.not_at_exit(self.close)
        self._world.fail(error)

    def _build(
        self,
        model: PipelineModule,
        factory: OptimizerFactory,
        lr_schedule: LrSchedule,
        compiler: Compiler | None,
    ) -> LocalModel:
        memory, device = self.config.memory, self._rank.device
        offloads_stash = self._job.offloads_stash(self._rank.mesh.pipe_rank)
        needs_scratch = memory.offload != "none" or offloads_stash
        return local_model(
            model,
            self._job,
            self._rank.mesh,
            self.config,
            self._rank.generator,
            factory,
            lr_schedule,
            compiler,
            scratch_tier(memory, device) if needs_scratch else None,
        )

    @property
    def _writers(self) -> list[int]:
        """The ranks that take part in a save. Replicas but the first hold the same, where state is
        not sharded, and so do pipes but the first."""
        return (
            list(range(self._rank.size)) if self._job.shards else self._trainer.ranks_of_replica(0)
        )

    def _writing(self) -> Callable[[Path], Steps[Records]] | None:
        """What writes the layers of this rank into a checkpoint."""
        if self._job.shards:
            return lambda directory: save_shards(directory, self._model, self._shards)
        mine = self._model.of_pipe(0)
        return (lambda directory: save_layers(directory, mine)) if self.data_rank == 0 else None

    def _writing_beside(self, snapshot: Snapshot) -> Callable[[Path, Put], Steps[Records]] | None:
        """The same, from a snapshot."""
        if self.rank not in self._writers:
            return None
        if self._job.shards:
            return lambda directory, put: save_shards(
                directory, self._model, self._shards, snapshot, put
            )
        return lambda directory, put: save_layers(directory, self._model.of_pipe(0), snapshot, put)

    @cached_property
    def _arena(self) -> SnapshotArena:
        return SnapshotArena(self._rank.device, self.config.memory.uses_scratch)

    def _tell_fault(self, fault: str) -> None:
        if fault:
            print(f"axrt: {fault}", file=sys.stderr, flush=True)

    def _gather_masters(self) -> None:
        """Bring the masters of all layers here, where each rank keeps a shard of them: the modules
        will have them when they are given back."""
        for stage, of in sorted(self._model.stages.items()):
            for place, layer in sorted((int(place), layer) for place, layer in of.layers.items()):
                if self._job.offloads_weights and place not in self._model.given:
                    continue
                mine = self._model.pieces_of(layer, with_state=False)
                parts = self._shards.for_all(stage, place, mine)
                wholes = wholes_of(self._model.shapes_of(layer), parts)
                for bucket in self._model.buckets_with(layer):
                    bucket.give_back_as({name: of.master for name, of in wholes.items()})

    def _check_memory(self, model: PipelineModule, factory: OptimizerFactory, sample: Any) -> None:
        settings = replace(self.config, schedule=self._schedule)
        self._exchange.agreed(
            lambda: check_fits(Predictor(model, factory, sample), settings, self._rank.size)
        )

    def _precompile(self, model: PipelineModule, sample: Any) -> None:
        given = self._exchange.agreed(
            lambda: checked_sample(
                sample, f"run.compile = {self.config.run.compile!r} compiles before the first step"
            )
        )
        if self.is_main:
            print(
                f"axrt: compiling layers with {self.config.run.compile} ...",
                file=sys.stderr,
                flush=True,
            )
        with self._rank.loop.computing(), self._rank.generator.borrowed():
            precompile(self._model, model, self.config, given, self._rank.generator)
        # The main rank alone waits here: the speed that it shows for the first step should not
        # include the time that others compile.
        self._exchange.gathered(None)

    def _await_later(self, collected: Collected, what: str) -> list[Any]:
        """All parts of a result that is read after its call has returned."""
        if collected.whole:
            return collected.in_order()
        with self._calls.of(f"for {what}"), self._ending_the_job_on_failure():
            return self._exchange.wait(collected, what)

    def _tell_once(self, notes: Sequence[str]) -> None:
        """Print what ranks have to say, each text once."""
        told = self._exchange.gathered(list(notes)) or ()
        for text in dict.fromkeys(text for of_rank in told for text in of_rank):
            print(f"axrt: {text}", file=sys.stderr, flush=True)

    def _publish(self) -> None:
        """Let layers have what the user has written to weights between two calls."""
        if self._gives_out_weights:
            with self._rank.loop.computing():
                self._model.reach_all_copies()
        if self._job.shards or self._job.offloads_weights:
            with self._rank.loop.computing():
                self._model.keep_memory()
        if self._model.has_masters:
            if self._model.shown:
                self._trainer.settle()
            with self._rank.loop.computing():
                self._model.publish_masters(self._gives_out_weights)

    # Around every call.

    def _check_open(self) -> None:
        if self._closed:
            raise AxrtError(
                "this engine is closed, or has failed; expected calls before close() or inside the "
                "with block"
            )

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._check_open()
        with self._ending_the_job_on_failure(), self._rank.generator.borrowed():
            yield
            self._rank.loop.flush()

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Context of calls that every rank refuses alike: a refusal leaves the engine as it is, and
        any other error ends the job."""
        self._check_open()
        try:
            with self._rank.generator.borrowed():
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

    def _tell_what_all_wait_for(self) -> None:
        """Print what `axrt inspect` would, when the patience ends."""
        inspection = self._rank.inspection
        if inspection.run is None:
            return
        with suppress(OSError):  # the job ends all the same
            answers = asked(inspection.run, False, _ANSWERS_S, inspection.answer_waiting)
            lines = table(answers, processes_of(inspection.run)) if answers else ()
            print(*lines, sep="\n", file=sys.stderr, flush=True)

    def _end_the_job(self, error: BaseException) -> NoReturn:
        self._closed = True
        error = as_failure(error)
        if isinstance(error, PeerLostError) and not self._world.survives:
            self._tell_what_all_wait_for()
        self._rank.inspection.stop()
        if self._world.survives:
            self._checkpoints.close()  # this process may go on with another engine
        if not isinstance(error, AxrtError):  # ours say where by themselves
            error.add_note(f"on rank {self.rank}, {self._world.where()}")
        try:
            self._model.release(failed=True)
        except Exception as second:  # such as the device's, which has failed already
            error.add_note(f"the user's modules were not given back: {second}")
        self._world.fail(error)


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
    world = world or (
        World(choose(settings.run.device, None))
        if transport
        else join(settings.run.transport, settings.run.device, settings.run.start_patience_s)
    )
    factory = optimizer or optimizer_factory(settings.optimizer)
    schedule = lr_schedule or (
        constant if optimizer else named_schedule(settings.optimizer, settings.run.steps)
    )
    try:
        layers, order = (
            dict(enumerate(map(name_of, model.layers))),
            {"order": digest_of_order(settings.schedule)},
        )
        world.check_alike(
            {**settings.as_dict(), "model layers": layers, "digest of schedule": order}
        )
        return Engine(model, factory, schedule, settings, world, transport, observers, sample)
    except BaseException as error:
        world.fail(as_failure(error))
