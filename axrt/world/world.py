"""The job of one process alone, which is the contract of every job."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch

from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from .heartbeat import Silence

T = TypeVar("T")


def at_the_start() -> str:
    """What a rank is at before it has an engine."""
    return "the start, before any step"


class World:
    """The job of one process alone: no other ranks to talk to, or to end when it fails.

    `MpiWorld` is the job of several ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size, self.node_rank = 0, 1, 0
        self.where: Callable[[], str] = at_the_start  # for a failure's text

    @property
    def survives(self) -> bool:
        """A lost rank is an error after which the others may go on."""
        return False

    @property
    def has_lost(self) -> bool:
        """Some ranks that the launcher started are lost."""
        return False

    @property
    def command(self) -> str:
        """The beginning of a command line that starts such a job; "" for one process alone."""
        return ""

    def launched_as(self, rank: int) -> int:
        """The number that the launcher gave this process, which is `rank` of the job now."""
        return rank

    def gathered_on_node(self, mine: T) -> list[T]:
        """The values of all ranks of this node, in the order of their ranks there."""
        return [mine]

    def transport(self, device: torch.device, cuda_aware: str) -> Transport:
        """The transport to the other ranks.

        Args:
            cuda_aware: `run.cuda_aware`: "auto", "true" or "false".
        """
        return LocalWorld(1).alone()

    def heartbeat(self, patience_s: float) -> Silence:
        """Signs of life between ranks, for one engine.

        Args:
            patience_s: seconds without a sign after which a rank counts as lost; 0: no limit.
        """
        return Silence()

    def check_alike(self, settings: Mapping[str, Mapping[Any, Any]]) -> None:
        """Compare the settings of all ranks.

        Raises:
            ConfigError: some rank's settings differ; raised on every rank.
        """

    def at_exit(self, close: Callable[[], None]) -> None:
        """Call `close` when the process ends, where other ranks must hear of it."""

    def not_at_exit(self, close: Callable[[], None]) -> None:
        """Take back `at_exit`."""

    def left(self) -> None:
        """Note that an engine has left the other ranks in order."""

    def fail(self, error: BaseException) -> NoReturn:
        """End the job, since this rank cannot go on. A process alone raises the error.

        Raises:
            RankLostError: another rank is lost, and `survives` is true.
        """
        raise error
