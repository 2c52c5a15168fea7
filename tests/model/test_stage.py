"""What a stage gives away is not what it goes on working with."""

from typing import Any

import torch
from torch import Tensor, nn

from axrt.model.layer_runs import RunSettings
from axrt.model.seeds import BorrowedGenerator
from axrt.model.stage import Stage
from axrt.scheduler.job import Job
from axrt.scheduler.policies import placement_for, policy_by_name

GENERATOR = BorrowedGenerator(0, torch.device("cpu"))


class Shift(nn.Module):
    """The gradient of `by` is, for a batch of one, a view of the activation's."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(3, 4))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.by.unsqueeze(0)


class Weights(nn.Module):
    """Sends its own weights on."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value, self.weights


def stage_of(layer: nn.Module) -> Stage:
    return with_gradients(Stage([layer], 0, None, RunSettings(alone(2), GENERATOR)))


def alone(microbatches: int, policy: str = "1f1b") -> Job:
    """A job of one stage."""
    of = policy_by_name(policy)
    return Job(placement_for(of, 1, microbatches), of, microbatches)


def with_gradients(stage: Stage) -> Stage:
    """Gradients have memory before the first backward, as a bucket gives it."""
    for parameter in stage.layers.parameters():
        parameter.grad = torch.full_like(parameter, -0.0) if parameter.requires_grad else None
    return stage


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_gradient_that_travels_is_not_added_to_by_the_next_backward() -> None:
    layer = Shift()
    stage = stage_of(layer)
    for number in range(2):
        stage.forward(number, torch.ones(1, 3, 4, requires_grad=True), None)
    (first,) = stage.backward(0, (torch.ones(1, 3, 4),))
    stage.backward(1, (torch.ones(1, 3, 4),))
    assert first is not None
    assert layer.by.grad is not None
    assert memory(first) != memory(layer.by.grad)
    assert torch.equal(first, torch.ones(1, 3, 4))
    assert torch.equal(layer.by.grad, torch.full((3, 4), 2.0))


def test_a_stages_own_weights_are_copied_before_they_travel() -> None:
    layer = Weights()
    value, weights = stage_of(layer).forward(0, torch.ones(3), None)
    assert memory(weights) != memory(layer.weights)
    assert weights.requires_grad
    assert not value.requires_grad


def test_where_no_gradient_flows_back_none_is_said() -> None:
    stage = stage_of(nn.Flatten())
    detached = stage_of(
        type("Detach", (nn.Module,), {"forward": lambda self, value: value.detach()})()
    )
    for one in (stage, detached):
        out = one.forward(0, torch.ones(2, 3, requires_grad=True), None)
        gradients = one.backward(0, (torch.ones(2, 3),) if out.requires_grad else ())
        assert [gradient is None for gradient in gradients] == [one is detached]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Ends(nn.Module):
    """In a function that is written in Python."""

    def forward(self, value: Tensor) -> Tensor:
        return Twice.apply(value)  # type: ignore[no-any-return, no-untyped-call]


def test_a_graph_that_ends_in_a_python_function_is_kept_by_a_token() -> None:
    """Up to torch 2.9 at least, such a node does not own its graph: the backward would find
    nothing, once the output has left."""
    stage = stage_of(Ends())
    stage.forward(0, torch.ones(1, 3, requires_grad=True), None)
    ((root,),) = [segment.roots for segment in stage._open[0].segments]
    assert root.ownership_token is not None
    assert [
        None if gradient is None else gradient.tolist()
        for gradient in stage.backward(0, (torch.ones(1, 3),))
    ] == [[[2.0, 2.0, 2.0]]]
