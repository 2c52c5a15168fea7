"""A stage computes: its forward keeps what its backward needs, and its backward gives the gradients
of its inputs. A backward runs whole, or the weight gradients of those layers that can defer them
come later, piece by piece (see `deferral.py`).

Activations enter a stage through an *inlet*: a node of the autograd graph whose outputs are the
tensors that arrived and whose backward catches their gradients. Leaves with `.grad` would do, but
torch lays a leaf's gradient out like the leaf, while in one process the stage before would get it
as it is; strides decide which kernels run, and so the last bits. An inlet also lets the first layer
of a stage work in place.

A forward keeps the graph, not the outputs: only edges of the graph are held, so an activation's
memory is free as soon as it is sent, unless the graph itself needs it.

In a stage that recomputes (activation checkpointing), the first layers keep nothing but the stage's
inputs. Before the backward they run again, with the same dropout and the same buffers; their
changes to those are forgotten. Such a stage has a graph in two segments, each with an inlet of its
own.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from axrt.errors import ModelError, NonFiniteLossError, OutputTypeError
from axrt.payload import copied, flatten, unflatten
from axrt.scheduler.job import Job

from .compiler import Compiler
from .deferral import Deferral, with_deferral, without_deferral
from .left import check_nothing_left
from .loss import Loss
from .module import LossFunction
from .precision import AS_THEY_ARE, Types, in_type, is_kept
from .saved import SavedTensors, memory_of
from .seeds import BorrowedGenerator

Gradients = tuple[Tensor | None, ...]
_Remembered = tuple[nn.Module, str, Any, Any]


@dataclass(slots=True)
class _Inflow:
    """The tensors and gradients that pass the inlet of a stage.

    It must not know the graph's roots: the graph holds it, and that circle nothing would collect.
    """

    # tensors that want a gradient; () once the inlet has taken them
    arrived: tuple[Tensor, ...] = ()
    gradients: Gradients = ()  # gradients of these tensors, once the inlet has caught them
    caught: bool = False  # the inlet has caught them


class _Segment(NamedTuple):
    """A part of the graph of a microbatch."""

    first: int  # index of its first layer, counted from the stage's
    inflow: _Inflow  # inlet at which its gradients end
    roots: list[GradientEdge]  # edges of the graph at which its gradients begin
    # the loss's own gradient, 1, where the segment ends with the loss; None elsewhere
    of_loss: Gradients | None


@dataclass(slots=True)
class _Stashed:
    """The state that a microbatch needs for its backward."""

    segments: list[_Segment] = field(default_factory=list)  # segments of its graph, in order
    # inputs and target for the layers that run again, and the buffers of each of them
    given: tuple[Any, Any, list[dict[str, Tensor]]] | None = None
    # gradients of the last segment's outputs, once a backward in pieces has begun
    gradients: Gradients = ()
    # what autograd has saved of it, where that may leave the device
    saved: SavedTensors | None = None


def are_apart(
    graphs: Sequence[tuple[int, Sequence[GradientEdge]]], first_layer: Mapping[int, int]
) -> bool:
    """No graph of a microbatch reaches into another one, but by its inlet.

    Args:
        graphs: (number of its first layer, where its gradients begin) for each, in order.
        first_layer: number of the first layer that lists a parameter, by the parameter's id.
    Returns:
        False also where a graph uses a parameter that only later graphs list.
    """
    seen: dict[Any, int] = {}
    for graph, (_, roots) in enumerate(graphs):
        ends_before = graphs[graph + 1][0] if graph + 1 < len(graphs) else math.inf
        waiting = [root.node for root in roots]
        while waiting:
            node = waiting.pop()
            parameter = getattr(node, "variable", None)
            if parameter is not None:
                if first_layer.get(id(parameter), 0) >= ends_before:
                    return False
            elif node not in seen:
                seen[node] = graph
                waiting += [to for to, _ in node.next_functions if to is not None]
            elif seen[node] != graph:
                return False
    return True


class _Inlet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inflow: _Inflow, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.inflow = inflow
        ctx.set_materialize_grads(False)
        tensors, inflow.arrived = inflow.arrived, ()
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        if ctx.inflow.caught:
            raise ModelError(
                "a layer got a tensor from an earlier one aside from its input, as it did not in "
                "the first step, and its gradient came after that one's was complete; expected "
                "all that passes between layers to be inputs and outputs, or memory.bucket_mb so "
                "large that a stage has one bucket"
            )
        ctx.inflow.caught = True
        ctx.inflow.gradients = gradients
        return None, None


class Stage:
    """Consecutive layers on one device.

    Backwards add to the parameters' `.grad`. Where gradients travel it must be there before: a
    gradient that autograd makes the first one may be a view of an activation's, which the network
    may still read.

    Args:
        first_layer: index of its first layer in the model.
        loss_fn: loss function on the last stage; None elsewhere.
        job: schedule of the run, which counts microbatches and replicas and says whether backwards
            are split; a compiler turns that off.
        generator: random numbers, seeded anew before each layer.
        replica: index of the replica that this stage belongs to.
        compiler: compiler that runs the layers and the loss; None: they run as they are.
        recomputed: number of first layers that keep nothing and run again before a backward; where
            it is all of them, so does the loss. 0: none.
        scale_of: function that gives the factor on the losses of a step (loss scaling); None: 1.
        offloads: True if what autograd saves of a microbatch may leave the device until its
            backward.
        looks: True if losses that layers leave on themselves are looked for, in the first
            microbatch.
    Attributes:
        layers: modules, by the index of the layer in the model as text.
        first_layer: index of the first layer in the model.
        loss: loss function on the last stage, as the user has given it; None elsewhere.
        device: device that they compute on.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        loss_fn: LossFunction | None,
        job: Job,
        generator: BorrowedGenerator,
        replica: int = 0,
        types: Types = AS_THEY_ARE,
        compiler: Compiler | None = None,
        recomputed: int = 0,
        scale_of: Callable[[int], float] | None = None,
        offloads: bool = False,
        looks: bool = False,
    ) -> None:
        self.recomputed, self._offloads = recomputed, offloads
        splits = job.splits and compiler is None
        ready = list(map(with_deferral, layers)) if splits else list(layers)
        self.layers = nn.ModuleDict(
            {str(place): layer for place, layer in enumerate(ready, first_layer)}
        )
        self.first_layer = first_layer
        if loss_fn and layers and isinstance(layers[-1], Loss):
            loss_fn = layers[-1].loss  # that of these layers, which may be copies
        self.loss = loss_fn
        self._run: list[Callable[[Any], Any]] = [
            compiler.layer(layer) if compiler else layer for layer in ready
        ]
        self._loss_fn = compiler.loss(loss_fn) if compiler and loss_fn else loss_fn
        self._job = job
        # Microbatches of all replicas are numbered together in a step; where replicas share them,
        # they are numbered so from the start.
        self._a_step = job.microbatches_in_all if job.drawn else job.microbatches
        self._first_of_step = 0 if job.drawn else replica * job.microbatches
        self._generator = generator
        self._types, self._scale_of, self._between = types, scale_of, types.between
        self._kept = [is_kept(layer, types.keep) for layer in layers]
        self._stash: dict[int, _Stashed] = {}
        self._anchor = torch.empty(0, requires_grad=True)
        self.device = generator.device
        self._parameters = [parameter for _, parameter in self.named_parameters()]
        self._deferral = Deferral(
            self._parameters if splits else (),
            (lambda: self._own_memory) if job.stays else None,
        )
        self._weights_leave = job.stays is not None
        self._cuts: tuple[int, ...] = ()
        self._may_be_cut = False  # known when a microbatch has run in pieces
        self._before_step: list[_Remembered] = []
        self._looks = set(range(len(layers))) if looks and loss_fn is None else set()

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
        self._cuts = tuple(place for place in places if self.recomputed < place < len(self._run))

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
        stashed = self._stash[number] = _Stashed()
        if not self._offloads:
            out = self._forward(stashed, number, inputs, target, in_pieces)
        else:
            stashed.saved = SavedTensors(self.device, self._is_own)
            with stashed.saved.saving():
                out = self._forward(stashed, number, inputs, target, in_pieces)
        if self._looks:
            self._look(stashed.segments, self.recomputed, len(self._run))
        return out

    def _look(self, segments: Sequence[_Segment], first: int, end: int) -> None:
        """Look for losses that layers have left on themselves, once."""
        roots = [root for segment in segments for root in segment.roots]
        for place in range(first, end):
            if place in self._looks:
                self._looks.remove(place)
                name = str(self.first_layer + place)
                check_nothing_left(name, self.layers[name], roots)

    def _forward(
        self, stashed: _Stashed, number: int, inputs: Any, target: Any, in_pieces: bool
    ) -> Any:
        whole = len(self._run)
        if self.recomputed:
            buffers = [
                {name: buffer.clone() for name, buffer in layer.named_buffers()}
                for layer in self._recomputed_layers
            ]
            runs_loss = self.recomputed == whole and self._loss_fn is not None
            # Copied: layers and losses may work in place.
            stashed.given = copied(inputs), copied(target) if runs_loss else target, buffers
            inputs = self._forgetting(number, inputs)
            if self.recomputed == whole:
                return self._ended(number, inputs, target, whole)[0]
        if in_pieces and self._cuts and not self._may_be_cut:
            out, stashed.segments = self._first_in_pieces(number, inputs, target)
            return out
        ends = (*self._cuts, whole) if in_pieces else (whole,)
        out, stashed.segments = self._segments(number, inputs, target, self.recomputed, ends)
        return out

    def recompute(self, number: int) -> None:
        """Run the layers of a microbatch again that have kept nothing, for its backward."""
        stashed = self._stash[number]
        assert stashed.given is not None
        inputs, target, buffers = stashed.given
        stashed.given = None
        with _buffers_in_place_of(zip(self._recomputed_layers, buffers, strict=True)):
            _, segments = self._segments(number, inputs, target, 0, (self.recomputed,))
        stashed.segments[:0] = segments
        if self._looks:
            self._look(segments, 0, self.recomputed)

    def saved(self, number: int) -> SavedTensors:
        """What autograd has saved of microbatch `number`, which may leave the device."""
        saved = self._stash[number].saved
        assert saved is not None, "this stage keeps what autograd saves"
        return saved

    def kept_to_run_again(self, number: int) -> list[Tensor]:
        """The copies that microbatch `number` keeps for layers that run again: inputs, target and
        buffers."""
        inputs, target, buffers = self._stash[number].given or (None, None, [])
        of_layers = [buffer for layer in buffers for buffer in layer.values()]
        return [*flatten(inputs)[1], *flatten(target)[1], *of_layers]

    def backward(self, number: int, gradients: Gradients | None) -> Gradients:
        """Run the backward of a microbatch, adding to the parameters' `.grad`.

        Args:
            gradients: gradients of the tensors that travelled on and wanted one, in order, None for
                those without; None altogether on the last stage.
        Returns:
            The gradients of the inputs that wanted one, in order.
        """
        given = gradients or ()
        for segment in reversed(self._stash.pop(number).segments):
            given = self._back_through(segment, given)
        return given

    def backward_pieces(self, number: int) -> int:
        """Number of pieces that the backward of microbatch `number` has left."""
        return len(self._stash[number].segments)

    def next_piece(self, number: int) -> int:
        """The index in the model of the first layer in the next piece of the backward of microbatch
        `number`."""
        return self.first_layer + self._stash[number].segments[-1].first

    def backward_piece(self, number: int, gradients: Gradients | None) -> Gradients:
        """Run the next piece of the backward of a microbatch; the last layers come first.

        Args:
            gradients: gradients for the first piece, as `backward` takes them; ignored later.
        Returns:
            The result of `backward`, from the last piece; () from others.
        """
        stashed = self._stash[number]
        given = self._back_through(stashed.segments.pop(), stashed.gradients or gradients or ())
        if not stashed.segments:
            del self._stash[number]
            return given
        stashed.gradients = given
        return ()

    def _back_through(self, segment: _Segment, given: Gradients) -> Gradients:
        """The gradients of a segment's inputs, from those of its outputs."""
        _, inflow, edges, of_loss = segment
        given = given if of_loss is None else of_loss
        if len(given) == len(edges) == 1:  # as nearly always
            if given[0] is not None:
                _walk((edges[0],), (given[0],))
            return inflow.gradients
        roots = tuple(
            [root for root, gradient in zip(edges, given, strict=True) if gradient is not None]
        )
        if roots:
            _walk(roots, tuple([gradient for gradient in given if gradient is not None]))
        return inflow.gradients

    def input_gradient(self, number: int, gradients: Gradients | None) -> Gradients:
        """Run the backward of a microbatch without the weight gradients that can wait.

        Layers that do not defer do all of their work here. Arguments and result are those of
        `backward`.
        """
        with self._deferral.collecting(number):
            return self.backward(number, gradients)

    def weight_pieces(self, number: int) -> int:
        """Number of weight gradients of microbatch `number` that wait."""
        return self._deferral.pieces(number)

    def waiting_bytes(self, number: int) -> int:
        """Bytes of memory that waiting products of microbatch `number` read."""
        return self._deferral.waiting_bytes(number)

    def waiting_parameters(self, number: int) -> list[nn.Parameter]:
        """The parameters whose gradients of microbatch `number` wait, the next one first."""
        return self._deferral.parameters(number)

    def weight_gradient(self, number: int) -> None:
        """Compute the next waiting weight gradient of microbatch `number`, if there is one, and add
        it to its parameter's `.grad`."""
        self._deferral.run_piece(number)

    @torch.no_grad()
    def evaluate(self, number: int, inputs: Any, target: Any) -> Any:
        """Run the forward of a microbatch in evaluation mode and keep nothing.

        Args:
            target: target for the loss, on the last stage; None elsewhere.
        Returns:
            The outputs that travel on; on the last stage the outputs and the loss, (mean, None) or
            (sum, weight).
        """
        outputs = self._run_layers(number, inputs, 0, len(self._run))
        loss = None if self._loss_fn is None else self._loss(outputs, target)
        if self._weights_leave:  # while others may still be reading them
            with suppress(TypeError):  # what cannot travel is read here alone
                skeleton, tensors = flatten(outputs)
                outputs = unflatten(skeleton, list(map(self._to_send, tensors)))
        return outputs if loss is None else (outputs, loss)

    def remember_buffers(self) -> None:
        """Keep the values that buffers, such as running means, have before a step that may be
        skipped."""
        self._before_step = _remembered_buffers(self.layers)

    def recall_buffers(self) -> None:
        """Give buffers the values again that they had before a step, which is skipped."""
        _recall(self._before_step)

    def release(self) -> None:
        """Give the layers back as they were, with the weights that they have now."""
        self._deferral.release()
        for layer in self.layers.values():
            without_deferral(layer)

    def drop(self) -> None:
        """Forget every microbatch under way and what it has added to gradients: `.grad` becomes
        None."""
        self._stash.clear()
        self._deferral.drop()
        self.__dict__.pop("_own_memory", None)  # weights may go on in other memory
        for parameter in self._parameters:
            parameter.grad = None

    def _segments(
        self, number: int, inputs: Any, target: Any, first: int, ends: Sequence[int]
    ) -> tuple[Any, list[_Segment]]:
        """Run layers in graphs of their own, and the loss after the last one of all.

        Args:
            first: index of the first layer in the stage.
            ends: indices of layers before each of which a graph ends, at most the number of layers;
                it goes on where the value there may not travel.
        Returns:
            The value that travels on, and the graphs.
        """
        segments: list[_Segment] = []
        inflow, begin = _Inflow(), first
        try:
            value = self._through_inlet(inputs, inflow)
        except TypeError as error:
            error.add_note(
                f"memory.recompute cuts the stage before layer {self.first_layer + first}, where "
                "it has to be able to"
            )
            raise
        for end in ends:
            value = self._run_layers(number, value, first, end)
            first = end
            if end != ends[-1] and not _may_travel(value):
                continue
            value, edges, of_loss = self._ended(number, value, target, end)
            segments.append(_Segment(begin, inflow, edges, of_loss))
            if end != ends[-1]:
                inflow, begin = _Inflow(), end
                value = self._through_inlet(value, inflow)
        return value, segments

    def _first_in_pieces(self, number: int, inputs: Any, target: Any) -> tuple[Any, list[_Segment]]:
        """Run a microbatch in pieces for the first time, and find out whether it may be.

        Layers may hand tensors to each other aside from their inputs and outputs, or use weights
        that they do not list. Then a graph reaches into another one, and the stage is not cut: the
        microbatch runs again as a whole.
        """
        whole, given = len(self._run), (copied(inputs), copied(target))  # layers may work in place
        buffers = _remembered_buffers(self.layers)
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
        _recall(buffers)
        return self._segments(number, *given, self.recomputed, (whole,))

    def _ended(
        self, number: int, outputs: Any, target: Any, end: int
    ) -> tuple[Any, list[GradientEdge], Gradients | None]:
        """End a graph where layers up to `end` have run.

        Returns:
            The value that travels on, the edges where gradients begin, and the loss's own gradient
            if the loss follows.
        """
        if self._loss_fn is not None and end == len(self._run):
            loss, weight = self._loss(outputs, target)
            if not loss.requires_grad:
                raise ModelError(_why_without_gradient(loss, *self._where(number)))
            # A sum is divided when the weights of all microbatches are known, at the end of the
            # step.
            loss_to_mean = loss / self._job.microbatches_in_all if weight is None else loss
            scale = self._scale_of(self._where(number)[0]) if self._scale_of else 1.0
            of_loss = torch.full_like(loss_to_mean, scale)
            return (loss.detach(), weight), [_edge(loss_to_mean)], (of_loss,)
        if isinstance(outputs, Tensor) and outputs.layout is torch.strided:  # as nearly always
            edges = [_edge(outputs)] if outputs.requires_grad else []
            return self._to_send(outputs), edges, None
        skeleton, tensors = flatten(outputs)
        edges = [_edge(tensor) for tensor in tensors if tensor.requires_grad]
        return unflatten(skeleton, [self._to_send(tensor) for tensor in tensors]), edges, None

    def _where(self, number: int) -> tuple[int, int]:
        """The step of a microbatch, and its index within it over all replicas, as
        `Job.place_in_batch` has them."""
        return number // self._a_step, self._first_of_step + number % self._a_step

    @property
    def _recomputed_layers(self) -> list[nn.Module]:
        return list(self.layers.values())[: self.recomputed]

    def _forgetting(self, number: int, value: Any) -> Any:
        """Run the layers that will run again: each one's graph is dropped when the next one has its
        input."""
        for place in range(self.recomputed):
            with suppress(TypeError):  # what cannot travel stays in the graph until something does
                value = self._through_inlet(value, _Inflow())
            value = self._run_layers(number, value, place, place + 1)
        return value

    def _run_layers(self, number: int, value: Any, first: int, end: int) -> Any:
        step, microbatch = self._where(number)
        try:
            for place, layer in enumerate(self._run[first:end], self.first_layer + first):
                self._generator.before_layer(step, microbatch, place)
                if self._between is None:  # most often, and a context would be one more call
                    value = layer(value)
                    continue
                if self._types.weights and not self._kept[place - self.first_layer]:
                    value = in_type(value, self._types.weights)
                with self._computing():
                    value = layer(value)
                value = in_type(value, self._between)
        except Exception as error:
            name = type(list(self.layers.values())[place - self.first_layer]).__name__
            error.add_note(f"in layer {place} ({name}), which was given {_described(value)}")
            raise
        return value

    def _computing(self) -> AbstractContextManager[Any]:
        if self._types.compute is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._types.compute)

    def _loss(self, outputs: Any, target: Any) -> tuple[Tensor, Tensor | float | None]:
        assert self._loss_fn is not None
        if self._types.weights:
            outputs = in_type(outputs, torch.float32, self._types.weights)
        if self._types.compute is None:
            found = self._loss_fn(outputs, target)
        else:
            with self._computing():
                found = self._loss_fn(outputs, target)
        loss, weight = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not (
            _is_one_number(loss)
            and (weight is None or isinstance(weight, int | float) or _is_one_number(weight))
        ):
            raise OutputTypeError(
                f"loss_fn returned {_described(found)}; expected a tensor with one element, the "
                "mean over the microbatch, or a pair of "
                "such a tensor, the sum, and its weight"
            )
        return loss, weight.detach() if isinstance(weight, Tensor) else weight

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

    def _through_inlet(self, inputs: Any, inflow: _Inflow) -> Any:
        if isinstance(inputs, Tensor) and inputs.layout is torch.strided:  # as nearly always
            if not inputs.requires_grad:
                return inputs
            inflow.arrived, inflow.gradients = (inputs.detach(),), (None,)
            (tensor,) = _Inlet.apply(inflow, self._anchor)  # type: ignore[no-untyped-call]
            return tensor
        skeleton, tensors = flatten(inputs)
        wanting = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        if not wanting:
            return inputs
        inflow.arrived = tuple(tensors[place].detach() for place in wanting)
        inflow.gradients = (None,) * len(wanting)  # as long as no gradient flows back to them
        for place, tensor in zip(wanting, _Inlet.apply(inflow, self._anchor), strict=True):  # type: ignore[no-untyped-call]
            tensors[place] = tensor
        return unflatten(skeleton, tensors)


