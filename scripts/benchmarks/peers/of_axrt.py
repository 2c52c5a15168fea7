"""axrt's own schedules."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpi4py import MPI
from torch import nn

import axrt
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.transport.mpi import MpiTransport

from .contestant import Contestant
from .late import LateTransport


def contestant(
    name: str,
    model: Callable[[int], axrt.PipelineModule],
    batches: Iterator[Any],
    settings: dict[str, Any],
    optimizer: Any = None,
    cap: int = 0,
    stages: int = 0,
    delay_s: float = 0.0,
) -> Contestant:
    """A policy of axrt's.

    Args:
        name: of the policy.
        model: stages to the model.
        batches: (inputs, target) of microbatches.
        settings: sections of the configuration.
        optimizer: of a bucket's named parameters; None: that of the settings.
        cap: `schedule.max_held`.
        stages: of the model; 0: those of the policy.
        delay_s: seconds that a message is under way.
    """
    microbatches = settings["schedule"]["microbatches"]
    job = build_schedule(name, MPI.COMM_WORLD.size, microbatches, max_held=cap)
    pipeline = model(stages or job.stages)
    config = {
        **settings,
        "schedule": {**settings["schedule"], "policy": name, "max_held": cap},
        "run": {"device": "cpu"},
    }
    world = MPI.COMM_WORLD
    transport = LateTransport(world, delay_s) if delay_s else MpiTransport(world)
    engine = axrt.initialize(pipeline, optimizer, config=config, transport=transport)
    layers: Sequence[nn.Module] = [
        layer for layer in pipeline.layers if isinstance(layer, nn.Module)
    ]

    def step() -> None:
        engine.train_batch(batches)

    tasks = (3 if job.splits else 2) * job.placement.chunks * microbatches
    return Contestant(
        f"{name}, {cap} held" if cap else name,
        "axrt",
        step,
        tasks,
        job.splits,
        layers,
        cap or 2 * MPI.COMM_WORLD.size,
    )


def by_default(
    model: axrt.PipelineModule,
    batches: Iterator[Any],
    settings: dict[str, Any],
    optimizer: Any,
) -> Contestant:
    """The schedule of a run that names none, and has a sample.

    Args:
        model: layers and loss.
        batches: (inputs, target) of microbatches.
        settings: sections of the configuration.
        optimizer: of a bucket's named parameters.
    """
    engine = axrt.initialize(
        model,
        optimizer,
        config={**settings, "run": {"device": "cpu"}},
        transport=MpiTransport(MPI.COMM_WORLD),
        sample=next(batches),
    )

    def step() -> None:
        engine.train_batch(batches)

    held = engine.schedule.max_held or 2 * MPI.COMM_WORLD.size
    by = "along a plan" if engine.candidates[0].endswith("along a plan") else "as without"
    name = f"with a sample: {engine.schedule.policy} {by}, {held} held"
    return Contestant(name, "axrt", step, 0, held=held)
