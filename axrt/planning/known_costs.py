"""The costs of a model's layers and of its messages: from a file, or measured at the start.

A microbatch runs through every layer a few times (`model.costs`), and messages go there and back
between the first rank and the next ones of its pipeline and its team. The spread of durations is
taken from the same measurements, since it separates policies that look alike on a steady machine.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from axrt.config import Config
from axrt.config.former import with_present_keys
from axrt.errors import ConfigError
from axrt.model.compiler import Compiler
from axrt.model.costs import kinds_of, measure
from axrt.model.module import PipelineModule
from axrt.model.precision import types_of
from axrt.model.preflight import checked_sample
from axrt.runtime.exchange import Exchange
from axrt.runtime.rank import Rank
from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts
from axrt.scheduler.simulation.costs import Edge
from axrt.scheduler.simulation.model_costs import ModelCosts

_LARGE = 2**20  # bytes


def costs_in_file(config: Config, model: PipelineModule, rank: Rank) -> ModelCosts:
    """The costs of the file that `schedule.costs` names, which the main rank reads; every rank
    calls it.

    Raises:
        ConfigError: there is no such file, or it is of another model; raised on every rank.
    """
    layers: list[LayerCosts] = []
    edges: dict[tuple[int, int], Edge] = {}

    def read() -> tuple[float, ...]:
        size = config.schedule.microbatch_size
        try:
            table = CostTable.read(Path(config.schedule.costs))
            layers.extend(table.of(size, kinds_of(model), config.parallel.tensor))
            edges.update(table.edges)
        except ValueError as error:
            raise ConfigError(f"schedule.costs: {error}") from None
        return *table.edge, table.task_s, table.lengths

    latency, bandwidth, task_s, lengths = rank.exchange.agreed(read)
    edge, team = Edge(latency, bandwidth), config.parallel.tensor
    # A table has one link between any two ranks, so members have that.
    return ModelCosts(layers, edge, task_s, edges, lengths, team, within=edge)


def settings_of(config: Config) -> dict[str, Any]:
    """The settings of `axrt train` that the costs of layers depend on, by "section.key"."""
    sections = {"model": asdict(config.model), "precision": asdict(config.precision)}
    of_types = [f"precision.{key}" for key in ("compute", "weights", "keep")]
    return {
        name: list(value) if isinstance(value, tuple) else value
        for section, of in sections.items()
        for key, value in of.items()
        if (name := f"{section}.{key}").startswith("model.") or name in of_types
    }


def check_costs(config: Config) -> None:
    """Check that a file of `schedule.costs` was measured with the settings of `axrt train`. One
    that cannot be read is refused later, where all ranks hear of it.

    Raises:
        ConfigError: some were others.
    """
    file = Path(config.schedule.costs)
    if not file.is_file():  # a pipe can be read once
        return
    try:
        table = CostTable.read(file)
    except ValueError:
        return
    table = replace(table, settings=with_present_keys(table.settings))
    if text := table.differs_from(settings_of(config)):
        raise ConfigError(f"schedule.costs: {config.schedule.costs}: {text}")


def measured_costs(
    config: Config,
    model: PipelineModule,
    rank: Rank,
    sample: Any,
    compiler: Compiler | None,
) -> ModelCosts:
    """The costs of layers on the main rank, and of messages between it and the next rank of its
    pipeline, or the next replica of one stage, and the next member of its team; every rank calls
    it.

    Args:
        sample: a microbatch, (inputs, targets); only the main rank's counts.
        compiler: compiler that runs the layers; None: they run as they are.
    Raises:
        ConfigError: there is no sample, or it does not go through the layers; raised on every rank.
    """
    mesh, team = rank.mesh, config.parallel.tensor
    layers = measured_layers(config, model, rank, sample, compiler, _policy(config), team)
    edge = within = Edge()
    if mesh.pipe * mesh.data > 1:
        next_team = mesh.rank_of(*((0, team) if mesh.pipe > 1 else (1, 0)))
        edge = measured_edge(rank.exchange, rank.device, next_team)
    if team > 1:
        within = measured_edge(rank.exchange, rank.device, mesh.rank_of(0, 1))
    return ModelCosts(layers, edge, team=team, within=within)


def measured_layers(
    config: Config,
    model: PipelineModule,
    rank: Rank,
    sample: Any,
    compiler: Compiler | None,
    what: str,
    team: int = 1,
) -> list[LayerCosts]:
    """The costs of each layer on the main rank, and none on others; see `measured_costs`.

    Args:
        team: number of members that hold each layer.
    """
    layers: list[LayerCosts] = []
    types = types_of(config.precision)

    def measured() -> None:
        given = checked_sample(sample, f"{what} measures the layers")
        try:
            of = (model, config.run.seed, given, rank.generator, types, compiler, team)
            layers.extend(measure(*of))
        except (Exception, SystemExit) as error:  # of the user's layers, whatever it is
            said = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
            raise ConfigError(
                f"{what} runs each layer by itself on the sample: {said}; expected a microbatch "
                "like those of the training, or another setting"
            ) from error

    with rank.generator.borrowed():
        rank.exchange.agreed(measured)
    return layers


def _policy(config: Config) -> str:
    return f"schedule.policy = {config.schedule.policy!r}"


def measured_edge(exchange: Exchange, device: torch.device, to: int = 1) -> Edge:
    """The link from the main rank to another one, in seconds and bytes, from the times of two sizes
    of message. Every rank calls it."""
    small_s, large_s = (
        exchange.round_trip_s(torch.zeros(size, dtype=torch.uint8, device=device), to=to) / 2
        for size in (1, _LARGE)
    )
    return Edge(small_s, _LARGE / (large_s - small_s) if large_s > small_s else float("inf"))