def _remembered_buffers(layers: nn.Module) -> list[_Remembered]:
    """Every buffer with its owner and name, and a copy of its value: layers may change it in place,
    or put another there."""
    return [
        (owner, name, buffer, None if buffer is None else buffer.clone())
        for owner in layers.modules()
        for name, buffer in owner._buffers.items()
    ]


@torch.no_grad()
def _recall(buffers: Sequence[_Remembered]) -> None:
    """Give buffers the values that they had when they were remembered."""
    for owner, name, buffer, value in buffers:
        owner._buffers[name] = None if buffer is None else buffer.copy_(value)


@contextmanager
def _buffers_in_place_of(layers: Iterable[tuple[nn.Module, dict[str, Tensor]]]) -> Iterator[None]:
    """Context in which layers have their buffers, such as running means, from their first forward;
    afterwards they have the present ones again.

    The tensors are exchanged, not their values: the new graph may keep what it reads.
    """
    now = []
    for layer, before in layers:
        for name, buffer in before.items():
            path, _, last = name.rpartition(".")
            owner = layer.get_submodule(path)
            now.append((owner._buffers, last, owner._buffers[last]))
            owner._buffers[last] = buffer
    try:
        yield
    finally:
        for buffers, name, buffer_now in now:
            buffers[name] = buffer_now


