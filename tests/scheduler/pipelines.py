"""Whole pipelines of brains without workers: in lockstep for timetables, in random order for
properties."""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import ceil
from random import Random

from axrt.scheduler.bucket import BucketCopy, Copies
from axrt.scheduler.job import Job
from axrt.scheduler.message import Message
from axrt.scheduler.numbering import NO_JOINTS, StageJoints
from axrt.scheduler.placement import Placement
from axrt.scheduler.planning.residency_planner import plan_residencies
from axrt.scheduler.policies import Bounds, Nested, Policy, placement_for, policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.residencies import READERS, Residencies
from axrt.scheduler.rules import Feature, OnDevice, Queue, features_of
from axrt.scheduler.simulation.reader_messages import has_ended, has_read
from axrt.scheduler.stash_places import least_places
from axrt.scheduler.task import AnyKind, Counts, Kind, Task

TICKS: dict[AnyKind, int] = dict[AnyKind, int](dict.fromkeys(Kind, 0))
TICKS |= {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1}
PIECES = 3
Move = tuple[str, int, Queue]


def read(state: RankState, end: int | None = None) -> list[Message]:
    """What the reader on this rank says now."""
    number = state.microbatch_to_read()
    if number is None:
        return []
    if number == end:
        return has_ended(
            state.job,
            range(state.job.replicas) if state.job.trains else (state.replica,),
            number,
        )
    return list(has_read(state.job, state.replica, number))


