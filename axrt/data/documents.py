"""Documents out of files: text, JSON lines, Parquet, and Hugging Face datasets on a disk (Arrow).

Files are cut into pieces, which are read apart from each other. A text file is one document; large
ones are read in parts that end with a line. A line of a JSON file, or a row of a table, is one.
Text and JSON lines may be compressed by gzip. Nobody can begin to read such a file in its middle,
so it is one piece.
"""

import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from axrt.errors import ConfigError, DataError
from axrt.scheduler.regular_file import opened

_PART_BYTES, _READ_BYTES = 1 << 20, 1 << 20
_LONGEST = 1 << 30  # bytes of a line
_LINES = (".jsonl", ".ndjson")
_TABLES = (".parquet", ".arrow")
_GZIP = ".gz"
_NOT_READ = (".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z")


class Piece(NamedTuple):
    """A piece of a file."""

    path: str  # path of the file
    # first, end: bytes of it, where lines that begin there belong to the piece; of a table row
    # groups or record batches; of a compressed file from 0 to behind all there may be
    first: int
    end: int
    num_bytes: int  # its size in the file, about


class Fields(NamedTuple):
    """Where a row has what is wanted of it."""

    text: str = "text"  # name of the field, or column, that has the text
    prompt: str = ""  # name of the one with the prompt; "": there is none
    # True to leave out rows without text, or without the prompt; else they are errors. A text
    # of no characters is a document by default.
    skip_empty: bool = False


class Part(NamedTuple):
    """A document or, of a text file, a part of one."""

    text: str  # its text
    is_end: bool  # the document ends with it
    document: str  # name of the document, which decides whether it is held out
    prompt: str = ""  # text before it that is read and not predicted; "": there is none


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
        if not files[0].is_file():
            raise DataError(
                f"{source.absolute()} is a pipe, a socket or a device; expected a file, which "
                "several processes can read in parts"
            )
        found += files
    return found


def pieces_of(files: Iterable[Path], piece_bytes: int) -> Iterator[Piece]:
    """The pieces of files, in order.

    Args:
        piece_bytes: size of a piece, in bytes, about.
    Raises:
        DataError: a table cannot be read, or a file is compressed in a way that is not read.
        ConfigError: its library is not installed.
    """
    for path in files:
        _check_form(path)
        if path.suffix in _TABLES:
            yield from _of_table(path, piece_bytes)
            continue
        size = path.stat().st_size
        if path.suffix == _GZIP:
            yield Piece(str(path), 0, sys.maxsize, size)
            continue
        for first in range(0, size, piece_bytes):
            end = min(first + piece_bytes, size)
            yield Piece(str(path), first, end, end - first)


def parts_of(piece: Piece, fields: Fields = Fields()) -> Iterator[Part | None]:  # noqa: B008
    """The documents of a piece; None for each row that is left out.

    Args:
        fields: where rows have their text.
    Raises:
        DataError: the file has something else there; the text names the place.
    """
    form = _form(Path(piece.path))
    if form in _TABLES:
        return _rows(piece, fields)
    if form in _LINES:
        return _json_lines(piece, fields)
    if fields.prompt:
        raise DataError(
            f"{piece.path}: text has no field {fields.prompt!r}; expected JSON lines or a table"
        )
    return _text(piece)


def _form(path: Path) -> str:
    """The ending of a file's name that says what is in it."""
    return path.with_suffix("").suffix if path.suffix == _GZIP else path.suffix


def _check_form(path: Path) -> None:
    if path.suffix in _NOT_READ:
        raise DataError(
            f"{path}: files of this compression are not read; expected .gz, or the file unpacked"
        )
    if path.suffix == _GZIP and _form(path) in _TABLES:
        raise DataError(f"{path}: a table in a .gz is not read; expected the table, unpacked")


def _text(piece: Piece) -> Iterator[Part]:
    path, read = Path(piece.path), 0
    size = None if path.suffix == _GZIP else path.stat().st_size
    for at, data in _parts_of_lines(piece):
        read = at + len(data)
        yield Part(_decoded(piece, at, data), read == size, piece.path)
    if read and size is None:  # what the size is shows at the end alone
        yield Part("", True, piece.path)


