"""A stage of which a rank has several virtual members (`parallel.tensor_shards`)."""

# Each virtual member is a stage as a rank of its own would have it (`stage.py`). A task runs their
# pieces one after the other. Where they come to a joint, what they have for each other stays here,
# and what other ranks need leaves (`virtual_joint.py`). Where no other rank holds the stage, tasks
# are whole, and go through all joints at once.
#
# What travels between stages is a tuple of what each virtual member makes. The model's inputs and
# targets are whole.

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from axrt.errors import ModelError
from axrt.transport.payload import copied, flatten

from .balanced import balanced_sum
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
    """What a rank has of a stage; its methods are those of `Stage`.

    Args:
        members: the stage of each virtual member.
        layers: layers that they compute with, and those that the rank's buckets step.
        own: layers of the stage as buckets step them.
        team: this member of the team, and how many there are.
    Attributes:
        layers: modules as buckets step them, by the index of the layer in the model as text.
    """

    def __init__(
        self, members: Sequence[Stage], layers: VirtualLayers, own: Sequence[nn.Module], team: Team
    ) -> None:
        first, *_ = self._members = list(members)
        self._layers, self._team = layers, team
        self.first_layer, self.loss, self.device = first.first_layer, first.loss, first.device
        self.layers = nn.ModuleDict(
            {str(place): layer for place, layer in enumerate(own, self.first_layer)}
        )
        self.forward_pieces = first.forward_pieces if team.size > 1 else 1
        self.deferral = VirtualDeferral([member.deferral for member in members])
        self.evaluation = VirtualEvaluation(
            [member.evaluation for member in members], layers, self.first_layer, team
        )
        self._joints: dict[int, VirtualJoint] = {}  # at which microbatches wait
        self._wanting: dict[int, list[int]] = {}  # gradients that each one's outputs want

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

    def forward(self, number: int, inputs: Any, target: Any, in_pieces: bool = False) -> Any:
        made = self.forward_piece(number, (inputs, target))
        while isinstance(made, VirtualJoint):
            made = self.forward_piece(number, None)
        return made

    def forward_piece(
        self, number: int, given: tuple[Any, Any] | None, came: CameOfRanks | None = None
    ) -> Any:
        if given is not None:
            self._layers.refresh()
            each = _for_each(given, self.first_layer, len(self._members))
            made = [
                member.forward_piece(number, of_one)
                for member, of_one in zip(self._members, each, strict=True)
            ]
        else:
            made = [
                member.forward_piece(number, None, of_one)
                for member, of_one in zip(self._members, self._came(number, came), strict=True)
            ]
        if any(isinstance(one, Joint) for one in made):
            self._joints[number] = joint_of(made, self._team)
            return self._joints[number]
        if self.loss is not None:
            return loss_of(made)
        self._wanting[number] = [
            sum(tensor.requires_grad for tensor in flatten(one)[1]) for one in made
        ]
        return tuple(made)

    def recompute(self, number: int) -> None:
        for member in self._members:
            member.recompute(number)

    def open(self, number: int) -> VirtualJoint:
        """The joint at which microbatch `number` waits."""
        return self._joints[number]

    def backward(self, number: int, gradients: Gradients | None) -> Gradients:
        return self._through(number, gradients, Stage.backward_piece)

    def input_gradient(self, number: int, gradients: Gradients | None) -> Gradients:
        return self._through(number, gradients, Stage.input_piece)

    def backward_piece(
        self, number: int, gradients: Gradients | None, came: CameOfRanks | None = None
    ) -> Gradients:
        return self._back(number, gradients, came, Stage.backward_piece)

    def input_piece(
        self, number: int, gradients: Gradients | None, came: CameOfRanks | None = None
    ) -> Gradients:
        return self._back(number, gradients, came, Stage.input_piece)

    def remember_buffers(self) -> None:
        for member in self._members:
            member.remember_buffers()

    def recall_buffers(self) -> None:
        for member in self._members:
            member.recall_buffers()

    def release(self) -> None:
        for member in self._members:
            member.release()

    def drop(self) -> None:
        for member in self._members:
            member.drop()
        self._joints.clear()
        self._wanting.clear()
        self._layers.stale()

    def _through(
        self, number: int, gradients: Gradients | None, piece: Callable[..., Gradients]
    ) -> Gradients:
        found = self._back(number, gradients, None, piece)
        while number in self._joints:
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
        each: list[tuple[Gradients, Came | None]]
        if number in self._joints:
            each = [((), of_one) for of_one in self._came(number, came)]
        else:
            each = [(of_one, None) for of_one in self._gradients_of_each(number, gradients)]
        found = [
            piece(member, number, *of_one)
            for member, of_one in zip(self._members, each, strict=True)
        ]
        if self._members[0].backward_pieces(number):
            opened = [member.open(number) for member in self._members]
            self._joints[number] = VirtualJoint(opened, self._team)
        return tuple(one for of_one in found for one in of_one)

    def _came(self, number: int, came: CameOfRanks | None) -> list[Came]:
        return self._joints.pop(number).came(came or _NOTHING)

    def _gradients_of_each(self, number: int, gradients: Gradients | None) -> list[Gradients]:
        if self.loss is not None:
            return [()] * len(self._members)
        rest = iter(gradients or ())
        return [tuple(next(rest) for _ in range(many)) for many in self._wanting.pop(number)]


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
    """The forwards of virtual members in evaluation mode; see `StageEvaluation`."""

    def __init__(
        self,
        of_members: Sequence[StageEvaluation],
        layers: VirtualLayers,
        first_layer: int,
        team: Team,
    ) -> None:
        self._of_members, self._layers = of_members, layers
        self._first_layer, self._team = first_layer, team
        self._joints: dict[int, VirtualJoint] = {}
        self._outputs = of_members[0].outputs
        self.outputs = self._outputs if team.size > 1 else Outputs.ALL

    def run(self, number: int, inputs: Any, target: Any) -> Any:
        made = self.run_piece(number, (inputs, target))
        while isinstance(made, VirtualJoint):
            made = self.run_piece(number, None)
        return made

    def run_piece(
        self, number: int, given: tuple[Any, Any] | None, came: CameOfRanks | None = None
    ) -> Any:
        if given is not None:
            self._layers.take()
            each = _for_each(given, self._first_layer, len(self._of_members))
            made = [
                of.run_piece(number, of_one)
                for of, of_one in zip(self._of_members, each, strict=True)
            ]
        else:
            joint = self._joints.pop(number)
            made = [
                of.run_piece(number, None, of_one)
                for of, of_one in zip(self._of_members, joint.came(came or _NOTHING), strict=True)
            ]
        if any(isinstance(one, Joint) for one in made):
            self._joints[number] = joint_of(made, self._team)
            return self._joints[number]
        if not self._of_members[0].has_loss:
            return tuple(made)
        return self._outputs.of_all([outputs for outputs, _ in made]), loss_of(
            [loss for _, loss in made]
        )


def joint_of(made: Sequence[Any], team: Team) -> VirtualJoint:
    """The joint that all virtual members have come to.

    Raises:
        ModelError: some have ended.
    """
    joints = [one for one in made if isinstance(one, Joint)]
    if len(joints) < len(made):
        raise ModelError(
            "the shares of a layer (parallel.tensor_shards) have different numbers of joints; "
            "expected the same Sum and Gathered from each"
        )
    return VirtualJoint(joints, team)


def loss_of(losses: Sequence[tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
    """The loss of a rank, (mean, None) or (sum, weight), from those of its virtual members."""
    values = [loss.double() for loss, _ in losses]
    if any(weight is None for _, weight in losses):
        return balanced_sum(values) / len(values), None
    return balanced_sum(values), balanced_sum([weight for _, weight in losses])


def _for_each(given: tuple[Any, Any], first_layer: int, many: int) -> list[tuple[Any, Any]]:
    """Inputs and target of each virtual member, in memory of its own."""
    inputs, target = given
    # What the stage before has made is of each; the model's inputs are whole.
    each = inputs if first_layer else [inputs, *(copied(inputs) for _ in range(1, many))]
    return [(one, target if place == 0 else copied(target)) for place, one in enumerate(each)]