class Pipeline:
    """The brains of all ranks of all replicas, what ran, and the most that was in flight on each.

    Args:
        buckets: of each stage, each held by the same stage in every pipe.
        tied: one bucket more on the first and one on the last stage, both held by both in every
            pipe.
        clips: steps wait for a vote.
        evaluate: so many microbatches without gradients, instead of steps.
        placement: the policy's own where it is None.
        end: the readers end after so many.
        recomputes: stages whose forwards run again.
        features: the rules of a job.
        leaves: buckets leave one by one where backwards are whole.
        slots: buckets whose offloaded state a rank may have on the device; 0: state stays there.
        shards: each copy steps a shard of its own, where there are several pipes.
        group: replicas that add up among themselves before groups do; 0: all.
        reductions: of a bucket in a step, where there are shards and backwards are whole.
        first_step: number of the step to begin with; nothing is watched then but the tasks.
        host_slots: buckets whose gradient a rank may have on the host; 0: steps are not there.
        room: stages whose weights a rank may have whole at a time, where there are shards or
            weights are in scratch; 0: any.
        brings: weights are in scratch, where there are slots and a room.
        forward_pieces: pieces that each forward comes in.
        team: members that hold each stage together.
        joints: joints of each stage's forwards, and of its backwards, where there is a team.
        fills: other work fills the time at a joint.
        whole: every member has all weights, and their copies are added up; False: they are cut.
        spare: places on the device for stashes, above the least that a rank can do with; None: for
            all that the policy holds.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: int,
        microbatches: int,
        *,
        steps: int = 1,
        replicas: int = 1,
        buckets: int = 1,
        tied: bool = False,
        clips: bool = False,
        evaluate: int | None = None,
        end: int | None = None,
        placement: Placement | None = None,
        recomputes: Collection[int] = (),
        features: Callable[[Job], Sequence[Feature]] = features_of,
        leaves: bool = False,
        by_library: bool = False,
        slots: int = 0,
        shards: bool = False,
        group: int = 0,
        reductions: int = 1,
        room: int = 0,
        spare: int | None = None,
        first_step: int = 0,
        host_slots: int = 0,
        brings: bool = False,
        forward_pieces: int = 1,
        team: int = 1,
        joints: StageJoints = NO_JOINTS,
        fills: bool = True,
        whole: bool = False,
        lag: int = 0,
        preconditions: bool = False,
    ) -> None:
        self.leaves, self._forward_pieces = leaves, forward_pieces
        self.placement = placement or placement_for(policy, ranks, microbatches)
        self.end = evaluate if end is None else end
        trains = evaluate is None
        self.job = Job(
            self.placement,
            policy,
            microbatches,
            replicas,
            recomputed=dict.fromkeys(recomputes, 1),
            votes=clips or (preconditions and trains),
            by_library=by_library,
            group=group * self.placement.pipes * team if trains and group < replicas else 0,
            slots=slots if trains else 0,
            host_slots=host_slots if trains else 0,
            held_on_device=(
                0
                if spare is None or not trains
                else least_places(self.placement.chunks, team) + spare
            ),
            shards=bool(shards and trains and replicas * self.placement.pipes > 1),
            team=team,
            joints=dict.fromkeys(range(self.placement.stages), joints) if team > 1 else {},
            fills=fills,
            lag=lag if trains and not host_slots else 0,
            preconditions=preconditions and trains and not host_slots,
            trains=trains,
        )
        if self.job.shards and not (self.job.splits or by_library):
            of = min(reductions, self.job.microbatches_a_pipe)
            self.job = replace(self.job, reductions=of)
        brings = brings and self.job.slots > 0
        if (self.job.shards or brings) and room:
            least = self.placement.chunks if self.placement.pipes > 1 else 1
            residencies = plan_residencies(self.job, max(room, least))
            self.job = replace(self.job, residencies=residencies, offloads_weights=brings)
        stages, pipes = self.placement.stages, self.job.pipes
        self.buckets_of = [
            {
                stage: copies_on(
                    stage,
                    stages,
                    range(pipes) if whole else range(member, pipes, team),
                    buckets,
                    tied,
                )
                for stage in range(stages)
            }
            for member in range(team)
        ]
        self.buckets = self.buckets_of[0]
        self.states = [
            RankState(
                self.job,
                rank,
                replica=replica,
                member=member,
                buckets=self.buckets_of[member],
                features=features(self.job),
                first_step=first_step,
            )
            for replica in range(replicas)
            for rank in range(ranks)
            for member in range(team)
        ]
        for state in self.states:
            for _ in range(steps if trains else 0):
                state.ask_step()
        self.ran: list[list[Task]] = [[] for _ in self.states]
        self.stash = [Bounds(0, 0)] * len(self.states)
        self.now = list(self.stash)
        self.untold: list[list[Task]] = [[] for _ in self.states]
        self.watches = [SlotWatch(self.job, self.buckets, first_step) for _ in self.states]
        self.stashes = [StashWatch(self.job, state.rank) for state in self.states]
        self._pieces_done: dict[Task, set[int]] = defaultdict(set)  # places that have finished

    def place_of(self, message: Message) -> int:
        """Which of the states a message is for."""
        replica, rank = self.states[0].place_of(message)
        return replica * self.placement.ranks * self.job.team + rank

    def end_of(self, state: RankState) -> int | None:
        """Where its reader ends: each replica's somewhere else, of training within one step."""
        if self.end is None or not state.job.trains:
            return self.end
        return min(
            self.end + state.replica, (self.end // state.microbatches + 1) * state.microbatches - 1
        )

    def start(self, place: int, task: Task, told_later: bool = False) -> None:
        """Start a task; one that may come in pieces may be told later whether it was one."""
        self.ran[place].append(task)
        self._check_joint(place, task)
        self.watches[place].started(task)
        self.stashes[place].started(task)
        if told_later and task.kind.in_pieces and not self._has_joints(task):
            self.states[place].start(task, None)
            self.untold[place].append(task)
        else:
            more, completes = self._piece(task)
            self.states[place].start(task, more, completes)
            self._count(place, task, more)

    def finish(self, place: int, task: Task) -> list[Message]:
        if task in self.untold[place]:
            more, completes = self._piece(task)
            self.states[place].tell(task, more, completes)
            self.untold[place].remove(task)
            self._count(place, task, more)
        self._pieces_done[task].add(place)
        self.watches[place].finished(task)
        self.stashes[place].finished(task, self._piece(task)[0])
        return self.states[place].finish(task)

    def _check_joint(self, place: int, task: Task) -> None:
        """A piece behind a joint starts when each other member has ended the piece before."""
        if not (self._has_joints(task) and task.part):
            return
        team = self.job.team
        first = place - place % team
        others = set(range(first, first + team)) - {place}
        assert others <= self._pieces_done[task._replace(part=task.part - 1)], task

    def _has_joints(self, task: Task) -> bool:
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)
        return bool(self.job.joints) and task.kind in kinds

    def _piece(self, task: Task) -> tuple[bool, tuple[int, ...]]:
        more = task.part < self.pieces_of(task) - 1
        # The deepest buckets of a stage are complete first, one with each piece.
        deepest = len(self.buckets[task.stage]) - 1 - task.part
        return more, (deepest,) if more and deepest > 0 else ()

    def _count(self, place: int, task: Task, more: bool) -> None:
        # Counted here, not asked of the state that is tested.
        forward = task.kind is Kind.FORWARD and task.part == 0
        # A backward with joints counts with its first piece.
        at_first = bool(self.job.joints) and self.job.trains
        counts = task.part == 0 if at_first else not more
        back = task.kind in (Kind.INPUT, Kind.BACKWARD) and counts
        last = counts if task.kind is Kind.BACKWARD else task.kind is Kind.WEIGHT and not more
        now = self.now[place] = Bounds(
            self.now[place].in_flight + forward - back, self.now[place].held + forward - last
        )
        if self.job.joints and not self.untold[place]:
            state = self.states[place]
            assert (state.in_flight, state.held) == now, task
        # What starts behind work that may be whole runs when that has ended.
        untold = self.untold[place]
        backs = sum(task.kind is Kind.BACKWARD for task in untold)
        self.stash[place] = Bounds(
            max(self.stash[place].in_flight, now.in_flight - backs),
            max(self.stash[place].held, now.held - len(untold)),
        )

    def pieces_of(self, task: Task) -> int:
        """Three of a weight gradient; one a bucket of a whole backward after which they leave; as
        many of a forward as were asked for; where there are joints one more than these."""
        joints = self.job.joints_of(task.stage)
        if self.job.joints and task.kind is Kind.FORWARD:
            return 1 + joints.forward
        if self.job.joints and task.kind in (Kind.BACKWARD, Kind.INPUT):
            return 1 + joints.back * self.job.trains
        if task.kind is Kind.FORWARD:
            return self._forward_pieces
        if task.kind is Kind.BACKWARD and self.leaves and self.job.ends_a_run(task.microbatch):
            return len(self.buckets[task.stage])
        return PIECES if task.kind is Kind.WEIGHT else 1

    @property
    def finished(self) -> bool:
        return all(state.finished for state in self.states)


