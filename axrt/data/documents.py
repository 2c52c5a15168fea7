"""Documents out of files: text, JSON lines, Parquet, and Hugging Face datasets on a disk (Arrow).

Files are cut into pieces, which are read apart from each other. A text file is one document; large
ones are read in parts that end with a line. A line of a JSON file, or a row of a table, is one.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from axrt.errors import ConfigError, DataError

_PART_BYTES = 1 << 20
_LINES = (".jsonl", ".ndjson")
_TABLES = (".parquet", ".arrow")


class Piece(NamedTuple):
    """A piece of a file.

    Args:
        path: path of the file.
        first, end: bytes of it, where lines that begin there belong to the piece; of a table row
            groups or record batches.
        num_bytes: its size, about.
    """

    path: str
    first: int
    end: int
    num_bytes: int


class Part(NamedTuple):
    """A document or, of a text file, a part of one.

    Args:
        text: its text.
        is_end: the document ends with it.
        document: name of the document, which decides whether it is held out.
        prompt: text before it that is read and not predicted; "": there is none.
    """

    text: str
    is_end: bool
    document: str
    prompt: str = ""


def files_of(sources: Iterable[str]) -> list[Path]:
    """The files of sources, each a file or a directory, in order.

    Raises:
        DataError: there is no such source, or nothing is in it.
    """
    found: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            of_dataset = (source / "dataset_info.json").exists()
            inside = sorted(source.glob("*.arrow" if of_dataset else "**/*"))
            files = [path for path in inside if path.is_file() and not path.name.startswith(".")]
        else:
            files = [source]
        if not files or not files[0].exists():
            raise DataError(f"{source.absolute()}: no file there; expected text to prepare")
        found += files
    return found


def pieces_of(files: Iterable[Path], piece_bytes: int) -> Iterator[Piece]:
    """The pieces of files, in order.

    Args:
        files: the files.
        piece_bytes: size of a piece, in bytes, about.
    Raises:
        DataError: a table cannot be read.
        ConfigError: its library is not installed.
    """
    for path in files:
        if path.suffix in _TABLES:
            yield from _of_table(path, piece_bytes)
            continue
        size = path.stat().st_size
        for first in range(0, size, piece_bytes):
            end = min(first + piece_bytes, size)
            yield Piece(str(path), first, end, end - first)


def parts_of(piece: Piece, field: str, prompt_field: str = "") -> Iterator[Part]:
    """The documents of a piece.

    Args:
        piece: piece of a file.
        field: name of the field, or column, that has the text.
        prompt_field: name of the one with the prompt; "": there is none.
    Raises:
        DataError: the file has something else there; the text names the place.
    """
    suffix = Path(piece.path).suffix
    if suffix in _TABLES:
        return _rows(piece, field, prompt_field)
    if suffix in _LINES:
        return _json_lines(piece, field, prompt_field)
    if prompt_field:
        raise DataError(
            f"{piece.path}: text has no field {prompt_field!r}; expected JSON lines or a table"
        )
    return _text(piece)


def _text(piece: Piece) -> Iterator[Part]:
    size = Path(piece.path).stat().st_size
    for at, data in _parts_of_lines(piece):
        yield Part(_decoded(piece, at, data), at + len(data) >= size, piece.path)


def _json_lines(piece: Piece, field: str, prompt_field: str) -> Iterator[Part]:
    for at, line in _lines(piece):
        if not line.strip():
            continue
        value = _decoded(piece, at, line)
        text = _of_json(piece, at, value, field)
        prompt = _of_json(piece, at, value, prompt_field) if prompt_field else ""
        yield Part(text, True, f"{piece.path}:{at}", prompt)


def _of_json(piece: Piece, at: int, line: str, field: str) -> str:
    try:
        value = json.loads(line)[field]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"{piece.path}: the line at byte {at} is no JSON object with {field!r} ({error!r})"
        ) from None
    return _checked(value, f"{piece.path}: {field!r} at byte {at}")


def _checked(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} is {type(value).__name__}; expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has no character at {error.start} ({error.reason}); expected text"
        ) from None
    return value


def _decoded(piece: Piece, at: int, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{piece.path}: byte {at + error.start} is no UTF-8 ({error.reason}); expected text"
        ) from None


def _parts_of_lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Whole lines of a piece, many at a time, with the place of the first one."""
    begun = size = 0
    lines: list[bytes] = []
    for at, line in _lines(piece):
        if size >= _PART_BYTES:
            yield begun, b"".join(lines)
            size, lines = 0, []
        begun = begun if lines else at
        lines.append(line)
        size += len(line)
    if lines:
        yield begun, b"".join(lines)


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a piece, each with its place; an error is that of the file."""
    try:
        with open(piece.path, "rb") as file:
            at = _first_line(file, piece.first)
            while at < piece.end and (line := file.readline()):
                yield at, line
                at += len(line)
    except OSError as error:
        raise DataError(f"{piece.path}: {error.strerror}; expected a readable file") from None


def _first_line(file: BinaryIO, first: int) -> int:
    """The place of the first line that begins at or behind a byte; the file is there then."""
    if first == 0:
        return 0
    file.seek(first - 1)
    return first - 1 + len(file.readline())


# Tables.


def _of_table(path: Path, piece_bytes: int) -> Iterator[Piece]:
    groups = _table(str(path))
    first, size = 0, 0
    for number in range(groups.number):
        size += groups.num_bytes(number)
        if size >= piece_bytes or number == groups.number - 1:
            yield Piece(str(path), first, number + 1, size)
            first, size = number + 1, 0


def _rows(piece: Piece, field: str, prompt_field: str) -> Iterator[Part]:
    groups = _table(piece.path)
    for group in range(piece.first, piece.end):
        prompts = groups.column(group, prompt_field) if prompt_field else repeat("")
        for row, (value, prompt) in enumerate(zip(groups.column(group, field), prompts)):  # noqa: B905
            where = f"of row {row} of group {group}"
            text = _checked(value, f"{piece.path}: {field!r} {where}")
            before = _checked(prompt, f"{piece.path}: {prompt_field!r} {where}")
            yield Part(text, True, f"{piece.path}:{group}:{row}", before)


class _Parquet:
    """The row groups of a Parquet file."""

    def __init__(self, path: str, library: Any) -> None:
        self._path, self._file = path, library.parquet.ParquetFile(path)
        self.number = int(self._file.num_row_groups)

    def num_bytes(self, group: int) -> int:
        return int(self._file.metadata.row_group(group).total_byte_size)

    def column(self, group: int, field: str) -> Iterator[Any]:
        _check_field(self._path, field, self._file.schema_arrow.names)
        return iter(self._file.read_row_group(group, columns=[field]).column(0).to_pylist())


class _Arrow:
    """The record batches of an Arrow file, as `datasets` writes it: a stream or a file."""

    def __init__(self, path: str, library: Any) -> None:
        self._path = path
        source = library.memory_map(path)
        try:
            self._batches = list(library.ipc.open_stream(source))
        except library.ArrowInvalid:
            file = library.ipc.open_file(source)
            self._batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        self.number = len(self._batches)

    def num_bytes(self, group: int) -> int:
        return int(self._batches[group].nbytes)

    def column(self, group: int, field: str) -> Iterator[Any]:
        batch = self._batches[group]
        _check_field(self._path, field, batch.schema.names)
        return iter(batch.column(field).to_pylist())


def _table(path: str) -> _Parquet | _Arrow:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{path}: pyarrow is not installed; expected it: pip install 'axrt[data]'"
        ) from None
    try:
        return (_Parquet if path.endswith(".parquet") else _Arrow)(path, pyarrow)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: {error}; expected a table that pyarrow reads") from None


def _check_field(path: str, field: str, there: list[str]) -> None:
    if field not in there:
        raise DataError(f"{path} has no column {field!r}; expected one of {', '.join(there)}")
