"""Token files of the two common forms."""

import os
import pickle
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from axrt import DataError
from axrt.config import Data
from axrt.data.corpus import load
from axrt.data.row import Row, unknown_in_row
from axrt.data.tokens import Mapped, index_of, map_tokens
from axrt.data.windows import Windows


def write_megatron(
    path: Path, sequences: list[list[int]], dtype: str = "int32", code: int = 4
) -> None:
    """As Megatron's IndexedDatasetBuilder writes it: lengths, then byte offsets, then documents."""
    path.write_bytes(b"".join(np.array(sequence, dtype=dtype).tobytes() for sequence in sequences))
    lengths = [len(sequence) for sequence in sequences]
    offsets = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(sequences), len(sequences) + 1)
    documents = np.arange(len(sequences) + 1)
    body = (
        np.array(lengths, np.int32).tobytes()
        + offsets.astype(np.int64).tobytes()
        + documents.astype(np.int64).tobytes()
    )
    path.with_suffix(".idx").write_bytes(head + body)


def test_a_row_of_uint16_is_mapped(tmp_path: Path) -> None:
    np.array([5, 60000, 7], np.uint16).tofile(tmp_path / "train.bin")
    tokens = map_tokens(tmp_path / "train.bin")
    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == [5, 60000, 7]


@pytest.mark.parametrize(("dtype", "code"), [("uint8", 1), ("int32", 4), ("uint16", 8)])
def test_an_index_beside_it_says_what_the_tokens_are(tmp_path: Path, dtype: str, code: int) -> None:
    write_megatron(tmp_path / "text_document.bin", [[1, 2, 3], [4], [5, 6]], dtype, code)
    assert map_tokens(tmp_path / "text_document.bin").tolist() == [1, 2, 3, 4, 5, 6]
    assert map_tokens(tmp_path / "text_document.bin").dtype == dtype


def test_a_corpus_holds_the_end_of_a_token_file_out_or_another_file(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "val.bin")
    corpus = load(Data(source=str(tmp_path / "train.bin"), held_out=0.1), context=4)
    assert corpus.held_out[0].tolist() == list(range(90, 100))
    corpus = load(
        Data(source=str(tmp_path / "train.bin"), validation=str(tmp_path / "val.bin")), context=4
    )
    assert (len(corpus.training[0]), len(corpus.held_out[0])) == (100, 20)


def test_a_part_of_a_mapped_row_travels_as_its_place_in_the_file(tmp_path: Path) -> None:
    np.arange(5000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    tokens = map_tokens(tmp_path / "train.bin")[1000:3000]
    windows = Windows(tokens, 16, 0, 60000)
    packed = pickle.dumps(windows)
    assert len(packed) < 1000
    assert torch.equal(pickle.loads(packed).microbatch(7, 2)[0], windows.microbatch(7, 2)[0])
    again = pickle.loads(pickle.dumps(pickle.loads(packed)))
    assert torch.equal(again.microbatch(7, 2)[0], windows.microbatch(7, 2)[0])


def test_a_row_that_was_mapped_again_knows_its_place_in_the_file(tmp_path: Path) -> None:
    """The system maps whole pages, and the row begins within one."""
    np.arange(5000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    place = Mapped.of(map_tokens(tmp_path / "train.bin")[3000:])
    assert place is not None
    again = np.memmap(place.path, place.dtype, "r", place.offset, (place.number,))
    assert Mapped.of(again) == place
    assert Row(again[50:]).where(7).startswith(" at byte 6114 of ")


def odd(path: Path) -> None:
    path.write_bytes(b"abc")


def cut_off(path: Path) -> None:
    write_megatron(path, [[1, 2, 3], [4]])
    path.write_bytes(path.read_bytes()[:-4])


def no_index(path: Path) -> None:
    path.write_bytes(b"abcd")
    path.with_suffix(".idx").write_bytes(b"something else altogether, long enough")


def short_index(path: Path) -> None:
    write_megatron(path, [[1, 2, 3], [4]])
    path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes()[:36])


def of_floats(path: Path) -> None:
    write_megatron(path, [[1, 2, 3]], "float32", 7)


def negative(path: Path) -> None:
    write_megatron(path, [[1, 2, 3], [4]])
    index = path.with_suffix(".idx")
    # their sum is right
    head, lengths, rest = (
        index.read_bytes()[:34],
        [6, -2],
        index.read_bytes()[42:],
    )
    index.write_bytes(head + np.array(lengths, np.int32).tobytes() + rest)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: None, "train.bin: No such file or directory"),
        (odd, "has 3 bytes, but a row of uint16 has a multiple of 2"),
        (cut_off, "has 12 bytes, but .*train.idx says 4 tokens of int32"),
        (no_index, "does not begin as Megatron's index does"),
        (short_index, "is cut off; expected the lengths of 2 sequences"),
        (negative, "train.idx says that sequence 1 .from 0. has -2 tokens; expected 0 or more"),
        (of_floats, "is of version 1 with tokens of type 7; expected version 1 and integers"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, make: object, text: str) -> None:
    make(tmp_path / "train.bin")  # type: ignore[operator]
    with pytest.raises(DataError, match=text):
        map_tokens(tmp_path / "train.bin")


