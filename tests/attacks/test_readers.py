"""Every file that axrt reads, damaged in its structure: whatever stands there, its reader takes it
or refuses it in a sentence. It never waits, ends in an error of somebody else's, or takes the
memory that a file asks for."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import tomli_w
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from axrt.checkpoint.durable import digest_of
from axrt.checkpoint.folder import named_latest
from axrt.checkpoint.layers import checked_file
from axrt.checkpoint.lock import DirectoryLock, holder_of
from axrt.checkpoint.manifest import MANIFEST, Manifest
from axrt.checkpoint.memory_run import MemoryRun
from axrt.checkpoint.slices import SliceReader
from axrt.cli import main
from axrt.cli.runs import row_of
from axrt.config import Config
from axrt.data.bundles import Done, Row
from axrt.data.documents import parts_of, pieces_of
from axrt.data.prepared import Prepared
from axrt.data.tokens import index_of, map_tokens
from axrt.deepspeed.settings import read as read_deepspeed
from axrt.deepspeed.settings import settings_of
from axrt.errors import AxrtError
from axrt.hugging_face.files import read_json
from axrt.hugging_face.importing import import_model
from axrt.hugging_face.model_config import model_keys
from axrt.observe.asking import table
from axrt.observe.inspection import Answer, _Question
from axrt.observe.origin import processes_of
from axrt.report.page import page_of
from axrt.report.run_data import RunData
from axrt.restarts.hosts import read_hosts
from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.scheduler.simulation.timeline import Timeline

from ..sweeps import fewer
from .files import CHECKPOINT, inside, prepare

MOST_KIB = 1 << 20  # that the process may grow by
LONGEST = 3000  # characters of a refusal
HANGS_S = 60  # no reader takes a hundredth of it


def said(text: str) -> None:
    assert "\n" not in text


class Reader(NamedTuple):
    """A file, below a folder in which there is all that axrt reads, and what reads it."""

    file: str
    read: Callable[[Path], object]


def report(folder: Path) -> object:
    return page_of(RunData.read(folder / "out", said), None, "")


def watched(folder: Path) -> object:
    ended = CliRunner().invoke(main, ["watch", str(folder / "out")])
    if ended.exception and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.output


def locked(folder: Path) -> None:
    DirectoryLock(folder / "out").release()


def checkpoint_file(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        checkpoint = folder / CHECKPOINT
        path = checkpoint / name
        manifest = Manifest.read(checkpoint)
        if path.is_file():  # as if it had been written like that
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
            manifest.files[name] = {"size_bytes": size, "crc32": "00000000"}
        return checked_file(path, manifest, SliceReader())

    return read


def order(folder: Path) -> object:
    with inside(folder):
        return build_schedule("fixed", 1, 2, order="order.csv")


def tokens(folder: Path) -> object:
    return map_tokens(folder / "tokens.bin").max(initial=0)


def rows(folder: Path) -> object:
    return [part for piece in pieces_of([folder / "rows.jsonl"], 64) for part in parts_of(piece)]


def imported(folder: Path) -> object:
    shutil.rmtree(folder / "imported", ignore_errors=True)
    return import_model(folder / "theirs", folder / "imported")


def answered(folder: Path) -> object:
    answer = Answer.read(folder / "rank-0000")
    return answer and list(table({0: answer}))


READERS = [
    Reader("out/config.toml", lambda folder: Config.read(folder / "out/config.toml")),
    Reader("out/config.toml", report),
    Reader("out/metrics.jsonl", report),
    Reader("out/metrics.jsonl", watched),
    Reader("out/config.toml", watched),
    Reader("out/metrics.jsonl", lambda folder: row_of(folder / "out")),
    Reader("out/starts.jsonl", report),
    Reader("out/starts.jsonl", lambda folder: processes_of(folder / "out")),
    Reader("out/launches.jsonl", report),
    Reader("out/memory.json", report),
    Reader("out/timeline.json", lambda folder: Timeline.read(folder / "out/timeline.json")),
    Reader("out/.lock", locked),
    Reader("out/.lock", lambda folder: holder_of(folder / "out")),
    Reader("out/checkpoints/latest", lambda folder: named_latest(folder / "out/checkpoints")),
    Reader("out/checkpoints/.memory", lambda folder: MemoryRun.read(folder / "out/checkpoints")),
    Reader(f"{CHECKPOINT}/{MANIFEST}", lambda folder: Manifest.read(folder / CHECKPOINT)),
    Reader(f"{CHECKPOINT}/layer-0001.safetensors", checkpoint_file("layer-0001.safetensors")),
    Reader("costs.json", lambda folder: CostTable.read(folder / "costs.json")),
    Reader("order.csv", order),
    Reader("tokens.bin", tokens),
    Reader("tokens.idx", tokens),
    Reader("tokens.json", lambda folder: Prepared.beside(folder / "tokens.bin")),
    Reader("rows.jsonl", rows),
    Reader("done.json", lambda folder: Done.read(folder / "done.json")),
    Reader(
        "deepspeed.json", lambda folder: settings_of(read_deepspeed(folder / "deepspeed.json"), 1)
    ),
    Reader("hosts", lambda folder: read_hosts(folder / "hosts")),
    Reader("theirs/config.json", imported),
    Reader("llama.json", lambda folder: model_keys(read_json(folder / "llama.json"))),
    Reader("theirs/generation_config.json", imported),
    Reader("theirs/model.safetensors", imported),
    Reader("question", lambda folder: _Question.read(folder / "question")),
    Reader("rank-0000", answered),
]
GPT2 = {  # the weights of a model of one block
    "wte.weight": (300, 8),
    "wpe.weight": (8, 8),
    "h.0.attn.c_attn.weight": (8, 24),
    "h.0.attn.c_attn.bias": (24,),
    "h.0.attn.c_proj.weight": (8, 8),
    "h.0.mlp.c_fc.weight": (8, 32),
    "h.0.mlp.c_fc.bias": (32,),
    "h.0.mlp.c_proj.weight": (32, 8),
    **{
        f"{name}.{what}": (8,)
        for name in ("h.0.ln_1", "h.0.ln_2", "ln_f")
        for what in ("weight", "bias")
    },
    **{f"h.0.{name}.c_proj.bias": (8,) for name in ("attn", "mlp")},
}
NAMES = [f"{number}-{reader.file.rpartition('/')[2]}" for number, reader in enumerate(READERS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and every other file that axrt reads."""
    folder = tmp_path_factory.mktemp("all")
    prepare(folder)
    (folder / "out/launches.jsonl").write_text(
        '{"began": "2026-01-02T03:04:05", "took_s": 3.5, "ranks": 2, "hosts": [], "settings": [], '
        '"code": 137, "said": null, "lost": ["a"], "step": 0, "gained": 2}\n'
    )
    MemoryRun("0123456789ab", "01234567").write(folder / "out/checkpoints")
    costs = LayerCosts(1.0, 1.0, 1.0, 8, 8, 0.0)
    (folder / "costs.json").write_text(CostTable({4: (costs, costs)}).to_json())
    Prepared("bytes", 256, None, 400, 2, {"sources": []}).write(folder / "tokens.bin")
    (folder / "rows.jsonl").write_text('{"text": "a b c"}\n{"text": "d", "more": [1, 2]}\n')
    Done((Row(3, 1),), 0).write(folder / "done.json")
    (folder / "deepspeed.json").write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": '
        '{"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}'
    )
    (folder / "hosts").write_text("node-1 slots=2\nnode-2:4\n")
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 8, '
        '"vocab_size": 300, "layer_norm_epsilon": 1e-05, "activation_function": "gelu_new"}'
    )
    (folder / "llama.json").write_text(
        '{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": '
        '1, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "vocab_size": '
        '300, "rms_norm_eps": 1e-06, "intermediate_size": 16, "rope_theta": 5e5, "rope_scaling": '
        '{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, '
        '"original_max_position_embeddings": 32}}'
    )
    (theirs / "generation_config.json").write_text('{"eos_token_id": 2}')
    save_file(
        {name: torch.zeros(shape) for name, shape in GPT2.items()}, theirs / "model.safetensors"
    )
    (folder / "question").write_text('{"stacks": true}')
    (folder / "rank-0000").write_text(
        '{"rank": 0, "size": 1, "host": "a", "pid": 3, "state": "waits", "since_s": 1.5, "task": '
        '"F0.1", "lacks": "a message", "owing": [0], "stacks": {"MainThread": "x"}}'
    )
    index = index_of(np.dtype(np.int32), np.array([150, 250]))
    (folder / "tokens.idx").write_bytes(index)
    return folder


