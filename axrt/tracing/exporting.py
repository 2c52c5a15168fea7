"""A module's graphs by torch.export, for training and for evaluation; and which line of the user's
code is at fault where there are none."""

import copy
import keyword
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

from .watching import watched

PREFIX = "module."  # what names in the graphs begin with
# Whose lines are not the user's: torch's, ours, and Python's own.
_LIBRARIES = tuple(Path(of).parent for of in (torch.__file__, __file__, traceback.__file__))


def exported(
    module: nn.Module, inputs: Any, types: Types = AS_THEY_ARE
) -> tuple[ExportedProgram, ExportedProgram]:
    """The graphs for training, in the mode that the module is in, and for evaluation; the module is
    afterwards as it was.

    Args:
        inputs: what the module is called with: a tensor, the values of a tuple, or those of a dict
            by keyword.
        types: types that it will compute in. Of a module whose weights will be narrow a copy is
            exported.
    Raises:
        ModelError: the module cannot be exported.
    """
    _check_modules(module)
    _check_memory(module)
    if types.weights:
        module, inputs = copy.deepcopy(module).to(types.weights), in_type(inputs, types.weights)
    skeleton, tensors = flatten(inputs)
    # Each by itself: of a tensor that stands at two places export would read one.
    tensors = [one.detach().clone() for one in tensors]
    called = _Called(module, skeleton)
    made = []
    with _modes_kept(module), _without_caches(module), computing(types, tensors):
        for training in (True, False):  # in training as it is: parts may be frozen on purpose
            if not training:
                module.eval()
            try:
                with torch.set_grad_enabled(training):
                    made.append(torch.export.export(called, tuple(tensors), strict=False))
            except Exception as error:
                raise ModelError(_why(module, error)) from None
    return made[0], made[1]


def computing(types: Types, inputs: Any) -> AbstractContextManager[Any]:
    """What a stage runs its layers in. Types that autocast gives are noted in a graph that is made
    within, and autocast itself is not."""
    _, tensors = flatten(inputs)
    if types.compute is None or not tensors:
        return nullcontext()
    return torch.autocast(tensors[0].device.type, dtype=types.compute)


def _check_modules(module: nn.Module) -> None:
    """Check that modules have no hooks that a graph loses, and no names that its code cannot have.

    Raises:
        ModelError: one has.
    """
    for name, one in module.named_modules():
        if one._backward_hooks or one._backward_pre_hooks:
            raise ModelError(
                f"{name or 'the module'} ({type(one).__name__}) has backward hooks, which "
                "torch.export leaves out; expected hooks on its parameters, which stay, or none"
            )
    for name in (*dict(module.named_modules()), *dict(module.named_parameters())):
        if bad := next(filter(keyword.iskeyword, name.split(".")), ""):
            raise ModelError(
                f"{name} has the name {bad!r}, a word of Python's own, which the code of a graph "
                "cannot say; expected another name"
            )


def _check_memory(module: nn.Module) -> None:
    """Check that no buffer or other tensor of the module has memory of another one: each would be
    a tensor of its own on the ranks that hold it.

    Raises:
        ModelError: one has.
    """
    parameters = {id(one): (name, one) for name, one in module.named_parameters()}
    others = {id(one): (name, one) for name, one in module.named_buffers()}
    for prefix, part in module.named_modules():
        plain = {name: one for name, one in vars(part).items() if isinstance(one, Tensor)}
        others |= {id(one): (f"{prefix}.{name}".lstrip("."), one) for name, one in plain.items()}
    every = [*parameters.values(), *others.values()]
    ranges = {name: _memory_of(one) for name, one in every}
    for name, _ in others.values():
        begin, end = ranges[name]
        for other, (first, last) in ranges.items():
            if other != name and begin < last and first < end:
                raise ModelError(
                    f"{name} has memory of {other}, and layers on other ranks would each have "
                    "their own; expected forward to make it of the other one, or a clone"
                )


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins and ends; (0, 0) where it has none."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs) + 1
    return tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()


class _Called(nn.Module):
    """The module, called with tensors alone, in the order in which they stand in its inputs."""

    def __init__(self, module: nn.Module, skeleton: object) -> None:
        super().__init__()
        self.module, self._skeleton = module, skeleton

    def forward(self, *tensors: Tensor) -> Any:
        with watched(self.module):
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
    found: list[Any] = [getattr(one, "config", None) for one in module.modules()]
    configs = {id(of): of for of in found}
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
        if frame.filename[:1] != "<"
        and not any(Path(frame.filename).is_relative_to(one) for one in _LIBRARIES)
    ]
    what = f"axrt.traced cannot trace {type(module).__name__}"
    if isinstance(error, ModelError):
        at = f"{frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`: " if frames else ""
        return f"{what}: {at}{error}"
    last = frames[-1] if frames else None
    where = f"{last.filename}:{last.lineno}, `{last.line}`" if last else "its forward"
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        return (
            f"{what}: {where}, depends on values of tensors; expected a forward that does the same "
            "for every microbatch, by torch.where for example, or an axrt.PipelineModule of layers "
            "of your own"
        )
    if isinstance(error, TypeError) and not last:
        return f"{what}: {_first_line(error)}; expected a sample whose inputs its forward takes"
    return (
        f"{what}: at {where}, torch.export says {type(error).__name__}: {_first_line(error)}; "
        "expected a module that it takes, or an axrt.PipelineModule of layers of your own"
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "nothing")
