"""A bucket by itself: how gradients are cut, added up and put back."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import axrt
from axrt.scheduler.bucket import copies_by_pipe
from axrt.store.assign import BucketSpec, buckets_of
from axrt.store.bucket import Bucket
from axrt.store.bucket_settings import BucketSettings, constant
from axrt.store.norms import clip_factor, total_norm

CPU = torch.device("cpu")


def bucket_of(
    *parameters: nn.Parameter,
    copies: int = 2,
    me: int = 0,
    narrow: torch.dtype | None = None,
    in_float32: bool = True,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> Bucket:
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    held = BucketSpec(copies_by_pipe(0, 0, copies), named, [name for name, _ in named], True)
    return Bucket(
        held,
        range(len(named)),
        held.copies[me],
        BucketSettings(
            lambda named: optimizer([p for _, p in named], lr=1.0), constant, CPU, in_float32
        ),
        [narrow] * len(named),
    )


def with_gradients(
    *gradients: list[float] | None,
    copies: int = 2,
    me: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Bucket:
    """A bucket whose gradient is complete; None: of a parameter that no microbatch has used.

    It is copy `me` of so many."""
    parameters = [
        nn.Parameter(torch.zeros(len(values or [0.0]), dtype=dtype)) for values in gradients
    ]
    bucket = bucket_of(*parameters, copies=copies, me=me)
    bucket.open()
    for parameter, values in zip(parameters, gradients, strict=True):
        if values is not None:
            (parameter * torch.tensor(values, dtype=dtype)).sum().backward()  # type: ignore[no-untyped-call]
    bucket.close()
    return bucket


def gradients_of(bucket: Bucket) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for _, p in bucket.named]


def added_up(*buckets: Bucket) -> list[tuple[torch.Tensor, ...]]:
    """What each of the copies adds up of its shards."""
    return [
        owner.within.add_up([bucket.within.part_for(to) for bucket in buckets])
        for owner, to in zip(buckets, buckets[0].copies, strict=True)
    ]


def test_a_bucket_without_parameters_has_nothing_to_step() -> None:
    def never(named: object) -> torch.optim.Optimizer:
        raise AssertionError("no optimizer is wanted here")

    copies = copies_by_pipe(0, 0, 2)
    empty = Bucket(
        BucketSpec(copies, [], [], True), [], copies[0], BucketSettings(never, constant, CPU)
    )
    empty.open()
    empty.close()
    empty.step(0)
    assert empty.lr is None
    assert total_norm([empty.norms()]) == 0.0
    assert empty.within.add_up([empty.within.part_for(copy) for copy in copies]) == ()


def test_a_parameter_without_a_gradient_has_no_norm_and_stays() -> None:
    bucket = with_gradients([3.0, 4.0], None)
    used, unused = (parameter for _, parameter in bucket.named)
    places, norms = bucket.norms()
    assert (places.tolist(), norms.tolist()) == ([0], [5.0])
    bucket.step(0)
    assert (used.tolist(), unused.tolist()) == ([-3.0, -4.0], [0.0])
    assert used.grad is None


def test_copies_add_up_their_shards_in_order_and_sums_make_the_gradient() -> None:
    one, other = with_gradients([1, 2, 3], [4] * 20), with_gradients([10, 20, 30], [40] * 20, me=1)
    sums = added_up(one, other)
    for bucket in (one, other):
        bucket.within.take_sums(sums)
        assert gradients_of(bucket) == [[11, 22, 33], [44] * 20]


def test_sums_that_arrive_where_the_gradient_is_are_not_copied() -> None:
    one, other = with_gradients([1, 2, 3], [4] * 20), with_gradients([10, 20, 30], [40] * 20, me=1)
    (mine,), (theirs,) = added_up(one, other)
    ((copy, (room,)),) = one.within.buffers_for_sums()
    assert copy == 1
    room.copy_(theirs)
    one.within.take_sums([(mine,), (room,)])
    assert gradients_of(one) == [[11, 22, 33], [44] * 20]


def test_three_copies_add_up_in_their_order_whichever_is_the_owner() -> None:
    values = ([1.0] * 60, [2.0**-24] * 60, [2.0**-24] * 60)
    buckets = [with_gradients(of, copies=3, me=me) for me, of in enumerate(values)]
    buckets[0].within.take_sums(added_up(*buckets))
    assert gradients_of(buckets[0]) == [[1.0] * 60], "another order would give 1 + 2**-23"


def test_a_gradient_that_is_still_read_goes_on_in_other_memory() -> None:
    one, other = with_gradients([1, 2, 3], [4] * 20), with_gradients([10, 20, 30], [40] * 20, me=1)
    one.within.take_sums(added_up(one, other))
    (lent,) = one.gradient.totals
    before = lent.clone()
    one.gradient.move_total()
    assert gradients_of(one) == [[11, 22, 33], [44] * 20]
    one.route.scale(0.5)
    one.check_unchanged()
    assert torch.equal(lent, before)
    assert gradients_of(one) == [[5.5, 11, 16.5], [22] * 20]


def test_what_only_one_copy_has_used_is_used_and_what_none_has_is_not() -> None:
    one, other = with_gradients([1], None, None), with_gradients([2], [3], None, me=1)
    sums = added_up(one, other)
    for bucket in (one, other):
        bucket.within.take_sums(sums)
        assert gradients_of(bucket) == [[3], [3], None]


def test_half_precision_is_added_up_in_single() -> None:
    small = [2.0**-8]
    buckets = [
        with_gradients(of, copies=3, me=me, dtype=torch.bfloat16)
        for me, of in enumerate(([1.0], small, small))
    ]
    sums = added_up(*buckets)
    for bucket in buckets:
        bucket.within.take_sums(sums)
    assert gradients_of(buckets[0]) == [[1 + 2.0**-7]], (
        "in bfloat16 each of the two would have been lost"
    )
    assert buckets[0].named[0][1].grad.dtype == torch.bfloat16  # type: ignore[union-attr]


def narrow_bucket(
    values: list[list[float] | None], in_float32: bool, copies: int = 2, me: int = 0
) -> tuple[Bucket, list[nn.Parameter]]:
    """A bucket of bfloat16 parameters with masters; two microbatches have added such gradients to
    each, or none."""
    parameters = [nn.Parameter(torch.ones(len(of or [0.0]))) for of in values]
    bucket = bucket_of(
        *parameters, copies=copies, me=me, narrow=torch.bfloat16, in_float32=in_float32
    )
    bucket.open()
    for _ in range(2):
        bucket.gradient.keep_open()
        for parameter, of in zip(parameters, values, strict=True):
            if of is not None:
                (parameter * torch.tensor(of)).sum().backward()  # type: ignore[no-untyped-call]
    bucket.close()
    return bucket, parameters


@pytest.mark.parametrize("in_float32", [True, False])
def test_narrow_gradients_of_copies_are_added_up_in_float32(in_float32: bool) -> None:
    small = 2.0**-9  # is lost beside 1 in bfloat16
    one, (used, unused) = narrow_bucket([[1.0] * 50, None], in_float32)
    other, _ = narrow_bucket([[small] * 50, None], in_float32, me=1)
    part, _ = one.within.part_for(other.me)
    assert part[0].dtype == (torch.float32 if in_float32 else torch.bfloat16)
    sums = added_up(one, other)
    for bucket in (one, other):
        bucket.within.take_sums(sums)
        (_, master), (_, idle) = bucket.trained
        assert master.grad is not None
        assert master.grad.dtype == torch.float32
        assert master.grad.tolist() == [2 + 2 * small] * 50
        assert idle.grad is None
    one.step(0)
    assert one.trained[0][1].tolist() == [-1 - 2 * small] * 50
    assert used.dtype == torch.bfloat16
    assert torch.equal(used, one.trained[0][1].bfloat16())
    assert used.grad is None
    assert unused.tolist() == [1.0]


@pytest.mark.parametrize("in_float32", [True, False])
def test_a_late_gradient_of_a_narrow_weight_is_refused_or_counts(in_float32: bool) -> None:
    for copies, place in ((2, 0), (2, 1), (1, 0), (1, 1)):
        bucket, parameters = narrow_bucket([[1.0], None], in_float32, copies)
        bucket.check_unchanged()
        parameters[place].sum().backward()  # type: ignore[no-untyped-call]
        if copies == 1:
            bucket.take_own()
            gradient = bucket.trained[place][1].grad
            assert gradient is not None
            assert gradient.tolist() == [3.0 - 2 * place]
            continue
        with pytest.raises(axrt.ModelError, match=f"{place} got a gradient from an earlier layer"):
            bucket.check_unchanged()


def test_layers_get_what_an_optimizer_has_put_in_place_of_a_master() -> None:
    bucket, (parameter,) = narrow_bucket([[1.0] * 3], True, copies=1)
    ((_, master),) = bucket.trained
    master.data = torch.full((3,), 7.0)
    bucket.step(0)
    assert parameter.tolist() == [5.0] * 3
    with torch.no_grad():
        master.fill_(2.0)
    bucket.publish_if_changed()
    assert parameter.tolist() == [2.0] * 3


def test_a_gradient_adds_up_in_place_and_keeps_the_sign_of_a_zero() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    bucket = bucket_of(parameter)
    bucket.open()
    here = parameter.grad
    assert here is not None
    (parameter * torch.tensor([-0.0, 1.0])).sum().backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is here
    assert here.signbit().tolist() == [True, False]
    (parameter * torch.tensor([-0.0, 2.0])).sum().backward()  # type: ignore[no-untyped-call]
    assert here.tolist() == [0.0, 3.0]
    assert here.signbit().tolist() == [True, False]


def test_weights_gradients_and_moments_are_views_of_flat_memory_and_stay_the_same_objects() -> None:
    parameters = [
        nn.Parameter(torch.randn(3, 5)),
        nn.Parameter(torch.randn(4, 2, 2, 3).to(memory_format=torch.channels_last)),
    ]
    before = [parameter.detach().clone() for parameter in parameters]
    named = [(f"0.{number}", parameter) for number, parameter in enumerate(parameters)]
    spec = BucketSpec(copies_by_pipe(0, 0, 1), named, [name for name, _ in named], True)
    bucket = Bucket(
        spec,
        range(2),
        spec.copies[0],
        BucketSettings(
            lambda named: torch.optim.Adam([p for _, p in named], lr=0.0), constant, CPU
        ),
    )
    assert all(
        torch.equal(now, value) and now.stride() == value.stride()
        for now, value in zip(parameters, before, strict=True)
    )
    for step in range(2):
        bucket.open()
        sum(parameter.square().sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        bucket.close()
        bucket.step(step)
    assert bucket.optimizer is not None
    states = list(bucket.optimizer.state.values())
    moments = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
    for kind in (parameters, *moments):
        assert len({tensor.untyped_storage().data_ptr() for tensor in kind}) == 1
        assert all(tensor.data_ptr() % 64 == 0 for tensor in kind)


def test_parameters_of_several_types_share_a_bucket() -> None:
    parameters = [
        nn.Parameter(torch.zeros(2, dtype=dtype))
        for dtype in (torch.float32, torch.float64, torch.float32)
    ]
    one, other = (
        bucket_of(*parameters),
        bucket_of(*[nn.Parameter(p.detach().clone()) for p in parameters], me=1),
    )
    for factor, bucket in ((1.0, one), (2.0, other)):
        bucket.open()
        sum((p.double() * factor).sum() for _, p in bucket.named).backward()  # type: ignore[union-attr]
        bucket.close()
    one.within.take_sums(added_up(one, other))
    assert gradients_of(one) == [[3.0, 3.0]] * 3
    assert [p.grad.dtype for _, p in one.named if p.grad is not None] == [
        torch.float32,
        torch.float64,
        torch.float32,
    ]


def test_a_hook_of_the_users_that_puts_another_gradient_there_is_heard() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))  # type: ignore[no-untyped-call]
    bucket = bucket_of(parameter)
    bucket.open()
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    bucket.close()
    assert gradients_of(bucket) == [[2.0]]
    (shard,), mask = bucket.within.part_for(bucket.me)
    assert mask is None
    assert float(shard.sum()) in (0.0, 2.0)


def test_a_gradient_that_a_hook_of_the_users_drops_is_in_no_sum() -> None:
    def drop(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if not parameter.grad.isfinite().all():
            parameter.grad = None

    healthy, other = (bucket_of(nn.Parameter(torch.ones(40)), me=me) for me in range(2))
    for bucket, factor in ((healthy, 1.0), (other, float("inf"))):
        ((_, parameter),) = bucket.named
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        bucket.open()
        (parameter * factor).sum().backward()  # type: ignore[no-untyped-call]
        bucket.close()
    sums = added_up(healthy, other)
    for bucket in (healthy, other):
        bucket.within.take_sums(sums)
        assert gradients_of(bucket) == [[1.0] * 40]


def test_a_gradient_that_was_dropped_within_a_step_has_memory_of_its_own_again() -> None:
    """Autograd takes over a first gradient as it is: here a view of what travels on."""
    parameter, other = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(2))
    bucket = bucket_of(parameter, other)
    bucket.open()
    parameter.grad = other.grad = None
    bucket.gradient.keep_open()
    travelling = torch.ones(1, 3, 4)
    for gradient in (travelling, torch.ones(1, 3, 4)):
        inputs = torch.zeros(1, 3, 4, requires_grad=True)
        torch.autograd.backward([inputs + parameter.unsqueeze(0)], [gradient], inputs=[parameter])
    assert torch.equal(travelling, torch.ones(1, 3, 4))
    bucket.close()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [[2.0] * 4] * 3
    assert other.grad is None


class Keeps(torch.optim.SGD):
    """Keeps the last gradient in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.grad


