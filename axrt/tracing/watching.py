"""What a forward does that a graph does not have, found while it is exported."""

# torch.export runs a forward once, and writes down operations of tensors. What Python does besides
# stays as it was in that one run: an attribute that counts calls, a random number of Python's own.
# What autograd is told besides is lost: a backward of one's own, a hook. Each of them would give
# wrong numbers without a word, so each is refused where it is called.

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from axrt.errors import ModelError

_MISSING, _TORCH = object(), Path(torch.__file__).parent
_SIMPLE = (bool, int, float, str, tuple, torch.dtype, torch.device)
_INSTEAD = "expected a forward without it, or an axrt.PipelineModule of layers of your own"


@contextmanager
def watched(module: nn.Module) -> Iterator[None]:
    """Context in which a module's forward is refused what a graph does not have.

    Raises:
        ModelError: it does something of that kind.
    """
    drawn = _states()
    with ExitStack() as stack:
        for owner, name, change in _changes(module):
            stack.enter_context(patch.object(owner, name, change))
        yield
    if drawn != _states():
        raise ModelError(
            "the forward draws random numbers of Python or numpy, which would be the same for "
            "every microbatch; expected those of torch"
        )


def _states() -> tuple[object, str]:
    """How far the generators of Python and numpy have come."""
    return random.getstate(), pickle.dumps(np.random.get_state()).hex()


def _changes(module: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """What is changed meanwhile: where, under which name, into what."""

    takes = torch.autograd.Function.__dict__["apply"].__func__

    def apply(kind: type, *given: Any, **keys: Any) -> Any:
        if _is_torchs(sys._getframe(1)):  # of a custom operation
            return takes(kind, *given, **keys)
        raise ModelError(
            f"the forward calls {kind.__name__}, an autograd.Function, whose backward no graph "
            "has; expected torch.library.custom_op with register_autograd, or checkpoints with "
            "use_reentrant=False"
        )

    yield torch.autograd.Function, "apply", classmethod(apply)
    yield Tensor, "register_hook", _refused("the forward sets a hook of a tensor")
    post = "register_post_accumulate_grad_hook"
    yield Tensor, post, _refused("the forward sets a hook of a tensor")
    yield torch, "manual_seed", _refused("the forward seeds torch's generator")
    yield torch.random, "fork_rng", _refused("the forward seeds torch's generator")
    enters = torch.inference_mode.__enter__

    def inferring(self: torch.inference_mode) -> None:
        if not _is_torchs(sys._getframe(1)):
            _refused("the forward enters torch.inference_mode")()
        enters(self)

    yield torch.inference_mode, "__enter__", inferring
    enter = saved_tensors_hooks.__enter__

    def entered(self: saved_tensors_hooks) -> None:
        if type(self) is saved_tensors_hooks:
            raise ModelError(f"the forward sets hooks of saved tensors; {_INSTEAD}")
        enter(self)

    yield saved_tensors_hooks, "__enter__", entered
    yield nn.Module, "__setattr__", _watching({id(one) for one in module.modules()})


def _is_torchs(caller: FrameType) -> bool:
    """The caller is torch itself, and not its checkpoint whose backward is one of its own."""
    file = Path(caller.f_code.co_filename)
    return file.is_relative_to(_TORCH) and file.name != "checkpoint.py"


def _refused(what: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise ModelError(f"{what}, which no graph has; {_INSTEAD}")

    return refuse


def _watching(modules: set[int]) -> Callable[[nn.Module, str, Any], None]:
    """Assignments to attributes that a forward may read: one that is made once, for later, is
    none."""
    assign = nn.Module.__setattr__

    def watching(self: nn.Module, name: str, value: Any) -> None:
        if id(self) in modules:
            kind = type(self).__name__
            if name in self.__dict__.get("_buffers", ()):
                raise ModelError(
                    f"the forward of {kind} assigns its buffer {name}, which a graph does not "
                    f"have; expected a change in place, self.{name}.copy_(...)"
                )
            old = self.__dict__.get(name, _MISSING)
            if not (old is _MISSING or old is None or old is value or _equal(old, value)):
                raise ModelError(
                    f"the forward of {kind} assigns its attribute {name}, and every microbatch "
                    "would be computed as if it had the first value; expected a buffer that is "
                    "changed in place, or a forward that does not change itself"
                )
        assign(self, name, value)

    return watching


def _equal(old: Any, value: Any) -> bool:
    return isinstance(old, _SIMPLE) and type(old) is type(value) and bool(old == value)
