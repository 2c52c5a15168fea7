"""Gradients in two halves have the bits of a whole backward, and what cannot wait does not."""

import gc
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import axrt
from axrt.model.layer_runs import RunSettings
from axrt.model.linear import Linear, with_deferral
from axrt.model.precision import Types
from axrt.model.stage import Stage

from .test_stage import GENERATOR, Shift, alone, with_gradients

MICROBATCHES = 3


def stage_of(layer: nn.Module, splits: bool = True, compute: torch.dtype | None = None) -> Stage:
    job = alone(MICROBATCHES, "zb-h1" if splits else "1f1b")
    return with_gradients(
        Stage([layer], 0, None, RunSettings(job, GENERATOR, types=Types(compute)))
    )


def pieces_and_gradients(
    make: Callable[[], nn.Module], splits: bool, inputs: Callable[[], Tensor], **made: Any
) -> tuple[list[int], list[Any]]:
    """How many gradients each microbatch left for later; all gradients, those of inputs too. Weight
    gradients run as late as may be."""
    torch.manual_seed(1)
    stage = stage_of(make(), splits, **made)
    pieces: list[int] = []
    caught: list[Tensor | None] = []
    torch.manual_seed(2)
    for number in range(MICROBATCHES):
        value = inputs()
        out = stage.forward(number, value.requires_grad_(value.is_floating_point()), None)
        backward = stage.input_gradient if splits else stage.backward
        caught += backward(number, (torch.randn_like(out, dtype=out.dtype),))
        pieces.append(stage.deferral.pieces(number))
    for number in range(MICROBATCHES):
        while stage.deferral.pieces(number):
            stage.deferral.run_piece(number)
    return pieces, caught + [parameter.grad for parameter in stage.layers.parameters()]


def assert_same_bits(
    make: Callable[[], nn.Module], inputs: Callable[[], Tensor], pieces: int, **made: Any
) -> None:
    _, whole = pieces_and_gradients(make, False, inputs, **made)
    found, split = pieces_and_gradients(make, True, inputs, **made)
    assert found == [pieces] * MICROBATCHES
    for one, other in zip(whole, split, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


class Sequential(nn.Module):
    """Runs modules in an order that may name one twice."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.order = list(modules)
        self.each = nn.ModuleList(modules)

    def forward(self, value: Tensor) -> Tensor:
        for module in self.order:
            value = module(value)
        return value


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    turned=st.booleans(),
)
def test_a_linear_layer_has_the_bits_of_torchs_own(
    shape: list[int], inputs: int, outputs: int, bias: bool, turned: bool
) -> None:
    class Turned(nn.Module):
        """Hands gradients on with the strides of a transposed tensor."""

        def forward(self, value: Tensor) -> Tensor:
            return value.transpose(0, -1).contiguous().transpose(0, -1) if turned else value

    assert_same_bits(
        lambda: nn.Sequential(nn.Linear(inputs, outputs, bias), Turned()),
        rows(*shape, inputs),
        pieces=int(inputs * prod(shape) > 1),
    )


def test_a_module_used_twice_and_a_weight_of_two_modules_are_summed_as_autograd_sums() -> None:
    def twice() -> nn.Module:
        shared = nn.Linear(8, 8)
        return Sequential(shared, nn.GELU(), shared, nn.GELU(), shared)

    def tied() -> nn.Module:
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second)

    assert_same_bits(twice, rows(5, 8), pieces=1)
    assert_same_bits(tied, rows(5, 8), pieces=1)


def test_a_weight_that_others_use_too_is_summed_at_once() -> None:
    class Tied(nn.Module):
        """A head with the weight of the embedding."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.between, self.head = (
                nn.Embedding(9, 6),
                nn.Linear(6, 6),
                nn.Linear(6, 9, bias=False),
            )
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.between(self.tokens(tokens)).relu_())
            return out

    assert_same_bits(Tied, lambda: torch.randint(9, (2, 5)), pieces=1)


def test_frozen_parameters_get_nothing() -> None:
    def frozen() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6))

    assert_same_bits(frozen, rows(4, 6), pieces=1)


def hooked(seen: list[Any]) -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    return layer


def test_a_hook_on_a_weight_sees_its_gradient() -> None:
    seen: list[Any] = []
    assert_same_bits(lambda: hooked(seen), rows(4, 6), pieces=0)
    assert all(isinstance(one, Tensor) for one in seen)
    assert len(seen) == 2 * MICROBATCHES


