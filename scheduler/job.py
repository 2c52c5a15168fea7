"""A job: the schedule that is decided once before anything runs, the same on every rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .numbering import NO_JOINTS, Numbering, StageJoints
from .placement import Placement
from .plural import plural
from .policies import Nested, Policy
from .residencies import Residencies
from .stash_places import least_places
from .task import AnyKind


class StageCopy(NamedTuple):
    """A stage in one copy of the pipeline.

    Args:
        pipe: index of the pipe, one copy of the sequence of stages, over all replicas, from 0.
            Where a team holds a stage, each member has a pipe of its own.
        stage: stage index over the whole model, from 0.
    """

    pipe: int
    stage: int


@dataclass(frozen=True, slots=True)
class Job(Numbering):
    """The schedule of a training or of an evaluation.

    Args:
        placement: map from stages to the ranks of a pipeline.
        policy: rule that says what runs first and which forward may start.
        microbatches: number of microbatches of a step and replica (gradient accumulation), at least
            1.
        replicas: number of copies of the pipeline (data parallelism), at least 1.
        cuts: indices of the layers at which stages begin, then the number of layers; () where no
            model is known.
        recomputed: number of first layers of a stage that run forward again before a backward
            (activation checkpointing), by stage; stages without any are left out.
        votes: True if optimizer steps wait for the norm of all gradients (gradient clipping).
        by_library: True if a library's collectives add gradients up, where each copy of a bucket
            has a rank of its own; False: messages do.
        slots: number of buckets whose offloaded state a rank may have on the device at a time; 0:
            state stays on the device.
        host_slots: number of buckets whose gradient a rank may have on the host at a time, where
            optimizer steps are there; 0: they are on the device.
        group: number of pipes whose copies add up among themselves before groups do across, and
            share shards out; whole replicas, and a divisor of `pipes`. 0: all of them.
        shards: True if each copy of a bucket keeps and steps a shard of its own (ZeRO); then there
            are several pipes, so every bucket has several copies.
        reductions: number of times that a bucket with shards is added up over its copies in a step,
            at least 1; each time for a run of microbatches of its pipe, as equal as can be.
        residencies: when a rank has the whole weights of a stage, where it keeps a shard of them or
            has them in scratch; None: at any time.
        offloads_weights: True if weights are in scratch, and come to the device for residencies;
            then state is offloaded as well.
        drawn: number of microbatches that each replica's reader draws in a step, where replicas
            share them (see `sharing.py`) and `microbatches` is the number of slots of each; 0: each
            replica computes its own.
        in_tree: True if gradients of shared microbatches are added up in a tree of their numbers,
            whoever has computed them.
        held_on_device: number of microbatches, each of one stage, whose stash a rank may have on
            the device at a time; 0: all that its policy holds.
        team: number of members that hold a stage together (tensor parallelism), at least 1.
        joints: joints of the stages that a team holds, by stage; stages without any are left out.
        lag: number of steps after which a step uses what an optimizer of matrices computes anew
            behind another one, see `rules/refreshes.py`; 0: nothing is, or within steps.
        preconditions: True if gradients of matrices are turned into changes before steps are voted
            on; then steps are voted on.
        fills: True if a rank runs other work while a task waits at a joint; False: it waits for the
            slices, a while (`linger.py`).
        trains: False for an evaluation, which has no steps and any number of microbatches: the
            reader's END says how many. Its backwards carry nothing; they keep the order, caps and
            bounds of training.
    """

    placement: Placement
    policy: Policy
    microbatches: int
    replicas: int = 1
    cuts: tuple[int, ...] = ()
    recomputed: Mapping[int, int] = field(default_factory=dict)
    votes: bool = False
    by_library: bool = False
    slots: int = 0
    host_slots: int = 0
    group: int = 0
    shards: bool = False
    reductions: int = 1
    residencies: Residencies | None = None
    offloads_weights: bool = False
    drawn: int = 0
    in_tree: bool = False
    held_on_device: int = 0
    team: int = 1
    joints: Mapping[int, StageJoints] = field(default_factory=dict)
    fills: bool = True
    lag: int = 0
    preconditions: bool = False
    trains: bool = True

    def __post_init__(self) -> None:
        pipes = self.placement.pipes
        if self.team < 1 or (self.joints and self.team == 1):
            raise ValueError(
                f"a team of {self.team} with joints of {plural(len(self.joints), 'stage')}; "
                "expected at least 1 member, and joints between several"
            )
        if self.shards and self.pipes == self.team:
            raise ValueError("shards of one copy; expected several pipes or replicas")
        if self.group:
            self._check_group()
        if self.reductions > 1:
            self._check_reductions()
        if self.held_on_device:
            self._check_held_on_device()
        if self.slots and self.host_slots:
            raise ValueError("slots on the device and on the host; expected steps on one side")
        if self.residencies is not None and not (self.shards or self.offloads_weights):
            raise ValueError("residencies of whole weights; expected shards, or weights in scratch")
        if self.offloads_weights and (self.residencies is None or not self.slots):
            raise ValueError("weights in scratch; expected residencies, and slots for state")
        # Two pipes take an even number of microbatches: a pipe without one would have to say so.
        if self.trains and (self.microbatches < 1 or self.microbatches % pipes):
            raise ValueError(
                f"{plural(self.microbatches, 'microbatch')} on {pipes} pipes; expected a multiple "
                f"of {pipes}, at least 1"
            )

    def _check_group(self) -> None:
        a_replica = self.placement.pipes * self.team
        whole = self.pipes % self.group == 0 and self.group % a_replica == 0
        if not whole or self.by_library:
            raise ValueError(
                f"groups of {self.group} pipes, of {self.pipes} in all; expected groups of whole "
                "replicas that divide them, and sums by messages"
            )

    def _check_held_on_device(self) -> None:
        least = least_places(self.placement.chunks, self.team)
        offloads = [rank for rank in range(self.ranks) if self.offloads_stash(rank)]
        late = [rank for rank in offloads if not self.policy.weights_in_turn(rank)]
        if late:
            raise ValueError(
                f"offload_activations = {self.held_on_device} with an order in which a weight "
                f"gradient of rank {late[0]} comes behind the next input gradient of its stage, "
                "whose stash may find no room then; expected an order that names none, or more "
                f"than {self.held_on_device}"
            )
        if 0 < self.held_on_device < least and offloads:
            raise ValueError(
                f"offload_activations = {self.held_on_device} with "
                f"{plural(self.placement.chunks, 'stage')} a rank; expected at least {least}: one "
                "stash that is made, one on its way down, and one of each stage that has come back"
            )

    def _check_reductions(self) -> None:
        may_be = self.shards and not self.by_library and not self.splits
        if not may_be or self.reductions > self.microbatches_a_pipe:
            raise ValueError(
                f"{self.reductions} reductions a step under {self.policy.name}; expected 1, or "
                "shards that messages add up, whole backwards, and a microbatch of each pipe for "
                "each"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks of a pipeline."""
        return self.placement.ranks

    @property
    def pipes(self) -> int:
        """Number of copies of the sequence of stages, over all replicas; each member of a team has
        its part of one."""
        return self.replicas * self.placement.pipes * self.team

    @property
    def pipes_a_group(self) -> int:
        """Number of pipes whose copies add up among themselves."""
        return self.group or self.pipes

    @property
    def is_grouped(self) -> bool:
        """Sums have two levels: within groups, then across."""
        return self.pipes_a_group < self.pipes

    @property
    def stages(self) -> int:
        """Number of stages of a pipe."""
        return self.placement.stages

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.placement.stages - 1

    @property
    def splits(self) -> bool:
        """Backwards are split into input gradients and weight gradients."""
        return self.trains and self.policy.splits

    @property
    def ties_may_wait_in_a_circle(self) -> bool:
        """Copies of a bucket on several stages of a pipe could wait for each other for ever if
        their runs waited for each other's reductions.

        The third run of a stage waits for the sums of the first, so for the backward of every copy.
        A stage that has its whole weights until then may have the place that the residency of
        another copy's stage waits for.
        """
        residencies = self.residencies
        return (
            residencies is not None
            and self.reductions > 2
            and residencies.capacity < self.placement.chunks
        )

    def held_on(self, rank: int) -> int:
        """The largest number of microbatches, each of one stage, that the policy lets a rank
        hold."""
        return self.policy.bounds(self.placement, rank, self.microbatches).held

    def offloads_stash(self, rank: int) -> bool:
        """A rank may hold more stashes than it has room for on the device."""
        return 0 < self.held_on_device < self.held_on(rank)

    # A bucket has one side, in every step and on all copies. Deep Optimizer States lets whichever
    # side is free take the next bucket. Then replicas would step one weight by different kernels,
    # and a run would not repeat itself.
    @property
    def steps_on_host(self) -> bool:
        """Optimizer steps are on the host, those of all copies of a bucket alike: kernels of the
        host and of a device may differ in bits."""
        return self.host_slots > 0

    def evaluation(self) -> "Job":
        """The evaluation that belongs to this training: forwards along the first pipe, under nested
        caps."""
        return replace(
            self.alone(),
            placement=self.placement.first_pipe,
            policy=Nested(),
            replicas=self.replicas,
            trains=False,
            joints={stage: StageJoints(of.forward, 0) for stage, of in self.joints.items()},
        )

    def alone(self) -> "Job":
        """The same schedule of one replica, with forwards, backwards and steps alone."""
        return replace(
            self,
            replicas=1,
            votes=False,
            by_library=False,
            slots=0,
            host_slots=0,
            group=0,
            shards=False,
            reductions=1,
            residencies=None,
            offloads_weights=False,
            drawn=0,
            in_tree=False,
            held_on_device=0,
            lag=0,
            preconditions=False,
        )

    @property
    def residencies_a_step(self) -> tuple[int, ...]:
        """The number of residencies of each stage in a step; () where weights are always whole."""
        return tuple(map(len, self.residencies.of_stage)) if self.residencies else ()

    def until(self, stage: int, kind: AnyKind, residencies: int) -> int:
        """How many tasks of a kind and pipe have run on a stage, over all steps, when so many of
        its residencies have ended."""
        assert self.residencies is not None
        of_stage = self.residencies.of_stage[stage]
        step, within = divmod(residencies, len(of_stage))
        of_step = of_stage[within - 1].until(kind) if within else 0
        return step * self.microbatches_a_pipe + of_step

    def __str__(self) -> str:
        return (
            f"{self.policy.name} on {self.placement.name} placement, {plural(self.ranks, 'rank')}"
            f"{f' x {self.team} members' * (self.team > 1)}, "
            f"{plural(self.microbatches, 'microbatch')}"
        )

    def stage_copies(self) -> Iterator[StageCopy]:
        """Every stage of every pipe, pipe by pipe."""
        for pipe in range(self.pipes):
            for stage in range(self.placement.stages):
                yield StageCopy(pipe, stage)

    # A member is to the brain what a replica is, but for joints: it has a pipe of its own, so
    # losses, norms and copies of whole weights count members as they count replicas. Pipes of a
    # team are numbered one after the other.

    def pipe_of(self, replica: int, rank: int, stage: int, member: int = 0) -> int:
        """The pipe whose copy of a stage a member of a rank of a replica holds."""
        whole = replica * self.placement.pipes + self.placement.pipe_of(rank, stage)
        return whole * self.team + member

    def place_of(self, pipe: int, stage: int) -> tuple[int, int]:
        """The replica that holds a stage of a pipe, and the place in it: members of a team stand
        one after the other, rank by rank."""
        whole, member = divmod(pipe, self.team)
        replica, rank = self.placement.place_of(whole, stage)
        return replica, rank * self.team + member

    def pipes_of(self, replica: int, number: int) -> range:
        """The pipes that a microbatch goes through: of each member one."""
        pipes = self.placement.pipes
        first = (replica * pipes + number % pipes) * self.team
        return range(first, first + self.team)

    def team_of(self, pipe: int) -> range:
        """The pipes of the members of a team, of which one is given."""
        first = pipe - pipe % self.team
        return range(first, first + self.team)

    def reader_of(self, pipe: int) -> StageCopy:
        """The copy of a stage on whose rank the pipe's batches are read: stage 0 of the first pipe
        of its replica."""
        return StageCopy(pipe - pipe % (self.placement.pipes * self.team), 0)

    def joints_of(self, stage: int) -> StageJoints:
        """The joints of a stage."""
        return self.joints.get(stage, NO_JOINTS)
