"""What a step of a layout takes on a cluster: a simulation of one replica, and closed forms of what
is exchanged."""

# Replicas are alike, and so are members of a team. So one pipeline is simulated, with two members
# where there are more; sums over replicas, the optimizer's step and the exchange at a joint have
# closed forms.
#
# Pieces between joints are merged until a task has a few, and an exchange takes as much longer:
# all joints of a model of many layers would take minutes to simulate.
#
# What is assumed: nothing varies; sums and optimizer steps of a stage follow its last backward, one
# after the other, and the stage's rank does nothing else meanwhile; all links of a node that are
# shared are in use at the same time; an optimizer's step takes what it moves in memory.

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from axrt.config import Config
from axrt.ledger.ledger import Ledger, Purpose, Tier
from axrt.ledger.prediction import Prediction
from axrt.planning.step_prediction import least_step_s, predicted
from axrt.scheduler.cluster.cluster import Cluster, Link
from axrt.scheduler.cluster.collectives import all_reduce, reduce_scatter
from axrt.scheduler.job import Job
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.scheduler.simulation.costs import Edge
from axrt.scheduler.simulation.model_costs import TASK_S, ModelCosts
from axrt.world.mesh import Mesh

_JOINTS = 8  # of a simulated forward or backward at most
LayersOf = Callable[[int, int], Sequence[LayerCosts]]  # by degree and samples of a microbatch


class StepTime(NamedTuple):
    """What a step takes by prediction, in seconds."""

    step_s: float  # in all
    joints_s: float  # so much of it because members exchange slices
    ends_s: float  # so much because of sums over replicas and optimizer steps
    busy: float  # share of it in which the busiest rank computes forwards and backwards

    @property
    def parts(self) -> dict[str, float]:
        """The same by what the time is due to; waiting is what is left."""
        computing = self.busy * self.step_s
        known = {
            "computing": computing,
            "joints": self.joints_s,
            "sums and optimizer steps": self.ends_s,
        }
        return {**known, "waiting": max(0.0, self.step_s - sum(known.values()))}


