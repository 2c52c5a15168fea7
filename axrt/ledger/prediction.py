"""The ledgers of all ranks of a run, from its model and settings alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import starmap
from typing import Any

from torch import nn

from axrt.config import AUTO, Config, Parallel, Schedule
from axrt.model.joints import Team
from axrt.model.module import PipelineModule
from axrt.model.team_layers import TeamLayers
from axrt.planning.default_schedule import settled
from axrt.scheduler.job import Job
from axrt.store.assign import BucketSpec
from axrt.store.bucket_settings import OptimizerFactory
from axrt.store.owners import Owned
from axrt.store.probe import Probed, probed
from axrt.world.mesh import Mesh

from .activations import Stashes, StashSource
from .ledger import Entry, Ledger, Purpose, Tier, Unit
from .occupancy import Occupancies, Occupancy
from .offloaded import scratch_of, state_entries
from .parameters import BucketBytes, BucketSizes, StageBytes, StageParameters, copies_apart
from .skeleton import Skeletons
from .snapshot import snapshot_bytes


@dataclass(frozen=True)
class Prediction:
    """The ledgers of a run."""

    config: Config  # settings of the run
    schedule: Schedule  # settings of its schedule, with the policy that it has
    job: Job  # the schedule itself, for the model
    mesh: Mesh  # numbers of pipelines and replicas
    # gives the ledger of a place: a replica, rank of its pipeline, and member of the team there;
    # the same one for those that hold as much
    ledger_of: Callable[[int, int, int], Ledger]
    # places among which is one like each that there is on devices; on hosts others may hold less
    places: tuple[tuple[int, int, int], ...]
    # what the owners of each stage's matrices step; () for a stage without any
    owned: tuple[tuple[Owned, ...], ...] = ()

    @cached_property
    def of_ranks(self) -> list[Ledger]:
        """The ledger of each rank of the job."""
        return [self.of_rank(rank) for rank in range(self.size)]

    def of_rank(self, rank: int) -> Ledger:
        """The ledger of a rank of the job."""
        of = replace(self.mesh, rank=rank)
        replica, member = (of.data_rank, of.member) if self.job.shards else (0, 0)
        ledger = self.ledger_of(replica, of.pipe_rank, member)
        writes = self.config.memory.zero or of.data_rank == 0  # else others write for it
        return ledger if writes else self._without_snapshot[id(ledger)]

    @cached_property
    def different(self) -> list[Ledger]:
        """The ledgers of all devices, each once: most of many replicas have one."""
        return list({id(one): one for one in starmap(self.ledger_of, self.places)}.values())

    @cached_property
    def _without_snapshot(self) -> dict[int, Ledger]:
        return {id(one): one.without(Purpose.SNAPSHOT) for one in self.different}

    @cached_property
    def fullest(self) -> int:
        """The first rank of the job whose device holds most."""
        most = self.most
        return next(rank for rank in range(self.size) if self.of_rank(rank).total() == most)

    @cached_property
    def most(self) -> int:
        """Bytes on the device of the fullest rank."""
        return max(one.total() for one in self.different)

    @cached_property
    def unit(self) -> Unit:
        """What all sizes of one output are said in: that of what a tier of a rank holds most."""
        return Unit.of(max(one.total(tier) for one in self.different for tier in Tier))

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        return self.mesh.pipe * self.mesh.data * self.mesh.tensor

    @property
    def unknown(self) -> tuple[str, ...]:
        """What could not be predicted, one text each."""
        return tuple(dict.fromkeys(text for one in self.different for text in one.unknown))


class Predictor:
    """Predicts what ranks will hold. What several configurations have in common is found out once.

    It is made before an engine, which changes modules that are given as they are.

    Args:
        factory: function that makes the optimizer of a bucket.
        sample: a microbatch, (inputs, targets); None: what microbatches hold is not predicted.
        stashes: what knows what stages keep, in place of running them on the sample.
    """

    def __init__(
        self,
        model: PipelineModule,
        factory: OptimizerFactory,
        sample: Any,
        stashes: StashSource | None = None,
    ) -> None:
        self._model, self._factory = model, factory
        self._sample, self._stashes = sample, stashes
        self._of_one = Skeletons(model.layers)
        self._of_teams: dict[tuple[int, int], tuple[Skeletons, StashSource | None]] = {}
        self._occupancies = Occupancies()
        self._jobs: dict[tuple[object, ...], tuple[Schedule, Job]] = {}
        self._moments: dict[tuple[object, ...], Probed] = {}
        self._sizes = BucketSizes()
        self._parameters: dict[tuple[object, ...], list[StageParameters]] = {}

    @property
    def layers(self) -> Sequence[object]:
        """The layers of the model."""
        return self._model.layers

    def predict(self, config: Config, size: int) -> Prediction:
        """The ledgers of a run.

        Policy "auto" would measure, and a run that names none may; here they take the schedule of
        a run that has no sample.

        Raises:
            ConfigError: the ranks, the schedule and the model do not fit each other.
        """
        of = config.parallel
        self._model.check_settings(config)
        mesh = Mesh.of(0, size, of.pipe, of.data, of.rank_order, of.tensor)
        schedule, job = self._settled(config, mesh)
        held, why = self._held(config, job)
        alike: dict[tuple[object, ...], Ledger] = {}
        held_by = self._parameters_of(config, job)
        saves = config.saves_beside and config.checkpoint.every and config.checkpoint.dir

        def ledger(replica: int, rank: int, member: int) -> Ledger:
            """The ledger of a rank; replicas whose shards are as large have the same."""
            stage_copies = [
                (job.pipe_of(replica, rank, of, member), of) for of in job.placement.stages_of(rank)
            ]
            mine = [held_by[of].of_pipe(pipe) for pipe, of in stage_copies]
            key = (rank, *(pipe < job.team for pipe, _ in stage_copies if saves), *map(id, mine))
            if key not in alike:
                alike[key] = made(rank, stage_copies, mine)
            return alike[key]

        def made(rank: int, stage_copies: list[tuple[int, int]], mine: list[StageBytes]) -> Ledger:
            unknown = [*why, *_without_moments(mine), *_kept_apart(job)]
            stages = {of: one for (_, of), one in zip(stage_copies, mine, strict=True)}
            gradients = self._gradients(config, job, rank, stages)
            entries = [*_entries(config, job, mine, held[rank], gradients)]
            if saves:
                copies = zip(mine, stage_copies, strict=True)
                copied = sum(snapshot_bytes(one, config, job, pipe) for one, (pipe, _) in copies)
                entries.append(Entry(Purpose.SNAPSHOT, Tier.HOST, copied))
            return Ledger.of(entries, unknown)

        places = tuple(
            (replica, rank, member)
            for rank in range(job.ranks)
            for replica, member in copies_apart(
                job, [held_by[of] for of in job.placement.stages_of(rank)]
            )
        )
        owned = tuple(of.owned for of in held_by)
        return Prediction(config, schedule, job, mesh, ledger, places, owned)

    def _of_team(self, parallel: Parallel) -> tuple[Skeletons, StashSource | None]:
        """The layers of the first member of a team, which has most, and what stages keep there."""
        size, every = key = parallel.tensor, parallel.virtual_members
        if key not in self._of_teams:
            plan, virtual = self._model.tensor, every // size
            own = of_virtual = self._of_one
            if every > 1:
                own = self._of_one.of_team(plan, Team(0, size), virtual)
                of_virtual = self._of_one.of_team(plan, Team(0, every))
            stashes = self._stashes
            if stashes is None and self._sample is not None:
                of_team = TeamLayers(plan, Team(0, every))
                loss_fn = self._model.loss_fn
                stashes = Stashes(of_virtual, loss_fn, self._sample, of_team, virtual)
            self._of_teams[key] = own, stashes
        return self._of_teams[key]

    def _settled(self, config: Config, mesh: Mesh) -> tuple[Schedule, Job]:
        if config.schedule.policy == AUTO:
            config = replace(config, schedule=replace(config.schedule, policy=""))
        of = config.memory
        key = (
            config.schedule,
            config.parallel,
            config.votes,
            mesh,
            of.recompute,
            of.zero,
            of.reductions,
            of.gathered,
            of.offload_activations,
            of.offload_parameters,
            of.offload,
        )
        if key not in self._jobs:
            self._jobs[key] = settled(config, self._model, mesh)
        return self._jobs[key]

    def _parameters_of(self, config: Config, job: Job) -> list[StageParameters]:
        """The parameters of each stage. Schedules and recomputation change nothing of them."""
        of_job = (
            job.team,
            config.parallel.virtual_members,
            job.cuts,
            job.pipes,
            job.pipes_a_group,
            job.shards,
            job.offloads_weights,
        )
        memory = replace(config.memory, recompute="none", offload_activations=0)
        key = (*of_job, job.steps_on_host, memory, config.precision, config.optimizer)
        if key not in self._parameters:
            self._parameters[key] = [
                StageParameters(
                    self._of_team(config.parallel)[0],
                    config,
                    job,
                    stage,
                    self._factory,
                    self._probe,
                    self._sizes,
                )
                for stage in range(job.stages)
            ]
        return self._parameters[key]

    def _held(self, config: Config, job: Job) -> tuple[list[Occupancy], list[str]]:
        """What the microbatches of each rank hold, or texts that say why that is not known."""
        nothing = [Occupancy(0, 0)] * job.ranks
        _, stashes = self._of_team(config.parallel)
        if stashes is None:
            return nothing, ["stash and messages: not known, since no sample was given"]
        try:
            sizes = stashes.of_stages(config, job)
        except (Exception, SystemExit) as error:  # of the user's own layers, whatever it is
            said = (str(error).splitlines() or [""])[0]
            return nothing, [
                "stash and messages: not known, since a layer cannot run on tensors without "
                f"values ({type(error).__name__}: {said})"
            ]
        return self._occupancies.of_ranks(job, sizes), []

    def _gradients(
        self, config: Config, job: Job, rank: int, stages: Mapping[int, StageBytes]
    ) -> int:
        """What gradients over microbatches take at most on a rank."""
        whole = {of: sum(bucket.gradients for bucket in one.buckets) for of, one in stages.items()}
        if job.offloads_weights and not job.shards:
            return _gradients_of_residencies(job, whole, stages)
        if not (job.shards and config.memory.zero > 1):
            return sum(whole.values())
        return self._occupancies.most_open(job, rank, whole)

    def _probe(self, spec: BucketSpec, stepped: Sequence[nn.Parameter]) -> Probed:
        named = list(zip(spec.called, stepped, strict=True))
        key = tuple((name, parameter.dim(), parameter.dtype) for name, parameter in named)
        if key not in self._moments:
            self._moments[key] = probed(self._factory, named)
        return self._moments[key]


def _without_moments(stages: Sequence[StageBytes]) -> Iterator[str]:
    if any(bucket.moments is None for stage in stages for bucket in stage.buckets):
        yield "moments: not known, since the optimizer cannot be stepped on tiny parameters"


def _kept_apart(job: Job) -> Iterator[str]:
    if job.in_tree:
        yield (
            "gradients that are kept apart (run.deterministic with schedule.share): not known: "
            "log2 m more where a replica computes m neighbours, and one a microbatch at most"
        )


def _entries(
    config: Config, job: Job, stages: Sequence[StageBytes], held: Occupancy, gradients: int
) -> Iterator[Entry]:
    buckets = [bucket for stage in stages for bucket in stage.buckets]
    gathered = _gathered(stages, job)
    for purpose, tier, sizes in (
        (Purpose.WEIGHTS, Tier.DEVICE, [b.kept if job.residencies else b.weights for b in buckets]),
        (Purpose.WEIGHTS, Tier.DEVICE, [b.virtual_weights for b in buckets]),
        (Purpose.GATHERED, Tier.DEVICE, gathered),
        (Purpose.FROZEN, Tier.DEVICE, [stage.frozen for stage in stages]),
        (Purpose.ORIGINALS, Tier.HOST, [stage.originals for stage in stages]),
        (Purpose.GRADIENTS, Tier.DEVICE, [gradients]),
        (Purpose.GRADIENTS, Tier.DEVICE, [b.virtual_gradients for b in buckets]),
        (Purpose.MESSAGES, Tier.DEVICE, [_parts(bucket, job) for bucket in buckets]),
        # Of a replica that is ahead shards may come before there is room for them.
        (Purpose.MESSAGES, Tier.DEVICE, [w - w // job.pipes_a_group for w in gathered]),
    ):
        yield Entry(purpose, tier, sum(sizes))
    yield from state_entries(config, buckets, job.votes)
    yield Entry(Purpose.STASH, Tier.DEVICE, held.stash)
    yield Entry(Purpose.STASH, scratch_of(config.memory), held.scratch)
    yield Entry(Purpose.MESSAGES, Tier.DEVICE, held.messages)


def _gradients_of_residencies(
    job: Job, whole: Mapping[int, int], stages: Mapping[int, StageBytes]
) -> int:
    """What gradients take at most where weights are in scratch: stages that step by themselves have
    one until they have stepped, as many at a time as there is room for."""
    assert job.residencies is not None
    lasting = [
        of
        for of, one in stages.items()
        if not job.votes
        and not any(bucket.is_tied for bucket in one.buckets)
        and all(residency.backwards == 0 for residency in job.residencies.of_stage[of][:-1])
    ]
    others = sum(size for of, size in whole.items() if of not in lasting)
    return others + sum(sorted(whole[of] for of in lasting)[-job.residencies.capacity :])


def _gathered(stages: Sequence[StageBytes], job: Job) -> list[int]:
    """The most weights that are whole for a time: those of the largest stages."""
    whole = sorted(sum(bucket.weights for bucket in stage.buckets) for stage in stages)
    return whole[-job.residencies.capacity :] if job.residencies else []


def _parts(bucket: BucketBytes, job: Job) -> int:
    """What other copies send for the shard that a copy owns."""
    return 0 if job.by_library else bucket.arriving