def accumulating() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.weight.register_post_accumulate_grad_hook(
        lambda parameter: setattr(parameter, "grad", parameter.grad * 2)
    )  # type: ignore[no-untyped-call]
    return layer


class Mine(nn.Linear):
    """A subclass may do anything."""


class Turning(nn.Module):
    """Its linear layer meets inputs that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.linear(value.t())
        return out


class Mapped(nn.Module):
    """Calls its linear layer a row at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = torch.vmap(self.linear)(value.view(3, 2, 6))
        return out


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.parametrize(
    "make",
    [
        accumulating,
        lambda: Mine(6, 6),
        lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
        lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
        lambda: torch.compile(nn.Linear(6, 6), backend="eager"),
        Turning,
        Mapped,
    ],
    ids=[
        "a post-accumulate hook",
        "a subclass",
        "a parametrised weight",
        "another parametrised weight",
        "compiled",
        "turned inputs",
        "vmap",
    ],
)
def test_what_may_not_defer_does_all_at_once(make: Callable[[], nn.Module]) -> None:
    assert_same_bits(make, rows(6, 6), pieces=0)


def test_one_row_without_a_batch_does_all_at_once() -> None:
    assert_same_bits(lambda: nn.Linear(6, 3), rows(6), pieces=0)


def test_autocast_does_all_at_once() -> None:
    assert_same_bits(
        lambda: nn.Linear(6, 6),
        lambda: torch.randn(4, 6).bfloat16(),
        pieces=0,
        compute=torch.bfloat16,
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_defer_what_their_second_forward_kept(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

        def forward(self, value: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.body, value, use_reentrant=reentrant)
            return out

    assert_same_bits(Checkpointed, rows(4, 6), pieces=2)


class Force(nn.Module):
    """The gradient of an energy, as physics wants it: a graph of gradients within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, value: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.energy(value).sum(), value, create_graph=True)
        return force


def test_gradients_of_gradients_are_autograds() -> None:
    assert_same_bits(Force, rows(4, 6), pieces=0)


class _Equilibrium(torch.autograd.Function):
    """Its backward asks autograd for the gradient of what a layer was given, several times, and for
    nothing else."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (value,) = ctx.saved_tensors
        with torch.enable_grad():
            at = value.detach().requires_grad_()
            out = ctx.layer(at).tanh()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(out, at, gradient, retain_graph=True)
        return gradient, None


def test_a_backward_that_asks_for_other_gradients_adds_nothing_to_weights() -> None:
    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, value: Tensor) -> Tensor:
            out: Tensor = _Equilibrium.apply(self.linear(value), self.linear)  # type: ignore[no-untyped-call]
            return out

    assert_same_bits(Equilibrium, rows(4, 6), pieces=1)


def test_a_gradient_that_a_later_product_reads_is_not_added_to() -> None:
    """The first gradient of `by` is a view of the linear layer's; the backwards of the next
    microbatches come before the first W."""
    assert_same_bits(lambda: nn.Sequential(nn.Linear(5, 4), Shift()), rows(1, 3, 5), pieces=1)


class Scale(torch.autograd.Function):
    """The example of `axrt.defer_weight_gradient`; `read` is what the closure returns."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, shape: tuple[int, ...] | None) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.shape = shape
        return value * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        value, weight = ctx.saved_tensors
        shape = ctx.shape or weight.shape
        return (
            gradient * weight,
            axrt.defer_weight_gradient(weight, lambda: (gradient * value).sum_to_size(shape)),
            None,
        )


class Scaled(nn.Module):
    def __init__(self, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.by, self.shape = nn.Parameter(torch.ones(6)), shape

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = Scale.apply(value, self.by, self.shape)  # type: ignore[no-untyped-call]
        return out


def test_a_function_of_the_users_defers_too_and_works_alone() -> None:
    assert_same_bits(Scaled, rows(4, 6), pieces=1)
    alone, plain = Scaled(), torch.randn(4, 6)
    alone(plain).sum().backward()
    assert torch.equal(alone.by.grad, plain.sum(0))  # type: ignore[arg-type]
    assert_same_bits(lambda: Scaled().requires_grad_(False), rows(4, 6), pieces=0)


def test_what_a_closure_returns_stays_whoevers_it_was() -> None:
    class _Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor, by: Tensor) -> Tensor:
            ctx.save_for_backward(by)
            return value + by

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
            (by,) = ctx.saved_tensors
            return gradient, axrt.defer_weight_gradient(by, lambda: gradient)

    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(4, 6))

        def forward(self, value: Tensor) -> Tensor:
            out: Tensor = _Add.apply(value, self.by)  # type: ignore[no-untyped-call]
            return out

    layer = Add()
    stage = stage_of(layer)
    for number in range(2):
        stage.forward(number, torch.zeros(4, 6, requires_grad=True), None)
    (sent,) = stage.input_gradient(0, (torch.ones(4, 6),))
    stage.input_gradient(1, (torch.ones(4, 6),))
    stage.deferral.run_piece(0)
    stage.deferral.run_piece(1)
    assert torch.equal(sent, torch.ones(4, 6))  # type: ignore[arg-type]
    assert torch.equal(layer.by.grad, torch.full((4, 6), 2.0))  # type: ignore[arg-type]


def test_a_gradient_of_another_shape_is_refused() -> None:
    stage = stage_of(Scaled(shape=(1, 6)))
    stage.forward(0, torch.zeros(4, 6, requires_grad=True), None)
    stage.input_gradient(0, (torch.ones(4, 6),))
    with pytest.raises(ValueError, match=r"shape \(1, 6\); expected that of its parameter, \(6,\)"):
        stage.deferral.run_piece(0)


def test_a_linear_layer_under_a_whole_backward_stays_as_it_is() -> None:
    layer = nn.Linear(3, 3)
    stage_of(layer, splits=False)
    assert type(layer) is nn.Linear
    assert type(with_deferral(layer)) is Linear
    assert repr(layer) == repr(nn.Linear(3, 3))
    assert functional.linear(torch.ones(3), layer.weight, layer.bias).equal(layer(torch.ones(3)))


def test_a_dropped_stage_forgets_what_waited() -> None:
    stage = stage_of(nn.Linear(3, 3))
    stage.forward(0, torch.ones(2, 3, requires_grad=True), None)
    stage.input_gradient(0, (torch.ones(2, 3),))
    assert stage.deferral.pieces(0) == 1
    stage.drop()
    assert stage.deferral.pieces(0) == 0


class Both(nn.Module):
    """The first gradient of `by` is a view of what the deeper stage gives back, which that stage's
    own product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(4, 6))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value, value + self.by.unsqueeze(0)


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.linear(value[0]) + value[1]
        return out


