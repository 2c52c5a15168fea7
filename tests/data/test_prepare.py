"""Text of every kind becomes token files, whatever is killed on the way."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
import tokenizers
from click.testing import CliRunner
from numpy.typing import NDArray

from axrt.cli import main
from axrt.config import Data
from axrt.data.bundles import bundles_of
from axrt.data.corpus import load
from axrt.data.documents import Piece, files_of, parts_of, pieces_of
from axrt.data.preparation import Order
from axrt.data.prepare import prepare
from axrt.data.prepared import Prepared
from axrt.data.tokenizer import tokenizer_of, train_tokenizer
from axrt.data.tokens import map_tokens
from axrt.errors import ConfigError, DataError

TEXTS = [
    f"document {number}: " + "words and wörds, " * (number % 7) + "ä€\n" for number in range(300)
]


def json_lines(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": t}) + "\n" for n, t in enumerate(texts)))
    return path


def arrays_of(tokens: Path) -> list[NDArray[Any]]:
    """The documents of a token file, by Megatron's definition of its index."""
    data = tokens.with_suffix(".idx").read_bytes()
    number = int(np.frombuffer(data, np.int64, 1, 18)[0])
    lengths = np.frombuffer(data, np.int32, number, 34)
    pointers = np.frombuffer(data, np.int64, number, 34 + 4 * number)
    ends = np.frombuffer(data, np.int64, number + 1, 34 + 12 * number)
    row = map_tokens(tokens)
    assert list(ends) == list(range(number + 1))
    assert lengths.sum() == len(row)
    begins = pointers // row.dtype.itemsize
    return [row[b : b + n] for b, n in zip(begins, lengths, strict=True)]


def documents_of(tokens: Path) -> list[list[int]]:
    return [document.tolist() for document in arrays_of(tokens)]


def as_bytes(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), 0] for text in texts]


@pytest.mark.parametrize("piece_bytes", [700, 1 << 20])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset", "arrow file"])
def test_every_row_is_a_document(tmp_path: Path, kind: str, piece_bytes: int) -> None:
    source = tmp_path / "in"
    source.mkdir()
    table = pyarrow.table({"text": TEXTS, "other": list(range(len(TEXTS)))})
    if kind == "jsonl":
        json_lines(source / "a.jsonl")
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, source / "a.parquet", row_group_size=70)
    elif kind == "dataset":  # as `datasets` saves one: a stream, and what is told of it
        (source / "dataset_info.json").write_text("{}")
        (source / "state.json").write_text("{}")
        with pyarrow.ipc.new_stream(source / "data-00000-of-00001.arrow", table.schema) as file:
            file.write_table(table, 70)
    else:
        with pyarrow.ipc.new_file(source / "a.arrow", table.schema) as file:
            file.write_table(table, 70)
    order = Order(tmp_path / "out", (str(source),), "bytes", piece_bytes=piece_bytes)
    found = prepare(order, 2)
    assert documents_of(tmp_path / "out.bin") == as_bytes(TEXTS)
    assert found[""].documents == len(TEXTS)
    assert not order.partial.exists()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_prompt_is_masked_and_trained_on(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n} and {n}? ", "text": f"{2 * n}"} for n in range(200)]
    if kind == "jsonl":
        Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "in.parquet")
    told = CliRunner().invoke(
        main, ["prepare", f"in.{kind}", "--out", "out", "--prompt-field", "question"]
    )
    assert told.exit_code == 0, told.output
    assert "data.masked=true" in told.output
    assert documents_of(Path("out.bin")) == [
        [*(~byte for byte in row["question"].encode()), *row["text"].encode(), 0] for row in rows
    ]
    keys = ["data.source=out.bin", "model.context=16", "model.width=8", "model.layers=1"]
    train = ["train", "x.toml", *keys, "run.steps=2", "run.device=cpu", "run.out=run"]
    Path("x.toml").write_text("[model]\nheads = 1\n")
    refused = CliRunner().invoke(main, train)
    assert refused.exit_code == 2
    assert "or data.masked = true where axrt prepare was given --prompt-field" in refused.output
    done = CliRunner().invoke(main, [*train, "data.masked=true", "data.document_end=0"])
    assert done.exit_code == 0, done.output
    loss = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])["val_loss"]
    assert 5 < loss < 6, "a mean over what counts: about log 256"


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("piece_bytes", [1, 97, 5000, 1 << 20])
def test_a_text_file_is_one_document_however_it_is_cut(
    tmp_path: Path, piece_bytes: int, end: str
) -> None:
    texts = ["one\n\nline ä\n" * 40 + end, "a single line" + end, "" + end * 3]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    sources = tuple(str(tmp_path / f"{number}.txt") for number in range(3))
    if piece_bytes == 1:  # each byte is a piece of its own: without processes
        pieces = list(pieces_of(files_of(sources), piece_bytes))
        parts = [part for piece in pieces for part in parts_of(piece) if part]
        assert "".join(part.text for part in parts) == "".join(texts)
        assert sum(part.is_end for part in parts) == sum(map(bool, texts))
        return
    prepare(Order(tmp_path / "out", sources, "bytes", piece_bytes=piece_bytes), 1)
    assert documents_of(tmp_path / "out.bin") == as_bytes([text for text in texts if text])


