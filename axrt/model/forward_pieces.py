"""A forward in pieces: between two of them a rank runs tasks of other microbatches."""

# A graph is one where nobody shares the stage. In a team it ends at each joint, and the next one
# begins with what has come, so that a backward has a piece for each of them.

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from torch import nn
from torch.autograd.graph import GradientEdge

from axrt.errors import ModelError

from .aside import Aside
from .in_pieces import InPieces
from .inlet import Gradients, Inflow, Inlet
from .joints import Came, Joint, Team, alone
from .layer_runs import LayerRuns
from .segment import Segment, are_apart, edge_of

Ended = tuple[Any, list[GradientEdge], Gradients | None]


def pauses_in(layers: Sequence[nn.Module]) -> int:
    """The number of pauses in a forward of layers that nobody shares."""
    return sum(len(layer.pieces) - 1 for layer in layers if isinstance(layer, InPieces))


class ForwardPieces:
    """Runs layers of a stage piece by piece.

    Args:
        runs: the layers.
        inlet: where activations enter them.
        team: this member, and how many hold the stage.
    """

    def __init__(self, runs: LayerRuns, inlet: Inlet, team: Team) -> None:
        self._runs, self._inlet, self._team = runs, inlet, team
        self._are_apart: set[tuple[int, int]] = set()  # layers of which a microbatch has run

    def kept(
        self,
        number: int,
        inputs: Any,
        part: tuple[int, int],
        ended: Callable[[Any], Ended],
        segments: list[Segment],
    ) -> Generator[Joint | None, Any, Any]:
        """Run layers that keep what their backward needs.

        Args:
            inputs: what the first of them is given.
            part: index of the first layer in the stage, and of the one behind the last.
            ended: function that ends the graph behind the last one, with the loss if that follows.
            segments: graphs of the microbatch, to which those of these layers are added.
        Yields:
            The joint behind a piece, and slices of the other members are sent for it; None where a
            team has no other member.
        Returns:
            What travels on.
        """
        inflow, (first, end), before = Inflow(), part, len(segments)
        aside = self._aside()
        pieces = self._runs.run_by_piece(number, self._inlet.through(inputs, inflow), first, end)
        given: Any = None
        while True:
            try:
                with aside or nullcontext():
                    made = pieces.send(given)
            except StopIteration as last:
                out, edges, of_loss = ended(last.value)
                goes_on = end < len(self._runs)  # it is no joint that the layers behind begin at
                segments.append(
                    Segment(
                        first, inflow, edges, of_loss, goes_on=goes_on, aside=aside and aside.end()
                    )
                )
                self._check_apart(part, segments[before:])
                return out
            if self._team.size == 1:
                yield None
                given = alone(made)
                continue
            joint = Joint(made, self._team)
            edges = [edge_of(tensor) for tensor in joint.tensors if tensor.requires_grad]
            back = joint.back()
            segments.append(Segment(first, inflow, edges, None, back, aside=aside and aside.end()))
            came = yield joint
            inflow, aside = Inflow(), self._aside()
            given = self._inlet.through(joint.value(came), inflow)
            del made, joint, came  # and what they hold, beside what was joined

    def _aside(self) -> Aside | None:
        return Aside(self._inlet) if self._runs.has_pauses else None

    def _check_apart(self, part: tuple[int, int], segments: Sequence[Segment]) -> None:
        """Check in the first microbatch that nothing passes a joint of some layers without an
        inlet.

        Raises:
            ModelError: something does.
        """
        if part in self._are_apart or not self._runs.has_pauses:
            return
        self._are_apart.add(part)
        graphs = [(place, segment.roots) for place, segment in enumerate(segments, 1)]
        if not are_apart(graphs, {}):
            first, end = (self._runs.first_layer + place for place in part)
            raise ModelError(
                f"one of layers {first} to {end - 1} hands a tensor that it has made "
                "before members of its team exchange slices to something behind that which "
                "torch's function modes do not see, such as an autograd.Function, torch.func or "
                "views of a tensor that was changed in place; expected to hand it over as the "
                "result of a function of torch, such as tensor.clone()"
            )

    # Layers of a team that run again for their backward send nothing twice: what came at a joint is
    # kept, and is as much as what is kept at the beginning of a stage.

    def forgotten(
        self, number: int, inputs: Any, end: int, kept: list[Came]
    ) -> Generator[Joint, Any, Any]:
        """Run the first layers of a microbatch, of which nothing is kept but what comes at joints.

        Args:
            inputs: what the first of them is given.
            end: index of the layer behind the last of them.
            kept: slices that come, to which those of each joint are added.
        Returns:
            What the next layer is given.
        """
        begun = self._inlet.through(inputs, Inflow())
        pieces = self._runs.run_by_piece(number, begun, 0, end)
        given: Any = None
        while True:
            try:
                joint = Joint(pieces.send(given), self._team)
            except StopIteration as last:
                return last.value
            came = yield joint
            kept.append(came)
            given = self._inlet.through(joint.value(came), Inflow())
            del joint, came


def run_again(pieces: Generator[Joint | None, Any, Any], kept: Sequence[Came]) -> None:
    """Run a forward of a team to its end, with the slices that have come before.

    Raises:
        ModelError: it has more joints than slices were kept for.
    """
    with suppress(StopIteration):
        next(pieces)
        for came in kept:
            pieces.send(came)
        raise ModelError(
            f"layers that run again have more than the {len(kept)} joints that they had before; "
            "expected the same, whatever they are given"
        )
