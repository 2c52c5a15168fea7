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
# An error of torch looks at the whole stack of C, and behind the first frame of a greenlet come
# frames of another moment. So torch's functions run on the stack of the loop (`_OnTheLoop`).
#
# Why not torch.export: it fixes shapes that are not known before the first batch, refuses code that
# looks at values, and gives a graph in place of the modules.

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from copy import copy
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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

    running: Any = greenlet(layer)
    running.gr_context = copy_context()  # the values that the caller sees
    running.pauses = True  # others are the program's own

    def piece(value: Any) -> Any:
        with _OnTheLoop(running):
            return in_its_modes(value)

    def in_its_modes(value: Any) -> Any:
        before = _modes()
        made = _run_calls(running, running.switch(value))
        if not running.dead and _modes() != before:
            _run_calls(running, running.throw())  # it leaves its contexts
            raise ModelError(
                "a matrix that is cut by rows ran within a context of the layer's own, such as "
                "torch.no_grad, torch.autocast, torch.device or torch.utils.checkpoint, which "
                "other tasks would be in during the pause behind it; expected the context around "
                "less, and memory.recompute in place of checkpoint"
            )
        return made

    yield piece
    while not running.dead:
        yield piece


class _Call(NamedTuple):
    """A function of torch that a layer calls, for the loop to run."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]


class _OnTheLoop(TorchFunctionMode):
    """Context of a piece, in which functions of torch that a layer calls run on the loop's stack.

    Args:
        running: the greenlet of the layer.
    """

    def __init__(self, running: Any) -> None:
        super().__init__()
        self._running, self._loop = running, running.parent

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from greenlet import getcurrent

        if getcurrent() is not self._running:
            return func(*args, **(kwargs or {}))
        return self._loop.switch(_Call(func, args, kwargs or {}))


def _run_calls(running: Any, made: Any) -> Any:
    """Run what a layer calls, until it pauses or ends."""
    while type(made) is _Call:
        try:
            found = made.func(*made.args, **made.kwargs)
        except Exception as error:
            made = running.throw(error)
        else:
            made = running.switch(found)
    return made


# The thread has them, and not the stack: what a layer enters and does not leave before a pause
# would hold for tasks of other microbatches.
def _modes() -> tuple[Any, ...]:
    """The contexts of torch that this thread is in."""
    of_devices = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    ]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        of_devices,
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
    )


def pausing_behind(rows: nn.Module) -> RemovableHandle:
    """Let a forward pause behind a matrix that is cut by rows, until the handle is removed."""
    return rows.register_forward_hook(_put_together)


def _put_together(rows: nn.Module, given: tuple[Any, ...], addends: Tensor) -> Any:
    from greenlet import getcurrent

    here = getcurrent()
    loop = here.parent if getattr(here, "pauses", False) else None
    if loop is None:
        raise ModelError(
            f"a {type(rows).__name__} that is cut by rows ran outside the forward of its layer, "
            "where its addends reach no other member; expected memory.recompute in place of "
            "torch.utils.checkpoint, and no call of a layer from elsewhere"
        )
    return loop.switch(Gathered(loop.switch(Sum(addends))))


def _kept(name: str, value: Any) -> Any:
    is_own = type(value) in (dict, list, set) and name not in _OF_TORCH
    return copy(value) if is_own else value


_OF_TORCH = vars(nn.Module())  # attributes of every module: weights, buffers and hooks


@contextmanager
def attributes_kept(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which layers run while others of their forwards have paused, which find what they
    have set on their modules as they left it."""
    modules = [module for layer in layers for module in layer.modules()]
    before = [{name: _kept(name, one) for name, one in vars(module).items()} for module in modules]
    try:
        yield
    finally:
        for module, kept in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(kept)
