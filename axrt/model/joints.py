"""Joints: places in a layer at which the members of a team exchange slices of tensors."""

#             forward                                     backward of it
#   Gathered  each member has its tokens; all of them     each has gradients of all tokens; those of
#             are put together                            its own are added up
#   Sum       each has addends of all tokens; those of    each has gradients of its own tokens; all
#             its own are added up                        of them are put together
#
# So a joint is one of two exchanges in either direction: put together, or add up. What a member
# sends another one are the slices that the other goes on with: all of its own tokens in the first
# case, and the other's tokens in the second. A graph ends at a joint, and the next one begins with
# what has come, as between two stages (`segment.py`).
#
# Addends have the type that computes. They are added in float32, in a balanced tree in the order of
# members, so that bits do not depend on which slices come first. A rank with several virtual
# members (`virtual_joint.py`) sends what its own come to.

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from axrt.errors import ModelError
from axrt.runtime.balanced import balanced_sum
from axrt.transport.payload import flatten, unflatten

if TYPE_CHECKING:
    from .gather_again import GatheredAgain


@dataclass(frozen=True, slots=True)
class Gathered:
    """A tensor of this member's tokens that the next piece gets with those of all members.

    Args:
        value: features, whose last dimension but one counts tokens, or whole numbers, whose last
            one does.
    """

    value: Tensor


@dataclass(frozen=True, slots=True)
class Sum:
    """Addends of all tokens, of which the next piece gets the sum over members for its own tokens.

    Args:
        value: floating-point tensor whose last dimension but one counts tokens.
    """

    value: Tensor


class Move(Enum):
    """What becomes of a tensor at a joint."""

    PASS = "goes on as it is"
    GATHER = "is put together"
    ADD = "is added up"


class Team(NamedTuple):
    """A member's place among those that hold a stage."""

    member: int = 0  # index of this one
    size: int = 1  # number of members


ALONE = Team()


def token_dim(tensor: Tensor) -> int:
    """The dimension that counts tokens: the last of whole numbers, which are tokens or targets, and
    the last but one of features."""
    has_features = tensor.is_floating_point() and tensor.dim() > 1
    return tensor.dim() - (2 if has_features else 1)


