"""What a step takes, against figures by hand."""

from dataclasses import replace

import pytest

from axrt.layouts.candidates import Shape

from .test_search import cluster, layers_of, search

PARAMETERS = sum(layer.parameters for layer in layers_of(1, 1))


@pytest.mark.parametrize("zero", [0, 1])
def test_the_end_of_a_step_is_sums_over_replicas_and_a_step_of_the_optimizer(zero: int) -> None:
    """Two replicas have a link of 1 us and 1 GB/s, memory of 1 GB/s, and float32 alone: half of the
    gradient goes there, and half of the sums, or of the weights, comes back. Adam reads the
    gradient, and reads and writes the weights and two moments: 28 bytes of a parameter that is
    stepped."""
    of = search(cluster(1, 2))
    found = of.in_shape(Shape(1, 1, 2, 1, 2), zero=zero)
    assert found is not None
    sums_s = 2 * (1e-6 + 2 * PARAMETERS / 1e9)
    step_s = 28 * PARAMETERS / (2 if zero else 1) / 1e9
    assert of.with_parts(found).time.ends_s == pytest.approx(sums_s + step_s, rel=0.02)


def test_what_runs_again_is_computing() -> None:
    of, shape = search(cluster(1, 2)), Shape(1, 2, 1, 1, 4)
    plain = of.in_shape(shape, policy="1f1b", recompute="none")
    again = of.in_shape(shape, policy="1f1b", recompute="full")
    assert plain
    assert again
    first = layers_of(1, 1)[: again.prediction.job.cuts[1]]
    on_first = sum(2 * one.forward_s + one.input_s + one.weight_s for one in first)
    assert again.time.computing_s >= 4 * on_first
    assert again.time.computing_s > plain.time.computing_s


def test_slices_take_what_their_bytes_take() -> None:
    """A slower link within the node makes joints longer, and nothing else."""
    shape, of = Shape(2, 1, 1, 1, 4), cluster(1, 2)
    slow = replace(of, within=replace(of.within, bandwidth=1e6))
    found = [search(one).in_shape(shape, fill="never") for one in (of, slow)]
    quick, late = (one.time for one in found if one)
    sizes = [size for one in layers_of(2, 1) for size in (*one.joints, *one.back_joints)]
    longer_s = 4 * sum(size / 1e6 - size / 1e9 for size in sizes)
    assert late.step_s - quick.step_s == pytest.approx(longer_s, rel=0.05)
    assert late.computing_s == quick.computing_s
