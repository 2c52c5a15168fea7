"""The cluster as numbers: which link joins whom, and closed forms of collectives."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.cluster.cluster import Cluster, Device, Link
from axrt.scheduler.cluster.collectives import (
    all_reduce,
    exchanged,
    reduce_scatter,
    ring,
    two_tiers,
)

MIB = 2**20
WITHIN, ACROSS = Link(1e-6, 300e9), Link(2e-6, 25e9, shared=True)
DEVICE = Device({"bfloat16": 312e12}, share=0.5, memory=80e9, bandwidth=2e12)
CLUSTER = Cluster(4, 8, DEVICE, WITHIN, ACROSS)


def test_ranks_of_a_node_are_joined_by_its_link_and_others_by_that_between_nodes() -> None:
    assert CLUSTER.num_devices == 32
    assert [CLUSTER.node_of(rank) for rank in (0, 7, 8, 31)] == [0, 0, 1, 3]
    assert CLUSTER.link(0, 7) is WITHIN
    assert CLUSTER.link(7, 8) is ACROSS
    with pytest.raises(ValueError, match="no rank 32 in a cluster of 4 x 8 devices; expected 0 to"):
        CLUSTER.link(0, 32)


def test_products_reach_a_share_of_the_operations_of_their_type() -> None:
    assert DEVICE.rate("bfloat16") == 156e12
    with pytest.raises(ValueError, match="no operations a second of float32, only of bfloat16"):
        DEVICE.rate("float32")


def test_devices_have_their_part_of_a_link_that_they_share() -> None:
    assert ACROSS.seconds(25e9) == pytest.approx(1 + 2e-6, rel=1e-12)
    assert ACROSS.seconds(25e9, sharing=8) == pytest.approx(8 + 2e-6, rel=1e-12)
    assert WITHIN.seconds(300e9, sharing=8) == pytest.approx(1 + 1e-6, rel=1e-12)


def test_64_mib_among_8_ranks_at_2_us_and_25_gb_a_second_take_4_725620_ms() -> None:
    assert ring(8, 64 * MIB, Link(2e-6, 25e9)) == pytest.approx(4.72562048e-3, abs=1e-12)


def test_64_mib_in_two_tiers_take_4_444000_ms_on_4_nodes_of_8_and_5_067165_ms_on_8_of_4() -> None:
    """The second figure once stood for 4 nodes of 8. Worked out by hand for those, in ms: scatter
    and gather 14 (0.001 + 0.027962027), across 6 (0.002 + 0.67108864)."""
    by_hand = 14 * (0.001 + 0.0279620266667) + 6 * (0.002 + 0.67108864)
    assert two_tiers(4, 8, 64 * MIB, WITHIN, ACROSS) * 1e3 == pytest.approx(by_hand, abs=1e-9)
    assert by_hand == pytest.approx(4.444000, abs=5e-7)
    found = two_tiers(8, 4, 64 * MIB, WITHIN, ACROSS) * 1e3
    assert found == pytest.approx(5.0671648, abs=1e-9)


def test_links_of_their_own_to_other_nodes_let_each_slice_go_at_full_speed() -> None:
    own = replace(ACROSS, shared=False)
    across = 6 * (2e-6 + 64 * MIB / (8 * 4 * 25e9))
    within = 14 * (1e-6 + 64 * MIB / (8 * 300e9))
    assert two_tiers(4, 8, 64 * MIB, WITHIN, own) == pytest.approx(across + within, rel=1e-9)


def through_rounds(cluster: Cluster, ranks: Sequence[int], size: float) -> float:
    """An oracle: every round of one ring, in which each message takes its link by itself or, where
    the link is shared, along with those that its node sends on it."""
    total = 0.0
    hops = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    for _ in range(2 * (len(ranks) - 1)):
        slowest = 0.0
        for a, b in hops:
            link = cluster.link(a, b)
            beside = [
                c
                for c, d in hops
                if cluster.link(c, d) is link and cluster.node_of(c) == cluster.node_of(a)
            ]
            at = link.bandwidth / (len(beside) if link.shared else 1)
            slowest = max(slowest, link.latency + size / len(ranks) / at)
        total += slowest
    return total


links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12), st.booleans())


@given(st.integers(1, 4), st.integers(1, 4), links, links, st.floats(0, 1e9))
def test_an_all_reduce_takes_the_faster_of_one_ring_and_two_tiers(
    nodes: int, devices: int, within: Link, across: Link, size: float
) -> None:
    cluster = Cluster(nodes, devices, DEVICE, within, across)
    ranks = range(cluster.num_devices)
    ways = [through_rounds(cluster, ranks, size)]
    if nodes > 1:
        ways.append(two_tiers(nodes, devices, size, within, across))
    assert all_reduce(cluster, ranks, size) == pytest.approx(min(ways), rel=1e-9)


def test_ranks_that_nodes_have_unequally_many_of_add_up_in_one_ring() -> None:
    ranks = (5, 6, 7, 8)
    expected = through_rounds(CLUSTER, ranks, 1e6)
    assert all_reduce(CLUSTER, ranks, 1e6) == pytest.approx(expected, rel=1e-12)


def test_groups_that_add_up_side_by_side_share_the_link_of_their_node() -> None:
    """Eight groups, each with one rank of every node, as replicas of a tensor-parallel node."""
    one = all_reduce(CLUSTER, (0, 8, 16, 24), 100e6, groups=8)
    assert one == pytest.approx(6 * (2e-6 + 100e6 / 4 / (25e9 / 8)), rel=1e-12)


def test_a_reduce_scatter_takes_half_and_one_rank_takes_nothing() -> None:
    assert reduce_scatter(CLUSTER, range(8), 1e6) == all_reduce(CLUSTER, range(8), 1e6) / 2
    assert all_reduce(CLUSTER, [3], 1e6) == 0


def test_ranks_that_send_each_other_their_slices_share_the_link_of_their_node() -> None:
    """Two nodes of two: each rank has a slice for its neighbour and two for the other node."""
    node, across = Link(1e-6, 1e9), Link(1e-5, 1e8, shared=True)
    of = Cluster(2, 2, Device({"float32": 1.0}, 1.0, 1.0, 1.0), node, across)
    assert exchanged(of, [0, 1], 4e6) == pytest.approx(1e-6 + 2e6 / 1e9)
    assert exchanged(of, range(4), 4e6) == pytest.approx(1e-5 + 2 * 1e6 / (1e8 / 2))
    assert exchanged(of, [0, 2], 4e6, groups=2) == pytest.approx(1e-5 + 2e6 / (1e8 / 2))
    assert exchanged(of, [0], 4e6) == 0
