"""A module's graphs by torch.export, for training and for evaluation; and which line of the user's
code is at fault where there are none."""

import copy
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from axrt.errors import ModelError
from axrt.model.precision import AS_THEY_ARE, Types, in_type
from axrt.transport.payload import flatten, unflatten

PREFIX = "module."  # what names in the graphs begin with
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parent)


def exported(
    module: nn.Module, inputs: Any, types: Types = AS_THEY_ARE
) -> tuple[ExportedProgram, ExportedProgram]:
    """The graphs for training and for evaluation; the module is afterwards as it was.

    Args:
        inputs: what the module is called with: a tensor, the values of a tuple, or those of a dict
            by keyword.
        types: types that it will compute in. Of a module whose weights will be narrow a copy is
            exported.
    Raises:
        ModelError: the module cannot be exported.
    """
    _check_hooks(module)
    if types.weights:
        module, inputs = copy.deepcopy(module).to(types.weights), in_type(inputs, types.weights)
    skeleton, tensors = flatten(inputs)
    called = _Called(module, skeleton)
    made = []
    with _modes_kept(module), _without_caches(module), computing(types, tensors):
        for training in (True, False):
            module.train(training)
            try:
                made.append(torch.export.export(called, tuple(tensors), strict=False))
            except Exception as error:
                raise ModelError(_why(module, error)) from error
    return made[0], made[1]


def computing(types: Types, inputs: Any) -> AbstractContextManager[Any]:
    """What a stage runs its layers in. Types that autocast gives are noted in a graph that is made
    within, and autocast itself is not."""
    _, tensors = flatten(inputs)
    if types.compute is None or not tensors:
        return nullcontext()
    return torch.autocast(tensors[0].device.type, dtype=types.compute)


def _check_hooks(module: nn.Module) -> None:
    for name, one in module.named_modules():
        if one._backward_hooks or one._backward_pre_hooks:
            raise ModelError(
                f"{name or 'the module'} ({type(one).__name__}) has backward hooks, which "
                "torch.export leaves out; expected hooks on its parameters, which stay, or none"
            )


class _Called(nn.Module):
    """The module, called with tensors alone, in the order in which they stand in its inputs."""

    def __init__(self, module: nn.Module, skeleton: object) -> None:
        super().__init__()
        self.module, self._skeleton = module, skeleton

    def forward(self, *tensors: Tensor) -> Any:
        return called_with(self.module, unflatten(self._skeleton, list(tensors)))


def called_with(module: nn.Module, inputs: Any) -> Any:
    """What a module returns for a microbatch's inputs: a tensor, the values of a tuple, or those of
    a dict by keyword."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    modes = [(one, one.training) for one in module.modules()]
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training


@contextmanager
def _without_caches(module: nn.Module) -> Iterator[None]:
    """Context in which models of transformers return no keys and values for generation, which no
    loss wants."""
    configs = {id(of): of for one in module.modules() if (of := getattr(one, "config", None))}
    caching = [of for of in configs.values() if getattr(of, "use_cache", False) is True]
    for of in caching:
        of.use_cache = False
    try:
        yield
    finally:
        for of in caching:
            of.use_cache = True


def _why(module: nn.Module, error: Exception) -> str:
    """Which line cannot be traced, and why as far as it is known."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(one) for one in _LIBRARIES)
    ]
    what = f"axrt.traced cannot trace {type(module).__name__}"
    last = frames[-1]
    where = f"{last.filename}:{last.lineno}, `{last.line}`" if frames[1:] else "its forward"
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        return (
            f"{what}: {where}, depends on values of tensors; expected a forward that does the same "
            "for every microbatch, by torch.where for example, or an axrt.PipelineModule of layers "
            "of your own"
        )
    return (
        f"{what}: at {where}, torch.export says {type(error).__name__}: {_first_line(error)}; "
        "expected a module that it takes, or an axrt.PipelineModule of layers of your own"
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "nothing")
