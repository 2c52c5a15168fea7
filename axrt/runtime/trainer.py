"""Runs sessions on a rank: the training, from step to step, and evaluations; each has a brain,
workers and a reader."""

# Every rank counts sessions alike. Parcels that are still under way for an old session are dropped
# by a new one.
#
# A step ends for a rank when its own stages have stepped and its share of losses and votes has been
# read; no barrier says that all have. A rank may be a step ahead of another one, so parcels say
# which session they are for, and messages which step.
#
# Norms without a vote are nobody's business but the caller's. They travel as control messages, for
# which `grad_norm` alone waits. In an evaluation forwards wait for no weights, since no step
# changes them, and its backwards carry nothing: they keep the bounds on what is in flight.

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from axrt.config import Optimizer
from axrt.model.evaluation import Outputs
from axrt.model.joints import Team
from axrt.model.preflight import warn_of_equal_readers
from axrt.model.stage import Stage
from axrt.results import EvalResult, StepResult
from axrt.scheduler.job import Job, StageCopy
from axrt.scheduler.message import Meaning
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.rules.clipping import voters_of
from axrt.scheduler.rules.collectives import by_rank
from axrt.store.local_model import LocalModel
from axrt.store.norms import Norms, total_norm
from axrt.transport.control import MAIN, ControlMessage, Topic
from axrt.workers.collectives import CollectiveWorker
from axrt.workers.evaluation import EvaluationWorker, WeightsOnDemand
from axrt.workers.gradients import GradientWorker
from axrt.workers.offload import OffloadWorker
from axrt.workers.slices import SliceMail
from axrt.workers.slot_numbers import SlotNumbers
from axrt.workers.stages import StageWorker
from axrt.workers.stash import StashWorker
from axrt.workers.stepping import SteppingWorker
from axrt.workers.weights import WeightsWorker, shard_of
from axrt.workers.worker import Land, Mail, Worker, Workers

from .exchange import Collected
from .groups import groups_on
from .losses import Losses, losses_of_members
from .rank import Rank
from .reader import BatchReader
from .session import Session
from .shard_exchange import ShardExchange
from .sharing_reader import SharingReader

Wait = Callable[[Collected, str], list[Any]]


