"""One member of a team by itself: at a joint its own slices stand in for those of the others."""

# Members have equally many tokens, and equal parts of what is cut. So slices of the others have the
# shapes and types of a member's own, and one member shows what each of them computes and sends.
# What it computes is no loss and no gradient of anything.

from typing import Any

from axrt.transport.payload import flatten

from .inlet import Gradients
from .joints import Came, Joint
from .stage import Stage


class MemberAlone:
    """Runs microbatches through a stage, piece by piece where it has joints.

    Args:
        stage: stage of the first member, or of a rank that nobody shares it with.
        team: number of members.
    Attributes:
        joints: bytes that the member has for all others together at each joint of the last forward.
        back_joints: the same for the last input gradient.
    """

    def __init__(self, stage: Stage, team: int) -> None:
        self._stage, self._others = stage, range(1, team)
        self.joints: list[int] = []
        self.back_joints: list[int] = []

    def forward(self, number: int, value: Any, target: Any) -> Any:
        """Run a forward; arguments and result are those of `Stage.forward`."""
        self.joints = []
        if not self._others:
            return self._stage.forward(number, value, target)
        out = self._stage.forward_piece(number, (value, target))
        while isinstance(out, Joint):
            came = {member: out.outgoing(member) for member in self._others}
            self.joints.append(_num_bytes(came))
            out = self._stage.forward_piece(number, None, came)
        return out

    def input_gradient(self, number: int, gradients: Gradients | None) -> Gradients:
        """Run an input gradient; arguments and result are those of `Stage.input_gradient`."""
        self.back_joints = []
        if not self._others:
            return self._stage.input_gradient(number, gradients)
        found = self._stage.input_piece(number, gradients)
        while self._stage.backward_pieces(number):
            microbatch = self._stage.open(number)
            came = {member: microbatch.outgoing(member) for member in self._others}
            self.back_joints.append(_num_bytes(came))
            found = self._stage.input_piece(number, None, came)
        return found

    def weight_gradient(self, number: int) -> None:
        """Run all weight gradients that wait."""
        while self._stage.deferral.pieces(number):
            self._stage.deferral.run_piece(number)


def _num_bytes(came: Came) -> int:
    return sum(one.nbytes for slices in came.values() for one in flatten(slices)[1])
