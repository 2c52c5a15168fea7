"""`--cluster C.toml`: the links of a simulation, and what does not go together with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from axrt.errors import ConfigError
from axrt.planning.cluster_file import is_of_cluster, read_cluster
from axrt.scheduler.cluster.cluster import Cluster
from axrt.scheduler.plural import plural
from axrt.scheduler.simulation.cost_table import CostTable

from .checks import given, refuse


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides of the cluster's file, such as links.node.bandwidth=100e9, and the others."""
    of_cluster = [text for text in overrides if is_of_cluster(text)]
    return of_cluster, [text for text in overrides if text not in of_cluster]


def read(path: Path | None, overrides: Sequence[str]) -> Cluster | None:
    """The cluster of the file; None where there is none."""
    if path is None:
        if overrides:
            refuse(f"{overrides[0]} is of a cluster; expected --cluster C.toml with it")
        return None
    try:
        return read_cluster(path, overrides)
    except ConfigError as error:
        refuse(str(error))


def check_cluster(options: dict[str, Any], context: click.Context) -> None:
    """Refuse what says again what links take, and more ranks than devices."""
    cluster = options["cluster"]
    if cluster is None:
        return
    costs = options["costs"]
    if isinstance(costs, CostTable):
        try:
            costs.check_cluster(cluster.device.digest)
        except ValueError as error:
            refuse(f"--costs: {error}")
    said = ["--latency"] * ("--latency" in given(context))
    said += ["world.node"] * bool(options["node"])
    if said:
        refuse(f"--cluster and {said[0]} both say what links take; expected one of them")
    ranks = options["ranks"] * options["replicas"] * options["tensor"]
    if ranks > cluster.num_devices:
        least = -(-ranks // cluster.devices)
        refuse(
            f"--cluster has {plural(cluster.nodes, 'node')} of {cluster.devices}, and there are "
            f"{plural(ranks, 'rank')}; expected {cluster.num_devices} at most, or "
            f"cluster.nodes={least}"
        )