def test_a_tokenizer_of_the_field_gives_its_own_tokens_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(TEXTS, 400, path)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    end = theirs.token_to_id("<|endoftext|>")
    order = Order(tmp_path / "out", (str(json_lines(tmp_path / "a.jsonl")),), str(path))
    found = prepare(order, 2)[""]
    expected = [[*theirs.encode(text).ids, end] for text in TEXTS]
    assert documents_of(tmp_path / "out.bin") == expected
    assert (found.vocab, found.end) == (theirs.get_vocab_size(), end)
    beside = Prepared.beside(tmp_path / "out.bin")
    assert beside is not None
    assert Path(beside.tokenizer).read_bytes() == path.read_bytes()


def test_the_name_of_a_special_token_is_text_in_a_document_and_the_token_in_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = tmp_path / "tokenizer.json", "one <|endoftext|> two"
    train_tokenizer(TEXTS, 300, path)
    single = {bytes([byte]): byte for byte in range(256)}
    end = {"<|endoftext|>": 256}
    theirs = tiktoken.Encoding("x", pat_str=r".", mergeable_ranks=single, special_tokens=end)
    monkeypatch.setattr(tiktoken, "get_encoding", {"x": theirs}.__getitem__)
    for tokenizer in (tokenizer_of(str(path)), tokenizer_of("tiktoken:x")):
        plain, special = tokenizer.encode([text])[0], tokenizer.encode([text], specials=True)[0]
        assert tokenizer.end not in plain
        assert tokenizer.end in special
        shown = tokenizer.decoder()
        assert "".join(shown(int(token)) for token in plain) == text