class Trainer:
    """The sessions of a rank.

    Args:
        wait: function that waits for all parts of a collection, called with a name for them; also
            between two calls of the user's.
    Attributes:
        training: session of the training.
    """

    def __init__(
        self,
        rank: Rank,
        job: Job,
        model: LocalModel,
        optimizer: Optimizer,
        shards: ShardExchange,
        wait: Wait,
    ) -> None:
        self._rank, self._job, self._model, self._wait = rank, job, model, wait
        self._shards = shards
        self._clip = optimizer.clip
        self._evaluation = job.evaluation()
        self._groups = groups_on(rank, job, model.copies)
        self._generation = 0
        self._sharing = self._shared() if job.drawn else None
        self._read_first: dict[int, str] = {}
        self._tells_first_read = job.replicas > 1
        rank.hears[Topic.READ] = self._hear_first_read
        self._begin(step=0)

    # The training.

    def train(self, batches: Iterable[Any] | None) -> bool:
        """Run one step. Returns False if the batches ended before it was whole."""
        state = self.training.state
        state.ask_step()
        first = self._tell_first_read if self._tells_first_read else None
        own = self._reader(self._job, batches, first)
        if self._sharing is None:
            self.training.reader = own
        else:
            step, _ = self._job.step_of(state.asked - 1)
            self.training.reader = self._sharing.of_step(step, self._generation, own)
        with self._rank.trace.step():
            self._rank.loop.run(self.training, lambda: state.finished or state.cut_short)
        return not state.cut_short

    @property
    def ended_after(self) -> int:
        """Number of microbatches that the step had before it was cut short."""
        end = self.training.state.end
        assert end is not None
        return self._job.step_of(end)[1]

    def settle(self) -> None:
        """Take offloaded state of steps that are done back to where it belongs; between calls it
        may still be under way."""
        self._rank.loop.settle(self.training)

    def begin_again(self, step: int) -> None:
        """Begin a step under a new generation; all work under way is dropped but for offloaded
        state on its way back."""
        self.settle()
        self._generation += 1
        self._rank.loop.forget(older_than=self._generation)
        self._model.drop()
        self._begin(step)

    def step_result(self, step: int) -> StepResult:
        """The result of a step that this rank has done; to be asked for once."""
        outcome, rank = self._stepping.outcome(step), self._rank
        norm: Callable[[], float | None] = lambda: outcome.norm  # noqa: E731
        if outcome.norm is None and rank.is_main:
            norms = rank.exchange.claim(
                Topic.STEPPED,
                step,
                [self._rank_of(*stage_copy) for stage_copy in voters_of(self._job)],
                generation=self._generation,
            )
            norm = lambda: float(total_norm(self._wait(norms, f"the gradient norm of step {step}")))  # noqa: E731
        return StepResult(
            step=step,
            loss=outcome.loss,
            lr=self._model.lr,
            skipped=outcome.skipped,
            loss_scale=self._model.loss_scale.of(step) if self._model.loss_scale else None,
            _grad_norm=norm,
        )

    def _begin(self, step: int) -> None:
        mail, model, mesh = Mail(), self._model, self._rank.mesh
        generation, transport = self._generation, self._rank.transport
        land: Land = partial(transport.expect, generation)
        has_residencies, in_scratch = self._job.residencies is not None, self._job.offloads_weights
        weights = WeightsWorker(model.buckets, mail, land, has_residencies, in_scratch)
        gradients = GradientWorker(
            model.buckets,
            mail,
            land,
            transport.still_reads,
            weights.expect_new,
            self._groups,
            self._job.step_completed_by,
        )
        collectives = CollectiveWorker(
            model.buckets,
            self._groups,
            partial(by_rank, self._job),
            self._rank.collective_queue,
            mail,
        )
        stepping = SteppingWorker(
            self._job, model, gradients.take_sums, mail, self._clip, self._tell_norms, self._skip
        )
        may_skip = model.loss_scale is not None
        slots = SlotNumbers(self._job.microbatches if self._job.drawn else 0)
        team = Team(mesh.member, mesh.tensor)
        stages = StageWorker(
            self._job, model.stages, mail, gradients, slots, model.pipes, team, may_skip
        )
        hears = {
            Meaning.LOSS: stepping.hear_losses,
            Meaning.VOTE: stepping.hear_vote,
            Meaning.TICKET: collectives.hear_ticket,
        }
        offload = OffloadWorker(model.buckets)
        every: list[Worker] = [stages, gradients, collectives, weights, stepping, offload]
        if model.stash is not None:
            offloading = {at: of for at, of in model.stages.items() if isinstance(of, Stage)}
            assert len(offloading) == len(model.stages), "virtual members offload no stashes"
            every.append(StashWorker(offloading, model.stash, slots))
        workers = Workers(mail, every, hears)
        state = RankState(
            self._job,
            mesh.pipe_rank,
            replica=mesh.data_rank,
            member=mesh.member,
            buckets=model.copies,
            first_step=step,
            checks=False,
        )
        self._stepping = stepping
        self.training = Session(generation, state, workers, self._reader(self._job, None))

    def _skip(self, stage: int) -> None:
        """Leave a stage as it was before a step, where an overflow skips that; a step that is
        skipped for its norm alone leaves buffers as its forwards have made them."""
        if self._model.loss_scale is not None:
            self._model.stages[stage].recall_buffers()

    def _tell_norms(self, step: int, stage: int, norms: Norms) -> None:
        stage_copy = StageCopy(self._model.pipes[stage], stage)
        about = voters_of(self._job).index(stage_copy)
        self._rank.exchange.tell(
            MAIN, ControlMessage(Topic.STEPPED, about, step), norms, self._generation
        )

    # An evaluation.

    def evaluate(self, batches: Iterable[Any] | None, outputs: bool) -> EvalResult | None:
        """Run one evaluation. Returns None where no replica has a microbatch."""
        self.settle()
        self._generation += 1
        generation, rank, job, mail = self._generation, self._rank, self._evaluation, Mail()
        come = self._weights_on_demand()
        mesh, team = rank.mesh, Team(rank.mesh.member, rank.mesh.tensor)
        pipe_of = {
            stage: job.pipe_of(mesh.data_rank, mesh.pipe_rank, stage, mesh.member)
            for stage in job.placement.stages_of(mesh.pipe_rank)
        }
        slices = SliceMail(job, mail, pipe_of, team) if team.size > 1 else None
        worker = EvaluationWorker(job, self._model.stages, mail, outputs, slices, come.bring)
        state = RankState(
            job, mesh.pipe_rank, replica=mesh.data_rank, member=mesh.member, checks=False
        )
        session = Session(generation, state, Workers(mail, [worker]), self._reader(job, batches))
        last = job.placement.rank_of(job.last_stage)
        with self._model.evaluating():
            with self._whole_weights(), come:
                rank.loop.run(session, lambda: state.finished)
            if mesh.pipe_rank == last:
                losses, stage = worker.losses(), self._model.stages[job.last_stage]
                have = stage.evaluation.outputs
                keeps = mesh.member == 0 or have is not Outputs.ALL
                about = mesh.data_rank * team.size + mesh.member
                for to in range(rank.size):
                    said = (*losses, have.value, worker.outputs * (keeps and to == MAIN))
                    control = ControlMessage(Topic.EVALUATED, about)
                    rank.exchange.tell(to, control, said, generation)
        pipes = range(job.replicas * team.size)
        last_ranks = [
            self._rank.mesh.rank_of(*job.place_of(pipe, job.last_stage)) for pipe in pipes
        ]
        evaluated = rank.exchange.claim(Topic.EVALUATED, 0, last_ranks, generation=generation)
        what = "the results of an evaluation"
        if state.end == 0 and not any(of for of, *_ in rank.exchange.awaited(evaluated, what)):
            return None
        given = rank.user_tensors.given

        def found() -> list[tuple[Losses, list[Any]]]:
            of_pipes = [
                (Losses(*of), Outputs(have), given(kept))
                for *of, have, kept in self._wait(evaluated, what)
            ]
            return [
                _of_members(of_pipes[first : first + team.size])
                for first in range(0, len(of_pipes), team.size)
            ]

        return EvalResult(found)

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        """Context within which the weights of all stages here are whole, where copies keep them
        together. How many microbatches an evaluation has, which residencies would depend on, is
        known to readers alone."""
        if self._job.residencies is None or not self._job.shards:
            yield
            return
        for stage, buckets in sorted(self._model.buckets.items()):
            for bucket in buckets:
                bucket.begin_residency()
            of_stage = [shard_of(bucket) for bucket in buckets]
            mine = [shard.weights for shard in of_stage]
            found = self._shards.for_all(stage, self._job.cuts[stage], mine)
            parts = self._rank.user_tensors.given(found)
            first = self._model.pipes[stage] // self._job.pipes_a_group * self._job.pipes_a_group
            for number, shard in enumerate(of_stage):
                # Of what members have cut, those of the same one have shards.
                shard.take_weights([parts[pipe - first][number] for pipe in shard.pipes])
        try:
            yield
        finally:
            for check in [bucket.end_residency() for bucket in self._model.all_buckets]:
                check()

    def _weights_on_demand(self) -> WeightsOnDemand:
        """What brings weights from scratch in an evaluation."""
        residencies = self._job.residencies
        is_alone = residencies is not None and not self._job.shards
        return WeightsOnDemand(
            self._model.buckets if is_alone else {},
            residencies.capacity if residencies is not None else 0,
        )

    # Readers.

    def _reader(
        self, job: Job, batches: Iterable[Any] | None, first: Callable[[str], None] | None = None
    ) -> BatchReader:
        rank = self._rank
        return BatchReader(
            batches, job, rank.mesh.data_rank, rank.generator, first, rank.loop.moves
        )

    def _shared(self) -> SharingReader:
        """The reader of a replica that shares microbatches with others."""
        rank = self._rank

        def tell(replica: int, control: ControlMessage, payload: Any) -> None:
            first = self._job.pipes_of(replica, 0)[0]
            rank.loop.tell(self._rank_of(first, 0), control, payload)

        reader = SharingReader(self._job, rank.mesh.data_rank, tell)
        rank.hears[Topic.ASKS], rank.hears[Topic.GIVES] = reader.hear_ask, reader.hear_answer
        return reader

    def _tell_first_read(self, digest: str) -> None:
        self._tells_first_read = False
        self._rank.exchange.tell(
            MAIN, ControlMessage(Topic.READ, self._rank.mesh.data_rank), digest
        )

    def _hear_first_read(self, control: ControlMessage, digest: str) -> None:
        self._read_first[control.about] = digest
        warn_of_equal_readers(self._read_first, control.about)

    def ranks_of_replica(self, replica: int) -> list[int]:
        """The ranks of the job that form one replica's pipeline."""
        places = range(self._job.ranks * self._job.team)
        return [self._rank.mesh.rank_of(replica, place) for place in places]

    def _rank_of(self, pipe: int, stage: int) -> int:
        return self._rank.mesh.rank_of(*self._job.place_of(pipe, stage))


def _of_members(found: list[tuple[Losses, Outputs, list[Any]]]) -> tuple[Losses, list[Any]]:
    """The losses and outputs of a replica, from what each member of its last stage has."""
    (first, have, kept), *others = found
    if not others:
        return first, kept
    losses = losses_of_members([of_one for of_one, _, _ in found])
    outputs = [kept for _, _, kept in found if kept]
    return losses, [have.of_all(of_one) for of_one in zip(*outputs, strict=True)]
