"""The engine: what a user calls. Every rank makes the same calls in the same order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from axrt.checkpoint.in_memory import JobMemory
from axrt.checkpoint.job import JobCheckpoints
from axrt.checkpoint.partners import host_name
from axrt.config import Config
from axrt.errors import DataError, EmptyEvaluationError, ModelError
from axrt.model.compiler import Compiler
from axrt.model.elsewhere import ModulesElsewhere
from axrt.observe.observer import Observer
from axrt.results import EvalResult, StepResult
from axrt.runtime.exchange import Collected
from axrt.runtime.one_call import OneCall, one_at_a_time
from axrt.runtime.rank import Rank
from axrt.scheduler.simulation.timeline import Timeline
from axrt.store.recipe import Recipe
from axrt.transport import Transport
from axrt.transport.control import MAIN, ControlMessage, Topic
from axrt.world.world import World

from .guard import CallGuard
from .info import EngineInfo
from .parts import build_parts, check_alike, compile_layers, tell_once
from .saves import Position, Saves
from .user_weights import UserWeights


class Engine(EngineInfo):
    """Trains one model on the ranks of a job; made by `axrt.initialize`.

    Args:
        recipe: model, optimizer and sample, the same on every rank.
        config: settings of the run.
        world: the job that this process belongs to.
        transport: transport to the other ranks; None: the world's own.
        observers: observers that are told of every event of this rank's loop.
    Attributes:
        config: settings of the run.
        candidates: schedules that were simulated, one text each, the chosen one first; empty where
            nothing was measured.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: Config,
        world: World,
        transport: Transport | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.config = config
        self._step = self._samples = 0
        self._calls = OneCall()
        self._world = world
        self._rank = Rank(config, world, transport, observers)
        self._guard = CallGuard(self._rank, world)
        self._exchange = self._rank.exchange
        self._exchange.calls = self._calls
        memory = JobMemory(
            self._exchange,
            self.rank,
            self._rank.size,
            host_name(config.run, world.launched_as(self.rank)),
            Path(config.checkpoint.memory_dir),
        )
        if config.checkpoint.memory_every:
            memory.check(must=not world.has_lost)
        checkpoints = JobCheckpoints(self._exchange, self.rank, recipe.layers, memory=memory)
        self._guard.lets_go = checkpoints.close
        compiler = Compiler(config.run.compile) if config.run.compile else None
        parts = build_parts(recipe, config, self._rank, compiler, self._await_later)
        self._schedule, self._job, self.candidates = parts.schedule, parts.job, parts.candidates
        self._peak, self._model, self._trainer = parts.peak, parts.model, parts.trainer
        self._guard.gives_back = partial(parts.model.release, failed=True)
        self._saves = Saves(checkpoints, memory, parts, recipe.layers)
        held = [place for place, _ in parts.model.layers()]
        self._weights = UserWeights(parts, ModulesElsewhere(recipe.model.layers, held))
        # Not before: another rank may be training, and while this one listens it hears of that.
        tell_once(self._rank, parts.notes)
        world.at_exit(self.close)
        world.where = lambda: f"step {self.step}, task {self._rank.loop.task or 'none yet'}"
        check_alike(parts)
        self._trains_nothing = parts.trains_nothing  # an evaluation needs nothing trained
        if compiler:  # last: a faster rank may be training, and tells this one
            compile_layers(parts, recipe)

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
        self._saves.end_reading()  # before anybody writes to them
        if self._guard.closed:
            return list(self._model.named_parameters())
        with self._guard.ending_the_job_on_failure():
            return self._weights.given_out()

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
        with self._guard.working():
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
            self._weights.publish()
            self._weights.check()
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
        with self._guard.working():
            self._weights.publish()
            result = self._trainer.evaluate(batches, outputs)
        if result is None:
            raise EmptyEvaluationError(
                "eval_batch got no microbatch on any replica; expected one or more"
            )
        return result

    @one_at_a_time
    def timeline(self) -> Timeline | None:
        """The timeline of the steps of `run.trace_steps`, in seconds; every rank calls it.

        A row is a rank: those of the first replica's pipeline, then those of the next. Clocks of
        different nodes are taken as they are.

        Returns:
            The timeline on the main rank; None on the others.
        """
        mine = self._measured_timeline()
        with self._guard.working():
            parts = self._exchange.gathered(mine.to_json())
        return Timeline.merged([Timeline.from_json(part) for part in parts]) if parts else None

    @one_at_a_time
    def peak_bytes(self) -> list[int] | None:
        """The most memory that each rank has had since just before it built its layers; every rank
        calls it.

        Returns:
            By rank, bytes on the accelerator, or the growth of the process where there is none; on
            the main rank. None on the others.
        """
        with self._guard.working():
            return self._exchange.gathered(self._peak.num_bytes())

    @one_at_a_time
    def broadcast(self, value: Any) -> Any:
        """The main rank's value, on every rank; every rank calls it.

        Args:
            value: a tensor, None, bool, int, float, str, or tuples, lists and dicts of these; only
                the main rank's counts.
        """
        with self._guard.working():
            return self._rank.user_tensors.given(self._exchange.broadcast(value))

    @one_at_a_time
    def gathered(self, value: Any) -> list[Any] | None:
        """The values of all ranks, in order, on the main rank; None on the others. Every rank calls
        it.

        Args:
            value: what `broadcast` takes.
        """
        with self._guard.working():
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
        with self._guard.agreeing():
            self._trainer.settle()
            self._weights.publish()
            if wait:
                self._saves.save(path, self._position(extra), replace)
                return True
            return self._saves.begin_to_save(path, self._position(extra), then, replace)

    @one_at_a_time
    def finish_saving(self) -> None:
        """Wait for the end of a save and of copies in memory that are under way, if there are any;
        every rank calls it.

        Raises:
            SaveError: its files could not be written; raised on every rank. Training may go on.
        """
        with self._guard.agreeing():
            self._saves.finish()

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
        with self._guard.agreeing():
            self._trainer.settle()
            self._weights.publish()
            self._saves.keep_in_memory(Path(folder), self._position(extra))

    @one_at_a_time
    def drop_memory(self, folder: str | Path) -> None:
        """Remove what `keep_in_memory` has kept of a run, as when it is done; every rank calls
        it."""
        with self._guard.agreeing():
            self._saves.drop_memory(Path(folder))

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
        with self._guard.agreeing():
            self._trainer.settle()
            if missing_ok and not self._exchange.agreed(path.exists):
                return None
            manifest = self._saves.load(path, missing_ok)
            if manifest is None:
                return None
            self._step, self._samples = manifest.step, manifest.samples
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
        with self._guard.agreeing():
            self._saves.own(Path(folder), self.step)

    def answer_in(self, run: str | Path) -> None:
        """Answer `axrt inspect RUN` from now on: what this rank does, what it lacks and from whom.

        Args:
            run: directory that all ranks and whoever asks can see; it need not exist yet.
        """
        self._rank.inspection.begin(Path(run))

    def ask_to_stop(self) -> None:
        """Tell the main rank that somebody has asked this one to end the run."""
        self._exchange.tell(MAIN, ControlMessage(Topic.STOPS, self._rank.number), None)

    def when_asked_to_stop(self, hear: Callable[[], None]) -> None:
        """Have a function called whenever a rank does `ask_to_stop`; on the main rank alone."""
        self._rank.hears[Topic.STOPS] = lambda control, payload: hear()

    @property
    def loaded_from(self) -> Path | None:
        """The checkpoint that `load_checkpoint` has taken last; None before."""
        return self._saves.loaded

    @one_at_a_time
    def close(self) -> None:
        """Wait until every rank has made its last call, then leave. The engine cannot be used
        afterwards."""
        if self._guard.closed:
            return
        self._guard.closed = True
        self._world.not_at_exit(self.close)
        with self._guard.ending_the_job_on_failure():
            self._saves.finish_at_the_end()
            self._trainer.settle()
            self._weights.publish()
            self._weights.gather()
            self._rank.leave(self._calls.last.number)
        self._model.release()
        self._world.left()
        self._saves.close()

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
        self._guard.closed = True
        self._world.not_at_exit(self.close)
        self._world.fail(error)

    def _position(self, extra: Mapping[str, Any] | None) -> Position:
        return Position(self.step, self.samples, extra or {})

    def _await_later(self, collected: Collected, what: str) -> list[Any]:
        """All parts of a result that is read after its call has returned."""
        if collected.whole:
            return collected.in_order()
        with self._calls.of(f"for {what}"), self._guard.ending_the_job_on_failure():
            return self._exchange.wait(collected, what)
