"""What a step of a layout takes on a cluster: a simulation of one replica, and closed forms of what
is exchanged."""

# Replicas are alike, so one pipeline is simulated. Sums over replicas and the optimizer's step have
# closed forms.
#
# What is assumed: nothing varies; sums and optimizer steps of a stage follow its last backward, one
# after the other, and the stage's rank does nothing else meanwhile; devices of a node that hold the
# same stages send at the same time, on a link that they may share; all teams of a node exchange at
# the same time; an optimizer's step takes what it moves in memory; tied weights count in each
# layer.

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from axrt.config import Config
from axrt.ledger.ledger import Ledger, Purpose, Tier
from axrt.ledger.prediction import Prediction
from axrt.planning.step_prediction import least_step_s, predicted
from axrt.scheduler.cluster.cluster import Cluster
from axrt.scheduler.cluster.collectives import exchanged
from axrt.scheduler.job import Job
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.scheduler.simulation.costs import Edge
from axrt.scheduler.simulation.model_costs import TASK_S, ModelCosts
from axrt.world.mesh import Mesh

LayersOf = Callable[[int, int], Sequence[LayerCosts]]  # by degree and samples of a microbatch


class StepTime(NamedTuple):
    """What a step takes by prediction, in seconds."""

    step_s: float  # in all
    joints_s: float  # so much of it because members exchange slices
    ends_s: float  # so much because of sums over replicas and optimizer steps
    computing_s: float  # in which the busiest rank computes, layers that run again included

    @property
    def parts(self) -> dict[str, float]:
        """The same by what the time is due to; waiting is what is left."""
        known = {
            "computing": self.computing_s,
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
        self._links: dict[tuple[int, Mesh], dict[tuple[int, int], Edge]] = {}

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
            at_once = costs._replace(within=Edge())
            joints_s = found.step_s - predicted(layout.schedule, job, at_once).step_s
        if with_parts:
            endless = costs._replace(step_s=())
            ends_s = found.step_s - predicted(layout.schedule, job, endless).step_s
        computing_s = self._computing_s(job, costs.layers)
        # Without joints a policy may choose other tasks, and be slower.
        return StepTime(found.step_s, max(0.0, joints_s), max(0.0, ends_s), computing_s)

    def _computing_s(self, job: Job, layers: Sequence[LayerCosts]) -> float:
        """Seconds of a step in which the busiest rank computes, with what the loop takes."""
        of_ranks = [0.0] * job.ranks
        for stage, (first, end) in enumerate(pairwise(job.cuts)):
            part, again = layers[first:end], layers[first : first + job.recomputed.get(stage, 0)]
            work_s = sum(layer.forward_s + layer.input_s + layer.weight_s for layer in part)
            again_s = sum(layer.forward_s for layer in again)
            pieces = 2 + sum(job.joints_of(stage))
            seconds = work_s + again_s + pieces * self._task_s
            of_ranks[job.placement.rank_of(stage)] += job.microbatches * seconds
        return max(of_ranks)

    def _costs(self, config: Config, job: Job, mesh: Mesh) -> ModelCosts:
        """The costs of a schedule, without those of the end of a step."""
        team = config.parallel.tensor
        layers = self._layers_of(team, config.schedule.microbatch_size)
        return ModelCosts(
            [replace(layer, spread=0.0) for layer in layers],
            task_s=self._task_s,
            edges=self._edges_of(job.ranks, mesh),
            team=team,
            within=self._within(mesh),
        )

    def _edges_of(self, ranks: int, mesh: Mesh) -> dict[tuple[int, int], Edge]:
        """The links between members of neighbouring ranks of a pipeline."""
        if (ranks, mesh) not in self._links:
            self._links[ranks, mesh] = {
                (a, b): self._edge(mesh, a, b)
                for a in range(ranks)
                for b in {(a + 1) % ranks, (a - 1) % ranks} - {a}
            }
        return self._links[ranks, mesh]

    def _edge(self, mesh: Mesh, a: int, b: int) -> Edge:
        """The link from rank `a` of a pipeline to rank `b`, of the replica whose link is slowest:
        others wait for it at the end of a step."""
        cluster = self._cluster
        pairs = [
            (mesh.rank_of(replica, a * mesh.tensor), mesh.rank_of(replica, b * mesh.tensor))
            for replica in range(mesh.data)
        ]
        nodes = Counter(cluster.node_of(here) for here, _ in pairs)
        links = [
            (cluster.link(here, there), nodes[cluster.node_of(here)] * mesh.tensor)
            for here, there in pairs
        ]
        edges = [Edge(link.latency, link.of_each(sharing)) for link, sharing in links]
        return min(edges, key=lambda edge: edge.bandwidth)

    def _within(self, mesh: Mesh) -> Edge:
        """The link between members of a team, on which all teams of a node exchange at once."""
        if mesh.tensor == 1:
            return Edge()
        link = self._cluster.link(mesh.rank_of(0, 0), mesh.rank_of(0, mesh.tensor - 1))
        return Edge(link.latency, link.of_each(self._cluster.devices))

    def _end_of_step(self, layout: Prediction, layers: Sequence[LayerCosts]) -> Iterator[float]:
        """Seconds of the end of a step on each stage."""
        job, mesh = layout.job, layout.mesh
        for stage, (first, end) in enumerate(pairwise(job.cuts)):
            rank = job.placement.rank_of(stage)
            stages = len(job.placement.stages_of(rank))
            held = sum(layer.held_parameters for layer in layers[first:end])
            copies = [mesh.rank_of(of, rank * mesh.tensor) for of in range(mesh.data)]
            sums_s = self._sums_s(layout, copies, held)
            stepped = held / (mesh.data if layout.config.memory.zero else 1)
            of_rank = layout.of_rank(copies[0])
            yield sums_s + self._stepped_s(layout.config, of_rank, stages, stepped)

    def _sums_s(self, layout: Prediction, copies: Sequence[int], held: int) -> float:
        """Seconds in which replicas add a stage's gradients up, and share its weights again."""
        if len(copies) == 1:
            return 0.0
        precision, of = layout.config.precision, layout.config.memory
        narrow = precision.weights != "float32"
        gradients = held * (2 if narrow and precision.gradients == "weights" else 4)
        weights = held * (2 if narrow else 4)
        beside = self._cluster.devices // max(self._cluster.by_node(copies))
        near = layout.job.pipes_a_group
        first, others = copies[:near], copies[::near]  # of one group, and an owner in each

        def exchanged_s(size: int) -> float:
            """Once within a group, and between those of all groups that own the same slice."""
            within = exchanged(self._cluster, first, size, beside)
            if len(others) == 1:
                return within
            return within + exchanged(self._cluster, others, size / near, beside * near)

        if not of.zero:
            return 2 * exchanged_s(gradients)
        return layout.job.reductions * exchanged_s(gradients) + exchanged_s(weights)

    def _stepped_s(self, config: Config, ledger: Ledger, stages: int, stepped: float) -> float:
        """Seconds of the optimizer's step on a stage: gradients are read, and masters, moments and
        weights read and written, those that are narrow only written. Offloaded state goes both
        ways at once."""
        device, precision = self._cluster.device, config.precision
        state = sum(
            ledger.of_purpose(purpose, tier)
            for purpose in (Purpose.MASTERS, Purpose.MOMENTS)
            for tier in Tier
        )
        narrow = precision.weights != "float32"
        gradients = 2 if narrow and precision.gradients == "weights" else 4
        moved = 2 * state + stages * stepped * (gradients + (2 if narrow else 8))
        away = state if config.memory.comes_to_device else 0
        return (moved / device.bandwidth + away / device.expanded_bandwidth) / stages


def _alone(job: Job) -> Job:
    """One replica."""
    return replace(job.alone(), votes=job.votes, team=job.team, joints=job.joints)