# A bucket that steps on the host goes through these in a step.
_ON_HOST = (Kind.SCALE, Kind.UNLOAD, Kind.HOST_STEP, Kind.LOAD)
# One whose state comes to a slot goes through these.
_IN_SLOT = (Kind.FETCH, Kind.STEP, Kind.STORE)


class SlotWatch:
    """What sharded and offloaded state promise of a rank, counted from its tasks alone: never older
    weights or state than those of the step before, no more buckets on the device than slots, and
    nothing in a shard's sum that this copy's backwards have not made."""

    def __init__(
        self, job: Job, buckets: Mapping[int, Sequence[Copies]], first_step: int = 0
    ) -> None:
        self._job, self._buckets, self._watches = job, buckets, first_step == 0
        self.on_device: set[tuple[int, int]] = set()
        self.on_host: set[tuple[int, int]] = set()
        self.whole: set[int] = set()  # stages whose weights are, or will be when they have come
        self.brought: set[int] = set()  # the same, from scratch
        self.with_gradient: set[int] = set()  # stages that have begun one, and not stepped
        self._started: Counter[tuple[AnyKind, int, int]] = Counter()
        self._finished: Counter[tuple[AnyKind, int, int]] = Counter()

    def started(self, task: Task) -> None:
        kind, stage, _, part = task
        if self._job.shards and self._watches:
            self._check_shard(task)
        if self._job.slots and self._watches:
            self._check_slots(task)
        if self._job.offloads_weights and self._watches:
            self._check_brought(task)
        if self._job.host_slots and self._watches:
            self._check_host(task)
        if self._job.lag and self._watches:
            self._check_refreshed(task)
        if self._job.preconditions and kind is Kind.NORM:
            changed = self._of_all_buckets(self._started, Kind.PRECONDITION, stage)
            assert changed > task.microbatch, task
        self._started[kind, stage, part] += 1

    def _check_refreshed(self, task: Task) -> None:
        """What follows from a step is computed behind it, and before the step that uses it."""
        kind, stage, number, part = task
        if kind in (Kind.STEP, Kind.PRECONDITION):
            refreshed = self._of_all_buckets(self._started, Kind.REFRESH, stage)
            assert refreshed > number - self._job.lag, task
        if kind is Kind.REFRESH:
            assert self._started[Kind.STEP, stage, part] > number, task

    def _check_host(self, task: Task) -> None:
        """A gradient goes to the host when it is whole, steps there, and weights come back before
        the next step's forwards."""
        kind, stage, number, part = task
        if kind is Kind.FORWARD and not self._job.shards:
            step, _ = self._job.step_of(number)
            assert self._of_all_buckets(self._finished, Kind.LOAD, stage) >= step, task
        if kind is Kind.UNLOAD:
            self.on_host.add((stage, part))
            assert len(self.on_host) <= self._job.host_slots, task
        for before, after in pairwise(_ON_HOST):
            if kind is after:
                assert self._finished[before, stage, part] == number + 1, task

    def _check_slots(self, task: Task) -> None:
        """State comes to the device for its step, after that of the step before has gone."""
        kind, stage, number, part = task
        if kind is Kind.FORWARD:
            step, _ = self._job.step_of(number)
            assert self._of_all_buckets(self._started, Kind.STEP, stage) >= step, task
        if kind is Kind.FETCH:
            assert self._of_all_buckets(self._finished, Kind.STORE, stage) == number, task
            assert (stage, part) not in self.on_device, task
            self.on_device.add((stage, part))
            assert len(self.on_device) <= self._job.slots, task
        for before, after in pairwise(_IN_SLOT):
            if kind is after:
                assert self._finished[before, stage, part] == number + 1, task

    def _check_shard(self, task: Task) -> None:
        """Weights are those of the step, and sums those of the run."""
        kind, stage, number, _ = task
        if kind is Kind.FORWARD:
            step, _ = self._job.step_of(number)
            residencies = self._job.a_step(Counts.RESIDENCIES, stage)
            assert self._of_all_buckets(self._started, Kind.GATHER, stage) >= step * residencies, (
                task
            )
        if kind is Kind.REDUCE:
            self._check_run(task)
        if kind is Kind.BACKWARD and self._job.reductions > 1:
            self._check_on_its_way(task)
        if self._job.residencies:
            self._check_residency(task, self._job.residencies)

    def _check_residency(self, task: Task, residencies: Residencies) -> None:
        """Weights are whole for all that reads them, and let go when a step changes them; a rank
        has no more of them than it has room for."""
        kind, stage, *_ = task
        shares = self._started[Kind.SHARE, stage, 0]
        if kind in READERS:
            assert stage in self.whole, task
            assert self._of_all_buckets(self._started, Kind.GATHER, stage) == shares, task
        if kind is Kind.SHARE:
            assert stage not in self.whole, task
            self.whole.add(stage)
            assert len(self.whole) <= residencies.capacity, task
        if kind is Kind.RELEASE:
            assert self._of_all_buckets(self._started, Kind.GATHER, stage) == shares, task
            self.whole.remove(stage)
        if kind is Kind.STEP and not self._job.offloads_weights:
            assert stage not in self.whole, task

    def _check_brought(self, task: Task) -> None:
        """Weights of the step have come from scratch for all that reads them, no more stages than
        there is room for; nor have more stages a gradient, where backwards of a stage are in one
        stay and nothing keeps its step back."""
        kind, stage, number, _ = task
        assert self._job.residencies is not None
        room, a_step = self._job.residencies.capacity, self._job.a_step(Counts.RESIDENCIES, stage)
        if kind is Kind.BRING:
            assert stage not in self.brought, task
            self.brought.add(stage)
            assert len(self.brought) <= room, task
            assert self._of_all_buckets(self._finished, Kind.STORE, stage) == number // a_step, task
        if kind in READERS:
            assert stage in self.brought, task
            brings = self._started[Kind.BRING, stage, 0]
            assert brings == self._finished[Kind.BRING, stage, 0], task
            now, _ = self._job.step_of(number)
            assert (brings - 1) // a_step == now, task
        if kind in (Kind.BACKWARD, Kind.INPUT):
            self.with_gradient.add(stage)
            in_one_residency = all(
                len(of) < 2 or not of[-2].backwards for of in self._job.residencies.of_stage
            )
            is_bound = in_one_residency and not self._waits_for_others
            assert not is_bound or len(self.with_gradient) <= room, task
        if kind is Kind.STEP and self._of_all_buckets(self._started, kind, stage) == number:
            self._started[kind, stage, -1] += 1
            if self._started[kind, stage, -1] == len(self._buckets[stage]):
                self._started[kind, stage, -1] = 0
                self.with_gradient.discard(stage)
        if kind is Kind.RELEASE:
            self.brought.remove(stage)

    @property
    def _waits_for_others(self) -> bool:
        """Steps wait for other stages: for a vote, or for gradients of tied weights."""
        of_stage = [{copy.stage for of in one for copy in of} for one in self._buckets.values()]
        return self._job.votes or any(len(stages) > 1 for stages in of_stage)

    def _check_on_its_way(self, backward: Task) -> None:
        """When a run begins, no more than one before it has not been added up, but for gradients of
        tied weights where stages would wait for each other."""
        stage, runs = backward.stage, self._job.run_of(backward.microbatch)
        for bucket, copies in enumerate(self._buckets[stage]):
            if len({copy.stage for copy in copies}) > 1 and self._job.ties_may_wait_in_a_circle:
                continue
            assert self._started[Kind.REDUCE, stage, bucket] >= runs - 1, backward

    def _check_run(self, reduce: Task) -> None:
        """Every backward whose gradient goes into the reduction has begun here."""
        step, run = divmod(reduce.microbatch, self._job.reductions)
        a_pipe = self._job.microbatches_a_pipe
        of_runs = ceil((run + 1) * a_pipe / self._job.reductions)
        kind = Kind.WEIGHT if self._job.splits else Kind.BACKWARD
        assert self._started[kind, reduce.stage, 0] >= step * a_pipe + of_runs, reduce

    def finished(self, task: Task) -> None:
        kind, stage, _, part = task
        self._finished[kind, stage, part] += 1
        if kind is Kind.LOAD and self._watches:
            self.on_host.remove((stage, part))
        if kind is Kind.STORE and self._watches:
            self.on_device.remove((stage, part))

    def _of_all_buckets(
        self, counts: Counter[tuple[AnyKind, int, int]], kind: AnyKind, stage: int
    ) -> int:
        """How many tasks every bucket has had."""
        of_all = [counts[kind, stage, bucket] for bucket in range(len(self._buckets[stage]))]
        return min(of_all, default=sys.maxsize)