def test_a_gradient_that_the_optimizer_keeps_is_its_own_from_then_on() -> None:
    bucket = bucket_of(nn.Parameter(torch.zeros(3)), optimizer=Keeps)
    ((_, parameter),) = bucket.named
    assert bucket.optimizer is not None
    for step in range(3):
        bucket.open()
        (parameter * torch.tensor([1.0, 2.0, 3.0]) * (step + 1)).sum().backward()  # type: ignore[no-untyped-call]
        bucket.close()
        kept = bucket.optimizer.state[parameter].get("last")
        assert kept is None or kept.tolist() == [step, 2.0 * step, 3.0 * step]
        assert gradients_of(bucket) == [[step + 1, 2.0 * (step + 1), 3.0 * (step + 1)]]
        bucket.step(step)
    assert parameter.tolist() == [-6.0, -12.0, -18.0]


def test_norms_of_several_types_are_one_in_the_widest_of_them() -> None:
    small, wide = (
        with_gradients([3.0], dtype=torch.bfloat16),
        with_gradients([4.0 + 2.0**-20], dtype=torch.float32),
    )
    none = with_gradients(None, dtype=torch.float64)
    for parts in ([small, wide, none], [none, wide, small]):
        norm = total_norm([bucket.norms() for bucket in parts])
        assert norm.dtype == torch.float32
        assert float(norm) == pytest.approx((9 + (4 + 2.0**-20) ** 2) ** 0.5, rel=1e-7)
        assert float(norm) != 5.0