@contextmanager
def within_a_minute(what: str) -> Iterator[None]:
    def hangs(number: int, frame: object) -> None:
        raise AssertionError(f"{what} hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def put_back(file: Path) -> Iterator[None]:
    """Context at whose end a file is what it was."""
    data, mode = file.read_bytes(), stat.S_IMODE(file.stat().st_mode)
    try:
        yield
    finally:
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
        file.write_bytes(data)
        file.chmod(mode)


def taken_or_refused(reader: Reader, folder: Path, what: str) -> str:
    """What a reader refuses a file with; "" where it takes it."""
    with within_a_minute(f"{reader.file}: {what}"):
        try:
            reader.read(folder)
        except (AxrtError, ValueError, OSError) as error:
            told = str(AxrtError(error)) or repr(error)  # as a command shows it
        except BaseException as error:
            error.add_note(f"{reader.file}: {what}")
            raise
        else:
            told = ""
    assert len(told) < LONGEST, f"{reader.file}: {what}: {told[:200]}"
    return told


def a_pipe(file: Path) -> None:
    os.mkfifo(file)


def a_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, inside(file.parent):  # whose path may be no longer
        one.bind(file.name)


def a_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("reader", READERS, ids=NAMES)
@pytest.mark.parametrize("replace", [a_pipe, a_socket, a_device, Path.mkdir])
def test_what_is_no_file_is_waited_for_by_nobody(
    folder: Path, reader: Reader, replace: Callable[[Path], None]
) -> None:
    file = folder / reader.file
    with put_back(file):
        file.unlink()
        replace(file)
        told = taken_or_refused(reader, folder, replace.__name__)
    if told and replace is not Path.mkdir:
        assert re.search("it is a|is a pipe|no file|no config|no regular", told), told


CONTENTS = {
    "nothing": b"",
    "zeros": bytes(5000),
    "no text": bytes(range(128, 256)) * 9,
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "whole deep lists": b"[" * 900 + b"]" * 900,
    "deep keys": b"a" + b".a" * 100_000 + b" = 1\n",
    "deep tables": b"[a" + b".a" * 100_000 + b"]\n",
    "a deep value": b"a = " + b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "a long number": b"1" * 6000,
    "a long number as a value": b'{"step": ' + b"9" * 6000 + b"}\n",
    "a long number in TOML": b"[run]\nsteps = " + b"9" * 6000 + b"\n",
    "a large number": b'{"step": 1e999, "time_s": 1e999}\n',
    "a long line": b'{"step": "' + b"x" * (20 << 20) + b'"}\n',
    "lone surrogates": b'{"step": "\\ud800"}\n',
    "a list": b"[1, 2, 3]\n",
    "a text": b'"text"\n',
    "nothing in JSON": b"null\n",
    "a NUL": b"\0{}\n",
}


@pytest.mark.parametrize("reader", READERS, ids=NAMES)
def test_any_content_is_taken_or_refused(folder: Path, reader: Reader) -> None:
    file = folder / reader.file
    with put_back(file):
        for what, content in CONTENTS.items():
            file.write_bytes(content)
            taken_or_refused(reader, folder, what)


@pytest.mark.parametrize("reader", READERS, ids=NAMES)
def test_memory_is_not_taken_for_what_a_file_says_it_has(folder: Path, reader: Reader) -> None:
    file = folder / reader.file
    if file.name in ("tokens.bin", "rows.jsonl"):  # of any size: they are mapped, or read in parts
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with put_back(file):
        os.truncate(file, 1 << 40)  # without a block on the disk
        taken_or_refused(reader, folder, "a terabyte")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + MOST_KIB


VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    0.5,
    2**63,
    -(2**63),
    10**99,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x" * 10_000,
    "\0",
    "\ud800",
    "../../x",
    [],
    {},
    [None] * 3,
    {"x": [{"x": {}}]},
    [0, 2**63],
]


