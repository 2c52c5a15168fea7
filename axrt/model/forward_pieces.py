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
from .gather_again import GatheredAgain
from .in_pieces import InPieces
from .inlet import Gradients, Inflow, Inlet
from .joints import Came, Joint, alone
from .layer_runs import LayerRuns, RunSettings
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
        settings: what all stages of a rank have in common.
    """

    def __init__(self, runs: LayerRuns, inlet: Inlet, settings: RunSettings) -> None:
        self._runs, self._inlet, self._team = runs, inlet, settings.of_team.team
        self._gathers_again = settings.gathers_again
        self._are_apart: set[tuple[int, int]] = set()  # layers of which a microbatch has run

    def kept(
        self,
        number: int,
        inputs: Any,
        target: Any,
        part: tuple[int, int],
        ended: Callable[[Any], Ended],
        segments: list[Segment],
        again: list[GatheredAgain] | None = None,
    ) -> Generator[Joint | None, Any, Any]:
        """Run layers that keep what their backward needs.

        Args:
            inputs: what the first of them is given.
            target: target for the loss, where it follows; None elsewhere.
            part: index of the first layer in the stage, and of the one behind the last.
            ended: function that ends the graph behind the last one, with the loss if that follows.
            segments: graphs of the microbatch, to which those of these layers are added.
            again: what is let go and gathered again, to which that of these layers is added; None:
                nothing is.
        Yields:
            The joint behind a piece, and slices of the other members are sent for it; None where a
            team has no other member.
        Returns:
            What travels on.
        """
        inflow, (first, end), before = Inflow(), part, len(segments)
        aside, gathered = self._aside(), None
        given: Any = self._inlet.through(inputs, inflow)
        pieces = self._runs.run_by_piece(number, given, target, first, end)
        given = None
        while True:
            try:
                with aside or nullcontext(), gathered.saving() if gathered else nullcontext():
                    made, given = pieces.send(given), None
            except StopIteration as last:
                out, edges, of_loss = ended(last.value)
                goes_on = end < len(self._runs)  # it is no joint that the layers behind begin at
                read = aside and aside.end()
                segments.append(Segment(first, inflow, edges, of_loss, None, goes_on, read))
                if gathered is not None:
                    gathered.keep()  # nothing comes again where no joint follows
                self._check_apart(part, segments[before:])
                return out
            if self._team.size == 1:
                yield None
                given = alone(made)
                continue
            joint = Joint(made, self._team)
            edges = [edge_of(tensor) for tensor in joint.tensors if tensor.requires_grad]
            back = joint.back(gathered)
            if gathered is not None:
                gathered.let_go()
            segments.append(Segment(first, inflow, edges, None, back, aside=aside and aside.end()))
            came = yield joint
            inflow, aside = Inflow(), self._aside()
            given = self._inlet.through(joint.value(came), inflow)
            gathered = self._gathered(joint, given, again)
            del made, joint, came  # and what they hold, beside what was joined

    def _aside(self) -> Aside | None:
        return Aside(self._inlet) if self._runs.has_pauses else None

    def _gathered(
        self, joint: Joint, given: Any, again: list[GatheredAgain] | None
    ) -> GatheredAgain | None:
        if again is None or not self._gathers_again:
            return None
        again.append(GatheredAgain(joint.gathered(given), self._team))
        return again[-1]

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
        self, number: int, inputs: Any, target: Any, end: int, kept: list[Came]
    ) -> Generator[Joint, Any, Any]:
        """Run the first layers of a microbatch, of which nothing is kept but what comes at joints.

        Args:
            inputs: what the first of them is given.
            target: target for the loss, where it follows; None elsewhere.
            end: index of the layer behind the last of them.
            kept: slices that come, to which those of each joint are added.
        Returns:
            What the next layer is given.
        """
        begun = self._inlet.through(inputs, Inflow())
        pieces = self._runs.run_by_piece(number, begun, target, 0, end)
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