def test_many_tokens_take_four_bytes_each(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(70_000)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    theirs = tokenizers.Tokenizer(model)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    theirs.save(str(tmp_path / "tokenizer.json"))
    source = json_lines(tmp_path / "a.jsonl", ["w69999 w1", "w65536"])
    prepare(Order(tmp_path / "out", (str(source),), str(tmp_path / "tokenizer.json")), 1)
    assert documents_of(tmp_path / "out.bin") == [[69999, 1], [65536]]


def of_words(path: Path, words: dict[str, int], **beside: object) -> tokenizers.Tokenizer:
    """A tokenizer that knows words by number, and files of Hugging Face's beside it."""
    theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path.parent.mkdir(exist_ok=True)
    theirs.save(str(path))
    for name, content in beside.items():
        path.with_name(f"{name}.json").write_text(json.dumps(content))
    return theirs


@pytest.mark.parametrize("largest", [255, 300, 70_000])
def test_a_tokenizer_with_gaps_in_its_numbers_is_as_large_as_its_largest(
    tmp_path: Path, largest: int
) -> None:
    """Their count was once taken for the size: 300 was written as 44."""
    of_words(tmp_path / "tokenizer.json", {"w0": 0, "w1": 17, "w2": largest})
    source = json_lines(tmp_path / "a.jsonl", ["w1 w2", "w2 w2 w0"])
    order = Order(tmp_path / "out", (str(source),), str(tmp_path / "tokenizer.json"))
    assert prepare(order, 1)[""].vocab == largest + 1
    assert documents_of(tmp_path / "out.bin") == [[17, largest], [largest, largest, 0]]
    corpus = load(Data(source=str(tmp_path / "out.bin"), held_out=0.0), 2, largest + 1)
    assert int(corpus.training[0].max()) == largest
    with pytest.raises(DataError, match=f"expected model.vocab = {largest + 1}"):
        load(Data(source=str(tmp_path / "out.bin"), held_out=0.0), 2, largest)


def test_what_was_made_when_a_tokenizer_had_other_numbers_is_not_taken_for_the_same(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokenizer.json"
    of_words(path, {"w0": 0, "w1": 300, "</s>": 7})
    order = Order(tmp_path / "out", (str(json_lines(tmp_path / "a.jsonl", ["w1"])),), str(path))
    prepare(order, 1)
    prepare(order, 1)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "w0"}')
    with pytest.raises(DataError, match=r"301 tokens, and 7 behind .* has 301, and 0\..*--force"):
        prepare(order, 1)
    assert prepare(order, 1, force=True)[""].end == 0
    assert documents_of(tmp_path / "out.bin") == [[300, 0]]


def test_one_that_was_begun_with_another_end_is_not_gone_on_with(tmp_path: Path) -> None:
    """Bundles that were done would have kept the former one."""
    path = tmp_path / "tokenizer.json"
    of_words(path, {"w0": 0, "w1": 300, "</s>": 7})
    source = tmp_path / "in"
    source.mkdir()
    json_lines(source / "a.jsonl", ["w1 " * 400_000])  # a bundle of its own, which gets done
    (source / "b.jsonl").write_text("no json")
    order = Order(tmp_path / "out", (str(source),), str(path))
    with pytest.raises(DataError):
        prepare(order, 1)
    assert order.plan.exists()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "w0"}')
    with pytest.raises(ConfigError, match=r"begun otherwise: tokens .*'end': 7.*'end': 0"):
        prepare(order, 1)


def test_a_tokenizer_that_was_kept_has_the_end_that_its_tokens_have(tmp_path: Path) -> None:
    path = tmp_path / "theirs" / "tokenizer.json"
    of_words(path, WORDS, tokenizer_config={"eos_token": "</s>"})
    source = str(json_lines(tmp_path / "a.jsonl", ["w0 w1"] * 9))
    for name, tokenizer, end in (
        ("one", str(path), ""),
        ("two", str(tmp_path / "one.tokenizer.json"), ""),
        ("other", str(path), "w1"),
    ):
        prepare(Order(tmp_path / name, (source,), tokenizer, end=end), 1)
    one, two, other = (str(tmp_path / f"{name}.bin") for name in ("one", "two", "other"))
    load(Data(source=(one, two), held_out=0.0), 2, 5)
    with pytest.raises(DataError, match=r"has token 2 behind each document, .* token 1; expect"):
        load(Data(source=one, validation=other), 2, 5)


WORDS = {"w0": 0, "w1": 1, "</s>": 2, "<|im_end|>": 3, "<|endoftext|>": 4}


@pytest.mark.parametrize(
    ("beside", "end"),
    [
        ({}, 4),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, 3),
        ({"tokenizer_config": {"eos_token": {"content": "</s>", "lstrip": False}}}, 2),
        ({"generation_config": {"eos_token_id": [3, 4]}}, 3),
        ({"special_tokens_map": {"eos_token": "</s>"}}, 2),
        ({"tokenizer_config": {}, "special_tokens_map": {"eos_token": "</s>"}}, 2),
        ({"tokenizer_config": {"eos_token": "unheard of"}}, 4),
        (
            {"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": 3}},
            2,
        ),
    ],
)
def test_the_end_of_a_document_is_the_one_that_the_tokenizer_names(
    tmp_path: Path, beside: dict[str, object], end: int
) -> None:
    path = tmp_path / "theirs" / "tokenizer.json"
    of_words(path, WORDS, **beside)
    assert tokenizer_of(str(path)).end == end
    assert tokenizer_of(str(path), "w1").end == 1
    with pytest.raises(ConfigError, match="has no token '<eos>'; expected the text of one"):
        tokenizer_of(str(path), "<eos>")
    with pytest.raises(ConfigError, match="expected none with bytes, where it is the byte 0"):
        tokenizer_of("bytes", "x")


