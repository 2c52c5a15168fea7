"""Any tensor goes through the bytes of the wire and is the same tensor: values, shape, dtype,
strides, wish for a gradient."""

from collections.abc import Callable
from itertools import product
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from axrt.scheduler.message import Meaning, Message
from axrt.transport import Parcel
from axrt.transport.envelope import is_large
from axrt.transport.local import LocalWorld
from axrt.transport.wire import Layout, Spec, dense

from .payloads import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.complex32,
    ),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    ),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ),
]


def through_the_wire(payload: object) -> object:
    transport = LocalWorld(1).alone()
    transport.send(0, Parcel(0, Message(Meaning.ACTIVATION, 0, 0), payload))
    ((_, parcel),) = transport.poll(wait_s=inf)
    return parcel.payload


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any dtype, 0 to 6 dimensions of any sizes, and any strides that are not negative: with
    gaps, repeated, overlapping, permuted."""
    shape = draw(st.lists(st.integers(0, 4), max_size=6))
    kind = draw(st.sampled_from(["any", "permuted", "gapped"]))
    if kind == "any":
        strides = draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))
    else:
        order, strides, span = draw(st.permutations(range(len(shape)))), [0] * len(shape), 1
        for dimension in order:
            strides[dimension] = span
            span *= max(1, shape[dimension]) + (draw(st.integers(0, 2)) if kind == "gapped" else 0)
    dtype, offset = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 3))
    elements = (
        offset
        + 1
        + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    memory = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (elements * dtype.itemsize,),
        dtype=torch.uint8,
        generator=generator,
    )
    tensor = memory.view(dtype).as_strided(shape, strides, offset)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    wants = (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1
    return tensor.requires_grad_() if wants and draw(st.booleans()) else tensor


@given(tensors())
def test_any_tensor_arrives_as_it_was(tensor: Tensor) -> None:
    assert_same(through_the_wire(tensor), tensor, str(Spec.of(tensor)))


@given(st.lists(tensors(), min_size=1, max_size=4))
def test_any_nest_of_tensors_arrives_as_it_was(several: list[Tensor]) -> None:
    payload = {"first": several[0], "rest": (several[1:], True, 1, 1.0, None)}
    assert_same(through_the_wire(payload), payload, "nest")


SHAPES = [shape for dimensions in range(1, 5) for shape in product((1, 2, 3), repeat=dimensions)]


def test_every_shape_of_small_sizes_arrives_as_it_was_small_and_large_transposed_or_not() -> None:
    assert len(SHAPES) == 120
    for shape in SHAPES:
        large = (*shape, 10_000)
        assert is_large(torch.empty(large).nbytes)
        for size in (shape, large):
            tensor = torch.randn(size)
            for of in (tensor, tensor.transpose(0, -1)):
                assert_same(through_the_wire(of), of, str(Spec.of(of)))


@given(tensors())
def test_what_travels_is_no_more_than_the_values_that_differ(tensor: Tensor) -> None:
    layout, row = Layout(Spec.of(tensor)), dense(tensor)
    repeated = [
        size == 1 or stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    once = [
        size if kept else min(size, 1) for size, kept in zip(tensor.shape, repeated, strict=True)
    ]
    assert layout.num_bytes == row.nbytes == torch.Size(once).numel() * tensor.dtype.itemsize
    assert row.is_contiguous()


UNSENDABLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "integers of four bits": (
        lambda: torch.empty(3, dtype=vars(torch)["int4"]),
        "torch.int4 cannot travel",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "torch.qint8 cannot travel",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "cannot travel between stages; expected dense",
    ),
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        "cannot travel between stages; expected dense tensors",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNSENDABLE)
def test_tensors_that_cannot_travel_are_refused_when_they_are_sent(kind: str) -> None:
    make, text = UNSENDABLE[kind]
    for payload in (make(), {"inside": make()}):
        with pytest.raises(TypeError, match=text):
            through_the_wire(payload)
