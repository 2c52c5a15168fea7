"""How long collectives take: closed forms.

A ring of n members moves a slice of S / n bytes in each of its n - 1 rounds, so with latency a and
bandwidth B a reduce-scatter, or an all-gather, takes (n - 1) (a + S / (n B)), and an all-reduce is
one after the other. Additions count nothing: they run at the speed of memory, far beyond a link's.

Where k nodes have m members each, an all-reduce in two tiers sends less between nodes:

    scatter within a node      (m - 1) (a1 + S / (m B1))
    all-reduce of each slice   2 (k - 1) (a2 + S / (k B2))      m rings of S / m at once
    gather within a node       (m - 1) (a1 + S / (m B1))

B2 is the bandwidth of a node there: each of its members has B2 / m for a slice of S / m, and m
cancels. Where each device has a link of its own to other nodes, the slice takes S / (m k B2).
"""

from collections.abc import Sequence

from .cluster import Cluster, Link


def ring(members: int, size: float, link: Link, sharing: int = 1) -> float:
    """Seconds of an all-reduce in a ring; a reduce-scatter or an all-gather takes half.

    Args:
        members: number of ranks in the ring, 1 or more; one rank takes no time.
        size: bytes that each rank has and gets, 0 or more.
        link: link between neighbours.
        sharing: number of ranks of a node that send on that link at the same time, 1 or more.
    """
    return 2 * (members - 1) * link.seconds(size / members, sharing)


def two_tiers(
    nodes: int, members: int, size: float, within: Link, across: Link, groups: int = 1
) -> float:
    """Seconds of an all-reduce that scatters within nodes, adds up across them and gathers within.

    Args:
        nodes: number of nodes, 1 or more.
        members: number of ranks of each node, 1 or more.
        size: bytes that each rank has and gets, 0 or more.
        within: link between ranks of a node.
        across: link between nodes; where it is shared, each member has its part of it.
        groups: number of such all-reduces at the same time on each node, 1 or more.
    """
    sharing = members * groups
    return ring(members, size, within, sharing) + ring(nodes, size / members, across, sharing)


def all_reduce(cluster: Cluster, ranks: Sequence[int], size: float, groups: int = 1) -> float:
    """Seconds of an all-reduce among ranks of a cluster, by the faster of two ways: one ring
    through all of them, or two tiers where each node has equally many of them.

    Args:
        cluster: where the ranks are.
        ranks: who adds up, each rank once, at least one.
        size: bytes that each rank has and gets, 0 or more.
        groups: number of such all-reduces at the same time on each node, 1 or more.
    Raises:
        ValueError: the cluster has no such rank.
    """
    of_nodes = cluster.by_node(ranks)
    if len(of_nodes) == 1:
        return ring(len(ranks), size, cluster.within, len(ranks) * groups)
    in_one_ring = _through_nodes(cluster, of_nodes, size, groups)
    if len(set(of_nodes)) > 1:
        return in_one_ring
    tiers = two_tiers(len(of_nodes), of_nodes[0], size, cluster.within, cluster.across, groups)
    return min(in_one_ring, tiers)


def reduce_scatter(cluster: Cluster, ranks: Sequence[int], size: float, groups: int = 1) -> float:
    """Seconds of a reduce-scatter or an all-gather of `size` bytes in all, which is half of an
    all-reduce; arguments and errors are those of `all_reduce`."""
    return all_reduce(cluster, ranks, size, groups) / 2


def exchanged(cluster: Cluster, ranks: Sequence[int], size: float, groups: int = 1) -> float:
    """Seconds in which each rank sends each other one its slice, all at the same time: a
    reduce-scatter or an all-gather by messages, as `parallel.collectives = "parts"` has it.

    A rank sends S / n to each other rank, on the node's links and on those between nodes at once.
    Arguments and errors are those of `all_reduce`.
    """
    of_nodes, slice_bytes = cluster.by_node(ranks), size / len(ranks)
    longest = 0.0
    for here in of_nodes:
        sharing = here * groups
        for others, link in ((here - 1, cluster.within), (len(ranks) - here, cluster.across)):
            if others:
                longest = max(longest, link.seconds(others * slice_bytes, sharing))
    return longest


def _through_nodes(cluster: Cluster, of_nodes: Sequence[int], size: float, groups: int) -> float:
    """One ring through all ranks, node after node. It leaves each node once, so nobody else of its
    ring shares that link, and its slowest link is at work in every round."""
    members = sum(of_nodes)
    across = ring(members, size, cluster.across, groups)
    neighbours = max(of_nodes) - 1  # on the busiest node
    if not neighbours:
        return across
    return max(across, ring(members, size, cluster.within, neighbours * groups))
