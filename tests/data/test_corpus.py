"""Text becomes tokens to train on and tokens held out."""

from pathlib import Path

import numpy as np
import pytest

from axrt import DataError
from axrt.config import Data
from axrt.data.corpus import check_prepared, identities, load
from axrt.data.prepared import Prepared, lost_tokenizer
from axrt.data.tokens import index_of


def test_a_directory_is_split_by_file_and_the_split_depends_on_names(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_bytes(bytes([number]) * 10)
    (tmp_path / "other.bin").write_bytes(b"\xff" * 10)
    corpus = load(Data(source=str(tmp_path), files="*.txt", held_out=0.3), context=4)
    training, held_out = set(corpus.training[0].tolist()), set(corpus.held_out[0].tolist())
    assert training | held_out == set(range(40))
    assert not training & held_out
    assert 4 <= len(held_out) <= 20


def test_the_directory_where_one_is_is_a_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"a" * 20)
    assert len(load(Data(source=".", held_out=0), context=4).training[0]) == 20


def test_a_directory_of_two_files_holds_one_out(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 20)
    (tmp_path / "b").write_bytes(b"b" * 20)
    corpus = load(Data(source=str(tmp_path), held_out=0.01), context=4)
    assert (len(corpus.training[0]), len(corpus.held_out[0])) == (20, 20)


def test_one_file_holds_its_end_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    corpus = load(Data(source=str(tmp_path / "a.txt"), held_out=0.1), context=4)
    assert corpus.held_out[0].tolist() == list(range(90, 100))


def test_the_standard_library_is_there() -> None:
    corpus = load(Data(), context=128)
    assert len(corpus.training[0]) > 10 * len(corpus.held_out[0]) > 100_000


@pytest.mark.parametrize(
    ("name", "held_out", "text"),
    [
        ("nowhere.txt", 0.1, "nowhere.txt: No such file or directory"),
        ("empty", 0.1, "no file of data.source = .*empty. matches data.files"),
        ("short.txt", 0.0, "has 3 tokens to train on; expected more than model.context = 8"),
        ("long.txt", 0.1, "has 2 tokens held out; expected more than model.context = 8"),
    ],
)
def test_missing_empty_and_short_data_is_refused(
    tmp_path: Path, name: str, held_out: float, text: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "long.txt").write_text("abcdefghijklmnopqrst")
    with pytest.raises(DataError, match=text):
        load(Data(source=str(tmp_path / name), held_out=held_out), context=8)


def test_tokens_that_the_model_does_not_know_and_patterns_outside_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.bin").write_text("abcdefghijklmnopqrst")
    of_bytes = Data(source=str(tmp_path / "text.bin"), held_out=0, dtype="uint8")
    with pytest.raises(
        DataError,
        match="has token 116 to train on at byte 19 of .*; expected 0 or more and less than model",
    ):
        load(of_bytes, context=4, vocab=100)
    with pytest.raises(DataError, match="expected a pattern inside data.source"):
        load(Data(source=str(tmp_path), files="/etc/*"), context=4)


def test_what_to_validate_on_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 20)
    (tmp_path / "b.txt").write_bytes(b"b" * 9)
    corpus = load(
        Data(source=str(tmp_path / "a.txt"), validation=str(tmp_path / "b.txt")), context=4
    )
    assert (len(corpus.training[0]), set(corpus.held_out[0].tolist())) == (20, {98})
    with pytest.raises(
        DataError,
        match="data.validation = .* has 9 tokens held out; expected more than model.context = 16",
    ):
        load(Data(source=str(tmp_path / "a.txt"), validation=str(tmp_path / "b.txt")), context=16)


def prepared(folder: Path, name: str, tokenizer: bytes = b"") -> str:
    """A token file as `axrt prepare` leaves it, with a tokenizer in a file or of bytes."""
    tokens = folder / f"{name}.bin"
    np.arange(40, dtype=np.uint16).tofile(tokens)
    index = index_of(np.dtype(np.uint16), np.array([40], np.int64))
    tokens.with_suffix(".idx").write_bytes(index)
    of_tokenizer = f"{name}.tokenizer.json" if tokenizer else "bytes"
    if tokenizer:
        (folder / of_tokenizer).write_bytes(tokenizer)
    Prepared(of_tokenizer, 256, 0, 40, 1, {}).write(tokens)
    return str(tokens)


def test_token_files_of_two_tokenizers_are_refused_and_both_are_named(tmp_path: Path) -> None:
    one, same, other, of_bytes = (
        prepared(tmp_path, name, tokenizer)
        for name, tokenizer in (("a", b"{1}"), ("b", b"{1}"), ("c", b"{2}"), ("d", b""))
    )
    (tmp_path / "theirs.bin").write_bytes(bytes(80))
    theirs = str(tmp_path / "theirs.bin")
    load(Data(source=(one, theirs, same), validation=same), context=4)
    for second in (other, of_bytes):
        with pytest.raises(
            DataError,
            match=r"data.source = .*a.bin' is of the tokenizer '.*a.tokenizer.json' \(256 tokens\)"
            r", and data.validation = .*[cd].bin' of '(.*c.tokenizer.json|bytes)' .*expected one",
        ):
            load(Data(source=one, validation=(theirs, second)), context=4)
    with pytest.raises(DataError, match=r"and data.source = .*d.bin' of 'bytes'"):
        check_prepared(Data(source=(one, theirs, of_bytes)), 256)


def test_an_index_that_was_lost_is_missed_and_a_tokenizer_too(tmp_path: Path) -> None:
    """Without its index a file would be read as a row of uint16, whatever it is."""
    one = prepared(tmp_path, "a", b"{1}")
    assert lost_tokenizer(Data(source=one)) == ""
    (tmp_path / "a.tokenizer.json").unlink()
    assert f"{tmp_path}/a.tokenizer.json, is not there" in lost_tokenizer(Data(source=one))
    (tmp_path / "a.idx").unlink()
    with pytest.raises(DataError, match=r"a.idx: no such file; expected it beside .*a.bin"):
        check_prepared(Data(source=one), 256)


def test_text_has_tokens_up_to_255() -> None:
    with pytest.raises(DataError, match="text as bytes has tokens up to 255; set model.vocab = 2"):
        check_prepared(Data(source="text.txt"), 200)


def test_data_are_told_apart_by_content_wherever_they_lie_and_large_files_are_not_read(
    tmp_path: Path,
) -> None:
    large, other = tmp_path / "large.bin", tmp_path / "there" / "large.bin"
    other.parent.mkdir()
    for path in (large, other):
        with path.open("wb") as file:
            file.truncate(1 << 40)  # a hole: of the size of a real one, and of no bytes
    before = identities(Data(source=(str(large), str(other))))
    assert before[str(large)] == before[str(other)]
    with large.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"1")
    assert identities(Data(source=str(large))) != {str(large): before[str(large)]}


def test_a_directory_is_told_apart_by_names_and_content_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    data = Data(source=str(tmp_path), files="*.txt")
    found = [identities(data)]
    (tmp_path / "other").write_text("not one of them")
    assert identities(data) == found[0]
    (tmp_path / "a.txt").write_text("test")
    found.append(identities(data))
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    found.append(identities(data))
    assert len({of[str(tmp_path)] for of in found}) == 3