def test_an_end_may_be_named_and_where_there_is_none_that_is_said(tmp_path: Path) -> None:
    of_words(tmp_path / "tokenizer.json", {"w0": 0, "w1": 1, "|": 2})
    json_lines(tmp_path / "a.jsonl", ["w1 w1", "w0"])
    sources = [str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    common = ["prepare", *sources, "--processes", "1"]
    none = CliRunner().invoke(main, [*common, "--out", str(tmp_path / "none")])
    assert "has no token for the end of a document, so nothing stands behind one" in none.output
    assert documents_of(tmp_path / "none.bin") == [[1, 1], [0]]
    named = CliRunner().invoke(main, [*common, "--end", "|", "--out", str(tmp_path / "named")])
    assert "data.document_end=2 keeps documents apart" in named.output
    assert documents_of(tmp_path / "named.bin") == [[1, 1, 2], [0, 2]]
    broken = tmp_path / "tokenizer_config.json"
    broken.write_text("[1")
    again = CliRunner().invoke(main, [*common, "--out", str(tmp_path / "broken")])
    assert again.exit_code == 2
    assert "tokenizer_config.json: " in again.output
    both = CliRunner().invoke(
        main, ["prepare", "a", "--out", "b", "--end", "|", "--train-tokenizer", "300"]
    )
    assert "--end | and --train-tokenizer, whose end is <|endoftext|>" in both.output


@pytest.mark.parametrize("text", ["a\0b", "\0", "ä\0\0€", "plain"])
def test_a_zero_in_a_text_of_bytes_ends_no_document(text: str) -> None:
    tokenizer = tokenizer_of("bytes")
    tokens = tokenizer.encode([text])[0]
    assert 0 not in tokens
    shown = tokenizer.decoder()
    assert "".join(shown(int(token)) for token in tokens) == text
    garbled = tokenizer.decoder()
    assert "".join(map(garbled, [0xC0, 0x41, 0xC0, 0xC0, 0x80, 300])) == "\ufffdA\ufffd\0\ufffd"


@pytest.mark.parametrize("piece_bytes", [97, 1 << 20])
def test_where_the_lot_leaves_a_part_with_nothing_the_end_of_all_is_held_out(
    tmp_path: Path, piece_bytes: int
) -> None:
    """One document is in one part or the other, whatever its name."""
    path, text = tmp_path / "book.txt", "".join(f"line {n} ä\n" for n in range(90))
    path.write_text(text)
    whole = [*text.encode(), 0]
    order = Order(tmp_path / "out", (str(path),), "bytes", held_out=0.1, piece_bytes=piece_bytes)
    found = prepare(order, 1)
    training, held_out = (documents_of(tmp_path / f"out{part}.bin") for part in ("", "-held-out"))
    assert [*training[0], *held_out[0]] == whole
    assert len(training) == len(held_out) == 1
    assert found["-held-out"].tokens == len(held_out[0]) == len(whole) // 10
    assert found[""].tokens + found["-held-out"].tokens == len(whole)


def test_no_file_without_tokens_is_recommended(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    told = CliRunner().invoke(
        main,
        ["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--held-out", "0.1"],
    )
    assert told.exit_code == 0
    assert "0.1 of so few tokens is none: nothing is held out" in told.output
    assert "data.validation" not in told.output


def test_documents_are_held_out_by_their_names(tmp_path: Path) -> None:
    source = str(json_lines(tmp_path / "a.jsonl"))
    found = [
        prepare(Order(tmp_path / out, (source,), "bytes", held_out=0.2, piece_bytes=size), 1)
        for out, size in (("one", 1 << 20), ("two", 900))
    ]
    assert [of["-held-out"].documents for of in found] == [found[0]["-held-out"].documents] * 2
    assert 30 < found[0]["-held-out"].documents < 90
    for part in ("", "-held-out"):
        one, two = (documents_of(tmp_path / f"{out}{part}.bin") for out in ("one", "two"))
        assert one == two
    both = [d for part in ("", "-held-out") for d in documents_of(tmp_path / f"one{part}.bin")]
    assert sorted(both) == sorted(as_bytes(TEXTS))


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "axrt", "prepare", *arguments, "--out", str(folder / "out")]


def test_a_killed_one_goes_on_where_it_was_and_leaves_no_process(tmp_path: Path) -> None:
    texts = [f"{number} " + "some more words " * 2000 for number in range(2300)]
    source = str(json_lines(tmp_path / "a.jsonl", texts))
    assert Path(source).stat().st_size > 1 << 26, "two pieces at least"
    begun = subprocess.Popen(
        command(tmp_path, source, "--processes", "2"), stderr=subprocess.DEVNULL
    )
    partial, deadline = tmp_path / "out.partial", time.monotonic() + 60
    while not list(partial.glob("0*.json")):
        assert begun.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    workers = psutil.Process(begun.pid).children(recursive=True)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    done = {path: path.stat().st_mtime_ns for path in partial.glob("0*.json")}
    if not (tmp_path / "out.bin").exists():
        order = Order(tmp_path / "out", (source,), "bytes")
        times: list[dict[Path, int]] = []

        def told(progress: Any) -> None:
            times.append({path: path.stat().st_mtime_ns for path in done})

        prepare(order, 2, told)
        assert times[-1] == done, "what was done was not done again"
    found = arrays_of(tmp_path / "out.bin")  # as lists they would take a gigabyte
    assert [document.astype(np.uint8).tobytes() for document in found] == [
        text.encode() + b"\0" for text in texts
    ]


def test_what_was_begun_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl")
    order = Order(tmp_path / "out", (str(source),), "bytes")
    order.partial.mkdir()
    (order.partial / "order.json").write_text(json.dumps(order.made_of()))
    json_lines(source, TEXTS[:9])
    said = r"out.partial was begun otherwise: .*a.jsonl has changed; .*Add --force to begin anew"
    with pytest.raises(ConfigError, match=said):
        prepare(order, 1)
    assert prepare(order, 1, force=True)[""].documents == 9


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "line 3 is no JSON .*character 10.*byte 15$"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"test": "b"}\n',
            "line 2 has no 'text'; .*--skip-empty, which",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": null}\n',
            "line 2 has null for 'text'; .*--skip-empty",
        ),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2 is list; expected a JSON object"),
        ("a.jsonl", b'{"text": 3}\n', "line 1 has int for 'text'; expected text"),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1 is no UTF-8 at its byte 10"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n3\n', mtime=0),
            "a.jsonl.gz: line 2 is int; .*; that line begins at byte 14 of the unpacked file",
        ),
        (
            "a.txt.gz",
            gzip.compress(b"some text", mtime=0)[:-9],
            "a.txt.gz: .*end-of-stream.*readable file",
        ),
        ("a.txt.gz", b"some text", "a.txt.gz: Not a gzipped file"),
        ("a.parquet.gz", b"", "a.parquet.gz: a table in a .gz is not read; .*unpacked"),
        ("a.jsonl.zst", b"", "a.jsonl.zst: .* not read; expected .gz, or the file unpacked"),
        ("a.txt", b"all \xff well\n", "a.txt: byte 4 is no UTF-8"),
        ("a.parquet", b"PAR1 and more", "a.parquet: .*expected a table that pyarrow reads"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(
    tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said):
        prepare(Order(tmp_path / "out", (str(tmp_path / name),), "bytes"), 1)
    assert os.listdir(tmp_path) == [name], "nothing was done that could be gone on with"


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_what_gzip_has_compressed_gives_the_same_tokens(tmp_path: Path, name: str) -> None:
    path = json_lines(tmp_path / name)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    for source, out in ((name, "plain"), (f"{name}.gz", "packed")):
        prepare(Order(tmp_path / out, (str(tmp_path / source),), "bytes", piece_bytes=900), 1)
    assert documents_of(tmp_path / "packed.bin") == documents_of(tmp_path / "plain.bin")
    assert len(documents_of(tmp_path / "plain.bin")) == (1 if name == "a.txt" else len(TEXTS))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_without_text_are_left_out_and_counted_where_that_is_asked_for(
    tmp_path: Path, kind: str
) -> None:
    source, rows = tmp_path / f"a.{kind}", [{"text": t} for t in ("a", None, "", "b", None)]
    if kind == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"other": 3}]))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    command = ["prepare", str(source), "--out", str(tmp_path / "out"), "--skip-empty"]
    told = CliRunner().invoke(main, command)
    assert told.exit_code == 0, told.output
    assert f"left out: {4 if kind == 'jsonl' else 3}\n" in told.output
    assert documents_of(tmp_path / "out.bin") == as_bytes(["a", "b"])