@pytest.mark.parametrize(("dtype", "code"), [("int8", 2), ("int16", 3), ("int32", 4), ("int64", 5)])
def test_a_negative_token_is_refused_with_its_file_before_anything_is_read(
    tmp_path: Path, dtype: str, code: int
) -> None:
    write_megatron(tmp_path / "train.bin", [[1, 2, 3, 4], [5, -7, 6]], dtype, code)
    size = np.dtype(dtype).itemsize
    with pytest.raises(
        DataError,
        match=(
            rf"train.bin' has token -7 to train on at byte {5 * size} of .*train.bin .token 5 from "
            r"0.; expected 0 or more and less than model.vocab = 256"
        ),
    ):
        load(Data(source=str(tmp_path / "train.bin"), held_out=0.0), context=2)


def test_a_negative_token_that_nobody_has_looked_at_is_refused_with_its_microbatch(
    tmp_path: Path,
) -> None:
    write_megatron(tmp_path / "train.bin", [[1, 2, 3, 4, -1, 2, 3, 4, 5]])
    windows = Windows(map_tokens(tmp_path / "train.bin"), 4, 0, 256)
    with pytest.raises(
        DataError,
        match=r"train.bin has token -1 at byte 16 of .*train.bin .token 4 from 0.; expected 0 or m",
    ):
        list(windows.evenly(2, 1))


def test_a_token_that_the_model_does_not_know_is_found_in_a_very_long_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("axrt.data.row._LOOKED_AT", 512)
    row = np.zeros(5000, np.int32)
    assert unknown_in_row(Row(row), 256) is None
    row[-1] = -1
    assert unknown_in_row(Row(row), 256) == (-1, 4999)
    row[-1] = 256
    assert unknown_in_row(Row(row), 256) == (256, 4999)


def test_a_row_in_which_prompts_are_masked_is_looked_at_in_little_memory() -> None:
    row = np.full(1 << 24, ~7, np.int32)
    row[-2] = ~300
    tracemalloc.start()
    try:
        assert unknown_in_row(Row(row), 256, masked=True) == (300, len(row) - 2)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < row.nbytes / 4


@pytest.mark.parametrize("part", [slice(None), slice(3001, None), slice(7000, 9000)])
def test_a_part_of_a_row_is_read_ahead_wherever_it_is_mapped(
    tmp_path: Path, part: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *of: told.append(of))
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    tokens = map_tokens(tmp_path / "a.bin")[part]
    Row(tokens).fetch(1500, 129)
    first = 2 * (int(tokens[0]) + 1500)  # a token is its place
    assert told == [(first, 2 * 129, os.POSIX_FADV_WILLNEED)]
    assert Row(tokens).part(1500, 129).tolist() == tokens[1500:1629].tolist()
    Row(np.arange(9)).fetch(0, 9)  # in memory
    assert len(told) == 1


def test_a_file_that_is_cut_off_while_it_is_read_ends_in_a_sentence(tmp_path: Path) -> None:
    """A mapped page that is gone would end the process with SIGBUS."""
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    windows = Windows(map_tokens(tmp_path / "a.bin"), 64, 0, 1 << 16)
    again = pickle.loads(pickle.dumps(windows))
    assert again.row(3).tolist() == windows.row(3).tolist()
    (tmp_path / "b.bin").write_bytes(bytes(40_000))
    late = Windows(map_tokens(tmp_path / "a.bin"), 64, 0, 1 << 16)
    os.rename(tmp_path / "a.bin", tmp_path / "c.bin")
    os.rename(tmp_path / "b.bin", tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"a.bin is another file than when this job began"):
        late.row(3)
    assert windows.row(3).tolist() == again.row(3).tolist(), "they have theirs open"
    os.truncate(tmp_path / "c.bin", 100)
    for one in (windows, again):
        with pytest.raises(DataError, match=r"a.bin has 100 bytes, and had more when this job"):
            one.row(3)


def test_a_document_of_more_tokens_than_the_index_can_say_is_several_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axrt.data.tokens._LONGEST", 10)
    lengths = np.array([3, 25, 10, 0, 11], np.int64)
    data = index_of(np.dtype(np.uint16), lengths)
    sequences, documents = struct.unpack_from("<QQ", data, 18)
    found = np.frombuffer(data, np.int32, sequences, 34)
    assert found.tolist() == [3, 10, 10, 5, 10, 0, 10, 1]
    ends = np.frombuffer(data, np.int64, documents, 34 + 12 * sequences)
    assert [int(found[one:other].sum()) for one, other in pairwise(ends)] == lengths.tolist()
    pointers = np.frombuffer(data, np.int64, sequences, 34 + 4 * sequences)
    assert pointers.tolist() == [0, *(2 * np.cumsum(found))[:-1].tolist()]
    np.arange(49, dtype=np.uint16).tofile(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(data)
    assert len(map_tokens(tmp_path / "a.bin")) == 49
