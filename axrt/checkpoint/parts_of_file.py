"""A file of whole tensors, as a member of a team sees it, which has parts of some of them."""

# A member reads the whole tensor and keeps its part. To read the part alone was thought of: the
# file's digests are those of whole slices of bytes, and a part by rows of a matrix lies in many of
# them, so most bytes would be read all the same. One tensor is whole at a time.
#
# State of the optimizer goes with its weight where it has the weight's shape. What has another
# shape, such as a count of steps, is the same on all members.

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from axrt.model.tensor_cuts import Part, Parts
from axrt.store.state import ParameterState

from .tensor_file import CheckedFile, CheckedTensors


def part_for(name: str, parts: Parts) -> Part | None:
    """What the members have of a tensor: a weight, or state that is named `weight/key`."""
    return parts.get(name) or parts.get(name.rpartition("/")[0])


class PartsOfFile:
    """The tensors of a checked file that a member has; see `CheckedFile`.

    Args:
        parts: what the members have of each parameter that they share out.
    """

    def __init__(self, file: CheckedFile, parts: Parts) -> None:
        self._file, self._parts = file, parts

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._file.metadata

    @property
    def like(self) -> dict[str, Tensor]:
        """Tensors without values, of the shapes that this member has; what it has nothing of is
        left out."""
        return {
            name: part.of(whole) if (part := part_for(name, self._parts)) else whole
            for name, whole in self._file.like.items()
            if (part := part_for(name, self._parts)) is None or part.is_here
        }

    def tensor(self, name: str) -> Tensor:
        """Read what this member has of a tensor."""
        whole, part = self._file.tensor(name), part_for(name, self._parts)
        return whole if part is None else part.of(whole)

    def reads_into(self, name: str, value: Tensor) -> bool:
        """It may be read straight into the memory of a tensor: it is not cut."""
        is_whole = part_for(name, self._parts) is None
        return is_whole and self._file.reads_into(name, value)

    def read_into(self, name: str, value: Tensor) -> None:
        """Read a tensor that is not cut."""
        self._file.read_into(name, value)


def seen_by(file: CheckedFile, parts: Parts) -> CheckedTensors:
    """A file as a rank sees it that has these parts."""
    return PartsOfFile(file, parts) if parts else file


def states_of_parts(
    states: Mapping[str, ParameterState], parts: Parts
) -> Mapping[str, ParameterState]:
    """What a member has of the optimizer's state of parameters, by name."""
    return {
        name: state if part is None else _part_of(state, part)
        for name, state in states.items()
        if (part := parts.get(name)) is None or part.is_here
    }


def _part_of(state: ParameterState, part: Part) -> ParameterState:
    return replace(state, tensors={key: part.of(value) for key, value in state.tensors.items()})
