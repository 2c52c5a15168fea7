"""Runs the layers of a stage, and the loss: each with its own random numbers, in the types that
they compute in. An error says which layer raised it, and what that was given."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from axrt.errors import ModelError, OutputTypeError
from axrt.scheduler.job import Job

from .compiler import Compiler
from .each_logit import check_each_logit
from .in_pieces import InPieces, Jointed
from .joints import Gathered, Sum, check_no_joint, own_tokens, shape_of_tokens
from .module import LossFunction
from .pausing import pausing_behind, pieces_of
from .precision import AS_THEY_ARE, Types, in_type, is_kept
from .seeds import BorrowedGenerator
from .team_layers import (
    DRAWS_APART,
    OF_ONE,
    BufferWatch,
    TeamLayers,
    Way,
    check_pieces,
    check_tokens,
    gathered,
    sums_in,
    tensors_in,
)
from .vocabulary import CutLogits, looked_up, numbers_of


@dataclass(frozen=True)
class RunSettings:
    """What all stages of a rank have in common."""

    # counts microbatches and replicas, and says whether backwards are split
    job: Job
    generator: BorrowedGenerator  # random numbers, seeded anew before each layer
    replica: int = 0  # index of the replica that the stages belong to
    types: Types = AS_THEY_ARE
    compiler: Compiler | None = None  # runs the layers and the loss; None: they run as they are
    # gives the factor on the losses of a step (loss scaling); None: 1
    scale_of: Callable[[int], float] | None = None
    # losses that layers leave on themselves are looked for, in the first microbatch
    looks: bool = False
    of_team: TeamLayers = OF_ONE  # what this member of a team runs of each layer
    gathers_again: bool = False  # what members gather is let go, and gathered for the backward

    @property
    def splits(self) -> bool:
        """Weight gradients may wait; a compiler turns that off."""
        return self.job.splits and self.compiler is None


class LayerRuns:
    """The layers of a stage as they are run.

    Args:
        first_layer: index of the first layer in the model.
        loss_fn: loss function on the last stage; None elsewhere.
    Attributes:
        first_layer: the same.
        has_pauses: True if some layer's forward pauses where members of a team exchange slices.
        makes_logits: True if the last layer makes logits of a part of the vocabulary.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        loss_fn: LossFunction | None,
        settings: RunSettings,
    ) -> None:
        job, compiler = settings.job, settings.compiler
        self._layers, self.first_layer = layers, first_layer
        self._run: list[Callable[[Any], Any]] = [
            compiler.layer(layer) if compiler else layer for layer in layers
        ]
        self._loss_fn = compiler.loss(loss_fn) if compiler and loss_fn else loss_fn
        self.has_loss = loss_fn is not None
        # Microbatches of all replicas are numbered together in a step; where replicas share them,
        # they are numbered so from the start.
        self._a_step = job.microbatches_in_all if job.drawn else job.microbatches
        self._first_of_step = 0 if job.drawn else settings.replica * job.microbatches
        self._of_team, self._team = settings.of_team, settings.of_team.team
        self._ways = [
            settings.of_team.way_of(place, layer) for place, layer in enumerate(layers, first_layer)
        ]
        self.has_pauses = Way.PAUSES in self._ways
        self.makes_logits = self._ways[-1:] == [Way.LOGITS]
        for place, (way, layer) in enumerate(zip(self._ways, layers, strict=True)):
            if way is Way.LOOKED_UP and isinstance(layer, nn.Embedding):
                self._run[place] = partial(looked_up, layer, self._team)
        self._rows = [
            settings.of_team.cut_by_rows(place, layer) if self._team.size > 1 else []
            for place, layer in enumerate(layers, first_layer)
        ]
        self._behind_rows = [
            pausing_behind(one)
            for rows, way in zip(self._rows, self._ways, strict=True)
            for one in (rows if way is Way.PAUSES else ())
        ]
        # The index of a member that draws for itself, of each layer.
        self._draws = [
            self._team.member if way in DRAWS_APART and self._team.size > 1 else None
            for way in self._ways
        ]
        self._in_all = job.microbatches_in_all * self._team.size
        self._buffers, self._looks = BufferWatch(layers), settings.looks
        self._scale_of = settings.scale_of
        self._generator, self._device = settings.generator, settings.generator.device
        self._types, self._between = settings.types, settings.types.between
        self._kept = [is_kept(layer, settings.types.keep) for layer in layers]

    def __len__(self) -> int:
        return len(self._run)

    def run(self, number: int, value: Any, first: int, end: int) -> Any:
        """Run some layers of a microbatch.

        Args:
            number: index of the microbatch, counted over steps.
            first, end: indices of the first layer in the stage, and of the one behind the last.
        """
        step, microbatch = self._where(number)
        try:
            for place, layer in enumerate(self._run[first:end], self.first_layer + first):
                draws = self._draws[place - self.first_layer]
                self._generator.before_layer(step, microbatch, place, draws)
                if self._between is None:  # most often, and a context would be one more call
                    value = layer(value)
                    continue
                if self._types.weights and not self._kept[place - self.first_layer]:
                    value = in_type(value, self._types.weights)
                with self._computing():
                    value = layer(value)
                value = in_type(value, self._between)
        except Exception as error:
            name = type(self._layers[place - self.first_layer]).__name__
            error.add_note(f"in layer {place} ({name}), which was given {_described(value)}")
            raise
        return value

    def run_by_piece(
        self, number: int, value: Any, target: Any, first: int, end: int
    ) -> Generator[Any, Any, Any]:
        """The same, with a pause between two pieces of a layer that has several, and at each joint
        of a team. Tasks of other microbatches may run meanwhile. A piece's value is yielded, and
        what is sent for it is given to the next one.

        Args:
            target: target for the loss, where it follows; None elsewhere.
        """
        for place in range(first, end):
            if self._team.size > 1:
                value = yield from self._layer_of_team(number, value, place)
            else:
                value = yield from self._by_its_pieces(number, value, place)
        if self.has_loss and self._team.size > 1 and end == len(self):
            if self.makes_logits:
                value = yield from self._with_numbers(value, target)
            elif self._of_team.loss_is_whole:
                value = yield gathered(value)
            member = None if self._of_team.loss_is_whole else self._team.member
            self._generator.before_layer(*self._where(number), self.first_layer + end, member)
        return value

    def _with_numbers(self, logits: Any, targets: Any) -> Generator[Any, Any, CutLogits]:
        """Exchange what a loss needs that is given a part of the logits.

        Raises:
            ModelError: they are no logits of these targets.
        """
        if not (
            isinstance(logits, Tensor)
            and isinstance(targets, Tensor)
            and logits.shape[:-1] == targets.shape
            and not targets.is_floating_point()
        ):
            raise ModelError(
                f"the last layer, whose vocabulary is cut, has returned {_described(logits)} and "
                f"the targets are {_described(targets)}; expected logits of shape (..., tokens, "
                "vocabulary), and whole numbers of shape (..., tokens)"
            )
        numbers = Gathered(numbers_of(logits, targets, self._team))
        logits, of_all = yield logits, numbers
        return CutLogits(logits, of_all, targets, self._team)

    def _by_its_pieces(self, number: int, value: Any, place: int) -> Generator[Any, Any, Any]:
        layer = self._layers[place]
        if isinstance(layer, InPieces):
            if not layer.is_only_its_pieces:  # hooks may come at any time: the tasks are kept
                value = self.run(number, value, place, place + 1)
                for _ in layer.pieces[1:]:
                    value = yield value
                return value
            return (yield from self._pieces_of(number, value, place, layer.team_pieces))
        return self.run(number, value, place, place + 1)

    def _layer_of_team(self, number: int, value: Any, place: int) -> Generator[Any, Any, Any]:
        """Run what this member runs of a layer; it is given its tokens, and has its tokens
        after."""
        at, way = self.first_layer + place, self._ways[place]
        if way in (Way.WHOLE, Way.LOGITS, Way.LOOKED_UP):
            if at:
                value = yield gathered(value)
            if way is Way.LOGITS:
                return self._logits(number, value, place)
            value = self.run(number, value, place, place + 1)
            if way is Way.LOOKED_UP:
                return (yield Sum(value))
            return own_tokens(value, self._team)
        layer = self._layers[place]
        name = f"layer {at} ({type(layer).__name__})"
        if way is Way.PAUSES:
            return (yield from self._with_pauses(number, value, place, name))
        given = value if at else self._of_team.own(value)
        check_tokens(f"before {name}", given)
        buffers = self._buffers.before(place)
        before = tensors_in(given)[:1]
        if way is Way.PIECES and isinstance(layer, Jointed):
            check_pieces(at, layer)
            value = yield from self._with_sums(number, given, place, layer)
        else:
            value = self.run(number, given, place, place + 1)
        self._buffers.check(place, buffers, name)
        check_tokens(f"behind {name}", *before, value)
        return value

    def _logits(self, number: int, value: Any, place: int) -> Any:
        """Run the layer whose vocabulary is cut."""
        layer, buffers = self._layers[place], self._buffers.before(place)
        run = partial(self.run, number, first=place, end=place + 1)
        if self._looks and self._of_team.begins(self.first_layer + place):
            linear = self._of_team.logits_in(self.first_layer + place, layer)
            check_each_logit(linear, self._team, lambda few: run(value=few), value)
        made = run(value=value)
        self._buffers.check(place, buffers, type(layer).__name__)
        return made

    def _with_pauses(
        self, number: int, value: Any, place: int, name: str
    ) -> Generator[Any, Any, Any]:
        """Run a layer as it is, whose forward pauses behind matrices that are cut by rows.

        Raises:
            ModelError: each of them has not run once.
        """
        at, layer, sums = self.first_layer + place, self._layers[place], 0
        if at:
            value = yield gathered(value)
        buffers, rows = self._buffers.before(place), len(self._rows[place])
        pieces = self._pieces_of(number, value, place, pieces_of(layer))
        given: Any = None
        while sums <= rows:
            try:
                made = pieces.send(given)
            except StopIteration as end:
                value = end.value
                break
            sums, given = sums + isinstance(made, Sum), None  # which may be let go
            if sums <= rows:
                given = yield made
        if sums != rows:
            raise ModelError(
                f"{name} has run {'at least ' * (sums > rows)}{sums} matrices that are cut by "
                f"'row'; expected each of the {rows} that it has once, in every forward"
            )
        self._buffers.check(place, buffers, name)
        return own_tokens(value, self._team)

    def _with_sums(
        self, number: int, value: Any, place: int, layer: Jointed
    ) -> Generator[Any, Any, Any]:
        """Run the pieces of a layer, whose sums are of matrices that are cut by rows.

        Raises:
            ModelError: there are more, or none.
        """
        at, sums = self.first_layer + place, 0
        pieces = self._pieces_of(number, value, place, layer.team_pieces)
        given: Any = None
        own = prod(shape_of_tokens(tensors_in(value)[0]))
        is_first = self._of_team.begins(at)
        while True:
            watch = self._of_team.watching(at, layer, own) if is_first else nullcontext()
            try:
                with watch:
                    made = pieces.send(given)
            except StopIteration as end:
                value = end.value
                break
            sums, given = sums + sums_in(made), None  # which may be let go
            given = yield made
        rows = len(self._rows[place])
        if sums > rows or (rows and not sums):
            raise ModelError(
                f"layer {at} ({type(layer).__name__}) has {sums} axrt.Sum "
                f"in its pieces and {rows} matrices that are cut by 'row'; expected a Sum for what "
                "such matrices return, and for nothing else"
            )
        return value

    def _pieces_of(
        self, number: int, value: Any, place: int, pieces: Iterable[Callable[[Any], Any]]
    ) -> Generator[Any, Any, Any]:
        """Run a layer piece by piece."""
        step, microbatch = self._where(number)
        self._generator.before_layer(step, microbatch, self.first_layer + place, self._draws[place])
        if self._types.weights and not self._kept[place]:
            value = in_type(value, self._types.weights)
        for at, piece in enumerate(pieces):
            if at:
                drawn = self._generator.states()  # others seed it meanwhile
                value = yield value
                self._generator.go_on_from(drawn)
            try:
                with self._computing():
                    value = piece(value)
            except Exception as error:
                where = f"in piece {at} of layer {self.first_layer + place}"
                error.add_note(f"{where}, which was given {_described(value)}")
                raise
        check_no_joint(value)
        return value if self._between is None else in_type(value, self._between)

    def release(self) -> None:
        """Take the hooks off the layers."""
        for handle in self._behind_rows:
            handle.remove()

    def loss(self, outputs: Any, target: Any) -> tuple[Tensor, Tensor | float | None]:
        """The loss, (mean, None) or (sum, weight), as the loss function gave it.

        Raises:
            OutputTypeError: it returned no tensor with one element.
        """
        assert self._loss_fn is not None
        if self._types.weights and not isinstance(outputs, CutLogits):  # which are widened
            outputs = in_type(outputs, torch.float32, self._types.weights)
        if self._team.size > 1 and not self._of_team.loss_is_whole:
            target = self._of_team.own(target)
            check_tokens("the loss, which takes each token by itself", outputs, target)
        try:
            if self._types.compute is None:
                found = self._loss_fn(outputs, target)
            else:
                with self._computing():
                    found = self._loss_fn(outputs, target)
        except (AttributeError, TypeError) as error:
            if not isinstance(outputs, CutLogits):
                raise
            raise ModelError(
                f"the loss takes no part of the logits ({error}), and members of a team share out "
                "the vocabulary; expected axrt.cross_entropy or axrt.masked_cross_entropy, or a "
                "loss that hands what it is given to them"
            ) from error
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

    def loss_to_mean(
        self, number: int, loss: Tensor, weight: Tensor | float | None
    ) -> tuple[Tensor, Tensor]:
        """What backwards begin at, whose gradients add up to that of a step's mean, and its
        gradient.

        Raises:
            ModelError: the loss depends on no trained weight.
        """
        if not loss.requires_grad:
            raise ModelError(_why_without_gradient(loss, *self._where(number)))
        # A sum is divided when the weights of all microbatches are known, at the end of the step.
        loss_to_mean = loss / self._in_all if weight is None else loss
        scale = self._scale_of(self._where(number)[0]) if self._scale_of else 1.0
        return loss_to_mean, torch.full_like(loss_to_mean, scale)

    def _where(self, number: int) -> tuple[int, int]:
        """The step of a microbatch, and its index within it over all replicas, as
        `Job.place_in_batch` has them."""
        return number // self._a_step, self._first_of_step + number % self._a_step

    def _computing(self) -> AbstractContextManager[Any]:
        if self._types.compute is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._types.compute)


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
