"""A stage of which a rank has several virtual members (`parallel.tensor_shards`)."""

# Each virtual member is a stage as a rank of its own would have it (`stage.py`). A task runs their
# pieces one after the other. Where they come to a joint, what they have for each other stays here,
# and what other ranks need leaves (`virtual_joint.py`). Where no other rank holds the stage, tasks
# are whole, and go through all joints at once.
#
# What travels between stages is a tuple of what each virtual member makes, in a forward, and their
# gradients one after the other in a backward. The model's inputs and targets are whole.

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from axrt.errors import ModelError
from axrt.runtime.balanced import balanced_sum
from axrt.runtime.losses import check_all_weighted_or_none
from axrt.transport.payload import copied, flatten

from .deferral import Deferral
from .evaluation import Outputs, StageEvaluation
from .inlet import Gradients
from .joints import Came, Joint, Slices, Team
from .stage import Stage
from .virtual_joint import VirtualJoint
from .virtual_layers import VirtualLayers

CameOfRanks = Mapping[int, tuple[Slices, ...]]  # what `VirtualJoint.outgoing` gave on each of them
_NOTHING: CameOfRanks = {}


class VirtualMembers:
    """What a rank has of a stage: the tasks of `Stage`, each of all virtual members.

    Args:
        members: the stage of each virtual member.
        layers: layers that they compute with.
        own: layers of the stage as buckets step them.
        team: this member of the team, and how many there are.
        is_first: True if it is given the model's inputs.
    Attributes:
        layers: modules as buckets step them, by the index of the layer in the model as text.
        first_layer, loss, device: those of each virtual member.
        forward_pieces: pieces that a forward comes in, one more than the joints in it; 1 where no
            other rank holds the stage.
        deferral: weight gradients that wait.
        evaluation: forwards in evaluation mode.
    """

    def __init__(
        self,
        members: Sequence[Stage],
        layers: VirtualLayers,
        own: Sequence[nn.Module],
        team: Team,
        is_first: bool,
    ) -> None:
        first, *_ = self._members = list(members)
        self._layers, self._is_first = layers, is_first
        self.first_layer, self.loss, self.device = first.first_layer, first.loss, first.device
        self.layers = nn.ModuleDict(
            {str(place): layer for place, layer in enumerate(own, self.first_layer)}
        )
        self.forward_pieces = first.forward_pieces if team.size > 1 else 1
        self.deferral = VirtualDeferral([member.deferral for member in members])
        evaluations = [member.evaluation for member in members]
        self.evaluation = VirtualEvaluation(evaluations, layers, team, is_first)
        self._forwards, self._backwards = _InPieces(team), _InPieces(team)
        self._wanting: dict[int, list[int]] = {}  # gradients that each one's outputs want
        layers.note_hooks()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The name and parameter of every trained parameter, as buckets step them."""
        return [
            (name, parameter)
            for name, parameter in self.layers.named_parameters()
            if parameter.requires_grad
        ]

    @property
    def modules_run(self) -> list[nn.Module]:
        """The modules that compute."""
        return [module for member in self._members for module in member.modules_run]

    def let_weights_change(self) -> None:
        """Weights, buffers and modes may change until the next forward, which takes them anew."""
        self._layers.let_change()

    def forward(self, number: int, inputs: Any, target: Any, in_pieces: bool = False) -> Any:
        """Run a forward through all of its joints, where no other rank holds the stage.

        Args:
            inputs: what each virtual member has made on the stage before, or the model's inputs.
            target: target for the loss, on the last stage; None elsewhere.
            in_pieces: ignored; a backward is whole.
        Returns:
            What each virtual member makes; on the last stage their loss, see `loss_of`.
        """
        made = self.forward_piece(number, (inputs, target))
        while isinstance(made, VirtualJoint):
            made = self.forward_piece(number, None)
        return made

    def forward_piece(
        self, number: int, given: tuple[Any, Any] | None, came: CameOfRanks | None = None
    ) -> Any:
        """Run the next piece of a forward.

        Args:
            given: inputs and target, see `forward`, for the first piece; None for the others.
            came: what other members have for this one at the joint before the piece.
        Returns:
            The result of `forward` from the last piece; the joint behind the piece from others.
        """
        each = None
        if given is not None:
            self._layers.refresh()
            each = _for_each(given, self._is_first, len(self._members))
        run = [partial(member.forward_piece, number) for member in self._members]
        made = self._forwards.next(number, run, each, came)
        if isinstance(made, VirtualJoint):
            return made
        if self.loss is not None:
            return loss_of(made)
        self._wanting[number] = [
            sum(tensor.requires_grad for tensor in flatten(one)[1]) for one in made
        ]
        return tuple(made)

    def recompute(self, number: int) -> None:
        """Run the layers of a microbatch again that have kept nothing, for its backward."""
        for member in self._members:
            member.recompute(number)

    def open(self, number: int) -> VirtualJoint:
        """The joint that the backward of a microbatch has come to."""
        return self._backwards.joints[number]

    def backward(self, number: int, gradients: Gradients | None) -> Gradients:
        """Run a backward through all of its joints, where no other rank holds the stage.

        Args:
            gradients: of what all virtual members have made that wanted one, in order.
        Returns:
            Those of the inputs of all virtual members.
        """
        return self._through(number, gradients, Stage.backward_piece)

    def input_gradient(self, number: int, gradients: Gradients | None) -> Gradients:
        """The same without the weight gradients that can wait."""
        return self._through(number, gradients, Stage.input_piece)

    def backward_piece(
        self, number: int, gradients: Gradients | None, came: CameOfRanks | None = None
    ) -> Gradients:
        """Run the next piece of a backward; see `backward`, and `forward_piece` for `came`."""
        return self._back(number, gradients, came, Stage.backward_piece)

    def input_piece(
        self, number: int, gradients: Gradients | None, came: CameOfRanks | None = None
    ) -> Gradients:
        """The same without the weight gradients that can wait."""
        return self._back(number, gradients, came, Stage.input_piece)

    def remember_buffers(self) -> None:
        """Keep the values of buffers before a step that may be skipped."""
        for member in self._members:
            member.remember_buffers()

    def recall_buffers(self) -> None:
        """Give buffers the values again that they had before a step, which is skipped."""
        for member in self._members:
            member.recall_buffers()

    def release(self) -> None:
        """Give the layers back as they were."""
        for member in self._members:
            member.release()

    def drop(self) -> None:
        """Forget every microbatch under way."""
        for member in self._members:
            member.drop()
        for of in (self._forwards.joints, self._backwards.joints, self._wanting):
            of.clear()
        self._layers.let_change()

    def _through(
        self, number: int, gradients: Gradients | None, piece: Callable[..., Gradients]
    ) -> Gradients:
        found = self._back(number, gradients, None, piece)
        while number in self._backwards.joints:
            found = self._back(number, None, None, piece)
        return found

    def _back(
        self,
        number: int,
        gradients: Gradients | None,
        came: CameOfRanks | None,
        piece: Callable[..., Gradients],
    ) -> Gradients:
        """Run the next piece of a backward, or of an input gradient."""
        each = None
        if number not in self._backwards.joints:
            each = self._gradients_of_each(number, gradients)
        run = [partial(piece, member, number) for member in self._members]
        found = self._backwards.next(number, run, each, came)
        if self._members[0].backward_pieces(number):
            self._backwards.come_to(number, [member.open(number) for member in self._members])
        return tuple(one for of_one in found for one in of_one)

    def _gradients_of_each(self, number: int, gradients: Gradients | None) -> list[Gradients]:
        if self.loss is not None:
            return [()] * len(self._members)
        rest = iter(gradients or ())
        return [tuple(next(rest) for _ in range(many)) for many in self._wanting.pop(number)]


class _InPieces:
    """Microbatches of which all virtual members run one piece after the other.

    Attributes:
        joints: at which microbatches wait, by number.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self.joints: dict[int, VirtualJoint] = {}

    def next(
        self,
        number: int,
        run: Sequence[Callable[[Any, Came | None], Any]],
        given: Sequence[Any] | None,
        came: CameOfRanks | None,
    ) -> Any:
        """Run the next piece.

        Args:
            run: runs it on each virtual member, with what that is given and what came for it.
            given: what each is given for the first piece; None for the others.
            came: what other members have for this one; None: there are none.
        Returns:
            What each has made; the joint where they have come to one.
        """
        if given is not None:
            made = [piece(one, None) for piece, one in zip(run, given, strict=True)]
        else:
            for_each = self.joints.pop(number).came(came or _NOTHING)
            made = [piece(None, one) for piece, one in zip(run, for_each, strict=True)]
        joints = [one for one in made if isinstance(one, Joint)]
        if not joints:
            return made
        if len(joints) < len(made):
            raise ModelError(
                "the virtual members of a rank (parallel.tensor_shards) have different numbers of "
                "joints; expected the same Sum and Gathered from each"
            )
        return self.come_to(number, joints)

    def come_to(self, number: int, members: Sequence[Any]) -> VirtualJoint:
        """Let a microbatch wait at a joint, to which each virtual member has come."""
        self.joints[number] = VirtualJoint(members, self._team)
        return self.joints[number]