def test_a_field_that_no_row_has_is_an_error_whatever_is_left_out(tmp_path: Path) -> None:
    source = str(json_lines(tmp_path / "a.jsonl", TEXTS[:3]))
    order = Order(tmp_path / "out", (source,), "bytes", "body", skip_empty=True)
    with pytest.raises(DataError, match=r"none of 3 rows has text in 'body'; .*another --field"):
        prepare(order, 1)


def test_small_files_are_one_piece_of_work_and_large_ones_are_by_themselves() -> None:
    small = [Piece(f"{number}.txt", 0, 10, 10) for number in range(600)]
    large = [Piece("large", at, at + 1, 1 << 22) for at in range(2)]
    pieces = [*small[:2], *large, *small[2:]]
    bundles = list(bundles_of(pieces))
    assert [piece for bundle in bundles for piece in bundle] == pieces
    assert [len(bundle) for bundle in bundles] == [2, 1, 1, 256, 256, 86]


def test_what_an_error_leaves_can_be_gone_on_with(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.txt").write_text("text")
    (tmp_path / "299.txt").write_bytes(b"\xff")
    order = Order(tmp_path / "out", tuple(map(str, sorted(tmp_path.glob("*.txt")))), "bytes")
    with pytest.raises(DataError, match="299.txt: byte 0 is no UTF-8"):
        prepare(order, 1)
    done = ["000000.bin", "000000.json", "000000.npy", "order.json"]
    assert sorted(os.listdir(order.partial)) == done


def test_ctrl_c_ends_all_processes_at_once_with_a_line(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    words = np.random.default_rng(0).integers(97, 123, (1 << 21, 12), np.uint8)
    words[:, 11] = 10
    source.write_bytes(words.tobytes())  # no word twice: a tokenizer of them takes minutes
    begun = subprocess.Popen(
        command(tmp_path, str(source), "--processes", "2", "--train-tokenizer", "9999"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert begun.stderr
    assert "a tokenizer of 9,999 tokens is made from" in begun.stderr.readline()
    while len(workers := psutil.Process(begun.pid).children(recursive=True)) < 2:
        time.sleep(0.005)  # the worker, and what keeps track of semaphores
    for worker in workers:
        worker.send_signal(signal.SIGINT)
    time.sleep(0.3)
    os.killpg(begun.pid, signal.SIGINT)  # as a terminal does
    said = begun.communicate(timeout=60)
    assert said == ("", "axrt: interrupted; the same command goes on\n")
    assert begun.returncode == 130
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert os.listdir(tmp_path) == ["a.txt"]


def test_one_tokenizer_is_asked_for(tmp_path: Path) -> None:
    source, out = str(json_lines(tmp_path / "a.jsonl")), str(tmp_path / "out")
    both = ["--train-tokenizer", "300", "--tokenizer", "bytes"]
    told = CliRunner().invoke(main, ["prepare", source, "--out", out, *both])
    assert told.exit_code == 2
    assert "--tokenizer bytes and --train-tokenizer, which makes another one" in told.output
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_tokenizer_is_not_begun_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    source = str(json_lines(tmp_path / "a.jsonl"))
    wanted = ["prepare", source, "--out", str(tmp_path / "out"), "--train-tokenizer", "300"]
    told = CliRunner().invoke(main, wanted)
    assert told.exit_code == 2
    assert told.output.startswith("axrt: tokenizers is not installed; expected it")
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    table = pyarrow.table({"body": ["a"], "other": [1]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    order = Order(tmp_path / "out", (str(tmp_path / "a.parquet"),), "bytes")
    with pytest.raises(DataError, match="has no column 'text'; expected one of body, other"):
        prepare(order, 1)
    assert (
        prepare(Order(order.out.with_name("b"), order.sources, "bytes", "body"), 1)[""].tokens == 2
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.txt",), "nowhere.txt: no file there"),
        (("a.txt", "--tokenizer", "words"), "tokenizer 'words'; expected 'bytes', the path"),
        (("a.txt", "--tokenizer", "no.json"), "no.json: .*expected a JSON file of Hugging Face's"),
        (("a.txt", "--tokenizer", "tiktoken:nope"), "tiktoken:nope: "),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a")
    result = CliRunner().invoke(main, ["prepare", *arguments, "--out", "out"])
    assert result.exit_code != 0
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert re.search(said, result.stderr), result.stderr
    assert os.listdir() == ["a.txt"]


def test_a_trained_model_speaks_text_wherever_its_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    json_lines(Path("a.jsonl"))
    prepared = CliRunner().invoke(
        main, ["prepare", "a.jsonl", "--out", "data/c", "--train-tokenizer", "300"]
    )
    assert prepared.exit_code == 0, prepared.output
    vocab = Prepared.beside(Path("data/c.bin")).vocab  # type: ignore[union-attr]
    assert f"model.vocab={vocab}" in prepared.output
    settings = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16"]
    settings += [
        "data.source=data/c.bin",
        "run.steps=3",
        "run.out=run",
        "schedule.microbatches=2",
    ]
    Path("t.toml").write_text("")
    train = ["train", "t.toml", *settings]
    result = CliRunner().invoke(main, train)
    assert result.exit_code != 0
    assert f"expected model.vocab = {vocab}" in result.output
    assert not Path("run").exists()
    assert CliRunner().invoke(main, [*train, f"model.vocab={vocab}"]).exit_code == 0
    Path("data/c.tokenizer.json").rename("data/away.json")
    warned = CliRunner().invoke(main, [*train, f"model.vocab={vocab}", "run.out=mute"])
    assert "the tokenizer of the data, data/c.tokenizer.json, is not there" in warned.stderr
    Path("run").rename("moved")
    Path("data").rename("gone")
    for path in ("moved", "moved/checkpoints/step-00000003"):
        told = CliRunner().invoke(main, ["generate", path, "--prompt", "wörds", "--tokens", "5"])
        assert told.exit_code == 0, told.output
        assert told.output.startswith("wörds")


def test_sources_without_text_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).touch()
    sources = [str(tmp_path / name) for name in ("one.txt", "two.txt")]
    out = ["--out", str(tmp_path / "out"), "--held-out", "0.1"]
    result = CliRunner().invoke(main, ["prepare", *sources, *out])
    assert result.exit_code == 2
    assert "two.txt holds no text; expected some" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.txt", "two.txt"]


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_pipe_in_place_of_what_is_made_is_refused(tmp_path: Path, end: str) -> None:
    (tmp_path / "a.txt").write_text("some text")
    command = ["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(main, command).exit_code == 0
    (tmp_path / f"out{end}").unlink()
    os.mkfifo(tmp_path / f"out{end}")
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert f"out{end}: it is a pipe; expected the file that was made, or --force" in result.output
