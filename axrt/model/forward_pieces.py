"""A forward in pieces: between two of them a rank runs tasks of other microbatches."""

# A graph is one where nobody shares the stage. In a team it ends at each joint, and the next one
# begins with what has come, so that a backward has a piece for each of them.

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

from torch import nn
from torch.autograd.graph import GradientEdge

from .in_pieces import InPieces
from .inlet import Gradients, Inflow, Inlet
from .joints import Came, Joint, Team, alone
from .layer_runs import LayerRuns
from .segment import Segment, edge_of

Ended = tuple[Any, list[GradientEdge], Gradients | None]


def pauses_in(layers: Sequence[nn.Module]) -> int:
    """The number of pauses in a forward of layers that nobody shares."""
    return sum(len(layer.pieces) - 1 for layer in layers if isinstance(layer, InPieces))


def forward_by_piece(
    number: int,
    inputs: Any,
    first: int,
    end: int,
    runs: LayerRuns,
    inlet: Inlet,
    team: Team,
    ended: Callable[[Any], Ended],
    segments: list[Segment],
) -> Generator[Joint | None, Any, Any]:
    """Run the forward of a microbatch with its pauses.

    Args:
        inputs: what the first of the layers is given.
        first, end: index of that layer in the stage, and of the one behind the last.
        ended: function that ends the graph behind the last layer, with the loss if one follows.
        segments: graphs of the microbatch, to which those of these layers are added.
    Yields:
        The joint behind a piece, and slices of the other members are sent for it; None where a team
        has no other member.
    Returns:
        What travels on.
    """
    inflow = Inflow()
    pieces = runs.run_by_piece(number, inlet.through(inputs, inflow), first, end)
    given: Any = None
    while True:
        try:
            made = pieces.send(given)
        except StopIteration as last:
            out, edges, of_loss = ended(last.value)
            goes_on = end < len(runs)  # it is no joint that the layers behind begin at
            segments.append(Segment(first, inflow, edges, of_loss, goes_on=goes_on))
            return out
        if team.size == 1:
            yield None
            given = alone(made)
            continue
        joint = Joint(made, team)
        edges = [edge_of(tensor) for tensor in joint.tensors if tensor.requires_grad]
        segments.append(Segment(first, inflow, edges, None, joint.back()))
        came = yield joint
        inflow = Inflow()
        given = inlet.through(joint.value(came), inflow)


# Layers of a team that run again for their backward send nothing twice: what came at a joint is
# kept, and is as much as what is kept at the beginning of a stage.


def forgotten_by_piece(
    number: int,
    inputs: Any,
    end: int,
    runs: LayerRuns,
    team: Team,
    kept: list[Came],
) -> Generator[Joint, Any, Any]:
    """Run the first layers of a microbatch, of which nothing is kept but what comes at joints.

    Args:
        inputs: what the first of them is given.
        end: index of the layer behind the last of them.
        kept: slices that come, to which those of each joint are added.
    Returns:
        What the next layer is given.
    """
    pieces = runs.run_by_piece(number, inputs, 0, end)
    given: Any = None
    while True:
        try:
            joint = Joint(pieces.send(given), team)
        except StopIteration as last:
            return last.value
        came = yield joint
        kept.append(came)
        given = joint.value(came)


def run_again(pieces: Generator[Joint | None, Any, Any], kept: Sequence[Came]) -> None:
    """Run a forward of a team to its end, with the slices that have come before."""
    with suppress(StopIteration):
        next(pieces)
        for came in kept:
            pieces.send(came)