def gradients_of_two_stages(splits: bool) -> list[Tensor | None]:
    torch.manual_seed(1)
    stages = first, second = stage_of(Both(), splits), stage_of(Join(), splits)
    for number in range(2):
        second.forward(
            number, first.forward(number, torch.randn(1, 4, 6, requires_grad=True), None), None
        )
    back, its = ((stage.input_gradient if splits else stage.backward) for stage in (second, first))
    for number in range(2):
        its(number, back(number, (torch.randn(1, 4, 6),)))
    for number in range(2 * splits):
        second.deferral.run_piece(number)
    return [parameter.grad for stage in stages for parameter in stage.layers.parameters()]


def test_where_two_stages_of_a_rank_meet_a_waiting_product_reads_what_it_was_given() -> None:
    for one, other in zip(
        gradients_of_two_stages(True), gradients_of_two_stages(False), strict=True
    ):
        assert torch.equal(one, other)  # type: ignore[arg-type]


def test_a_layer_with_a_state_that_it_changes_computes_at_once() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.state = torch.ones(4, 6)

        def forward(self, value: Tensor) -> Tensor:
            with torch.no_grad():
                self.state.mul_(0.9).add_(value)
            out: Tensor = self.linear(self.state) + value
            return out

    torch.manual_seed(0)
    split, whole = Remembers(), Remembers()
    whole.load_state_dict(split.state_dict())
    one, other = stage_of(split), stage_of(whole, splits=False)
    for number in range(MICROBATCHES):
        value = torch.randn(4, 6)
        for stage, backward in ((one, one.input_gradient), (other, other.backward)):
            stage.forward(number, value.clone().requires_grad_(), None)
            backward(number, (value,))
    assert torch.equal(split.linear.weight.grad, whole.linear.weight.grad)  # type: ignore[arg-type]


