"""Samples whose order depends on the seed alone, whatever layout of ranks reads them."""

from itertools import islice

import numpy as np
import pytest
import torch

from axrt import DataError
from axrt.data.loader import microbatches
from axrt.data.order import Share
from axrt.data.windows import Windows
from axrt.runtime.losses import IGNORED

TOKENS = np.arange(200, dtype=np.uint8)


def windows(seed: int = 0, vocab: int = 256) -> Windows:
    return Windows(TOKENS, 8, seed, vocab)


def test_targets_are_inputs_one_token_later() -> None:
    inputs, targets = windows().microbatch(0, 3)
    assert inputs.shape == targets.shape == (3, 8)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_an_epoch_takes_every_window_once_and_the_next_in_another_order() -> None:
    samples = windows()
    first, second = (
        samples.microbatch(epoch * samples.per_epoch, samples.per_epoch)[0][:, 0].tolist()
        for epoch in (0, 1)
    )
    assert sorted(np.diff(sorted(first))) == [8] * (samples.per_epoch - 1)
    assert first != second
    assert first != windows(seed=1).microbatch(0, samples.per_epoch)[0][:, 0].tolist()


def test_validation_takes_the_same_evenly_spaced_places_every_time() -> None:
    starts = [int(row[0]) for inputs, _ in windows().evenly(3, 2) for row in inputs]
    assert starts == [0, 38, 76, 114, 152, 191]


def test_a_token_that_the_model_does_not_know_is_refused_when_it_is_read() -> None:
    with pytest.raises(
        DataError,
        match=r"the data has token \d+; expected 0 or more and less than model.vocab = 100",
    ):
        windows(vocab=100).microbatch(0, 20)


def samples_of_steps(
    replicas: int, microbatches: int, size: int, steps: int, used: int = 0
) -> list[list[int]]:
    """The samples of each step, in the order in which gradients are summed."""
    streams = [
        Share(replica, replicas, microbatches, size).first_samples(used)
        for replica in range(replicas)
    ]
    return [
        [
            sample
            for stream in streams
            for first in islice(stream, microbatches)
            for sample in range(first, first + size)
        ]
        for _ in range(steps)
    ]


@pytest.mark.parametrize(
    ("replicas", "microbatches", "size"),
    [(1, 12, 1), (1, 3, 4), (2, 6, 1), (3, 2, 2), (4, 1, 3), (12, 1, 1)],
)
def test_every_layout_of_one_global_batch_reads_the_same_samples_in_the_same_order(
    replicas: int, microbatches: int, size: int
) -> None:
    assert Share(0, replicas, microbatches, size).global_batch == 12
    assert samples_of_steps(replicas, microbatches, size, 5) == [
        list(range(12 * step, 12 * step + 12)) for step in range(5)
    ]


def test_reading_goes_on_at_any_sample_even_with_another_batch() -> None:
    assert samples_of_steps(2, 1, 2, 2, used=7) == [[7, 8, 9, 10], [11, 12, 13, 14]]


@pytest.mark.parametrize("workers", [0, 2])
def test_microbatches_come_in_order_whoever_makes_them(workers: int) -> None:
    stream = microbatches(windows(), 2, Share(1, 2, 3, 2).first_samples(40), workers)
    starts = list(islice(Share(1, 2, 3, 2).first_samples(40), 9))
    for first, (inputs, targets) in zip(starts, stream, strict=False):
        expected = windows().microbatch(first, 2)
        assert torch.equal(inputs, expected[0])
        assert torch.equal(targets, expected[1])


def test_the_system_reads_a_few_microbatches_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(Windows, "fetch", lambda _, sample: told.append(sample))
    stream = microbatches(windows(), 2, range(0, 40, 2), 0)
    for number in range(20):
        next(stream)
        assert told == list(range(min(40, 2 * (number + 9))))
    assert next(stream, None) is None


def test_what_comes_behind_the_end_of_a_document_is_not_predicted() -> None:
    row = np.array([5, 9, 1, 2, 9, 9, 3, 4, 9], np.uint8)
    inputs, targets = next(Windows(row, 8, 0, 256, document_end=9).evenly(1, 1))
    assert inputs.tolist() == [[5, 9, 1, 2, 9, 9, 3, 4]]
    assert targets.tolist() == [[9, IGNORED, 2, 9, IGNORED, IGNORED, 4, 9]]


def test_masked_tokens_are_read_and_not_predicted() -> None:
    row = np.array([~5, ~6, 1, 2, 0, ~7, 3, 0, 4], np.int32)
    inputs, targets = next(Windows(row, 8, 0, 10, document_end=0, masked=True).evenly(1, 1))
    assert inputs.tolist() == [[5, 6, 1, 2, 0, 7, 3, 0]]
    assert targets.tolist() == [[IGNORED, 1, 2, 0, IGNORED, 3, 0, IGNORED]]
    with pytest.raises(DataError, match="has token 7"):
        list(Windows(row, 8, 0, 7, masked=True).evenly(1, 1))
    with pytest.raises(DataError, match="has token -8"):
        list(Windows(row, 8, 0, 10).evenly(1, 1))