def shape_of_tokens(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor up to the dimension that counts tokens."""
    return tuple(tensor.shape[: token_dim(tensor) + 1]) if tensor.dim() else ()


def slice_of(tensor: Tensor, member: int, size: int) -> Tensor:
    """The tokens of one of several members.

    Raises:
        ModelError: members cannot have equally many tokens.
    """
    dim = token_dim(tensor)
    if not tensor.dim():
        raise ModelError(
            "a tensor of shape () counts no tokens, and members of a team (parallel.tensor) share "
            "out the tokens of all that goes from layer to layer; expected (..., tokens) of whole "
            "numbers, or (..., tokens, features)"
        )
    if tensor.shape[dim] % size:
        raise ModelError(
            f"a tensor of shape {tuple(tensor.shape)} has no multiple of {size} tokens along "
            f"dimension {dim}; expected a length that {size} divides, as many as there are "
            "members (parallel.tensor) or virtual ones (parallel.tensor_shards)"
        )
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, member * length, length)


def own_tokens(payload: Any, team: Team) -> Any:
    """A payload with the tokens of one member in each tensor."""
    if team.size == 1:
        return payload
    skeleton, tensors = flatten(payload)
    return unflatten(
        skeleton,
        # Copied: a view would keep all tokens for as long as a layer keeps these.
        [
            slice_of(tensor, *team).clone(memory_format=torch.contiguous_format)
            for tensor in tensors
        ],
    )


def tokens_of_all(payloads: Sequence[Any]) -> Any:
    """A payload with the tokens of all members, from what each of them has."""
    parts = [flatten(payload) for payload in payloads]
    together = [
        torch.cat(of_all, token_dim(of_all[0]))
        for of_all in zip(*(tensors for _, tensors in parts), strict=True)
    ]
    return unflatten(parts[0][0], together)


def widened_sum(addends: Sequence[Tensor | None]) -> Tensor:
    """The sum of addends in float32 or wider, and a balanced tree."""
    wide = [None if one is None else one.to(wide_type(one.dtype)) for one in addends]
    found: Tensor = balanced_sum(wide)
    return found


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which addends of a type are added up."""
    return torch.promote_types(dtype, torch.float32)


Slices = tuple[Tensor, ...]  # what one member has for another one
# What came of one. None: its addend is in what came of another virtual member of its rank.
CameOf = tuple[Tensor | None, ...]
Came = Mapping[int, CameOf]  # of each other member, by its index


def _for(to: int, tensors: Sequence[Tensor], moves: Sequence[Move], team: Team) -> Slices:
    """The slices that a member has for another one, in memory of their own: the next piece may
    write to what it is given before they have left."""
    return tuple(
        [
            (tensor if move is Move.GATHER else slice_of(tensor, to, team.size)).clone(
                memory_format=torch.contiguous_format
            )
            for tensor, move in zip(tensors, moves, strict=True)
            if move is not Move.PASS
        ]
    )


def _joined(
    tensors: Sequence[Tensor], moves: Sequence[Move], came: Came, team: Team
) -> list[Tensor]:
    """What a member goes on with."""
    _check_alike(tensors, moves, came, team)
    found: list[Tensor] = []
    place = 0  # among those that others send
    for tensor, move in zip(tensors, moves, strict=True):
        if move is Move.PASS:
            found.append(tensor)
            continue
        own = tensor if move is Move.GATHER else slice_of(tensor, *team)
        of_all = [own if of == team.member else came[of][place] for of in range(team.size)]
        if move is Move.GATHER:
            found.append(torch.cat([one for one in of_all if one is not None], token_dim(own)))
        else:
            found.append(widened_sum(of_all).to(own.dtype))
        place += 1
    return found


def _check_type(joint: Sum | Gathered) -> None:
    """Check that numbers may be exchanged at a joint: no complex ones, and no sums of whole ones.

    Raises:
        ModelError: they may not.
    """
    tensor, name = joint.value, type(joint).__name__
    if not isinstance(tensor, Tensor):
        raise ModelError(f"axrt.{name}({type(tensor).__name__}); expected a tensor")
    is_sum_of_others = isinstance(joint, Sum) and not tensor.is_floating_point()
    if tensor.is_complex() or is_sum_of_others:
        raise ModelError(
            f"a tensor of {tensor.dtype} comes to a joint of a team ({name}); expected "
            "floating-point numbers, or whole ones that are gathered"
        )


def _check_alike(tensors: Sequence[Tensor], moves: Sequence[Move], came: Came, team: Team) -> None:
    """Check that others have sent what this member expects.

    Raises:
        ModelError: their joint is another one.
    """
    expected = [
        (tensor if move is Move.GATHER else slice_of(tensor, *team)).shape
        for tensor, move in zip(tensors, moves, strict=True)
        if move is not Move.PASS
    ]
    types = [
        tensor.dtype for tensor, move in zip(tensors, moves, strict=True) if move is not Move.PASS
    ]
    of_both = list(zip(expected, types, strict=True))
    for member, slices in came.items():
        if len(slices) != len(of_both) or not all(map(_fits, slices, of_both)):
            raise ModelError(
                f"member {member} has sent slices of {_told(slices)} to member {team.member}, "
                f"which has {_told(of_both)} at this joint; expected the same on both: Sum and "
                "Gathered may not depend on the rank"
            )


def _fits(came: Tensor | None, expected: tuple[torch.Size, torch.dtype]) -> bool:
    if came is None:
        return True
    shape, dtype = expected
    if came.shape != shape:
        return False
    return came.dtype == dtype or came.dtype == wide_type(dtype)  # a sum of several is wide


def _are_addends(moves: Iterable[Move]) -> list[bool]:
    return [move is Move.ADD for move in moves if move is not Move.PASS]


def _told(slices: Iterable[Any]) -> str:
    pairs = [(one.shape, one.dtype) if isinstance(one, Tensor) else one for one in slices]
    return ", ".join(f"shape {tuple(shape)} and {dtype}" for shape, dtype in pairs) or "nothing"


class Joint:
    """One joint of a microbatch, as one member comes to it.

    Args:
        value: payload with `Sum` and `Gathered` in it; all else passes.
    Attributes:
        tensors: tensors of the payload, in order of appearance, as the graph has made them.
    """

    def __init__(self, value: Any, team: Team) -> None:
        self._team = team
        self._moves: list[Move] = []
        plain = self._stripped(value)
        self._skeleton, self.tensors = flatten(plain)

    def _stripped(self, value: Any) -> Any:
        """The payload without wrappers; notes what becomes of each tensor."""
        if isinstance(value, Sum | Gathered):
            _check_type(value)
            self._moves.append(Move.ADD if isinstance(value, Sum) else Move.GATHER)
            return value.value
        if type(value) in (tuple, list):
            return type(value)([self._stripped(part) for part in value])
        if type(value) is dict:
            return {key: self._stripped(part) for key, part in value.items()}
        if isinstance(value, Tensor):
            self._moves.append(Move.PASS)
        return value

    @property
    def are_addends(self) -> list[bool]:
        """For each of the slices that leave, whether it is to be added up."""
        return _are_addends(self._moves)

    def outgoing(self, to: int) -> Slices:
        """The slices that this member has for another one."""
        return _for(to, [tensor.detach() for tensor in self.tensors], self._moves, self._team)

    def value(self, came: Came) -> Any:
        """The payload that the next piece gets; its tensors want a gradient where these did."""
        mine = [tensor.detach() for tensor in self.tensors]
        found = _joined(mine, self._moves, came, self._team)
        wanting = [
            tensor.requires_grad_(was.requires_grad)
            for tensor, was in zip(found, self.tensors, strict=True)
        ]
        return unflatten(self._skeleton, wanting)

    def gathered(self, value: Any) -> list[Tensor]:
        """The tensors that have been put together, of the payload that the next piece gets."""
        pairs = zip(flatten(value)[1], self._moves, strict=True)
        return [tensor for tensor, move in pairs if move is Move.GATHER]

    def back(self, again: "GatheredAgain | None" = None) -> "BackJoint":
        """What its backward needs; the tensors are not kept.

        Args:
            again: what the piece before it has let go; None: nothing.
        """
        wanting = [
            (move, tensor)
            for move, tensor in zip(self._moves, self.tensors, strict=True)
            if tensor.requires_grad
        ]
        moves = [_BACK[move] for move, _ in wanting]
        likes = [torch.empty_like(tensor, device="meta") for _, tensor in wanting]
        device = self.tensors[0].device if self.tensors else torch.device("cpu")
        return BackJoint(moves, likes, self._team, device, again)


# A gradient of tokens of its own is what a sum gives back, so they are put together, and so on.
_BACK = {Move.PASS: Move.PASS, Move.GATHER: Move.ADD, Move.ADD: Move.GATHER}


class BackJoint:
    """A joint in a backward: gradients of what has come become those of what was sent.

    Args:
        moves: what becomes of each gradient.
        likes: what was sent, without memory.
        device: device that it was on.
        again: what is gathered again with them; None: nothing.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        likes: Sequence[Tensor],
        team: Team,
        device: torch.device,
        again: "GatheredAgain | None",
    ) -> None:
        self._moves, self._likes, self._team, self._device = moves, likes, team, device
        self._again = again

    @property
    def are_addends(self) -> list[bool]:
        """For each of the slices that leave, whether it is to be added up."""
        return _are_addends(self._with_own(())[1])

    def made(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of what has come, zeros where none flowed back."""
        return [
            gradient if gradient is not None else self._zeros(move, like)
            for gradient, move, like in zip(gradients, self._moves, self._likes, strict=True)
        ]

    def _zeros(self, move: Move, like: Tensor) -> Tensor:
        shape, size = list(like.shape), self._team.size
        if move is not Move.PASS:
            dim = token_dim(like)
            shape[dim] = shape[dim] * size if move is Move.ADD else shape[dim] // size
        return torch.zeros(shape, dtype=like.dtype, device=self._device)

    def outgoing(self, gradients: Sequence[Tensor], to: int) -> Slices:
        """The slices that this member has for another one."""
        return _for(to, *self._with_own(gradients), self._team)

    def value(self, gradients: Sequence[Tensor], came: Came) -> tuple[Tensor, ...]:
        """The gradients of what was sent."""
        found = _joined(*self._with_own(gradients), came, self._team)
        if self._again is not None:
            self._again.take_back(found[len(gradients) :])
        return tuple(found[: len(gradients)])

    def _with_own(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Move]]:
        """Gradients and what is gathered again, each with its move."""
        own = self._again.own if self._again is not None else []
        return [*gradients, *own], [*self._moves, *[Move.GATHER] * len(own)]


def check_no_joint(value: Any) -> None:
    """Check that what a layer returns has no joint in it: nobody would go on with what comes.

    Raises:
        ModelError: there is one.
    """
    if isinstance(value, Sum | Gathered):
        raise ModelError(
            f"the last piece returned {type(value).__name__}, and no piece goes on with what comes "
            "of it; expected one more piece, such as one that returns what it is given"
        )
    parts = value.values() if type(value) is dict else value
    for part in parts if type(value) in (tuple, list, dict) else ():
        check_no_joint(part)


def alone(value: Any) -> Any:
    """The payload that the next piece gets where nobody shares the stage."""
    if isinstance(value, Sum | Gathered):
        return value.value
    if type(value) in (tuple, list):
        return type(value)([alone(part) for part in value])
    if type(value) is dict:
        return {key: alone(part) for key, part in value.items()}
    return value