def test_a_gradient_that_comes_too_late_is_refused() -> None:
    bucket = with_gradients([1.0])
    bucket.check_unchanged()
    bucket.named[0][1].sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(
        axrt.ModelError, match="0 got a gradient from an earlier layer than its own"
    ):
        bucket.check_unchanged()


def test_norms_are_joined_in_model_order_whatever_order_they_come_in() -> None:
    values = torch.rand(100)
    places = torch.randperm(100)
    whole = torch.linalg.vector_norm(values)
    assert (
        total_norm([(places[:30], values[places[:30]]), (places[30:], values[places[30:]])])
        == whole
    )


def test_the_order_in_which_shards_tell_of_their_pieces_changes_no_bit_of_the_norm() -> None:
    values = torch.rand(256, generator=torch.Generator().manual_seed(7))
    pieces = [(torch.tensor([place // 4]), values[place : place + 1]) for place in range(256)]
    drawn = random.Random(0)
    norms = {float(total_norm(drawn.sample(pieces, len(pieces)))) for _ in range(100)}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(float(torch.linalg.vector_norm(values)), rel=1e-6)


@pytest.mark.parametrize(("norm", "factor"), [(0.5, 1.0), (2.0, 0.5)])
def test_the_factor_is_that_of_torch(norm: float, factor: float) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([norm])
    nn.utils.clip_grad_norm_(parameter, 1.0)
    assert parameter.grad is not None
    assert float(clip_factor(torch.tensor(norm), 1.0) * norm) == float(parameter.grad)
    assert float(clip_factor(torch.tensor(norm), 1.0)) == pytest.approx(factor, rel=1e-5)


def test_buckets_take_whole_parameters_in_model_order() -> None:
    named = [
        (f"0.{name}", nn.Parameter(torch.zeros(size)))
        for name, size in (("a", 2), ("b", 2), ("huge", 9), ("c", 1), ("d", 2))
    ]
    held = buckets_of([nn.Identity()], [0, 1], 0, named, pipes=3, most_bytes=16)
    assert [[name for name, _ in one.named] for one in held] == [
        ["0.a", "0.b"],
        ["0.huge"],
        ["0.c", "0.d"],
    ]
    assert [[copy.pipe for copy in one.copies] for one in held] == [[0, 1, 2]] * 3


def test_double_precision_keeps_its_norm() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([1e200, 3e200], dtype=torch.float64)
    expected = nn.utils.get_total_norm([parameter.grad])
    bucket = with_gradients([1e200, 3e200], dtype=torch.float64)
    assert total_norm([bucket.norms()]) == expected
    nn.utils.clip_grad_norm_(parameter, 1.0)
    bucket.route.scale(clip_factor(expected, 1.0))
    assert gradients_of(bucket) == [parameter.grad.tolist()]


def test_a_gradient_of_what_was_not_used_before_is_refused_when_it_comes_too_late() -> None:
    bucket = with_gradients([1.0], None)
    bucket.named[1][1].sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(axrt.ModelError, match="1 got a gradient from an earlier layer"):
        bucket.check_unchanged()


def test_what_the_step_itself_does_to_a_gradient_is_not_taken_for_a_late_one() -> None:
    bucket = with_gradients([1.0])
    bucket.route.scale(0.5)
    bucket.check_unchanged()
    bucket.step(0)
    bucket.check_unchanged()
    bucket.named[0][1].sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(axrt.ModelError, match="0 got a gradient from an earlier layer"):
        bucket.check_unchanged()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_let_go_when_modules_are_given_back(dtype: torch.dtype) -> None:
    """Else a rank has all weights in both types at its end, and needs more memory than before."""
    parameter = nn.Parameter(torch.arange(8.0))
    bucket = bucket_of(parameter, copies=1, narrow=dtype)
    narrow = StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]
    bucket.release()
    assert parameter.dtype is torch.float32
    assert parameter.tolist() == list(range(8))
    assert narrow.expired()  # type: ignore[no-untyped-call]