def places_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values within a value."""
    if isinstance(value, dict | list):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*at, key)
            yield from places_in(inside, (*at, key))


def changed(value: Any, at: tuple[Any, ...], to: Any) -> Any:
    """A value with another one at a place."""
    if not at:
        return to
    copy = value.copy()
    copy[at[0]] = changed(copy[at[0]], at[1:], to)
    return copy


def written(file: Path, value: Any) -> bytes | None:
    """The content of a file with a value; None where its format has none such."""
    try:
        if file.suffix == ".toml":
            return tomli_w.dumps(value).encode()
        text = json.dumps(value).encode()
    except (ValueError, TypeError, AttributeError):
        return None
    if file.name == MANIFEST:  # with a digest that fits
        head, rest = b'{"crc32": "', b'",\n' + text.removeprefix(b"{")
        return head + digest_of(head + b"0" * 8 + rest).encode() + rest
    if file.suffix == ".safetensors":
        return len(text).to_bytes(8, "little") + text + bytes(64)
    return text + b"\n"


def values_of(file: Path) -> Any:
    if file.suffix == ".toml":
        return tomllib.loads(file.read_text())
    if file.suffix == ".safetensors":
        data = file.read_bytes()
        return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    text = file.read_text()
    found = json.loads(text.splitlines()[0] if file.suffix == ".jsonl" else text)
    if file.name == MANIFEST:
        del found["crc32"]
    return found


ENDINGS = (".json", ".jsonl", ".toml", ".safetensors", "question", "rank-0000", ".memory")
STRUCTURED = [
    (reader, name)
    for reader, name in zip(READERS, NAMES, strict=True)
    if reader.file.endswith(ENDINGS)
]
PLACES, MANY = fewer(25, 6), fewer(len(VALUES), 7)  # drawn of a file, and for each place


@pytest.mark.parametrize(
    "reader", [reader for reader, _ in STRUCTURED], ids=[name for _, name in STRUCTURED]
)
def test_any_value_in_any_place_is_taken_or_refused(folder: Path, reader: Reader) -> None:
    random, file = Random(reader.file), folder / reader.file
    whole = values_of(file)
    places = list(places_in(whole))
    with put_back(file):
        short = [at for at in places if len(at) == 1]
        for at in [*short, *random.sample(places, min(PLACES, len(places)))]:
            for to in random.sample(VALUES, MANY):
                content = written(file, changed(whole, at, to))
                if content is not None:
                    file.write_bytes(content)
                    taken_or_refused(reader, folder, f"{at}: {str(to)[:30]}")


def test_the_files_are_read_as_they_are(folder: Path) -> None:
    """Without that no test here would say anything."""
    for reader in READERS:
        told = taken_or_refused(reader, folder, "as it is")
        assert not told or "crc32 does not fit" in told, (reader.file, told)
