"""A piece of a parameter with its state, as it leaves the rank that steps it, and whole parameters
from pieces (ZeRO)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .shards import Piece
from .state import ParameterState

MASTER = "(master)"  # in a file, beside the names of state


class SavedPiece(NamedTuple):
    """What a rank keeps of a parameter; all of it can travel in a message."""

    name: str  # name of the parameter
    first: int  # its first element that is in the piece
    is_whole: bool  # the piece is the whole parameter
    master: Tensor | None  # float32 weights of the piece; None where weights are not narrow
    moments: dict[str, Tensor]  # state that has the shape of the piece, by key
    others: dict[str, Tensor]  # other tensors of the state, by key
    # optimizer, plain, group: those of `ParameterState`
    optimizer: str
    plain: dict[str, Any]
    group: dict[str, Any]

    @property
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Its tensors by the names that they have in a file; no state has the name of masters."""
        if self.master is not None:
            yield MASTER, self.master
        yield from self.moments.items()
        yield from self.others.items()

    @classmethod
    def of(
        cls,
        name: str,
        piece: Piece,
        stepped: Tensor,
        is_master: bool,
        state: ParameterState,
        copied: Callable[[Tensor], Tensor],
    ) -> Self:
        """The piece with copies of its values on the CPU.

        Args:
            copied: function that gives the copy of a tensor.
        """
        moments = {key: copied(one) for key, one in state.tensors.items() if is_cut(one, stepped)}
        others = {key: copied(one) for key, one in state.tensors.items() if key not in moments}
        return cls(
            name,
            piece.first,
            piece.is_whole,
            copied(stepped) if is_master else None,
            moments,
            others,
            state.optimizer,
            state.plain,
            state.group,
        )


def itself(tensor: Tensor) -> Tensor:
    """The tensor, where none is to be copied."""
    return tensor


def copied_now(tensor: Tensor) -> Tensor:
    """A copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


class WholeParameter(NamedTuple):
    """A parameter whose pieces have come together."""

    master: Tensor | None  # its float32 weights, on the CPU; None where weights are not narrow
    state: ParameterState  # its state, on the CPU


def wholes_of(
    shapes: Mapping[str, torch.Size], parts: Iterable[Sequence[Sequence[Any]]]
) -> dict[str, WholeParameter]:
    """Parameters by name, from their pieces.

    Args:
        shapes: shape of each parameter.
        parts: pieces of each copy.
    """
    by_name: dict[str, list[SavedPiece]] = {}
    for part in parts:
        for of_one in part:
            piece = SavedPiece(*of_one)
            by_name.setdefault(piece.name, []).append(piece)
    return {name: _whole(shapes[name], pieces) for name, pieces in by_name.items()}


def _whole(shape: torch.Size, pieces: Sequence[SavedPiece]) -> WholeParameter:
    first = pieces[0]
    moments = {
        key: _joined(shape, [(one, one.moments[key]) for one in pieces]) for key in first.moments
    }
    masters = [(one, one.master) for one in pieces if one.master is not None]
    master = _joined(shape, masters) if masters else None
    tensors = {**first.others, **moments}
    state = ParameterState(first.optimizer, tensors, first.plain, first.group)
    return WholeParameter(master, state)


def _joined(shape: torch.Size, values: Sequence[tuple[SavedPiece, Tensor]]) -> Tensor:
    piece, value = values[0]
    if piece.is_whole:
        return value
    joined = torch.empty(shape, dtype=value.dtype)
    flat = joined.view(-1)
    for piece, value in values:
        flat[piece.first : piece.first + value.numel()] = value
    return joined


def cut_state(state: ParameterState, piece: Piece, shape: torch.Size) -> ParameterState:
    """What a piece has of the state of a parameter with that shape."""
    if piece.is_whole:
        return state
    cut = {
        key: piece.of(value) if value.dim() and value.shape == shape else value
        for key, value in state.tensors.items()
    }
    return replace(state, tensors=cut)


def is_cut(value: Tensor, stepped: Tensor) -> bool:
    """A tensor of the state has an element for each of what is stepped."""
    return value.dim() > 0 and value.shape == stepped.shape
