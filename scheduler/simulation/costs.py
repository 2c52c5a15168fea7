"""What tasks and messages of a simulated job cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..cluster.cluster import Cluster, Link
from ..cluster.collectives import ring as ring_on
from ..linger import LINGER
from ..placement import Placement
from ..task import AnyKind


class Work(NamedTuple):
    """The cost of one microbatch on a stage.

    Args:
        forward, input, weight: durations in the unit of `Costs`; a whole backward takes input +
            weight.
        sent: size of the activation that the stage sends on, and of its gradient that comes back,
            in the unit of `Edge.bandwidth` x time.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    sent: float = 0.0


class Edge(NamedTuple):
    """The link from one rank to another.

    Args:
        latency: duration of any message on the way.
        bandwidth: size per time; infinity (the default) makes size free.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")

    def seconds(self, size: float) -> float:
        """How long a message of a size takes, alone."""
        return self.latency + size / self.bandwidth


_UNIT, _AT_ONCE = Work(), Edge()


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations and sizes, each in any one unit.

    Args:
        work: cost of a rank, divided evenly over its chunks; or a tuple with the cost of each
            stage.
        reduce: duration of adding up one copy's shard of a bucket; used only where there are
            replicas.
        step: duration of the optimizer step on a bucket.
        step_of: the same of each stage, in place of `step`; (): all take that.
        state: size of a bucket's offloaded state.
        copies_in, copies_out: bandwidths of a rank's copies of such state, or of gradients and
            weights where steps are on the host, to the device and from it, in size per time;
            infinity (the default) makes copies free.
        offload, reload: durations of taking out and bringing back what a microbatch keeps on a
            rank from its forward to its backward; divided evenly over the rank's chunks, or a tuple
            with those of each stage.
        others: duration of other kinds of work that are not of a microbatch, such as steps on the
            host, by kind; a missing kind takes 0.
        task: duration added to every forward, recomputation and backward, and to each piece of one,
            for the loop itself.
        edge: link between any two ranks.
        edges: links that differ from `edge`, by (from, to), with ranks numbered over all replicas.
        message: duration for which a rank is busy sending any message, besides its tasks; its
            messages leave one after the other.
        node: number of consecutive ranks on a node, numbered over all replicas; 0: all.
        between_nodes: link from each rank to all ranks of other nodes together: its messages to
            them take turns.
        edge_shared, between_shared: whether the messages that ranks of a node send within it, or to
            other nodes, take turns, rank by rank, as on one link of the node.
        exchange: duration of the exchange of slices at a joint, on a member's way to the others of
            its team.
        exchange_of: the same at a joint of each stage, in place of `exchange`; (): all take that.
        bucket: size of a bucket's gradient, and of its weights.
        jitter: sigma of a lognormal factor on the durations of forwards, recomputations and
            backwards, whose median is 1; 0 is none.
        lengths: sigma of a lognormal factor on the forwards, recomputations and backwards of a
            microbatch, the same on all stages, whose median is 1: sequences differ in length; 0 is
            none.
        hiccups: (share, factor): that share of forwards, recomputations and backwards takes
            `factor` times as long; share 0 is none.
        stragglers: factor on the forwards, recomputations and backwards of a rank, by rank numbered
            over all replicas; a missing rank has 1.
        recomputed: share of a forward that runs again before a backward, by stage; a missing stage
            that recomputes has 1.
        pieces: number of pieces of a weight gradient.
        linger: longest wait before an early weight gradient (anticipation), as a share of its
            duration; 0: nobody waits. A weight gradient in several pieces never waits.
        seed: seed of jitter, lengths and hiccups.
    """

    work: Work | tuple[Work, ...] = _UNIT
    reduce: float = 0.0
    step: float = 0.0
    step_of: tuple[float, ...] = ()
    state: float = 0.0
    copies_in: float = float("inf")
    copies_out: float = float("inf")
    offload: float | tuple[float, ...] = 0.0
    reload: float | tuple[float, ...] = 0.0
    others: Mapping[AnyKind, float] = field(default_factory=dict)
    task: float = 0.0
    edge: Edge = _AT_ONCE
    edges: dict[tuple[int, int], Edge] = field(default_factory=dict)
    message: float = 0.0
    node: int = 0
    between_nodes: Edge = _AT_ONCE
    edge_shared: bool = False
    between_shared: bool = False
    exchange: float = 0.0
    exchange_of: tuple[float, ...] = ()
    bucket: float = 0.0
    jitter: float = 0.0
    lengths: float = 0.0
    hiccups: tuple[float, float] = (0.0, 1.0)
    stragglers: dict[int, float] = field(default_factory=dict)
    recomputed: dict[int, float] = field(default_factory=dict)
    pieces: int = 4
    linger: float = LINGER
    seed: int = 0

    def of_stage(self, placement: Placement, stage: int) -> Work:
        """The cost of one microbatch on a stage."""
        if not isinstance(self.work, Work):
            return self.work[stage]
        forward, back, weight, sent = self.work
        return Work(
            forward * placement.share, back * placement.share, weight * placement.share, sent
        )

    def link(self, source: int, to: int) -> Edge:
        """The link from one rank to another."""
        if self.node and source // self.node != to // self.node:
            return self.between_nodes
        return self.edges.get((source, to), self.edge)

    def on(self, cluster: Cluster) -> "Costs":
        """The same with the links of a cluster; durations are then in seconds, sizes in bytes."""
        within, across = cluster.within, cluster.across
        return replace(
            self,
            edge=Edge(within.latency, within.bandwidth),
            edges={},
            node=cluster.devices,
            between_nodes=Edge(across.latency, across.bandwidth),
            edge_shared=within.shared,
            between_shared=across.shared,
        )

    def of_busiest(self, placement: Placement) -> float:
        """The duration of one microbatch on the rank with most work.

        A microbatch goes through one pipe, so of several pipes it is the average.
        """
        of_ranks = [
            sum(sum(self.of_stage(placement, stage)[:3]) for stage in placement.stages_of(rank))
            for rank in range(placement.ranks)
        ]
        return max(of_ranks) / placement.pipes


def ring(costs: Costs, copies: int) -> float:
    """The time on the way of an all-reduce by a library, as of a ring: what the same bucket's parts
    and sums take."""
    return ring_on(copies, costs.bucket, Link(*costs.edge))


def of_stage(cost: float | tuple[float, ...], placement: Placement, stage: int) -> float:
    return cost[stage] if isinstance(cost, tuple) else cost * placement.share
