"""A safetensors file that is written and read tensor by tensor: no more than one is in memory."""

#   8 bytes                size of the header, little-endian
#   header                 JSON: `__metadata__`, then type, shape and bytes of each tensor; spaces
#   bytes of the tensors   wide types first, then by name
#
# Names, types and shapes are known before any value, so tensors may be written in any order. The
# files are those of safetensors' own writer, which takes all tensors at once. It puts several texts
# of metadata in a random order, and here they are sorted: equal tensors have equal files.
#
# A file is read twice, by several threads (`slices.py`). `check_file` looks at all of it and notes
# digests of each slice. Later each tensor is read again where it is needed, and must have the same
# bytes: one that has changed in between ends the job, because part has been taken by then.
#
# Where a save is waited for, no second copy of the state is made: one bucket at a time is present
# (`present` of its route), and here one tensor at a time. A header needs names, types and shapes
# only, and the CRC-32 of the file follows from those of the tensors.

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from axrt.device.device import is_on_host
from axrt.errors import AxrtError, DamagedError, DataError
from axrt.scheduler.regular_file import MALFORMED, json_of, opened

from .durable import crc_of_both, digits_of, durable
from .manifest import FileRecord
from .slices import Slice, SliceReader

_TYPES = {  # in the order of their tensors in a file
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_ORDER = {dtype: number for number, dtype in enumerate(_TYPES.values())}
_TENSORS = 3  # are read at a time, so that the disk has work while one of them ends
_SIZE_BYTES, _LARGEST_HEADER_BYTES = 8, 100_000_000  # the second is a limit of safetensors

Tensors = Mapping[str, Tensor]  # by name
Look = Callable[[str, Tensor], None]  # at the name and a part of a tensor


# safetensors' own writer takes all tensors of a file at once, so `tensor_file.py` replaced it.
class _Entry(NamedTuple):
    """A tensor of a file: its type, its shape, and which bytes behind the header are its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    end: int


class _Layout(NamedTuple):
    """The bytes of a file before those of its tensors, and its tensors by name, in the order of
    their bytes."""

    header: bytes
    entries: dict[str, _Entry]

    @property
    def size_bytes(self) -> int:
        """The size of the whole file."""
        ends = [entry.end for entry in self.entries.values()]
        return len(self.header) + max(ends, default=0)

    def crc_of(self, crcs: Mapping[str, int]) -> int:
        """The CRC-32 of the whole file, from that of each tensor."""
        crc = zlib.crc32(self.header)
        for name, entry in self.entries.items():
            crc = crc_of_both(crc, crcs[name], entry.end - entry.first)
        return crc


# Writing.


def write_file(
    path: Path, like: Tensors, metadata: Mapping[str, str], values: Iterable[tuple[str, Tensor]]
) -> FileRecord:
    """Write a file durably; the record is of the bytes that it was given.

    Args:
        like: tensors of the types and shapes that will be written; their values are not read.
        metadata: texts for the header, by name.
        values: every name of `like` once with its tensor, in any order. Each is asked for when the
            one before is written, so a generator may fetch it then.
    Raises:
        OSError: the file cannot be written; an older file of that name stands.
        DataError: a tensor is of a type that no file can hold.
    """
    layout = _laid_out(path, like, metadata)
    crcs: dict[str, int] = {}
    with durable(path) as file:
        file.write(layout.header)
        for name, value in values:
            entry, data = layout.entries[name], _bytes_of(value)
            assert len(data) == entry.end - entry.first, f"{name} is not what was announced"
            file.seek(len(layout.header) + entry.first)
            file.write(data)
            crcs[name] = zlib.crc32(data)
        assert crcs.keys() == like.keys(), f"{path} lacks {like.keys() - crcs.keys()}"
    return FileRecord(layout.size_bytes, digits_of(layout.crc_of(crcs)))


def check_types(where: str, like: Tensors) -> None:
    """Check that tensors may be in a file.

    Raises:
        DataError: a tensor is of a type that no file can hold.
    """
    for name, value in like.items():
        if value.dtype not in _ORDER or value.layout is not torch.strided:
            raise DataError(
                f"{where}: {name} has type {value.dtype} and layout {value.layout}; expected dense "
                "tensors of a type that safetensors knows"
            )


def _laid_out(path: Path, like: Tensors, metadata: Mapping[str, str]) -> _Layout:
    check_types(str(path), like)
    entries: dict[str, _Entry] = {}
    end = 0
    for name in sorted(like, key=lambda name: (_ORDER[like[name].dtype], name)):
        first, end = end, end + like[name].numel() * like[name].itemsize
        entries[name] = _Entry(like[name].dtype, tuple(like[name].shape), first, end)
    return _Layout(_header_of(entries, metadata), entries)


def _header_of(entries: Mapping[str, _Entry], metadata: Mapping[str, str]) -> bytes:
    told: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    for name, entry in entries.items():
        told[name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (entry.first, entry.end),
        }
    text = json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_SIZE_BYTES, "little") + text


def _bytes_of(value: Tensor) -> memoryview:
    """The bytes of a tensor: its own memory where it is contiguous on the CPU, else a copy."""
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    return _memory(flat.view(torch.uint8))


def _memory(data: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, shape (bytes,), uint8."""
    return data.numpy().data


# Reading.


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A file that had the bytes that were saved when it was checked."""

    path: Path  # path of the file
    metadata: Mapping[str, str]  # texts of the header, by name
    _layout: _Layout
    _slices: Mapping[str, list[Slice]]
    _reader: SliceReader

    @property
    def like(self) -> dict[str, Tensor]:
        """Tensors of the types and shapes of those in the file, by name; they have no values and no
        memory (torch's device `meta`)."""
        return {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for name, entry in self._layout.entries.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Read a tensor.

        Returns:
            A tensor on the CPU, in memory of its own.
        Raises:
            AxrtError: its bytes cannot be read, or have changed since they were checked.
        """
        entry = self._layout.entries[name]
        data = torch.empty(entry.end - entry.first, dtype=torch.uint8)
        self._read(name, data)
        return data.view(entry.dtype).reshape(entry.shape)

    def reads_into(self, name: str, value: Tensor) -> bool:
        """A tensor may be read straight into the memory of one of its shape."""
        its = self._layout.entries[name]
        is_same = is_on_host(value) and value.is_contiguous() and value.dtype == its.dtype
        return is_same and value.numel() > 0

    def read_into(self, name: str, value: Tensor) -> None:
        """Read a tensor into the memory of another, on any thread; errors are those of `tensor`."""
        flat = value.detach().view(-1)
        flat[:0].zero_()  # the read below is no operator, and whoever has the tensor sees a change
        self._read(name, flat.view(torch.uint8))

    def _read(self, name: str, into: Tensor) -> None:
        slices = self._slices[name]
        try:
            with opened(self.path) as file:
                is_same = not slices or self._reader.read(file.fileno(), slices, into)
        except OSError as error:
            raise self._has_changed(name, error.strerror or str(error)) from None
        if not is_same:
            raise self._has_changed(name, "its bytes are others")

    def _has_changed(self, name: str, what: str) -> AxrtError:
        return AxrtError(
            f"{self.path} has changed since it was checked, at {name}: {what}. Part of the "
            "checkpoint has been taken, so this job cannot go on; expected that nobody writes to a "
            "checkpoint while it is loaded. Start the job again"
        )


class CheckedTensors(Protocol):
    """The tensors of a file that has been checked, or parts of them; see `CheckedFile`."""

    @property
    def path(self) -> Path: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...
    @property
    def like(self) -> dict[str, Tensor]: ...
    def tensor(self, name: str) -> Tensor: ...
    def reads_into(self, name: str, value: Tensor) -> bool: ...
    def read_into(self, name: str, value: Tensor) -> None: ...


def copy_all(copies: Sequence[tuple[CheckedTensors, str, Tensor]]) -> None:
    """Read tensors, several at a time, and copy each into one of its shape.

    Args:
        copies: the file, the name in it, and where it goes.
    Raises:
        AxrtError: their bytes cannot be read, or have changed since they were checked.
    """
    straight = [one for one in copies if one[0].reads_into(*one[1:])]
    with ThreadPoolExecutor(_TENSORS) as several:
        list(several.map(lambda one: one[0].read_into(*one[1:]), straight))
    with torch.no_grad():
        for file, name, value in copies:
            if not file.reads_into(name, value) and value.numel():
                value.copy_(file.tensor(name))  # here, in order with what else the device does


def look_away(name: str, part: Tensor) -> None:
    """See nothing."""


def check_file(
    path: Path, record: FileRecord, look: Look = look_away, reader: SliceReader | None = None
) -> CheckedFile:
    """Read a whole file, and find out whether it is as it was saved.

    Args:
        look: function that sees the parts of each tensor with its name, shape (elements,), on any
            thread and before it is known whether the file is as it was saved.
        reader: threads that read; None: new ones.
    Raises:
        DamagedError: it cannot be read, is no safetensors file, or differs from the one that was
            saved.
    """
    reader = reader or SliceReader()
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size_bytes:
                raise DamagedError(
                    f"{path} has {size} bytes, and {record.size_bytes} were saved; expected the "
                    "file as it was saved"
                )
            layout, metadata = _read_layout(path, file, size)
            slices = dict(_slices_of(file.fileno(), layout, reader, look))
    except OSError as error:
        raise DamagedError(
            f"{path}: {error.strerror or error}; expected a file of a whole checkpoint"
        ) from None
    if digits_of(layout.crc_of({name: _crc_of(of) for name, of in slices.items()})) != record.crc32:
        raise DamagedError(
            f"{path} has other bytes than were saved: its crc32 does not fit; expected the file as "
            "it was saved"
        )
    return CheckedFile(path, metadata, layout, slices, reader)


def _read_layout(path: Path, file: BufferedReader, size: int) -> tuple[_Layout, dict[str, str]]:
    """What the header of a file tells of its tensors, which take up the rest; and its metadata."""
    begin = file.read(_SIZE_BYTES)
    length = min(int.from_bytes(begin, "little"), _LARGEST_HEADER_BYTES)
    header = begin + file.read(length)
    try:
        told = json_of(header[_SIZE_BYTES:])
        metadata = {str(key): str(value) for key, value in told.pop("__metadata__", {}).items()}
        layout = _Layout(header, _entries_of(told))
        if layout.size_bytes != size:
            raise ValueError(f"{layout.size_bytes} bytes in a file of {size}")
        return layout, metadata
    except MALFORMED as error:
        raise DamagedError(
            f"{path} does not tell its tensors ({str(error)[:80]!r}); expected a safetensors file, "
            "as it was saved"
        ) from None


def _entries_of(told: Mapping[str, Any]) -> dict[str, _Entry]:
    """The tensors of a header, which lie one behind the other.

    Raises:
        ValueError: they cannot be; other errors mean the same.
    """
    entries: dict[str, _Entry] = {}
    end = 0
    for name, of in sorted(told.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _TYPES[of["dtype"]], tuple(of["shape"])
        first, end = end, end + prod(shape) * dtype.itemsize
        if of["data_offsets"] != [first, end] or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{name} cannot be {of}")
        entries[name] = _Entry(dtype, shape, first, end)
    return entries


def _slices_of(
    file: int, layout: _Layout, reader: SliceReader, look: Look
) -> Iterator[tuple[str, list[Slice]]]:
    begin = len(layout.header)
    for name, entry in layout.entries.items():

        def seen(part: Tensor, name: str = name, dtype: torch.dtype = entry.dtype) -> None:
            look(name, part.view(dtype))

        yield name, reader.check(file, begin + entry.first, begin + entry.end, seen)


def _crc_of(slices: Sequence[Slice]) -> int:
    """The CRC-32 of slices, one behind the other."""
    crc = 0
    for one in slices:
        crc = crc_of_both(crc, one.crc, one.num_bytes)
    return crc
