"""`axrt simulate --cluster`: links of a file, in seconds and bytes."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main
from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts
from axrt.scheduler.simulation.costs import Edge

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster.toml"
ACROSS = ("links.across.latency=0.5", "links.across.bandwidth=1e9")
AT_ONCE = ("links.node.latency=1e-9", "links.node.bandwidth=1e15")


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", "--policy", "1f1b", *arguments])


def makespan(*arguments: str) -> float:
    result = simulate("--cluster", str(EXAMPLE), "--json", *arguments)
    assert result.exit_code == 0, result.output
    return float(json.loads(result.output)["makespan"])


TWO_RANKS = ("--ranks", "2", "--microbatches", "1")


def test_messages_between_nodes_take_the_latency_and_their_bytes_there() -> None:
    """F0 to 1, its 1 GB to 2.5, F1 and B1 to 5.5, the gradient to 7, B0 to 9."""
    apart = ("cluster.devices=1", "world.transfer=1e9", *ACROSS)
    assert makespan(*TWO_RANKS, *apart) == pytest.approx(9, rel=1e-9)


def test_messages_within_a_node_take_its_link() -> None:
    beside = ("world.transfer=1e9", "links.node.bandwidth=2e9", "links.node.latency=0.25")
    assert makespan(*TWO_RANKS, *beside) == pytest.approx(6 + 2 * 0.75, rel=1e-9)


@pytest.mark.parametrize(("shared", "expected"), [("false", 10.0), ("true", 14.0)])
def test_ranks_of_a_node_take_turns_on_the_link_that_they_share(
    shared: str, expected: float
) -> None:
    """Four replicas on two nodes end at 3 and send parts of 1 GB, each two of them across, which
    take until 5, or until 7 where a node's four take turns. Sums take as
    long again, so they are there at 7, or at 11, and the second step takes 3."""
    found = makespan(
        *("--ranks", "1", "--microbatches", "1", "--replicas", "4", "--steps", "2"),
        "world.reduce_transfer=4e9",
        *("cluster.devices=2", "links.across.latency=1e-9", "links.across.bandwidth=1e9"),
        *(f"links.across.shared={shared}", *AT_ONCE),
    )
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_shared_link_of_a_node_is_taken_in_turns_by_two_pipes() -> None:
    """Chimera's pipes begin at both ends: messages cross at the same time, or one by one."""
    case = ("--policy", "chimera", "--ranks", "2", "--microbatches", "2", "world.transfer=1e9")
    links = ("links.node.latency=1e-9", "links.node.bandwidth=1e9")
    own, shared = (makespan(*case, *links, f"links.node.shared={one}") for one in ("false", "true"))
    assert own == pytest.approx(8, rel=1e-6)
    assert shared == pytest.approx(9, rel=1e-6)


def test_the_links_of_a_table_of_costs_do_not_count(tmp_path: Path) -> None:
    layers = tuple(
        [LayerCosts(1.0, 1.0, 1.0, sent, 0, 0.0, name="L") for sent in (1_000_000_000, 0)]
    )
    (tmp_path / "costs.json").write_text(CostTable({1: layers}, Edge(100.0, 1.0)).to_json())
    table = ("--costs", str(tmp_path / "costs.json"))
    assert makespan(*TWO_RANKS, *table, "cluster.devices=1", *ACROSS) == pytest.approx(9, rel=1e-9)


def test_the_line_below_a_table_names_the_links_and_seconds() -> None:
    said = simulate(*TWO_RANKS, "--cluster", str(EXAMPLE)).output
    assert "links of 4 nodes of 8 (--costs, --stage-costs, --cluster). Times are in s." in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--latency", "1"), "--cluster and --latency both say what links take; expected one"),
        (("world.node=8,4",), "--cluster and world.node both say what links take; expected one"),
        (("--replicas", "40"), "has 4 nodes of 8, and there are 80 ranks; .* cluster.nodes=10"),
        (("links.node.bandwidth=25",), "bandwidth = 25 bytes a second; .* write 25e9 for 25 GB/s"),
        (("links.nodes.latency=1",), "no section links.nodes; did you mean links.node?"),
    ],
)
def test_what_does_not_go_with_a_cluster_is_refused(arguments: tuple[str, ...], text: str) -> None:
    result = simulate(*TWO_RANKS, "--cluster", str(EXAMPLE), *arguments)
    assert result.exit_code == 2
    assert re.search(text, result.output), result.output


def test_keys_of_a_cluster_without_one_are_refused() -> None:
    result = simulate(*TWO_RANKS, "links.node.latency=1e-6")
    assert result.exit_code == 2
    assert "links.node.latency=1e-6 is of a cluster; expected --cluster C.toml" in result.output
