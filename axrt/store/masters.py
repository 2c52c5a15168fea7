"""The weights of a bucket in two types (mixed precision): float32 *masters*, which the optimizer
steps, and narrow copies of them, which layers compute with.

A parameter of a module becomes the narrow copy and stays the same object, with its hooks. Its
master is a parameter of its own. A parameter that is not narrow is its own master.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from axrt.errors import ModelError

from .flat import FlatBuffer, Layout, adopt, by_key, hollow


@dataclass(slots=True)
class _Narrow:
    """Parameters of one type in flat memory.

    Args:
        parameters: the module's.
        masters: their masters.
        narrow: memory of the module's.
        layout: where each master begins in its memory.
        wide: memory of the masters; None while they are elsewhere.
        before: type that the module's had.
    """

    parameters: list[nn.Parameter]
    masters: list[nn.Parameter]
    narrow: FlatBuffer
    layout: Layout
    wide: FlatBuffer | None
    before: torch.dtype


class Masters:
    """The parameters that the optimizer steps, and the memory of both types.

    Args:
        parameters: trained parameters of modules, on their device.
        narrow: type that each is to have on the device; None: it stays as it is.
        device: device of the parameters.
    Attributes:
        parameters: parameter that the optimizer steps for each of them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        narrow: Sequence[torch.dtype | None],
        device: torch.device,
    ) -> None:
        self.parameters = list(parameters)
        self._narrow: list[_Narrow] = []
        both = zip(parameters, narrow, strict=True)
        for group in by_key([(parameter.dtype, to) for parameter, to in both]):
            of_type, to = [parameters[place] for place in group], narrow[group[0]]
            if to is None:
                adopt(of_type, device)
                continue
            made = _narrowed(of_type, to, device)
            self._narrow.append(made)
            for place, master in zip(group, made.masters, strict=True):
                self.parameters[place] = master
        self._published, self._untouched = self._versions(), self._narrow_versions()
        self._masters = {id(master) for group in self._narrow for master in group.masters}
        self._have_moved = False

    @property
    def layouts(self) -> list[Layout]:
        """The layout of the memory of the masters, one for each type of parameters."""
        return [group.layout for group in self._narrow]

    def is_master(self, parameter: nn.Parameter) -> bool:
        """The parameter is the master of a narrow one."""
        return id(parameter) in self._masters

    def move_to(self, buffers: Sequence[FlatBuffer]) -> None:
        """Let masters be what is in other memory of their layouts; masters that are here move
        there with their values."""
        for group, buffer in zip(self._narrow, buffers, strict=True):
            self._have_moved = True
            if group.wide is not None:
                buffer.flat.copy_(group.wide.flat)
            group.wide = buffer
            for master, view in zip(group.masters, buffer.views, strict=True):
                master.data = view

    def leave(self) -> None:
        """Let masters be hollow: their values are elsewhere."""
        for group in self._narrow:
            for master in group.masters if group.wide is not None else ():
                master.data = hollow(master)
            group.wide = None

    def publish(self) -> None:
        """Give layers the weights that the masters have, which are here.

        Raises:
            ModelError: somebody has written to a narrow parameter, which would be undone.
        """
        if self._narrow_versions() != self._untouched:
            raise ModelError(
                "a weight that layers compute with was changed beside the optimizer, by a layer or "
                "by the user, and its float32 master was not; expected changes of "
                "engine.named_parameters() alone, or precision.weights = 'float32'"
            )
        for group in self._narrow:
            assert group.wide is not None, "masters are published while they are elsewhere"
            for master, view in zip(group.masters, group.wide.views, strict=True):
                if master.data_ptr() != view.data_ptr():  # somebody has put another tensor there
                    view.copy_(master.detach())
                    master.data = view
            group.narrow.flat.copy_(group.wide.flat)
        self._published = self._versions()

    def have_changed(self) -> bool:
        """A master was written to since `publish`, by somebody who has not published it."""
        return self._versions() != self._published

    def give_back(self) -> None:
        """Give the modules' parameters the type that they had, with the weights of the masters, or
        with their own where masters are elsewhere. Masters are the same tensors then."""
        for group in self._narrow:
            for parameter, master in zip(group.parameters, group.masters, strict=True):
                parameter.grad = None  # of the narrow type
                found = parameter if group.wide is None else master
                # A copy where the memory of masters is a slot, which others use.
                parameter.data = found.detach().to(group.before, copy=self._have_moved)
                master.data = parameter.data
        # The flat memory goes with its bucket, so a rank never has all weights in both types.
        self._narrow, self._published, self._untouched = [], [], []

    def _narrow_versions(self) -> list[int]:
        return [parameter._version for group in self._narrow for parameter in group.parameters]

    def _versions(self) -> list[int]:
        return [master._version for group in self._narrow for master in group.masters]


def _narrowed(parameters: list[nn.Parameter], to: torch.dtype, device: torch.device) -> _Narrow:
    narrow = FlatBuffer(parameters, device, to, narrowest=to)
    wide = FlatBuffer(parameters, device, torch.float32, narrowest=to)
    masters = []
    before = parameters[0].dtype
    for parameter, copy, view in zip(parameters, narrow.views, wide.views, strict=True):
        view.copy_(parameter.detach())
        parameter.grad = None
        parameter.data = copy
        masters.append(nn.Parameter(view))
        masters[-1].__dict__.update(parameter.__dict__)  # marks for the user's factory
    narrow.flat.copy_(wide.flat)
    layout = Layout(parameters, torch.float32, narrowest=to)
    return _Narrow(parameters, masters, narrow, layout, wide, before)