def _json_lines(piece: Piece, fields: Fields) -> Iterator[Part | None]:
    for at, line in _lines(piece):
        if not line.strip():
            continue
        try:
            part = _of_row(_row(line), fields, f"{piece.path}:{at}")
        except ValueError as error:
            number = _line_number(piece, at)
            begins = f"that line begins at byte {at}{_unpacked(piece)}"
            raise DataError(f"{piece.path}: line {number} {error}; {begins}") from None
        yield part


def _unpacked(piece: Piece) -> str:
    """What a place in the text of a file counts, where that is not the file's own bytes."""
    return " of the unpacked file" if piece.path.endswith(_GZIP) else ""


def _row(line: bytes) -> dict[str, Any]:
    """A line as a JSON object; a ValueError says what it is instead."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"is no UTF-8 at its byte {error.start} ({error.reason})") from None
    except json.JSONDecodeError as error:
        what = f"{error.msg} at character {error.pos}"
        raise ValueError(f"is no JSON ({what}); expected an object") from None
    except (ValueError, RecursionError) as error:  # numbers too long, brackets too deep
        raise ValueError(f"is no JSON that can be read ({error}); expected an object") from None
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}; expected a JSON object")
    return row


def _of_row(row: Mapping[str, Any], fields: Fields, document: str) -> Part | None:
    """The document of a row, or None where it is left out; a ValueError says what is wrong."""
    text = _value(row, fields.text, fields.skip_empty)
    prompt = _value(row, fields.prompt, fields.skip_empty) if fields.prompt else ""
    if prompt is None or text is None or (fields.skip_empty and not text):
        return None
    return Part(text, True, document, prompt)


def _value(row: Mapping[str, Any], field: str, may_lack: bool) -> str | None:
    value = row.get(field)
    if value is None:
        if may_lack:
            return None
        lacks = f"has null for {field!r}" if field in row else f"has no {field!r}"
        others = [name for name, text in row.items() if isinstance(text, str)]
        another = f"another --field, which may be {' or '.join(others)}, " if others else ""
        raise ValueError(
            f"{lacks}; expected text, {another}or --skip-empty, which leaves such rows out"
        )
    if not isinstance(value, str):
        raise ValueError(f"has {type(value).__name__} for {field!r}; expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = f"no character at {error.start} of {field!r} ({error.reason})"
        raise ValueError(f"has {what}; expected text") from None
    return value


def _decoded(piece: Piece, at: int, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{piece.path}: byte {at + error.start}{_unpacked(piece)} is no UTF-8 "
            f"({error.reason}); expected text"
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
        with _opened(piece) as file:
            at = _first_line(file, piece.first)
            while at < piece.end and (line := file.readline(_LONGEST)):
                if len(line) == _LONGEST and not line.endswith(b"\n"):
                    raise DataError(
                        f"{piece.path}: the line at byte {at} has over {_LONGEST:,} bytes; "
                        "expected shorter ones"
                    )
                yield at, line
                at += len(line)
    except (OSError, EOFError, zlib.error) as error:  # the last two: of what is compressed
        what = getattr(error, "strerror", None) or error
        raise DataError(f"{piece.path}: {what}; expected a readable file") from None


def _opened(piece: Piece) -> BinaryIO | gzip.GzipFile:
    if piece.path.endswith(_GZIP):
        opened(piece.path).close()  # a pipe would be waited for
        return gzip.open(piece.path)
    return opened(piece.path)


def _line_number(piece: Piece, at: int) -> int:
    """The number of the line at a place, from 1: all before it is read, which an error is worth."""
    before = 0
    with _opened(piece) as file:
        while at > 0 and (data := file.read(min(at, _READ_BYTES))):
            before, at = before + data.count(b"\n"), at - len(data)
    return before + 1


def _first_line(file: BinaryIO | gzip.GzipFile, first: int) -> int:
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


def _rows(piece: Piece, fields: Fields) -> Iterator[Part | None]:
    groups = _table(piece.path)
    for group in range(piece.first, piece.end):
        prompts = groups.column(group, fields.prompt) if fields.prompt else repeat("")
        for row, (text, prompt) in enumerate(zip(groups.column(group, fields.text), prompts)):  # noqa: B905
            values = {fields.prompt: prompt, fields.text: text}
            try:
                part = _of_row(values, fields, f"{piece.path}:{group}:{row}")
            except ValueError as error:
                raise DataError(f"{piece.path}: row {row} of group {group} {error}") from None
            yield part


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
