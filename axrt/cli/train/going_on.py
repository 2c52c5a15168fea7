"""Training that goes on in the same job when a rank is lost.

The ranks that are left take the layout of the same batch that fits them, and go on from the newest
copies in memory or the newest checkpoint, as after a start of their own.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click

from axrt.checkpoint.partners import host_name
from axrt.config import Config
from axrt.errors import ConfigError
from axrt.exit_codes import Exit, leave_code
from axrt.restarts.layout import Layout, smaller_layouts, whole_layout
from axrt.world.leaving import leave_at_once
from axrt.world.mpi_world import MpiWorld
from axrt.world.survivors import HOW, RankLostError, SurvivingWorld
from axrt.world.world import World

from .interrupt import Interrupt


@dataclass
class Attempt:
    """What a training is begun with, anew after each loss."""

    file: str  # configuration
    overrides: tuple[str, ...]  # values laid over it
    world: World | None = None  # job of the ranks that are left; None: it is not known yet
    directory: Path | None = None  # directory of the run, once it is known
    # function that lets go of what only one attempt may have
    when_lost: Callable[[], None] = lambda: None
    commit: str = ""  # git commit of the directory, on the first rank, see `commit_of`
    # what has been told by signals, between two attempts, too; None: nobody listens yet
    interrupt: Interrupt | None = None
    verbose: bool = False  # more is said at the beginning and at the end


# Nothing of a job holds its engine when a rank is lost. The world kept it, and so did the error
# under which the next attempt began: each loss left a copy of weights and state in memory. The next
# attempt begins behind the error, when all of that is let go.
def train_with_survivors(
    config: Config, attempt: Attempt, world: World, train: Callable[[Attempt], Exit]
) -> tuple[Exit, World]:
    """Train until that ends, with the ranks that are left.

    Args:
        train: function that trains on the ranks of an attempt.
    Returns:
        The exit code of this rank, and the job as it is then. A spare has that of the first rank.
    """
    surviving = _may_go_on(world)
    if surviving is None:
        return train(replace(attempt, world=world)), world
    of = config.parallel
    wanted = of.pipe * of.data * of.tensor if of.pipe else world.size
    whole = whole_layout(config, min(wanted, world.size))
    _check_hosts(config, world)
    if whole.ranks < world.size:
        surviving = surviving.with_spares(whole.ranks)
        if world.rank == 0:
            click.echo(f"axrt: run.survive: spares: {len(surviving.spares)}", err=True)
    with Interrupt() as interrupt:  # a launcher passes signals on to all ranks, spares too
        begun = replace(attempt, interrupt=interrupt)
        while True:
            begun = replace(begun, world=surviving)
            code = _code_of(begun, surviving, train)
            if code is not None:
                return code, surviving
            # Behind the error, which holds all that the attempt has held; there is more to come.
            gc.unfreeze()
            gc.collect()
            surviving, layout = _left(config, whole, surviving)
            begun = _again(config, attempt, begun, layout)


def _check_hosts(config: Config, world: World) -> None:
    """A spare may become any rank, and then it is late to find that it has no host."""
    try:
        host_name(config.run, world.size - 1)
    except ConfigError as error:
        world.fail(error)


# A spare hears signals and stays. Launchers pass them on to every rank; one that died of SIGUSR1
# left the others waiting in the end of MPI.
def _code_of(
    begun: Attempt, surviving: SurvivingWorld, train: Callable[[Attempt], Exit]
) -> Exit | None:
    """How an attempt ends; None where a rank is lost."""
    try:
        if surviving.is_spare:
            if begun.interrupt:
                begun.interrupt.end_in_order()  # that of the others
            return Exit(surviving.wait_as_a_spare())
        code = train(begun)
    except RankLostError:
        begun.when_lost()
        return None
    if surviving.rank == 0:
        surviving.dismiss_spares(code)
    return code


def _may_go_on(world: World) -> SurvivingWorld | None:
    surviving = SurvivingWorld.begun(world) if isinstance(world, MpiWorld) else None
    if isinstance(world, MpiWorld) and surviving is None and world.rank == 0:
        click.echo(
            f"axrt: run.survive: here the job ends when a rank is lost; under {HOW} it would go "
            "on, and ranks beyond parallel.pipe x parallel.data would be spares. `axrt launch` "
            "starts it again",
            err=True,
        )
    return surviving


def _left(config: Config, whole: Layout, world: SurvivingWorld) -> tuple[SurvivingWorld, Layout]:
    """The job of the ranks that are left, and the layout that they take. It ends where none fits
    them."""
    found: dict[int, Layout | None] = {}  # by number of ranks

    def fitting(ranks: int) -> Layout | None:
        if ranks not in found:
            found[ranks] = _fitting(config, whole, ranks)
        return found[ranks]

    def workers(ranks: int) -> int:
        layout = fitting(ranks)
        return layout.ranks if layout else ranks

    left = world.survivors(workers)
    layout, is_first = fitting(left.everyone.size), left.rank == 0 and not left.is_spare
    now = f"axrt: lost: {', '.join(left.lost)}. Left: {left.everyone.size} of the ranks"
    if layout is None:
        if is_first:
            click.echo(
                f"{now}, and no layout with the same samples in a step fits them; start more",
                err=True,
            )
        leave_code(Exit.LOST_PEER)
        leave_at_once(Exit.LOST_PEER)
    if is_first:
        spares = f", spares: {len(left.spares)}" if left.spares else ""
        click.echo(
            f"{now}, which go on: ranks in the pipeline: {layout.ranks_of_a_replica}, replicas: "
            f"{layout.data}{spares}",
            err=True,
        )
    return left, layout


def _fitting(config: Config, whole: Layout, ranks: int) -> Layout | None:
    if ranks >= whole.ranks:
        return whole
    return next(iter(smaller_layouts(config, whole, ranks)), None)


def _again(config: Config, first: Attempt, lost: Attempt, layout: Layout) -> Attempt:
    """The attempt that goes on from the newest state, where there is any. A spare does not know
    the directory yet, and has the same settings."""
    file, overrides = first.file, first.overrides
    if lost.directory is not None:
        file, overrides = str(lost.directory / "config.toml"), ()
    resume = f"checkpoint.resume={config.checkpoint.going_on}"
    return replace(
        first,
        file=file,
        overrides=(*overrides, resume, *layout.settings),
        directory=lost.directory,
        interrupt=lost.interrupt,
    )
