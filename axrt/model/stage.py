"""A stage computes: its forward keeps what its backward needs, and its backward gives the gradients
of its inputs. A backward runs whole, or the weight gradients of those layers that can defer them
come later, piece by piece (see `deferral.py`)."""

# Activations enter a stage through an *inlet* (`inlet.py`).
#
# A forward keeps the graph, not the outputs: only edges of the graph are held, so an activation's
# memory is free as soon as it is sent, unless the graph itself needs it.
#
# In a stage that recomputes (activation checkpointing), the first layers keep nothing but the
# stage's inputs. Before the backward they run again, with the same dropout and the same buffers;
# their changes to those are forgotten. Such a stage has a graph in two segments, each with an inlet
# of its own.

from collections.abc import Collection, Generator, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from axrt.transport.payload import copied, flatten, unflatten

from .buffers import Remembered, buffers_in_place_of, recall, remembered_buffers
from .deferral import Deferral
from .evaluation import StageEvaluation
from .forward_pieces import ForwardPieces, pauses_in, run_again
from .inlet import Gradients, Inflow, Inlet
from .joints import Came, Joint
from .layer_runs import LayerRuns, RunSettings
from .left import check_nothing_left
from .linear import with_deferral, without_deferral
from .loss import Loss
from .module import LossFunction
from .open_microbatch import OpenMicrobatch
from .pausing import attributes_kept
from .saved import SavedTensors, memory_of
from .segment import Segment, are_apart, edge_of, may_travel