class VirtualDeferral:
    """The weight gradients of virtual members that wait; see `Deferral`."""

    def __init__(self, of_members: Sequence[Deferral]) -> None:
        self._of_members = of_members

    def pieces(self, number: int) -> int:
        """Number of pieces that microbatch `number` has left."""
        return max(of.pieces(number) for of in self._of_members)

    def run_piece(self, number: int) -> None:
        """Compute the next gradient of microbatch `number` of each virtual member."""
        for of in self._of_members:
            if of.waits(number):
                of.run_piece(number)


class VirtualEvaluation:
    """The forwards of virtual members in evaluation mode; see `StageEvaluation`.

    Attributes:
        outputs: what this rank has of what the last stage returns.
    """

    def __init__(
        self,
        of_members: Sequence[StageEvaluation],
        layers: VirtualLayers,
        team: Team,
        is_first: bool,
    ) -> None:
        self._of_members, self._layers, self._is_first = of_members, layers, is_first
        self._forwards = _InPieces(team)
        self._outputs = of_members[0].outputs
        self.outputs = self._outputs if team.size > 1 else Outputs.ALL

    def run(self, number: int, inputs: Any, target: Any) -> Any:
        """Run a forward through all of its joints, where no other rank holds the stage."""
        made = self.run_piece(number, (inputs, target))
        while isinstance(made, VirtualJoint):
            made = self.run_piece(number, None)
        return made

    def run_piece(
        self, number: int, given: tuple[Any, Any] | None, came: CameOfRanks | None = None
    ) -> Any:
        """Run the next piece of a forward; see `VirtualMembers.forward_piece`."""
        each = None
        if given is not None:
            self._layers.refresh()
            each = _for_each(given, self._is_first, len(self._of_members))
        run = [partial(of.run_piece, number) for of in self._of_members]
        made = self._forwards.next(number, run, each, came)
        if isinstance(made, VirtualJoint):
            return made
        if not self._of_members[0].has_loss:
            return tuple(made)
        outputs, losses = zip(*made, strict=True)
        return self._outputs.of_all(outputs), loss_of(losses)


def loss_of(losses: Sequence[tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
    """The loss of a rank, (mean, None) or (sum, weight), from those of its virtual members.

    Raises:
        DataError: some have weights and others none.
    """
    values = balanced_sum([loss.double() for loss, _ in losses])
    weights = [weight for _, weight in losses if weight is not None]
    check_all_weighted_or_none(len(weights), len(losses))
    return (values, balanced_sum(weights)) if weights else (values / len(losses), None)


def _for_each(given: tuple[Any, Any], is_first: bool, many: int) -> list[tuple[Any, Any]]:
    """Inputs and target of each virtual member, in memory of its own."""
    inputs, target = given
    # What the stage before has made is of each; the model's inputs are whole.
    each = [inputs, *(copied(inputs) for _ in range(1, many))] if is_first else inputs
    return [(one, target if place == 0 else copied(target)) for place, one in enumerate(each)]
