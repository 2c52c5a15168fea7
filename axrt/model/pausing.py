"""Layers as they are in a team: their forward pauses where members exchange slices."""

# The forward of a layer runs on a stack of its own, a greenlet. A hook behind each matrix that is
# cut by rows switches back to the loop with addends, later slices, and is given what has come of
# them. So any Python code runs as its author wrote it, and the layer keeps its modules: names of
# weights, hooks, deferred products and recomputation are those of any layer.
#
#     loop      starts the layer .......... sends slices, runs other tasks ... goes on with the sum
#     layer     norm, columns, heads, rows ->                                  -> adds, norm, ...
#
# Between two layers a member has its own tokens, and such a layer sees all of them: it is put
# together before, and cut behind. What it makes of all tokens is the same on each member, and its
# gradients are addends, as those of a whole layer (`team_layers.py`). Columns need no exchange.
#
# Why not torch.export: it fixes shapes that are not known before the first batch, refuses code that
# looks at values, and gives a graph in place of the modules.

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from axrt.errors import ConfigError, ModelError

from .joints import Gathered, Sum

JOINTS_OF_A_ROW = 2  # addends are added up for each member's tokens, and these put together


def check_can_pause() -> None:
    """Check that layers can be run so here.

    Raises:
        ConfigError: greenlet is not installed.
    """
    if find_spec("greenlet") is None:
        raise ConfigError(
            "tensor={...} cuts layers that do not come in pieces, and greenlet, which lets them "
            "pause, is not installed; expected pip install 'axrt[tensor]', or layers that are "
            "axrt.InPieces"
        )


def pieces_of(layer: Callable[[Any], Any]) -> Iterator[Callable[[Any], Any]]:
    """The pieces of a forward, each to be called with what the one before is given for its value:
    a `Sum` or a `Gathered`, and of the last one what the layer returns."""
    from greenlet import greenlet

    running = greenlet(layer)
    yield running.switch
    while not running.dead:
        yield running.switch


def pausing_behind(rows: nn.Module) -> RemovableHandle:
    """Let a forward pause behind a matrix that is cut by rows, until the handle is removed."""
    return rows.register_forward_hook(_put_together)


def _put_together(rows: nn.Module, given: tuple[Any, ...], addends: Tensor) -> Any:
    from greenlet import getcurrent

    loop = getcurrent().parent
    if loop is None:
        raise ModelError(
            f"a {type(rows).__name__} that is cut by rows ran outside the forward of its layer, "
            "where its addends reach no other member; expected memory.recompute in place of "
            "torch.utils.checkpoint, and no call of a layer from elsewhere"
        )
    return loop.switch(Gathered(loop.switch(Sum(addends))))