def _edge(tensor: Tensor) -> GradientEdge:
    """The edge of the graph that a tensor comes from.

    `get_gradient_edge` costs as much as a node, so it is called only for leaves and for functions
    that are written in Python: those hold their part of the graph only with a token.
    """
    made_by = tensor.grad_fn
    if made_by is None or isinstance(made_by, torch._C._FunctionBase):
        return get_gradient_edge(tensor)
    return GradientEdge(made_by, tensor.output_nr)


def _walk(roots: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...]) -> None:
    """`torch.autograd.backward` without its preparation of arguments, which costs more than the
    walk through an empty stage."""
    _engine_run_backward(
        roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _may_travel(value: Any) -> bool:
    try:
        flatten(value)
    except TypeError:
        return False
    return True


def _is_one_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _why_without_gradient(loss: Tensor, step: int, microbatch: int) -> str:
    which = f"the loss of step {step}, microbatch {microbatch}"
    if not loss.is_floating_point():
        return (
            f"{which} is of type {loss.dtype}; expected a floating-point number, which has a "
            "gradient. Look at loss_fn"
        )
    return (
        f"{which} depends on no weight that is trained; expected one that does. Look for "
        "torch.no_grad, detach or numbers made of "
        "tensors in loss_fn and in the layers that end in it, and for requires_grad = False"
    )


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_described(one) for one in value)})"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def check_finite(value: float, where: Callable[[], str], what: str = "loss") -> None:
    """Check that a loss is a finite number.

    Args:
        where: function that gives step, stage and microbatch, for the error.
    Raises:
        NonFiniteLossError: it is infinite or not a number.
    """
    if not math.isfinite(value):
        raise NonFiniteLossError(
            f"the {what} is {value} at {where()} (all counted from 0); expected a finite number. "
            "Look at that microbatch's data, lower optimizer.lr, or lengthen optimizer.warmup_steps"
        )
