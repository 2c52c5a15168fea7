"""Training that goes on in the same job when a rank is lost.

The ranks that are left take the layout of the same batch that fits them, and go on from the newest
copies in memory or the newest checkpoint, as after a start of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import click

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.launch import MpiWorld, World
from axrt.restarts.layout import Layout, smaller_layouts, whole_layout
from axrt.survivors import HOW, RankLostError, SurvivingWorld

T = TypeVar("T")


@dataclass
class Attempt:
    """What a training is begun with, anew after each loss.

    Args:
        file: configuration.
        overrides: values laid over it.
        world: job of the ranks that are left; None: it is not known yet.
        directory: directory of the run, once it is known.
        when_lost: function that lets go of what only one attempt may have.
    """

    file: str
    overrides: tuple[str, ...]
    world: World | None = None
    directory: Path | None = None
    when_lost: Callable[[], None] = lambda: None


def train_with_survivors(
    config: Config, attempt: Attempt, world: World, train: Callable[[Attempt], T]
) -> tuple[T | None, World]:
    """Train until that ends, with the ranks that are left.

    Args:
        config: settings of the run.
        attempt: the first attempt.
        world: job as the launcher started it.
        train: function that trains on the ranks of an attempt.
    Returns:
        The result of `train`, None on a spare that nobody has needed; and the job as it is then.
    """
    surviving = _may_go_on(world)
    if surviving is None:
        return train(replace(attempt, world=world)), world
    of = config.parallel
    wanted = of.pipe * of.data if of.pipe else world.size
    whole = whole_layout(config, min(wanted, world.size))
    if whole.ranks < world.size:
        surviving = surviving.with_spares(whole.ranks)
    begun = attempt
    while True:
        begun = replace(begun, world=surviving)
        try:
            done = None
            if surviving.is_spare:
                surviving.wait_as_a_spare()
            else:
                done = train(begun)
        except RankLostError as lost:
            begun.when_lost()
            surviving, layout = _left(config, whole, surviving, lost)
            begun = _again(attempt, begun.directory, layout)
        else:
            if surviving.rank == 0 and not surviving.is_spare:
                surviving.dismiss_spares()
            return done, surviving


def _may_go_on(world: World) -> SurvivingWorld | None:
    surviving = SurvivingWorld.begun(world) if isinstance(world, MpiWorld) else None
    if isinstance(world, MpiWorld) and surviving is None and world.rank == 0:
        click.echo(
            f"axrt: run.survive: here the job ends when a rank is lost; it would go on under {HOW}."
            " `axrt launch` starts it again",
            err=True,
        )
    return surviving


def _left(
    config: Config, whole: Layout, world: SurvivingWorld, lost: RankLostError
) -> tuple[SurvivingWorld, Layout]:
    """The job of the ranks that are left, and the layout that they take."""
    left = world.survivors(lambda ranks: _fitting(config, whole, ranks).ranks)
    layout = _fitting(config, whole, left.everyone.size)
    if left.rank == 0 and not left.is_spare:
        spares = f", spares: {len(left.spares)}" if left.spares else ""
        click.echo(
            f"axrt: {lost}. {left.everyone.size} ranks are left and go on: ranks in the pipeline: "
            f"{layout.pipe}, replicas: {layout.data}{spares}",
            err=True,
        )
    return left, layout


def _fitting(config: Config, whole: Layout, ranks: int) -> Layout:
    if ranks >= whole.ranks:
        return whole
    found = smaller_layouts(config, whole, ranks)
    if not found:
        raise ConfigError(
            f"{ranks} ranks are left, and no layout with the same samples in a step fits them"
        )
    return found[0]


def _again(first: Attempt, directory: Path | None, layout: Layout) -> Attempt:
    """The attempt that goes on from the newest state, where there is any."""
    file, overrides = first.file, first.overrides
    if directory is not None:
        file, overrides = str(directory / "config.toml"), ()
    settings = ("checkpoint.resume=auto", *layout.settings)
    return Attempt(file, (*overrides, *settings), directory=directory)
