"""A stage in evaluation mode: forwards without a graph, of which nothing is kept."""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from axrt.transport.payload import flatten, unflatten

from .joints import Came, Joint, tokens_of_all
from .layer_runs import LayerRuns
from .team_layers import TeamLayers
from .vocabulary import CutLogits


class Outputs(Enum):
    """What a member of a team has of what the last layer returns."""

    ALL = "all of it"
    TOKENS = "its tokens"
    LOGITS = "the logits of its part of the vocabulary"

    def of_all(self, of_members: Sequence[Any]) -> Any:
        """The outputs of a microbatch, from what each member has that has kept some."""
        if self is Outputs.LOGITS:
            return torch.cat(list(of_members), -1)
        return tokens_of_all(of_members) if self is Outputs.TOKENS else of_members[0]


class StageEvaluation:
    """The forwards of a stage in evaluation mode.

    Args:
        runs: its layers.
        of_team: what this member of a team runs of them.
        to_send: function that gives a tensor that may travel while weights leave; None: weights
            stay.
    Attributes:
        outputs: what this member has of what the last stage returns.
        has_loss: the loss follows the layers.
    """

    def __init__(
        self, runs: LayerRuns, of_team: TeamLayers, to_send: Callable[[Tensor], Tensor] | None
    ) -> None:
        self._runs, self._team, self._to_send = runs, of_team.team, to_send
        self._open: dict[int, Generator[Joint, Any, Any]] = {}
        self.outputs, self.has_loss = Outputs.TOKENS, runs.has_loss
        if self._team.size == 1 or of_team.loss_is_whole:
            self.outputs = Outputs.LOGITS if runs.makes_logits else Outputs.ALL

    @torch.no_grad()
    def run(self, number: int, inputs: Any, target: Any) -> Any:
        """Run the forward of a microbatch.

        Args:
            target: target for the loss, on the last stage; None elsewhere.
        Returns:
            The outputs that travel on; on the last stage the outputs and the loss, (mean, None) or
            (sum, weight).
        """
        return self._ended(self._runs.run(number, inputs, 0, len(self._runs)), target)

    @torch.no_grad()
    def run_piece(
        self, number: int, given: tuple[Any, Any] | None, came: Came | None = None
    ) -> Any:
        """Run the next piece of a forward, in a team.

        Args:
            given: inputs and target, see `run`, for the first piece; None for the others.
            came: slices of the joint before the piece; None where there is none.
        Returns:
            The result of `run` from the last piece; the joint behind the piece from others.
        """
        if given is not None:
            self._open[number] = self._by_piece(number, *given)
        try:
            return self._open[number].send(came)
        except StopIteration as end:
            del self._open[number]
            return end.value

    def _by_piece(self, number: int, inputs: Any, target: Any) -> Generator[Joint, Any, Any]:
        pieces = self._runs.run_by_piece(number, inputs, target, 0, len(self._runs))
        given: Any = None
        while True:
            try:
                joint = Joint(pieces.send(given), self._team)
            except StopIteration as end:
                return self._ended(end.value, target)
            given = joint.value((yield joint))

    def _ended(self, outputs: Any, target: Any) -> Any:
        loss = self._runs.loss(outputs, target) if self._runs.has_loss else None
        if isinstance(outputs, CutLogits):
            outputs = outputs.logits
        if self._to_send is not None:  # while others may still be reading weights
            with suppress(TypeError):  # what cannot travel is read here alone
                skeleton, tensors = flatten(outputs)
                outputs = unflatten(skeleton, list(map(self._to_send, tensors)))
        return outputs if loss is None else (outputs, loss)