def test_what_is_changed_before_its_product_has_run_is_noticed() -> None:
    stage, gradient = stage_of(nn.Linear(3, 3)), torch.ones(2, 3)
    stage.forward(0, torch.ones(2, 3, requires_grad=True), None)
    stage.input_gradient(0, (gradient,))
    gradient.add_(1)
    with pytest.raises(
        RuntimeError,
        match=(
            r"of shape \(2, 3\), or its output's gradient was changed in place after the backward"
        ),
    ):
        stage.deferral.run_piece(0)


class _Nothing(torch.autograd.Function):
    """Has no gradient for what it was given."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = _Nothing.apply(self.a(value)) + self.b(value)  # type: ignore[no-untyped-call]
        return out


def test_where_no_gradient_arrives_none_is_made() -> None:
    assert_same_bits(Cut, rows(4, 6), pieces=1)


class _Recomputed(torch.autograd.Function):
    """Asks autograd for the gradients of inputs and weights alike, as some checkpoint functions
    do."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: nn.Linear, *weights: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(value)
        with torch.no_grad():
            out: Tensor = layer(value)
            return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            at = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.layer(at)
        of_value, *of_weights = torch.autograd.grad(out, [at, *ctx.layer.parameters()], gradient)
        return of_value, None, *of_weights


def test_a_backward_that_asks_for_weight_gradients_itself_gets_them() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, value: Tensor) -> Tensor:
            out: Tensor = _Recomputed.apply(value, self.linear, *self.linear.parameters())  # type: ignore[no-untyped-call]
            return out

    assert_same_bits(Recomputed, rows(4, 6), pieces=0)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors", "ignore:.*torch.jit.script")
def test_complex_and_empty_weights_and_forward_mode_are_torchs() -> None:
    assert_same_bits(
        lambda: nn.Linear(4, 4, dtype=torch.complex64),
        lambda: torch.randn(3, 4, dtype=torch.complex64),
        pieces=0,
    )
    assert_same_bits(lambda: nn.Linear(6, 0), rows(4, 6), pieces=0)
    layer = with_deferral(nn.Linear(3, 3))
    with torch.autograd.forward_ad.dual_level():
        primal, tangent = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)
        dual = torch.autograd.forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
        out = layer(dual)
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None  # type: ignore[no-untyped-call]


def test_a_weight_used_in_both_ways_over_microbatches_is_added_in_their_order() -> None:
    """A batch of one is contiguous when it is turned, others are not; what waits is added before
    what comes after."""
    shapes = iter([(1, 5), (4, 5), (3, 5)] * 2)
    assert_same_gradients_in_order(lambda: torch.randn(*next(shapes), 6))


def assert_same_gradients_in_order(inputs: Callable[[], Tensor]) -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, value: Tensor) -> Tensor:
            out: Tensor = self.linear(value.transpose(0, 1))
            return out

    _, whole = pieces_and_gradients(Turns, False, inputs)
    found, split = pieces_and_gradients(Turns, True, inputs)
    assert found == [1, 0, 0]
    assert all(torch.equal(one, other) for one, other in zip(whole, split, strict=True))


def test_parameters_can_be_saved_and_a_second_stage_of_the_same_modules_defers(
    tmp_path: Any,
) -> None:
    layer = nn.Linear(3, 3)
    stage_of(layer)
    torch.save({"weight": layer.weight}, tmp_path / "weight.pt")
    assert torch.equal(torch.load(tmp_path / "weight.pt")["weight"], layer.weight)
    again = stage_of(layer)
    again.forward(0, torch.ones(2, 3, requires_grad=True), None)
    again.input_gradient(0, (torch.ones(2, 3),))
    assert again.deferral.pieces(0) == 1


def test_a_stage_is_freed_when_nobody_refers_to_it() -> None:
    def weight_of_a_stage() -> weakref.ref[Tensor]:
        stage = stage_of(nn.Linear(3, 3))
        stage.forward(0, torch.ones(2, 3, requires_grad=True), None)
        stage.input_gradient(0, (torch.ones(2, 3),))
        stage.deferral.run_piece(0)
        return weakref.ref(next(stage.layers.parameters()))

    gc.disable()
    try:
        assert weight_of_a_stage()() is None
    finally:
        gc.enable()
