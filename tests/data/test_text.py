"""Text becomes samples whose order depends on the seed alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from axrt import DataError
from axrt.config import Data
from axrt.data.text import load
from axrt.data.windows import Windows

TOKENS = np.arange(200, dtype=np.uint8)


def test_a_directory_is_split_by_file_and_the_split_depends_on_names(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_bytes(bytes([number]) * 10)
    (tmp_path / "other.bin").write_bytes(b"\xff" * 10)
    corpus = load(Data(source=str(tmp_path), files="*.txt", held_out=0.3), context=4)
    training, held_out = set(corpus.training.tolist()), set(corpus.held_out.tolist())
    assert training | held_out == set(range(40))
    assert not training & held_out
    assert 4 <= len(held_out) <= 20


def test_a_directory_of_two_files_holds_one_out(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 20)
    (tmp_path / "b").write_bytes(b"b" * 20)
    corpus = load(Data(source=str(tmp_path), held_out=0.01), context=4)
    assert (len(corpus.training), len(corpus.held_out)) == (20, 20)


def test_one_file_holds_its_end_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    corpus = load(Data(source=str(tmp_path / "a.txt"), held_out=0.1), context=4)
    assert corpus.held_out.tolist() == list(range(90, 100))


def test_the_standard_library_is_there() -> None:
    corpus = load(Data(), context=128)
    assert len(corpus.training) > 10 * len(corpus.held_out) > 100_000


@pytest.mark.parametrize(
    ("name", "held_out", "text"),
    [
        ("nowhere.txt", 0.1, "nowhere.txt: No such file or directory"),
        ("empty", 0.1, "no file of .*empty matches data.files"),
        ("short.txt", 0.0, "has 3 bytes to train on; expected more than model.context = 8"),
        ("long.txt", 0.1, "has 2 bytes held out; expected more than model.context = 8"),
    ],
)
def test_missing_empty_and_short_data_is_refused(tmp_path: Path, name: str, held_out: float, text: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "long.txt").write_text("abcdefghijklmnopqrst")
    with pytest.raises(DataError, match=text):
        load(Data(source=str(tmp_path / name), held_out=held_out), context=8)


def test_tokens_that_the_model_does_not_know_and_patterns_outside_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefghijklmnopqrst")
    with pytest.raises(DataError, match="has token 116 to train on; expected less than model.vocab = 100"):
        load(Data(source=str(tmp_path / "text.txt"), held_out=0), context=4, vocab=100)
    with pytest.raises(DataError, match="expected a pattern inside data.source"):
        load(Data(source=str(tmp_path), files="/etc/*"), context=4)


def test_targets_are_inputs_one_token_later() -> None:
    inputs, targets = Windows(TOKENS, context=8, seed=0).microbatch(0, 3)
    assert inputs.shape == targets.shape == (3, 8)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_an_epoch_takes_every_window_once_and_the_next_in_another_order() -> None:
    windows = Windows(TOKENS, context=8, seed=0)
    first, second = (windows.microbatch(epoch * windows.per_epoch, windows.per_epoch)[0][:, 0].tolist() for epoch in (0, 1))
    assert sorted(np.diff(sorted(first))) == [8] * (windows.per_epoch - 1)
    assert first != second
    assert first != Windows(TOKENS, context=8, seed=1).microbatch(0, windows.per_epoch)[0][:, 0].tolist()


def test_the_order_of_samples_is_the_same_however_they_are_grouped() -> None:
    windows = Windows(TOKENS, context=8, seed=0)
    fours, twos = windows.batches(1, 4), windows.batches(2, 2)
    for _ in range(5):
        assert torch.equal(next(fours)[0], torch.cat([next(twos)[0], next(twos)[0]]))


def test_a_stream_may_begin_at_any_step() -> None:
    windows = Windows(TOKENS, context=8, seed=0)
    stream = windows.batches(2, 2)
    for _ in range(6):
        next(stream)
    assert torch.equal(next(stream)[0], next(windows.batches(2, 2, first_step=3))[0])


def test_validation_takes_the_same_evenly_spaced_places_every_time() -> None:
    windows = Windows(TOKENS, context=8, seed=0)
    starts = [int(row[0]) for inputs, _ in windows.evenly(3, 2) for row in inputs]
    assert starts == [0, 38, 76, 114, 152, 191]
