"""Token files without an index: what type their tokens have. Files of nanoGPT and llm.c are written
as the scripts of those projects do."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest

from axrt import DataError
from axrt.config import Data
from axrt.data.corpus import load
from axrt.data.row import Row
from axrt.data.tokens import Mapped, map_tokens

LARGE = [9, 128_000, 3, 70_000, 15_000, 4, 99, 100_000] * 40


def of_llm_c(tokens: list[int], magic: int, version: int, dtype: str) -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + np.array(tokens, dtype).tobytes()


@pytest.mark.parametrize(
    ("magic", "version", "dtype", "tokens"),
    [(20240520, 1, "uint16", [1, 50_256, 7]), (20240801, 7, "uint32", LARGE)],
)
def test_files_of_llm_c_are_read_by_their_header(
    tmp_path: Path, magic: int, version: int, dtype: str, tokens: list[int]
) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(of_llm_c(tokens, magic, version, dtype))
    row = map_tokens(path)
    assert (row.tolist(), row.dtype.name) == (tokens, dtype)
    place = Mapped.of(row[1:])
    assert place is not None
    assert Row(row[1:]).part(0, place.number).tolist() == tokens[1:]
    with pytest.raises(DataError, match=f"says tokens of {dtype}, and data.dtype is 'int64'"):
        map_tokens(path, dtype="int64")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=f"its header says {len(tokens)} tokens of {dtype}"):
        map_tokens(path)


def test_a_row_of_nanogpt_is_a_row_of_uint16_whatever_its_numbers(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for vocab in (2, 5, 200, 65, 50_257, 65_536):
        row = random.integers(0, vocab, 1000).astype(np.uint16)
        row.tofile(tmp_path / "train.bin")
        for known in (vocab, 50_304, 100_000):
            assert map_tokens(tmp_path / "train.bin", vocab=known).tolist() == row.tolist()
    np.zeros(64, np.uint16).tofile(tmp_path / "train.bin")
    assert map_tokens(tmp_path / "train.bin").tolist() == [0] * 64


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_wider_tokens_are_told_by_a_large_vocabulary_and_refused_with_the_key_by_a_small_one(
    tmp_path: Path, dtype: str
) -> None:
    np.array(LARGE, dtype).tofile(tmp_path / "train.bin")
    for vocab in (128_256, 100_000):  # it may know fewer: that is refused as such
        row = map_tokens(tmp_path / "train.bin", vocab=vocab)
        assert (row.tolist(), row.dtype.name) == (LARGE, dtype)
    with pytest.raises(DataError, match="has token 128000 to train on"):
        load(Data(source=str(tmp_path / "train.bin"), held_out=0.0), 4, 100_000)
    small = np.array([3, 300, 50_000, 7, 256] * 20, dtype)
    small.tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=f"tokens of {dtype}; .*data.dtype = '{dtype}'"):
        map_tokens(tmp_path / "train.bin", vocab=50_257)
    data = Data(source=str(tmp_path / "train.bin"), held_out=0.0, dtype=dtype)
    assert load(data, 4, 50_257).training[0].tolist() == small.tolist()
    assert len(map_tokens(tmp_path / "train.bin", dtype="uint16")) > len(small)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_masked_tokens_are_told_by_their_sign(tmp_path: Path, dtype: str) -> None:
    row = np.array([~300, ~7, 5, 60_000] * 20, dtype)
    row.tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=f"data.dtype = '{dtype}'"):
        map_tokens(tmp_path / "train.bin")
    assert map_tokens(tmp_path / "train.bin", vocab=100_000).tolist() == row.tolist()


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
@pytest.mark.parametrize("vocab", [50_257, 128_256])
def test_wider_tokens_that_are_cut_off_are_no_narrower_ones(
    tmp_path: Path, dtype: str, vocab: int
) -> None:
    path = tmp_path / "train.bin"
    for cut in (2, 4, 6) if dtype == "int64" else (2,):
        path.write_bytes(np.array(LARGE, dtype).tobytes()[:-cut])
        with pytest.raises(DataError, match=dtype):
            map_tokens(path, vocab=vocab)


def test_a_header_of_llm_c_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(of_llm_c([1, 2], 20240520, 2, "uint16"))
    with pytest.raises(DataError, match="in a header of version 2 that is not known; expected ver"):
        map_tokens(path)


def test_a_token_behind_a_header_is_counted_without_it(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(of_llm_c([1, 2, 3, 4, 999, 6], 20240520, 1, "uint16"))
    with pytest.raises(DataError, match=r"at byte 1032 of .*train.bin .token 4 from 0."):
        load(Data(source=str(path), held_out=0.0), 2, 100)


def of_numpy(tokens: list[int]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(tokens, np.uint16))
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (of_numpy([1, 2, 3]), "begins as an array of NumPy's"),
        (b"PK\x03\x04" + bytes(8), "begins as a zip file"),
        (b"PAR1" + bytes(8), "begins as a Parquet file, which axrt prepare reads"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 0, 0), "begins as an index of Megatron"),
    ],
)
def test_what_begins_as_another_format_is_refused_unless_its_type_is_said(
    tmp_path: Path, content: bytes, text: str
) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{text}.*; expected tokens and nothing else.*data.dtype"):
        map_tokens(path)
    assert len(map_tokens(path, dtype="uint8")) == len(content)


def test_an_index_says_more_than_a_key(tmp_path: Path) -> None:
    from .test_tokens import write_megatron

    write_megatron(tmp_path / "train.bin", [[1, 2], [3]])
    assert map_tokens(tmp_path / "train.bin", dtype="int32").tolist() == [1, 2, 3]
    with pytest.raises(DataError, match="says tokens of int32, and data.dtype is 'uint8'"):
        map_tokens(tmp_path / "train.bin", dtype="uint8")
