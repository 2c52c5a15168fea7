"""What a microbatch has open on a stage from its forward to the end of its backward."""

# A microbatch is open between its tasks, and between two pieces of one:
#
#     forward             segments are added; in pieces, `going_on` is what is left of it
#     (recompute)         the segments of layers that run again come before them
#     backward, in pieces segments are taken from the end; `gradients` pass from one to the next
#
# Promised: no segment knows another one but by the gradients that pass between them, so any number
# of tasks of other microbatches may run between two pieces. What would break it: a layer that hands
# a tensor to another one aside from its output, which `are_apart` finds in the first microbatch.

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from axrt.transport.payload import flatten

from .aside import Root
from .gather_again import GatheredAgain
from .inlet import Gradients
from .joints import Came, Joint, Slices
from .saved import SavedTensors
from .segment import Segment


@dataclass(slots=True)
class OpenMicrobatch:
    """One microbatch on one stage."""

    segments: list[Segment] = field(default_factory=list)  # of its graph, in order
    # inputs and target for the layers that run again, and the buffers of each of them
    given: tuple[Any, Any, list[dict[str, Tensor]]] | None = None
    # slices that came at the joints of these layers, in order
    came: list[Came] = field(default_factory=list)
    # what its pieces have let go, and gather again
    again: list[GatheredAgain] = field(default_factory=list)
    # gradients of the last segment's outputs, once a backward in pieces has begun
    gradients: Gradients = ()
    # gradients that wait for the segments of which later ones have read aside from a joint
    waiting_roots: list[Root] = field(default_factory=list)
    # the rest of a forward in pieces, between two of them
    going_on: Generator[Joint | None, Any, Any] | None = None
    # what autograd has saved of it, where that may leave the device
    saved: SavedTensors | None = None

    def backward(self, gradients: Gradients) -> Gradients:
        """The gradients of its inputs, from those of its outputs, of all segments at once."""
        for segment in reversed(self.segments):
            if segment.aside is None:  # as nearly always, and `_through` would be one more call
                gradients = segment.backward(gradients)
            else:
                gradients = self._through(segment, gradients)
        return gradients

    def _through(self, segment: Segment, given: Gradients) -> Gradients:
        """Run the backward of a segment, with what later ones have read of it aside from a
        joint."""
        if segment.aside is None:
            return segment.backward(given)
        since, waiting = segment.aside.since, self.waiting_roots
        mine = [root for root in waiting if root.edge.node._sequence_nr() >= since]
        earlier = [root for root in waiting if root.edge.node._sequence_nr() < since]
        found = segment.backward(given, mine)
        self.waiting_roots = earlier + segment.aside.roots()
        return found

    def backward_piece(self, gradients: Gradients, came: Came | None = None) -> Gradients:
        """Run the backward of the last segment that is left.

        Args:
            gradients: gradients of the outputs, for the first piece; ignored later.
            came: slices of the joint behind the segment; None where there is none.
        Returns:
            The gradients of its inputs, from the last piece; () from others.
        """
        segment = self.segments.pop()
        given, self.gradients = self.gradients or gradients, ()
        if segment.joint is not None:
            assert came is not None, "a piece behind a joint has the slices of all members"
            given = segment.joint.value([one for one in given if one is not None], came)
        found = self._through(segment, given)
        while self.segments and self.segments[-1].goes_on:
            found = self._through(self.segments.pop(), found)
        if not self.segments:
            return found
        joint = self.segments[-1].joint
        self.gradients = found if joint is None else tuple(joint.made(found))
        return ()

    @property
    def are_addends(self) -> list[bool]:
        """For each of the slices of that joint, whether it is to be added up."""
        joint = self.segments[-1].joint
        assert joint is not None
        return joint.are_addends

    def outgoing(self, to: int) -> Slices:
        """What this member has for another one at the joint that its backward has come to."""
        joint = self.segments[-1].joint
        assert joint is not None
        return joint.outgoing([one for one in self.gradients if one is not None], to)

    def kept_beside(self) -> list[Tensor]:
        """What it keeps that is not seen where autograd saves: copies of inputs, target and buffers
        and slices of other members, for layers that run again, and what is gathered again."""
        inputs, target, buffers = self.given or (None, None, [])
        of_layers = [buffer for layer in buffers for buffer in layer.values()]
        came = [of for at_joint in self.came for of in at_joint.values()]
        slices = [one for of in came for one in of if one is not None]
        again = [one for of in self.again for one in of.kept()]
        return [*flatten(inputs)[1], *flatten(target)[1], *of_layers, *slices, *again]