class StashWatch:
    """What a rank promises of stashes, counted from its tasks alone: what a backward needs is
    there, what goes down comes back once, and no more are on the device than there is room for."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._offloads = job, job.offloads_stash(rank)
        self._ends = Kind.WEIGHT if job.splits else Kind.BACKWARD
        self.on_device: set[tuple[int, int]] = set()
        self.went_down: set[tuple[int, int]] = set()
        self.down: set[tuple[int, int]] = set()
        self._made: set[tuple[int, int]] = set()
        self._back: set[tuple[int, int]] = set()
        self._leaving = 0

    def started(self, task: Task) -> None:
        which = task.stage, task.microbatch
        if task.kind is Kind.FORWARD:
            self.on_device.add(which)
        if task.kind is Kind.OFFLOAD:
            assert which in self._made & self.on_device, task
            self.went_down.add(which)
            self._leaving += 1
        if task.kind is Kind.RELOAD:
            assert which in self.down, task
            self.down.remove(which)
            self.on_device.add(which)
        if task.kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT):
            assert which in (self._back if which in self.went_down else self.on_device), task
        if self._offloads:  # copies of one direction run one after the other
            copied = len(self.on_device) + min(self._leaving, 1)
            assert copied <= self._job.held_on_device, task

    def finished(self, task: Task, more: bool) -> None:
        which = task.stage, task.microbatch
        if task.kind is Kind.FORWARD and not more:
            self._made.add(which)
        if task.kind is Kind.OFFLOAD:
            self.on_device.remove(which)
            self.down.add(which)
            self._leaving -= 1
        if task.kind is Kind.RELOAD:
            self._back.add(which)
        if task.kind is self._ends and not more:
            self.on_device.remove(which)


def copies_on(
    stage: int, stages: int, pipes: Sequence[int], buckets: int, tied: bool
) -> list[Copies]:
    """The buckets of a stage: those that are its own, and those of a layer tied from the first to
    the last stage."""
    both = {0: [buckets], stages - 1: [buckets]} if stages > 1 else {0: [buckets, buckets + 1]}
    copies = tuple(
        BucketCopy(pipe, stage, bucket)
        for pipe in pipes
        for stage in both
        for bucket in both[stage]
    )
    own = [tuple(BucketCopy(pipe, stage, of) for pipe in pipes) for of in range(buckets)]
    return own + [copies] * (len(both.get(stage, ())) if tied else 0)


def run_in_random_order(pipeline: Pipeline, seed: int) -> None:
    """Deliver, start and finish in any order that a network and devices allow; stop when nothing
    can move.

    In some runs one queue is so slow that the others are steps ahead of it, if they may be. What a
    rank may do is asked again when something has happened to it: it does not depend on others.
    """
    random = Random(seed)
    share_told_later = random.choice((0.0, 0.5, 1.0))
    beside = OnDevice.COLLECTIVES, OnDevice.COPIES_IN, OnDevice.COPIES_OUT, OnDevice.HOST
    slow = random.choice((None, *beside))
    wires: list[Message] = []
    running: list[dict[Queue, list[Task]]] = [
        {queue: [] for queue in state.queues} for state in pipeline.states
    ]
    moves_of: list[list[Move]] = [[] for _ in pipeline.states]
    changed = set(range(len(pipeline.states)))
    while True:
        reading = {place for place in sorted(changed) if _reads(pipeline, place, wires)}
        for place in changed:
            moves_of[place] = _moves(pipeline.states[place], place, running[place])
        moves: list[Move] = [("deliver", i, OnDevice.COMPUTE) for i in range(len(wires))]
        moves += chain.from_iterable(moves_of)
        if not moves:
            return
        move, which, queue = random.choice(_without(slow, moves, random))
        if move == "deliver":
            message = wires.pop(which)
            which = pipeline.place_of(message)
            pipeline.states[which].deliver(message)
        elif move == "finish":
            wires += pipeline.finish(which, running[which][queue].pop(0))
        else:
            picked = pipeline.states[which].pick(queue)
            assert picked is not None
            pipeline.start(which, picked, random.random() < share_told_later)
            running[which][queue].append(picked)
        changed = {which, *reading}


def _reads(pipeline: Pipeline, place: int, wires: list[Message]) -> bool:
    """Let the reader of a rank say what it has read, if anything."""
    state = pipeline.states[place]
    messages = read(state, pipeline.end_of(state))
    for message in messages:
        if state.is_here(message):  # the reader's own stage hears it at once
            state.deliver(message)
        else:
            wires.append(message)
    return bool(messages)


def _moves(state: RankState, place: int, running: dict[Queue, list[Task]]) -> list[Move]:
    """What a rank may do: finish the first task of a queue, or start one more."""
    moves: list[Move] = []
    for queue, tasks in running.items():
        moves += [("finish", place, queue)] * bool(tasks)
        moves += [("start", place, queue)] * (len(tasks) < 2 and state.pick(queue) is not None)
    return moves


def _without(slow: Queue | None, moves: list[Move], random: Random) -> list[Move]:
    """The moves, as a rule without the ends of tasks on that queue, if others are left."""
    quick = [of for of in moves if of[0] != "finish" or of[2] is not slow]
    return quick if quick and random.random() < 0.99 else moves


def timetable(
    policy: str,
    ranks: int,
    microbatches: int,
    steps: int = 1,
    in_flight: int = 0,
    evaluate: bool = False,
    recomputes: Collection[int] = (),
) -> str:
    """One row a rank, one column a tick; a forward takes one tick, a backward two (of an evaluation
    none), messages and steps none."""
    rule = Nested() if policy == Nested.name else policy_by_name(policy, in_flight)
    pipeline = Pipeline(
        rule,
        ranks,
        microbatches,
        steps=steps,
        evaluate=microbatches if evaluate else None,
        recomputes=recomputes,
    )
    ticks = TICKS | {Kind.BACKWARD: 0} if evaluate else TICKS
    running: list[tuple[Task, int] | None] = [None] * ranks
    rows: list[list[str]] = [[] for _ in range(ranks)]
    now = 0
    while not pipeline.finished:
        _settle(pipeline, running, now, ticks)
        for rank, row in enumerate(rows):
            task = running[rank]
            row.append(
                ".."
                if task is None
                else _cell(task[0], microbatches, len(row) == task[1] - ticks[task[0].kind])
            )
        now += 1
    width = max(len(" ".join(row).rstrip(". ").split()) for row in rows)
    return "\n".join(" ".join(row[:width]) for row in rows)


def _cell(task: Task, microbatches: int, first: bool) -> str:
    return f"{task.kind.value}{task.microbatch % microbatches}" if first else "--"


def _settle(
    pipeline: Pipeline, running: list[tuple[Task, int] | None], now: int, ticks: dict[AnyKind, int]
) -> None:
    """Finish what ends now, deliver all of it, then let every idle rank pick, until nothing
    changes."""
    moved = True
    while moved:
        moved = False
        for rank, state in enumerate(pipeline.states):
            task = running[rank]
            if task is not None and task[1] == now:
                running[rank] = None
                moved = True
                for message in state.finish(task[0]):
                    pipeline.states[pipeline.place_of(message)].deliver(message)
        for rank, state in enumerate(pipeline.states):
            for message in read(state, pipeline.end):
                pipeline.states[pipeline.place_of(message)].deliver(message)
            choice = state.pick() if running[rank] is None else None
            if choice is not None:
                pipeline.start(rank, choice)
                running[rank] = (choice, now + ticks[choice.kind])
                moved = True


def drawn(picture: str) -> str:
    """The picture without its margin; the test's own words for a timetable."""
    return "\n".join(line.strip() for line in picture.strip().splitlines())
