"""The file of a cluster: what is read of it, and how it is refused."""

from math import inf
from pathlib import Path

import pytest

from axrt import ConfigError
from axrt.planning.cluster_file import read_cluster
from axrt.scheduler.cluster.cluster import Cluster, Device, Link

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster.toml"


def test_the_example_is_four_nodes_of_eight_devices() -> None:
    operations = {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12}
    assert read_cluster(EXAMPLE) == Cluster(
        nodes=4,
        devices=8,
        device=Device(operations, 0.6, 80e9, 2e12, 0.0, inf),
        within=Link(1e-6, 300e9, shared=False),
        across=Link(2e-6, 25e9, shared=True),
    )


def test_overrides_reach_keys_of_sections_within_others() -> None:
    found = read_cluster(
        EXAMPLE,
        [
            "cluster.nodes=2",
            "links.node.bandwidth=100e9",
            "links.across={latency=3e-6, bandwidth=5e9, shared=false}",
            "links.across.latency=4e-6",
            "device.operations.bfloat16=0",
            "device.expanded_memory=1e12",
            "device.expanded_bandwidth=64e9",
        ],
    )
    assert (found.nodes, found.within.bandwidth) == (2, 100e9)
    assert found.across == Link(4e-6, 5e9, shared=False)
    assert list(found.device.operations) == ["float32", "float16"]
    assert (found.device.expanded_memory, found.device.expanded_bandwidth) == (1e12, 64e9)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("links.node.latancy=1", "there is no key links.node.latancy; did you mean links.node.lat"),
        ("links.acros.latency=1", "there is no section links.acros; did you mean links.across?"),
        ("devise.memory=1", "there is no section devise; did you mean device?"),
        ("links.node=3", r"\[links.node\] is an integer; expected a section of keys"),
        ("cluster.nodes=0", "cluster.nodes = 0; expected a number from 1 to 1e.07"),
        ("cluster.devices=2.5", "cluster.devices = 2.5 is a number; expected an integer"),
        (
            "links.across.bandwidth=25",
            "links.across.bandwidth = 25 bytes a second; expected bytes a second from 100000 .*: "
            "write 25e9 for 25 GB/s",
        ),
        ("links.node.bandwidth=0", "bandwidth = 0 bytes a second; .* write 25e9 for 25 GB/s"),
        ("links.node.bandwidth=25GB/s", "bandwidth = '25GB/s' is a string; expected a number"),
        ("links.node.latency=2", "latency = 2 seconds; expected .* to 1 .*: write 2e-6 for 2 us"),
        ("links.node.latency=inf", "links.node.latency = inf; expected finite"),
        ("links.node.latency=nan", "links.node.latency = nan seconds; expected seconds from 1e-09"),
        ("links.node.shared=1", "links.node.shared = 1 is an integer; expected a boolean"),
        ("device.share=60", "device.share = 60; expected a number .* to 1 .*: write 0.6 for 60 %"),
        ("device.share=0", "device.share = 0; expected a number from 0.001"),
        ("device.memory=80", "device.memory = 80 bytes; .*: write 80e9 for 80 GB"),
        (f"device.memory={'9' * 400}", "device.memory = 9999.* bytes; expected bytes"),
        ("device.operations.float32=19.5", "float32 = 19.5 operations a second; .* 312e12 for 312"),
        ("device.expanded_memory=1e12", "with device.expanded_bandwidth = 0; expected both, or"),
    ],
)
def test_a_mistake_is_named_with_its_unit_and_what_to_write(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        read_cluster(EXAMPLE, [override])
    assert "mistakes" not in str(refused.value)  # it is the only one


def test_all_keys_that_are_missing_are_named(tmp_path: Path) -> None:
    path = tmp_path / "C.toml"
    path.write_text("[cluster]\nnodes = 2\ndevices = 2\n[links.node]\nlatency = 1e-6\n")
    with pytest.raises(ConfigError) as refused:
        read_cluster(path)
    text = str(refused.value)
    assert "links.node.bandwidth is missing (between devices of a node" in text
    assert "such as 25e9 for 25 GB/s" in text
    for key in ("device.share", "device.memory", "device.bandwidth", "links.across.shared"):
        assert f"{key} is missing" in text
    assert "device.operations says none" in text
    assert "links.node.latency" not in text


def test_a_device_without_operations_is_refused() -> None:
    zeros = [f"device.operations.{name}=0" for name in ("float32", "bfloat16", "float16")]
    with pytest.raises(ConfigError, match="device.operations says none; expected operations"):
        read_cluster(EXAMPLE, zeros)


def test_a_tier_that_joins_nobody_needs_no_link(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(
        EXAMPLE.read_text().partition("[links.node]")[0].replace("nodes = 4", "nodes = 1")
    )
    path.write_text(path.read_text().replace("devices = 8", "devices = 1"))
    assert read_cluster(path).num_devices == 1


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_cluster(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[cluster\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_cluster(tmp_path / "bad.toml")
