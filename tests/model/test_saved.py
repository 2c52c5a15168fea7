"""What autograd saves leaves its memory and comes back as it was."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from axrt.errors import ModelError
from axrt.model.saved import SavedTensors
from axrt.offload.memory import aligned

CPU = torch.device("cpu")


def saved_of(
    run: Callable[[], Tensor], own: tuple[Tensor, ...] = ()
) -> tuple[SavedTensors, Tensor]:
    addresses = {tensor.untyped_storage().data_ptr() for tensor in own}
    saved = SavedTensors(CPU, lambda one: one.untyped_storage().data_ptr() in addresses)
    with saved.saving():
        out = run()
    return saved, out


def down(saved: SavedTensors) -> Tensor:
    """Take it down; returns what was copied, as a disk would bring it back."""
    copied = aligned(saved.measure(), CPU)
    saved.copy_to(copied)
    saved.let_go()
    return copied.clone()


def back(saved: SavedTensors, copied: Tensor) -> None:
    memory = aligned(len(copied), CPU)
    memory.copy_(copied)
    saved.take_back(memory)


class Odd(nn.Module):
    """Saves views of one memory, an output, integers, a number, and a tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)

    def forward(self, value: Tensor) -> Tensor:
        left, right = self.linear(value).chunk(2, -1)
        mixed = left.t()[1:4] * right.t()[::2].contiguous() + left.exp().t()[2:5]
        places = torch.tensor([2, 0, 1])
        kept: Tensor = mixed[places] * left.t()[1:4] * left.mean()
        return kept.pow(2).sum()


def gradients(module: nn.Module, value: Tensor, out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, [value, *module.parameters()]))


def test_gradients_have_the_bits_of_those_of_memory_that_has_stayed() -> None:
    module, value = Odd(), torch.randn(5, 6, requires_grad=True)
    expected = gradients(module, value, module(value))
    saved, out = saved_of(lambda: module(value), tuple(module.parameters()))
    copied = down(saved)
    assert copied.numel() > 0
    back(saved, copied)
    for one, other in zip(gradients(module, value, out), expected, strict=True):
        assert torch.equal(one, other)


def test_memory_that_nobody_else_refers_to_goes_and_all_other_stays() -> None:
    weight, value = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    refs: dict[str, StorageWeakRef] = {}

    def run() -> Tensor:
        hidden = (value @ weight).exp()
        refs["hidden"] = StorageWeakRef(hidden.untyped_storage())  # type: ignore[no-untyped-call]
        return (hidden * hidden).tanh()

    saved, out = saved_of(run, (weight,))
    kept = out.detach().clone()
    copied = down(saved)
    gc.collect()
    assert refs["hidden"].expired()  # type: ignore[no-untyped-call]
    assert torch.equal(out, kept), "what others refer to, such as the network, is as it was"
    assert not weight.isnan().any()
    assert not value.isnan().any()
    back(saved, copied)
    torch.autograd.backward(out.sum())
    gc.collect()
    assert not any(holder() for holder in saved._holders), "the graph frees its holders"


def test_what_is_read_too_early_is_found() -> None:
    value = torch.randn(3, requires_grad=True)
    saved, out = saved_of(lambda: value.exp().sum())
    down(saved)
    with pytest.raises(ModelError, match="is read while its memory is away"):
        torch.autograd.backward(out)


@pytest.mark.parametrize("when", ["before", "while it is down", "when it is back"])
def test_a_change_in_place_is_found_as_autograd_finds_it(when: str) -> None:
    value = torch.randn(3, requires_grad=True)
    hidden: list[Tensor] = []

    def run() -> Tensor:
        hidden.append(value.exp())
        return hidden[0].sum() + hidden[0].view(-1).pow(3).sum()

    saved, out = saved_of(run)
    if when == "before":
        hidden[0].detach().add_(1)
    copied = down(saved)
    if when == "while it is down":
        hidden[0].detach()[0] = 1.0
    back(saved, copied)
    if when == "when it is back":
        hidden[0].detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(out)


def test_tensors_that_share_memory_are_copied_once() -> None:
    value = torch.randn(64, requires_grad=True)

    def run() -> Tensor:
        hidden = value.exp()
        return (hidden * hidden.view(8, 8).t().reshape(64) * hidden[:32].repeat(2)).sum()

    saved, _ = saved_of(run)
    once = {place.holders[0].tensor.data_ptr() for place in (saved.measure(), saved._places)[1]}
    assert len(once) == len(saved._places)
    assert saved.measure() == sum(place.num_bytes for place in saved._places)
