"""A bucket by itself: how gradients are cut, added up and put back."""

import pytest
import torch
from torch import nn

from axrt.optim.bucket import Bucket, clip_factor, constant, total_norm
from axrt.optim.held import Held, buckets_of
from axrt.scheduler.bucket import held_by_pipes

CPU = torch.device("cpu")


def bucket_of(*parameters: nn.Parameter, holders: int = 2) -> Bucket:
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    held = Held(held_by_pipes(0, 0, holders), named, [name for name, _ in named], True)
    return Bucket(held, range(len(named)), held.holders[0], lambda named: torch.optim.SGD([p for _, p in named], lr=1.0), constant, CPU)


def with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values, dtype=torch.float32)
    return parameter


def test_a_bucket_without_parameters_has_nothing_to_step() -> None:
    def never(named: object) -> torch.optim.Optimizer:
        raise AssertionError("no optimizer is wanted here")

    holders = held_by_pipes(0, 0, 2)
    empty = Bucket(Held(holders, [], [], True), [], holders[0], never, constant, CPU)
    empty.step(0)
    assert empty.lr is None
    assert total_norm([empty.norms()]) == 0.0
    assert empty.add_up([empty.parts()[0], empty.parts()[0]]).numel() == 0


def test_a_parameter_without_a_gradient_has_no_norm_and_stays() -> None:
    used, unused = with_gradient(3.0, 4.0), nn.Parameter(torch.ones(2))
    bucket = bucket_of(used, unused)
    places, norms = bucket.norms()
    assert (places.tolist(), norms.tolist()) == ([0], [5.0])
    bucket.step(0)
    assert (used.tolist(), unused.tolist()) == ([-3.0, -4.0], [1.0, 1.0])
    assert used.grad is None


def test_holders_add_up_their_shards_in_order() -> None:
    one, other = bucket_of(with_gradient(1, 2, 3), with_gradient(4)), bucket_of(with_gradient(10, 20, 30), with_gradient(40))
    parts = [one.parts(), other.parts()]
    assert all(parameter.grad is None for bucket in (one, other) for _, parameter in bucket.named), "a part is given away"
    assert [[shard.tolist() for shard, _ in of] for of in parts] == [[[1, 2], [3, 4]], [[10, 20], [30, 40]]]
    sums = [bucket.add_up([of[shard] for of in parts]) for shard, bucket in enumerate((one, other))]
    one.take_sums(sums)
    assert [p.grad.tolist() for _, p in one.named if p.grad is not None] == [[11, 22, 33], [44]]


def test_what_only_one_holder_has_used_is_used_and_what_none_has_is_not() -> None:
    one, other = (
        bucket_of(with_gradient(1), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))),
        bucket_of(with_gradient(2), with_gradient(3), nn.Parameter(torch.ones(1))),
    )
    parts = [one.parts(), other.parts()]
    sums = [bucket.add_up([of[shard] for of in parts]) for shard, bucket in enumerate((one, other))]
    one.take_sums(sums)
    assert [p.grad.tolist() if p.grad is not None else None for _, p in one.named] == [[3], [3], None]


def test_half_precision_is_added_up_in_single() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    parameter.grad = torch.ones(1, dtype=torch.bfloat16)
    bucket = bucket_of(parameter)
    part = bucket.parts()[0][0]
    small = torch.full_like(part, 2.0**-9)
    assert float(bucket.add_up([(part, None), (small, None)])) == 1 + 2.0**-9
    bucket.take_sums([part, torch.empty(0)])
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.bfloat16


def test_norms_are_joined_in_model_order_whatever_order_they_come_in() -> None:
    values = torch.rand(100)
    places = torch.randperm(100)
    whole = torch.linalg.vector_norm(values)
    assert total_norm([(places[:30], values[places[:30]]), (places[30:], values[places[30:]])]) == whole


@pytest.mark.parametrize(("norm", "factor"), [(0.5, 1.0), (2.0, 0.5)])
def test_the_factor_is_that_of_torch(norm: float, factor: float) -> None:
    parameter = with_gradient(norm)
    nn.utils.clip_grad_norm_(parameter, 1.0)
    assert parameter.grad is not None
    assert float(clip_factor(torch.tensor(norm), 1.0) * norm) == float(parameter.grad)
    assert float(clip_factor(torch.tensor(norm), 1.0)) == pytest.approx(factor, rel=1e-5)


def test_buckets_take_whole_parameters_in_model_order() -> None:
    named = [(f"0.{name}", nn.Parameter(torch.zeros(size))) for name, size in (("a", 2), ("b", 2), ("huge", 9), ("c", 1), ("d", 2))]
    held = buckets_of([nn.Identity()], [0, 1], 0, named, pipes=3, most_bytes=16)
    assert [[name for name, _ in one.named] for one in held] == [["0.a", "0.b"], ["0.huge"], ["0.c", "0.d"]]
    assert [[holder.pipe for holder in one.holders] for one in held] == [[0, 1, 2]] * 3


def test_double_precision_keeps_its_norm() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([1e200, 3e200], dtype=torch.float64)
    expected = nn.utils.get_total_norm([parameter.grad])
    assert total_norm([bucket_of(parameter).norms()]) == expected
    nn.utils.clip_grad_norm_(parameter, 1.0)
    other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    other.grad = torch.tensor([1e200, 3e200], dtype=torch.float64)
    bucket_of(other).scale(clip_factor(expected, 1.0))
    assert torch.equal(other.grad, parameter.grad)
