"""The sums by which a change of weights is seen on a device."""

import pytest
import torch

from axrt.store.flat import are_nan, hollow, is_other, sums_of

SIZES = [1, 2, 8, 63, 64, 65, 80, 4096, 5000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_flip_of_a_sign_is_seen(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    values = torch.randn(size * 8 // dtype.itemsize).to(dtype)
    before = sums_of(values.view(torch.int64))
    for place in range(0, len(values), max(1, len(values) // 500)):
        values[place] *= -1
        assert (sums_of(values.view(torch.int64)) != before).any(), place
        values[place] *= -1
    assert torch.equal(sums_of(values.view(torch.int64)), before)


@pytest.mark.parametrize("size", SIZES[1:])
def test_every_swap_is_seen(size: int) -> None:
    torch.manual_seed(size)
    words = torch.randint(-(2**62), 2**62, (size,))
    before = sums_of(words)
    for one, other in torch.randint(size, (300, 2)).tolist():
        if one != other:
            swapped = words.clone()
            swapped[[one, other]] = words[[other, one]]
            assert (sums_of(swapped) != before).any(), (one, other)


def test_other_bits_are_seen_where_values_are_equal() -> None:
    zeros, negative = torch.zeros(16), -torch.zeros(16)
    assert not is_other(zeros, torch.zeros(16))
    assert is_other(zeros, negative)


def test_a_hollow_tensor_that_was_written_to_is_none() -> None:
    given = [hollow(torch.zeros(3, 2)), hollow(torch.zeros(0)), hollow(torch.zeros(()))]
    assert are_nan(given)
    given[2].fill_(1.0)
    assert not are_nan(given)