class Stage:
    """Consecutive layers on one device.

    Backwards add to the parameters' `.grad`. Where gradients travel it must be there before: a
    gradient that autograd makes the first one may be a view of an activation's, which the network
    may still read.

    Args:
        first_layer: index of its first layer in the model.
        loss_fn: loss function on the last stage; None elsewhere.
        settings: what all stages of a rank have in common.
        recomputed: number of first layers that keep nothing and run again before a backward; where
            it is all of them, so does the loss. 0: none.
        offloads: True if what autograd saves of a microbatch may leave the device until its
            backward.
    Attributes:
        layers: modules, by the index of the layer in the model as text.
        first_layer: index of the first layer in the model.
        loss: loss function on the last stage, as the user has given it; None elsewhere.
        device: device that they compute on.
        deferral: weight gradients that wait.
        forward_pieces: pieces that a forward comes in, one more than the pauses in it.
        evaluation: its forwards in evaluation mode.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        loss_fn: LossFunction | None,
        settings: RunSettings,
        recomputed: int = 0,
        offloads: bool = False,
    ) -> None:
        self.recomputed, self._offloads = recomputed, offloads
        ready = list(map(with_deferral, layers)) if settings.splits else list(layers)
        self.layers = nn.ModuleDict(
            {str(place): layer for place, layer in enumerate(ready, first_layer)}
        )
        self.first_layer = first_layer
        if loss_fn and layers and isinstance(layers[-1], Loss):
            loss_fn = layers[-1].loss  # that of these layers, which may be copies
        self.loss = loss_fn
        self._runs = LayerRuns(ready, first_layer, loss_fn, settings)
        self._open: dict[int, OpenMicrobatch] = {}
        self._inlet = Inlet()
        self._pieces = ForwardPieces(self._runs, self._inlet, settings)
        self.device = settings.generator.device
        self._parameters = [parameter for _, parameter in self.named_parameters()]
        self._weights_leave = settings.job.residencies is not None
        self.deferral = Deferral(
            self._parameters if settings.splits else (),
            (lambda: self._own_memory) if self._weights_leave else None,
        )
        self._team = settings.of_team.team
        self.forward_pieces = 1 + (
            settings.of_team.joints(first_layer, ready, loss_fn is not None)
            if self._team.size > 1
            else pauses_in(() if settings.compiler else ready[recomputed:])
        )
        self._cuts: tuple[int, ...] = ()
        self._may_be_cut = False  # known when a microbatch has run in pieces
        self.evaluation = StageEvaluation(
            self._runs, settings.of_team, self._to_send if self._weights_leave else None
        )
        self._before_step: list[Remembered] = []
        looks = settings.looks and loss_fn is None
        self._looks = set(range(len(layers))) if looks else set()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The name and parameter of every trained parameter, in model order.

        The names, `layer.name`, are those of `PipelineModule.sequential`.
        """
        return [
            (name, parameter)
            for name, parameter in self.layers.named_parameters()
            if parameter.requires_grad
        ]

    # Reductions begin within the last backward, by segments; a hook that sends would decide.
    def cut_at(self, layers: Collection[int]) -> None:
        """Let backwards run in pieces where they are asked for piece by piece: a piece ends before
        each of these layers of the model. Those that run again, or are on another stage, are left
        out.
        """
        places = sorted(place - self.first_layer for place in layers)
        self._cuts = tuple(place for place in places if self.recomputed < place < len(self._runs))

    def forward(self, number: int, inputs: Any, target: Any, in_pieces: bool = False) -> Any:
        """Run the forward of a microbatch and keep what its backward needs.

        Args:
            inputs: payload that the stage before returned, or the reader read; tensors that want a
                gradient say so.
            target: target for the loss, on the last stage; None elsewhere.
            in_pieces: True if its backward comes piece by piece (see `cut_at`).
        Returns:
            The outputs that travel on, detached; on the last stage (mean, None) or (sum, weight),
            as the loss function gave them.
        Raises:
            ModelError: the loss depends on no trained weight.
            OutputTypeError: the loss function returned no tensor with one element, or the outputs
                cannot travel.
        """
        microbatch = self._open[number] = OpenMicrobatch()
        if not self._offloads:
            out = self._forward(microbatch, number, inputs, target, in_pieces)
        else:
            microbatch.saved = SavedTensors(self.device, self._is_own)
            with microbatch.saved.saving():
                out = self._forward(microbatch, number, inputs, target, in_pieces)
        if self._looks:
            self._look(microbatch.segments, self.recomputed, len(self._runs))
        return out

    def forward_piece(
        self, number: int, given: tuple[Any, Any] | None, came: Came | None = None
    ) -> Any:
        """Run the next piece of the forward of a microbatch, where it comes in several.

        Args:
            given: inputs and target, see `forward`, for the first piece; None for the others.
            came: slices of the joint before the piece; None where there is none.
        Returns:
            The result of `forward` from the last piece; the joint behind the piece from others,
            None where a team has no other member.
        """
        if given is not None:
            microbatch = self._open[number] = OpenMicrobatch()
            if self._offloads:
                microbatch.saved = SavedTensors(self.device, self._is_own)
            microbatch.going_on = self._forward_by_piece(microbatch, number, *given)
        microbatch = self._open[number]
        assert microbatch.going_on is not None
        try:
            with microbatch.saved.saving() if microbatch.saved else nullcontext():
                return microbatch.going_on.send(came)
        except StopIteration as end:
            microbatch.going_on = None
            if self._looks:
                self._look(microbatch.segments, self.recomputed, len(self._runs))
            return end.value

    def _forward_by_piece(
        self, microbatch: OpenMicrobatch, number: int, inputs: Any, target: Any
    ) -> Generator[Joint | None, Any, Any]:
        pieces, first, whole = self._pieces, self.recomputed, len(self._runs)
        if first and self._team.size == 1:
            inputs = self._forget(microbatch, number, inputs, target)
        elif first:
            self._keep_given(microbatch, inputs, target)
            inputs = yield from pieces.forgotten(number, inputs, target, first, microbatch.came)
            if first == whole:
                return self._ended(number, inputs, target, whole)[0]
        ended = lambda value: self._ended(number, value, target, whole)  # noqa: E731
        part, into = (first, whole), (microbatch.segments, microbatch.again)
        return (yield from pieces.kept(number, inputs, target, part, ended, *into))

    def _look(self, segments: Sequence[Segment], first: int, end: int) -> None:
        """Look for losses that layers have left on themselves, once."""
        roots = [root for segment in segments for root in segment.roots]
        for place in range(first, end):
            if place in self._looks:
                self._looks.remove(place)
                name = str(self.first_layer + place)
                check_nothing_left(name, self.layers[name], roots)

    def _forward(
        self, microbatch: OpenMicrobatch, number: int, inputs: Any, target: Any, in_pieces: bool
    ) -> Any:
        whole = len(self._runs)
        if self.recomputed:
            inputs = self._forget(microbatch, number, inputs, target)
            if self.recomputed == whole:
                return self._ended(number, inputs, target, whole)[0]
        if in_pieces and self._cuts and not self._may_be_cut:
            out, microbatch.segments = self._first_in_pieces(number, inputs, target)
            return out
        ends = (*self._cuts, whole) if in_pieces else (whole,)
        out, microbatch.segments = self._segments(number, inputs, target, self.recomputed, ends)
        return out

    def recompute(self, number: int) -> None:
        """Run the layers of a microbatch again that have kept nothing, for its backward."""
        microbatch = self._open[number]
        assert microbatch.given is not None
        inputs, target, buffers = microbatch.given
        microbatch.given = None
        layers = self._recomputed_layers
        kept = attributes_kept(layers) if self._runs.has_pauses else nullcontext()
        with kept, buffers_in_place_of(zip(layers, buffers, strict=True)):
            end = self.recomputed
            if self._team.size == 1:
                _, segments = self._segments(number, inputs, target, 0, (end,))
            else:
                segments = []
                ended = lambda value: self._ended(number, value, target, end)  # noqa: E731
                again = self._pieces.kept(number, inputs, target, (0, end), ended, segments)
                run_again(again, microbatch.came)
        microbatch.segments[:0] = segments
        microbatch.came = []
        if self._looks:
            self._look(segments, 0, self.recomputed)

    def open(self, number: int) -> OpenMicrobatch:
        """What microbatch `number` has open here, between its forward and its backward."""
        return self._open[number]

    @property
    def modules_run(self) -> list[nn.Module]:
        """The modules that compute, the loss too."""
        return [*self.layers.values(), *([self.loss] if isinstance(self.loss, nn.Module) else [])]

    def backward(self, number: int, gradients: Gradients | None) -> Gradients:
        """Run the backward of a microbatch, adding to the parameters' `.grad`.

        Args:
            gradients: gradients of the tensors that travelled on and wanted one, in order, None for
                those without; None altogether on the last stage.
        Returns:
            The gradients of the inputs that wanted one, in order.
        """
        return self._open.pop(number).backward(gradients or ())

    def backward_pieces(self, number: int) -> int:
        """Number of pieces that the backward of microbatch `number` has left; 0: it has ended."""
        return len(self._open[number].segments) if number in self._open else 0

    def next_piece(self, number: int) -> int:
        """The index in the model of the first layer in the next piece of the backward of microbatch
        `number`."""
        return self.first_layer + self._open[number].segments[-1].first

    def backward_piece(
        self, number: int, gradients: Gradients | None, came: Came | None = None
    ) -> Gradients:
        """Run the next piece of the backward of a microbatch; the last layers come first.

        Args:
            gradients: gradients for the first piece, as `backward` takes them; ignored later.
            came: slices of the joint that the piece begins at; None where there is none.
        Returns:
            The result of `backward`, from the last piece; () from others.
        """
        microbatch = self._open[number]
        found = microbatch.backward_piece(gradients or (), came)
        if not microbatch.segments:
            del self._open[number]
        return found

    def input_piece(
        self, number: int, gradients: Gradients | None, came: Came | None = None
    ) -> Gradients:
        """Run the next piece of an input gradient; see `backward_piece` and `input_gradient`."""
        with self.deferral.collecting(number):
            return self.backward_piece(number, gradients, came)

    def input_gradient(self, number: int, gradients: Gradients | None) -> Gradients:
        """Run the backward of a microbatch without the weight gradients that can wait; arguments
        and result are those of `backward`."""
        with self.deferral.collecting(number):
            return self.backward(number, gradients)

    def remember_buffers(self) -> None:
        """Keep the values that buffers, such as running means, have before a step that may be
        skipped."""
        self._before_step = remembered_buffers(self.layers)

    def recall_buffers(self) -> None:
        """Give buffers the values again that they had before a step, which is skipped."""
        recall(self._before_step)

    def release(self) -> None:
        """Give the layers back as they were, with the weights that they have now."""
        self.deferral.release()
        self._runs.release()
        for layer in self.layers.values():
            without_deferral(layer)

    def drop(self) -> None:
        """Forget every microbatch under way and what it has added to gradients: `.grad` becomes
        None."""
        self._open.clear()
        self.deferral.drop()
        self.__dict__.pop("_own_memory", None)  # weights may go on in other memory
        for parameter in self._parameters:
            parameter.grad = None

    def _segments(
        self, number: int, inputs: Any, target: Any, first: int, ends: Sequence[int]
    ) -> tuple[Any, list[Segment]]:
        """Run layers in graphs of their own, and the loss after the last one of all.

        Args:
            first: index of the first layer in the stage.
            ends: indices of layers before each of which a graph ends, at most the number of layers;
                it goes on where the value there may not travel.
        Returns:
            The value that travels on, and the graphs.
        """
        segments: list[Segment] = []
        inflow, begin = Inflow(), first
        try:
            value = self._inlet.through(inputs, inflow)
        except TypeError as error:
            error.add_note(
                f"memory.recompute cuts the stage before layer {self.first_layer + first}, where "
                "it has to be able to"
            )
            raise
        for end in ends:
            value = self._runs.run(number, value, first, end)
            first = end
            if end != ends[-1] and not may_travel(value):
                continue
            value, edges, of_loss = self._ended(number, value, target, end)
            segments.append(Segment(begin, inflow, edges, of_loss))
            if end != ends[-1]:
                inflow, begin = Inflow(), end
                value = self._inlet.through(value, inflow)
        return value, segments

    def _first_in_pieces(self, number: int, inputs: Any, target: Any) -> tuple[Any, list[Segment]]:
        """Run a microbatch in pieces for the first time, and find out whether it may be.

        Layers may hand tensors to each other aside from their inputs and outputs, or use weights
        that they do not list. Then a graph reaches into another one, and the stage is not cut: the
        microbatch runs again as a whole.
        """
        whole, given = len(self._runs), (copied(inputs), copied(target))  # layers may work in place
        buffers = remembered_buffers(self.layers)
        ends = (*self._cuts, whole)
        out, segments = self._segments(number, inputs, target, self.recomputed, ends)
        own = {
            id(parameter): int(name.partition(".")[0]) - self.first_layer
            for name, parameter in self.named_parameters()
        }
        if are_apart([(segment.first, segment.roots) for segment in segments], own):
            self._may_be_cut = True
            return out, segments
        self._cuts = ()
        recall(buffers)
        return self._segments(number, *given, self.recomputed, (whole,))

    def _ended(
        self, number: int, outputs: Any, target: Any, end: int
    ) -> tuple[Any, list[GradientEdge], Gradients | None]:
        """End a graph where layers up to `end` have run.

        Returns:
            The value that travels on, the edges where gradients begin, and the loss's own gradient
            if the loss follows.
        """
        if self._runs.has_loss and end == len(self._runs):
            loss, weight = self._runs.loss(outputs, target)
            begin, of_loss = self._runs.loss_to_mean(number, loss, weight)
            return (loss.detach(), weight), [edge_of(begin)], (of_loss,)
        if isinstance(outputs, Tensor) and outputs.layout is torch.strided:  # as nearly always
            edges = [edge_of(outputs)] if outputs.requires_grad else []
            return self._to_send(outputs), edges, None
        skeleton, tensors = flatten(outputs)
        edges = [edge_of(tensor) for tensor in tensors if tensor.requires_grad]
        return unflatten(skeleton, [self._to_send(tensor) for tensor in tensors]), edges, None

    @property
    def _recomputed_layers(self) -> list[nn.Module]:
        return list(self.layers.values())[: self.recomputed]

    def _keep_given(self, microbatch: OpenMicrobatch, inputs: Any, target: Any) -> None:
        """Keep what the layers need that will run again."""
        buffers = [
            {name: buffer.clone() for name, buffer in layer.named_buffers()}
            for layer in self._recomputed_layers
        ]
        runs_loss = self.recomputed == len(self._runs) and self._runs.has_loss
        # Copied: layers and losses may work in place.
        microbatch.given = copied(inputs), copied(target) if runs_loss else target, buffers

    def _forget(self, microbatch: OpenMicrobatch, number: int, inputs: Any, target: Any) -> Any:
        """Run the layers that will run again, and keep what they need for that: each one's graph is
        dropped when the next one has its input."""
        self._keep_given(microbatch, inputs, target)
        value = inputs
        for place in range(self.recomputed):
            with suppress(TypeError):  # what cannot travel stays in the graph until something does
                value = self._inlet.through(value, Inflow())
            value = self._runs.run(number, value, place, place + 1)
        return value

    @cached_property
    def _own_memory(self) -> set[int]:
        """Addresses of weights and buffers; asked for once they have moved to their buckets."""
        return {memory_of(tensor) for tensor in (*self.layers.parameters(), *self.layers.buffers())}

    def _is_own(self, tensor: Tensor) -> bool:
        """The tensor is one of this stage's weights or buffers, or a view of one."""
        return memory_of(tensor) in self._own_memory

    def _to_send(self, tensor: Tensor) -> Tensor:
        """The tensor detached, and a copy if it is one of this stage's weights or buffers: those
        change while the network may still be reading."""
        out = tensor.detach()
        if self._is_own(out):
            out = out.clone()
        return out.requires_grad_(tensor.requires_grad)
