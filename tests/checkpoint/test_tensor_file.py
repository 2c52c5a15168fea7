"""Files of tensors are those of safetensors' own writer, and no more than one tensor is held."""

import json
import zlib
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

import axrt
from axrt.checkpoint import slices
from axrt.checkpoint.durable import crc_of_both, digest_of
from axrt.checkpoint.manifest import FileRecord
from axrt.checkpoint.tensor_file import _TYPES, CheckedFile, Look, check_file, copy_all, write_file

from .damage import ON_BYTES

TEXT = {"parameters": '["é", "\\""]\n'}


def written(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] = TEXT) -> FileRecord:
    """Last names first, which is no order of a file."""
    like = {name: torch.empty_like(value, device="meta") for name, value in tensors.items()}
    return write_file(path, like, metadata, sorted(tensors.items(), reverse=True))


def same(one: Tensor, other: Tensor) -> bool:
    """Equal in type, shape and bits, those of nan included."""
    mine, its = (value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(mine, its)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any type and bits, and of shapes such as () and (2, 0)."""
    dtype = draw(st.sampled_from(list(_TYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = torch.Size(shape).numel() * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    flat = torch.tensor(list(data), dtype=torch.uint8)
    return (
        flat.remainder(2).bool().view(shape)
        if dtype is torch.bool
        else flat.view(dtype).view(shape)
    )


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, tensors(), max_size=6), NAMES)
def test_the_bytes_are_those_of_the_usual_writer(
    tmp_path_factory: pytest.TempPathFactory, made: dict[str, Tensor], text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    record = written(path, made, {"parameters": text})
    data = save(made, {"parameters": text})
    assert path.read_bytes() == data
    assert record == FileRecord(len(data), digest_of(data))
    checked = check_file(path, record)
    assert checked.metadata == {"parameters": text}
    assert all(same(checked.tensor(name), value) for name, value in made.items())
    assert {name: (one.dtype, one.shape) for name, one in checked.like.items()} == {
        name: (one.dtype, one.shape) for name, one in made.items()
    }


def test_every_type_has_the_place_that_the_usual_writer_gives_it(tmp_path: Path) -> None:
    made = {
        f"{n}": torch.zeros(8, dtype=torch.uint8).view(t) for n, t in enumerate(_TYPES.values())
    }
    written(tmp_path / "a", made)
    assert (tmp_path / "a").read_bytes() == save(made, TEXT)


def test_several_texts_of_metadata_are_sorted_and_any_reader_reads_the_file(tmp_path: Path) -> None:
    metadata = {"b": "1", "frozen": "[]", "a": "2"}
    written(tmp_path / "a", {"w": torch.arange(3.0)}, metadata)
    written(tmp_path / "b", {"w": torch.arange(3.0)}, dict(reversed(metadata.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == metadata
        assert torch.equal(file.get_tensor("w"), torch.arange(3.0))


def test_what_is_not_contiguous_is_written_by_its_values(tmp_path: Path) -> None:
    value = torch.arange(6.0, requires_grad=True).view(2, 3).T
    record = written(tmp_path / "a", {"w": value})
    assert torch.equal(check_file(tmp_path / "a", record).tensor("w"), value)


@given(st.binary(max_size=40), st.binary(max_size=2000))
def test_the_crc_of_two_stretches_follows_from_that_of_each(one: bytes, other: bytes) -> None:
    crcs = zlib.crc32(one), zlib.crc32(other)
    assert crc_of_both(*crcs, len(other)) == zlib.crc32(one + other)


@pytest.mark.parametrize(
    "value", [torch.zeros(1, dtype=torch.complex128), torch.eye(2).to_sparse()]
)
def test_what_no_file_can_hold_is_refused_by_name(tmp_path: Path, value: Tensor) -> None:
    with pytest.raises(
        axrt.DataError, match=r"a: 0.w has type .* expected dense tensors of a type"
    ):
        write_file(tmp_path / "a", {"0.w": value}, TEXT, [])
    assert not list(tmp_path.iterdir())


def test_a_value_that_cannot_be_fetched_leaves_the_older_file(tmp_path: Path) -> None:
    def values() -> object:
        yield "a", torch.zeros(2)
        raise axrt.AxrtError("gone")

    record = written(tmp_path / "f", {"a": torch.ones(2)})
    like = dict.fromkeys("ab", torch.zeros(2))
    with pytest.raises(axrt.AxrtError, match="gone"):
        write_file(tmp_path / "f", like, TEXT, values())  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    check_file(tmp_path / "f", record)


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, FileRecord]:
    made = {"a": torch.arange(40.0), "b": torch.arange(7, dtype=torch.uint8), "c": torch.ones(())}
    return tmp_path / "file", written(tmp_path / "file", made)


def test_parts_of_any_length_are_those_of_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices end in the middle of tensors, and each is seen once; the whole file has its digest."""
    made = {
        "a": torch.randn(1003),
        "b": torch.arange(77.0, dtype=torch.float64),
        "c": torch.ones(0),
    }
    record = written(tmp_path / "file", made)
    for num_bytes in (8, 16, 1000, 4096):
        monkeypatch.setattr(slices, "_SLICE_BYTES", num_bytes)
        seen: dict[str, list[Tensor]] = {name: [] for name in made}
        look: Look = lambda name, part: seen[name].append(part.clone())  # noqa: E731, B023
        checked = check_file(tmp_path / "file", record, look)
        for name, value in made.items():
            assert sorted(x for part in seen[name] for x in part.tolist()) == sorted(value.tolist())
            assert same(checked.tensor(name), value)
            spread = torch.zeros(len(value), 2, dtype=value.dtype)[:, 0]
            for into in [torch.zeros_like(value), spread] if len(value) else []:
                version = into._version
                copy_all([(checked, name, into)])
                assert same(into, value)
                assert into._version > version


@pytest.mark.parametrize("damage", ON_BYTES, ids=lambda damage: damage.__name__)
def test_damage_is_found_and_named(file: tuple[Path, FileRecord], damage: object) -> None:
    path, record = file
    whole = path.read_bytes()
    for seed in range(30):
        what = damage(path, Random(seed))  # type: ignore[operator]
        with pytest.raises(axrt.DamagedError, match=str(path)):  # noqa: PT012 - what was done is told
            check_file(path, record)
            pytest.fail(what)
        path.write_bytes(whole)


def entry(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"[" * 5000,
        b"\xff",
        b"{}",
        json.dumps({**entry(), "__metadata__": 3}).encode(),
        json.dumps({"a": 3}).encode(),
        json.dumps(entry(dtype="F31")).encode(),
        json.dumps(entry(shape=[3])).encode(),
        json.dumps(entry(shape=[-2, -1])).encode(),
        json.dumps(entry(shape=["2"])).encode(),
        json.dumps(entry(shape=2)).encode(),
        json.dumps(entry(shape=[2.0])).encode(),
        json.dumps(entry(data_offsets=[0, 4])).encode(),
        json.dumps(entry(data_offsets=[4, 12])).encode(),
        json.dumps(entry(data_offsets=None)).encode(),
        json.dumps({**entry(), "b": entry()["a"]}).encode(),
    ],
)
def test_a_header_that_cannot_be_is_refused_though_its_digest_fits(
    tmp_path: Path, header: bytes
) -> None:
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(axrt.DamagedError, match="file (does not tell its tensors|has other bytes)"):
        check_file(tmp_path / "file", FileRecord(len(data), digest_of(data)))


