"""What members of a team do with each layer of a stage: its pieces, their own tokens, or all of
it."""

#   PIECES   some of its matrices are cut, and the layer says where it exchanges what (`Jointed`): a
#            joint between two of them
#   PAUSES   some of its matrices are cut, and its forward pauses behind those that are cut by rows
#            (`pausing.py`)
#   TOKENS   each token by itself, as the user has said: a member gives it its own tokens
#   LOGITS   the last layer, whose vocabulary is cut: a member makes some of the logits of all
#            tokens, for a loss that knows of it (`vocabulary.py`)
#   LOOKED_UP  an embedding whose vocabulary is cut: a member looks all tokens up in its part, and a
#            joint behind it adds up
#   WHOLE    any other: each member runs all tokens, put together at a joint before it, and goes on
#            with its own
#
# A whole layer costs what it costs on one rank, and is right for any layer. Its gradients are, too:
# a member's own tokens are all that its later layers make gradients of, so those of the inputs and
# weights are addends, which the joint and the reduction of the bucket add up. The loss is the same,
# but for one thing: each member has all of it. It counts as that of a replica, divided by the
# number of members, and what is added up is once the whole again.
#
# Random numbers: a whole layer draws the same on all members, and what it draws on one rank. Pieces
# and layers of tokens draw what the member's index adds to the seed.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from axrt.errors import ModelError

from .in_pieces import Jointed
from .joints import ALONE, Gathered, Sum, Team, own_tokens, shape_of_tokens
from .layers import Layer, LayerSpec
from .loss import Loss
from .pausing import JOINTS_OF_A_ROW
from .tensor_plan import DIVIDE, LOSS, ROW, TOKEN, VOCABULARY, Plan, cut_modules


class Way(Enum):
    """What a member runs of a layer."""

    PIECES = "its pieces"
    PAUSES = "all tokens, with pauses"
    TOKENS = "its own tokens"
    LOGITS = "all tokens, with some of the vocabulary"
    LOOKED_UP = "all tokens, in its part of an embedding"
    WHOLE = "all tokens"


DRAWS_APART = (Way.PIECES, Way.TOKENS)  # ways in which each member draws numbers of its own


