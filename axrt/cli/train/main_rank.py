"""What the main rank alone does, and every rank hears of if it is refused."""

from collections.abc import Callable
from typing import TypeVar

from axrt.engine import Engine
from axrt.errors import ConfigError

T = TypeVar("T")


def on_main(engine: Engine, act: Callable[[], T] | None) -> T | None:
    """Act on the main rank alone.

    Returns:
        The result of `act` on the main rank; None on the others.
    Raises:
        ConfigError: `act` has raised it; raised on every rank.
    """
    made, refusal = None, None
    if engine.is_main and act:
        try:
            made = act()
        except ConfigError as error:
            refusal = str(error)
    refusal = engine.broadcast(refusal)
    if refusal is not None:
        raise ConfigError(refusal)
    return made