class StepTimes:
    """Predicts what steps take on a cluster, of layouts whose memory has been predicted.

    Args:
        layers_of: function that gives the costs of layers; how much they vary does not count.
        task_s: seconds that the loop takes for a task.
    """

    def __init__(self, cluster: Cluster, layers_of: LayersOf, task_s: float = TASK_S) -> None:
        self._cluster, self._layers_of, self._task_s = cluster, layers_of, task_s

    def least_s(self, config: Config, job: Job, mesh: Mesh) -> float:
        """Seconds that a step of a schedule takes at least, whatever its end takes."""
        return least_step_s(_alone(job), self._costs(config, job, mesh))

    def of(self, layout: Prediction, with_parts: bool = False) -> StepTime:
        """What a step takes.

        Args:
            with_parts: True to find out what is due to joints and to the ends of steps, which takes
                two more simulations; else they are 0.
        """
        costs = self._costs(layout.config, layout.job, layout.mesh)
        costs = costs._replace(step_s=tuple(self._end_of_step(layout, costs.layers)))
        job = _alone(layout.job)
        found = predicted(layout.schedule, job, costs)
        joints_s = ends_s = 0.0
        if with_parts and job.joints:
            at_once = costs._replace(exchange_s=0.0)
            joints_s = found.step_s - predicted(layout.schedule, job, at_once).step_s
        if with_parts:
            endless = costs._replace(step_s=())
            ends_s = found.step_s - predicted(layout.schedule, job, endless).step_s
        return StepTime(found.step_s, joints_s, ends_s, found.busy)

    def _costs(self, config: Config, job: Job, mesh: Mesh) -> ModelCosts:
        """The costs of a schedule, without those of the end of a step."""
        team = config.parallel.tensor
        layers = self._layers_of(team, config.schedule.microbatch_size)
        return ModelCosts(
            [replace(layer, spread=0.0) for layer in layers],
            task_s=self._task_s,
            edges=dict(self._edges(job, mesh)),
            # A simulation has two members at most, and cuts what it sends by their number.
            team=min(team, 2),
            exchange_s=self._exchange_s(job, mesh, layers),
        )

    def _edges(self, job: Job, mesh: Mesh) -> Iterator[tuple[tuple[int, int], Edge]]:
        """The links between members of neighbouring ranks of a pipeline, as the simulation numbers
        them."""
        ranks, members = job.ranks, min(mesh.tensor, 2)
        for a in range(ranks):
            for b in {(a + 1) % ranks, (a - 1) % ranks} - {a}:
                here, there = (mesh.rank_of(0, of * mesh.tensor) for of in (a, b))
                edge = _edge(self._cluster.link(here, there), self._sharing(mesh, a))
                for member in range(members):
                    yield (a * members + member, b * members + member), edge

    def _sharing(self, mesh: Mesh, a: int) -> int:
        """Devices of a node that send from rank `a` of their pipeline at the same time: those that
        hold the same stages."""
        cluster = self._cluster
        node = cluster.node_of(mesh.rank_of(0, a * mesh.tensor))
        same = (
            mesh.rank_of(replica, a * mesh.tensor + member)
            for replica in range(mesh.data)
            for member in range(mesh.tensor)
        )
        return sum(cluster.node_of(rank) == node for rank in same)

    def _exchange_s(self, job: Job, mesh: Mesh, layers: Sequence[LayerCosts]) -> float:
        """Seconds that a member's slices take to all others at a joint that is simulated."""
        if mesh.tensor == 1:
            return 0.0
        sizes = [size for layer in layers for size in (*layer.joints, *layer.back_joints)]
        members = [mesh.rank_of(0, member) for member in range(mesh.tensor)]
        link = self._cluster.link(members[0], members[-1])
        sharing = self._cluster.devices  # all teams of a node exchange at the same time
        taken_s = sum(link.seconds(size, sharing) for size in sizes)
        simulated = sum(sum(of) for of in _few(job).values())
        return taken_s / simulated if simulated else 0.0

    def _end_of_step(self, layout: Prediction, layers: Sequence[LayerCosts]) -> Iterator[float]:
        """Seconds of the end of a step on each stage."""
        job, mesh = layout.job, layout.mesh
        for stage, (first, end) in enumerate(pairwise(job.cuts)):
            rank = job.placement.rank_of(stage)
            stages = len(job.placement.stages_of(rank))
            held = sum(layer.held_parameters for layer in layers[first:end])
            copies = [mesh.rank_of(of, rank * mesh.tensor) for of in range(mesh.data)]
            sums_s = self._sums_s(layout, copies, held)
            yield sums_s + self._stepped_s(layout.config, layout.of_rank(copies[0]), stages)

    def _sums_s(self, layout: Prediction, copies: Sequence[int], held: int) -> float:
        """Seconds in which replicas add a stage's gradients up, and share its weights again."""
        if len(copies) == 1:
            return 0.0
        precision, of = layout.config.precision, layout.config.memory
        narrow = precision.weights != "float32"
        gradients = held * (2 if narrow and precision.gradients == "weights" else 4)
        weights = held * (2 if narrow else 4)
        beside = self._cluster.devices // max(self._cluster.by_node(copies))
        where = (self._cluster, copies)
        if not of.zero:
            return all_reduce(*where, gradients, beside)
        scattered = layout.job.reductions * reduce_scatter(*where, gradients, beside)
        return scattered + reduce_scatter(*where, weights, beside)

    def _stepped_s(self, config: Config, ledger: Ledger, stages: int) -> float:
        """Seconds of the optimizer's step on a stage: all that it has is read, and written but for
        gradients."""
        device = self._cluster.device
        state = sum(
            ledger.of_purpose(purpose, tier)
            for purpose in (Purpose.MASTERS, Purpose.MOMENTS)
            for tier in Tier
        )
        moved = 2 * state + sum(map(ledger.of_purpose, (Purpose.WEIGHTS, Purpose.GRADIENTS)))
        away = state if config.memory.comes_to_device else 0
        return (moved / device.bandwidth + away / device.expanded_bandwidth) / stages


def _alone(job: Job) -> Job:
    """One replica, with two members where there are more."""
    return replace(job.alone(), votes=job.votes, team=min(job.team, 2), joints=_few(job))


def _few(job: Job) -> dict[int, StageJoints]:
    """The joints that are simulated."""
    return {
        stage: StageJoints(min(of.forward, _JOINTS), min(of.back, _JOINTS))
        for stage, of in job.joints.items()
    }


def _edge(link: Link, sharing: int) -> Edge:
    return Edge(link.latency, link.of_each(sharing))