class TeamLayers:
    """The layers of a model as the members of a team run them.

    Args:
        plan: see `PipelineModule`, `tensor`.
        team: this member, and how many there are.
    """

    def __init__(self, plan: Plan, team: Team) -> None:
        self.plan, self.team = plan, team
        self._begun: set[int] = set()  # layers whose first forward has begun

    @cached_property
    def loss_is_whole(self) -> bool:
        """The loss is that of all tokens."""
        return self.team.size > 1 and self.plan.get(LOSS) != TOKEN

    def way_of(self, place: int, layer: Layer) -> Way:
        """What a member runs of a layer.

        Args:
            place: index of the layer in the model.
        """
        module: object = layer
        if isinstance(layer, LayerSpec):
            module = layer.looked_at if self._may_cut(layer) else None
        if isinstance(module, nn.Module) and (cuts := self._cuts(place, module)):
            if isinstance(module, Jointed):
                return Way.PIECES
            if self.team.size == 1:
                return Way.WHOLE
            if VOCABULARY not in cuts:
                return Way.PAUSES
            return Way.LOOKED_UP if isinstance(module, nn.Embedding) else Way.LOGITS
        by_tokens = any(
            way == TOKEN and fnmatchcase(str(place), pattern) for pattern, way in self.plan.items()
        )
        return Way.TOKENS if by_tokens or isinstance(module, Loss) else Way.WHOLE

    def _may_cut(self, layer: LayerSpec) -> bool:
        cuts = any(way not in (TOKEN, DIVIDE) for way in self.plan.values())
        return self.team.size > 1 and cuts and issubclass(layer.typename, nn.Module)

    def _cuts(self, place: int, layer: nn.Module) -> list[str]:
        """How modules of a layer are cut."""
        return [way for _, _, _, way in cut_modules(self.plan, place, layer)]

    def cut_by_rows(self, place: int, layer: nn.Module) -> list[nn.Module]:
        """The matrices of a layer that are cut by rows, whose addends a `Sum` has."""
        cut = cut_modules(self.plan, place, layer)
        return [module for _, module, _, way in cut if way == ROW]

    def logits_in(self, place: int, layer: nn.Module) -> nn.Linear:
        """The matrix of the last layer that makes a part of the logits."""
        cut = cut_modules(self.plan, place, layer)
        (found,) = (module for _, module, _, way in cut if way == VOCABULARY)
        assert isinstance(found, nn.Linear)
        return found

    def begins(self, place: int) -> bool:
        """It is the first forward of a layer here."""
        is_first = place not in self._begun
        self._begun.add(place)
        return is_first

    @contextmanager
    def watching(self, place: int, layer: nn.Module, own: int) -> Iterator[None]:
        """Context of a piece of a layer, in which matrices that are cut see all tokens.

        Args:
            own: number of this member's tokens.
        Raises:
            ModelError: one is given others; raised by its forward.
        """
        tokens = own * self.team.size
        hooks = [
            module.register_forward_pre_hook(partial(_check_input, path, tokens))
            for path, module, _, _ in cut_modules(self.plan, place, layer)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def joints(self, first: int, layers: Sequence[Layer], has_loss: bool) -> int:
        """The number of joints in consecutive layers.

        Args:
            first: index of the first one in the model.
            has_loss: the loss follows them.
        """
        found = sum(self._joints_of(place, layer) for place, layer in enumerate(layers, first))
        return found + (has_loss and self.loss_is_whole)

    def _joints_of(self, place: int, layer: Layer) -> int:
        way = self.way_of(place, layer)
        if way is Way.PIECES:
            module = layer.looked_at if isinstance(layer, LayerSpec) else layer
            assert isinstance(module, Jointed)
            return len(module.team_pieces) - 1
        before = int(way is not Way.TOKENS and place > 0)  # the model's inputs are whole
        if way is Way.PAUSES:
            module = layer.looked_at if isinstance(layer, LayerSpec) else layer
            assert isinstance(module, nn.Module)
            return before + JOINTS_OF_A_ROW * len(self.cut_by_rows(place, module))
        return before + (way is Way.LOOKED_UP)

    def own(self, value: Any) -> Any:
        """The member's tokens of inputs or targets.

        Raises:
            ModelError: their tensors have different tokens, or not equally many for each member.
        """
        if self.team.size > 1:
            check_tokens("inputs or targets, which are to be cut", value)
        return own_tokens(value, self.team)


OF_ONE = TeamLayers({}, ALONE)


def _check_input(path: str, tokens: int, module: nn.Module, given: tuple[Any, ...]) -> None:
    """Check that a matrix that is cut is given the tokens of all members."""
    found = given[0].numel() // given[0].shape[-1]
    if found != tokens:
        raise ModelError(
            f"{path} is cut, and was given {found} tokens; expected the {tokens} of all members, "
            "which stand in axrt.Gathered in the value of the piece before, or within a Sum's piece"
        )


def gathered(value: Any) -> Any:
    """A payload of which the next piece gets the tokens of all members."""
    if type(value) in (tuple, list):
        return type(value)([gathered(part) for part in value])
    if type(value) is dict:
        return {key: gathered(part) for key, part in value.items()}
    return Gathered(value) if isinstance(value, Tensor) else value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a payload."""
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_in(part)]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def sums_in(value: Any) -> int:
    """The number of sums at a joint."""
    if isinstance(value, Sum):
        return 1
    parts = value.values() if type(value) is dict else value
    return sum(map(sums_in, parts)) if type(value) in (tuple, list, dict) else 0


def check_tokens(where: str, *values: Any) -> None:
    """Check that all tensors of values count the same tokens.

    Raises:
        ModelError: they do not.
    """
    tensors = [tensor for value in values for tensor in tensors_in(value)]
    shapes = list(dict.fromkeys(map(shape_of_tokens, tensors)))
    if len(shapes) > 1:
        raise ModelError(
            f"{where}: tensors have tokens of shapes {' and '.join(map(str, shapes))} on one "
            "member of a team; expected one shape in all, (..., tokens) of whole numbers or (..., "
            "tokens, features). Look for a Sum or a Gathered that is missing, or leave the layer "
            "or the loss unnamed in tensor={...}: then it sees all tokens"
        )


class BufferWatch:
    """Finds buffers that a layer changes, of which members would have different ones."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        # Dicts, which stay as buffers are exchanged: to look for modules takes longer than a joint.
        self._of_layers = [[module._buffers for module in layer.modules()] for layer in layers]

    def before(self, place: int) -> list[tuple[int, int]]:
        """What tells whether a layer's buffers change."""
        return [
            (id(buffer), buffer._version)
            for of in self._of_layers[place]
            for buffer in of.values()
            if buffer is not None
        ]

    def check(self, place: int, before: list[tuple[int, int]], name: str) -> None:
        """Check that they have not changed.

        Raises:
            ModelError: some have.
        """
        if self.before(place) != before:
            raise ModelError(
                f"{name} changes buffers, and each member of a team would have its own; expected a "
                "layer that sees all tokens, which is not named in tensor={...} and has nothing cut"
            )


def check_pieces(place: int, layer: nn.Module) -> None:
    """Check that to run a layer of a team is to run its pieces.

    Raises:
        ModelError: it has hooks, or a forward of its own.
    """
    if isinstance(layer, Jointed) and not layer.is_only_its_pieces:
        raise ModelError(
            f"layer {place} ({type(layer).__name__}) has hooks or a forward of its own, and a team "
            "runs it piece by piece; expected parallel.tensor = 1, or a layer that is only its "
            "pieces"
        )