@pytest.mark.parametrize("size", [0, 7, 8])
def test_a_file_without_a_header_is_refused(tmp_path: Path, size: int) -> None:
    data = b"\xff" * size
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(axrt.DamagedError, match="does not tell its tensors"):
        check_file(tmp_path / "file", FileRecord(size, digest_of(data)))


def overwrite(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-50] + bytes(50))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("change", [overwrite, shorten, Path.unlink])
def test_a_file_that_changes_after_its_check_is_found_when_it_is_used(
    file: tuple[Path, FileRecord], change: object
) -> None:
    path, record = file
    checked: CheckedFile = check_file(path, record)
    change(path)  # type: ignore[operator]
    with pytest.raises(
        axrt.AxrtError, match="file has changed since it was checked, at b: "
    ) as why:
        checked.tensor("b")
    assert "Part of the checkpoint has been taken" in str(why.value)
    assert not isinstance(why.value, axrt.ConfigError)  # which says that nothing was changed


def test_each_tensor_is_asked_for_when_the_one_before_is_written(tmp_path: Path) -> None:
    def values() -> object:
        for number in range(3):
            yield f"{number}", torch.full((100_000,), float(number))
            size = (tmp_path / "file.new").stat().st_size
            assert size >= 400_000 * (number + 1)

    like = {f"{number}": torch.empty(100_000, device="meta") for number in range(3)}
    write_file(tmp_path / "file", like, {}, values())  # type: ignore[arg-type]
