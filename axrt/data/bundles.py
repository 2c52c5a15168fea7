"""What the processes of `axrt prepare` leave, bundle by bundle, and the rows of tokens that these
come to.

A bundle is a piece of a large file, or several small files. Its files are those of its parts: the
tokens, and the lengths of documents. It is done when its JSON file is there, which is written last.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from axrt.checkpoint.durable import write_durably
from axrt.errors import DataError
from axrt.scheduler.regular_file import MALFORMED, json_of, opened, read_text

from .documents import Piece
from .preparation import HELD_OUT, TRAINING, Order

_BUNDLE_BYTES, _BUNDLE_PIECES = 1 << 20, 256  # of small files, which are read as one
_COPIED_BYTES = 1 << 22  # at a time

Bundle = tuple[Piece, ...]


class Row(NamedTuple):
    """What a bundle of pieces has come to in one part."""

    tokens: int  # number of tokens
    open: int  # those of a document that goes on in the next bundle


class Done(NamedTuple):
    """What a bundle of pieces has come to."""

    rows: tuple[Row, ...]  # those of each part, in order
    skipped: int  # number of rows that were left out, since they have no text

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` has written.

        Raises:
            DataError: it is something else.
        """
        try:
            rows, skipped = json_of(read_text(path))
            done = cls(tuple(Row(*map(int, row)) for row in rows), int(skipped))
            if any(min(row) < 0 for row in done.rows):
                raise ValueError(f"rows {done.rows}")
        except (OSError, *MALFORMED) as error:
            raise DataError(f"{path}: {error}; add --force to begin anew") from None
        return done

    def write(self, path: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_durably(path, json.dumps(self).encode())


def bundles_of(pieces: Iterable[Piece]) -> Iterator[Bundle]:
    """Pieces in order, small ones together: each bundle costs files and time of its own. How many
    processes there are decides nothing: others may go on."""
    bundle: list[Piece] = []
    size = 0
    for piece in pieces:
        if bundle and (size + piece.num_bytes > _BUNDLE_BYTES or len(bundle) == _BUNDLE_PIECES):
            yield tuple(bundle)
            bundle, size = [], 0
        bundle.append(piece)
        size += piece.num_bytes
    if bundle:
        yield tuple(bundle)


def bundle_file(order: Order, part: str, number: int) -> Path:
    """The path of the tokens of a bundle, in one part."""
    return order.partial / f"{number:06}{part}.bin"


class WholeRow(NamedTuple):
    """All tokens that one part of the bundles has come to."""

    files: list[tuple[Path, int]]  # file of each bundle, and how many tokens it has
    documents: NDArray[np.int64]  # number of tokens of each document, shape (documents,)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(tokens for _, tokens in self.files)

    @classmethod
    def of(cls, order: Order, part: str, bundles: int, size: int) -> Self:
        """The row of a part, whose tokens have `size` bytes each."""
        files, lengths = [], list[NDArray[np.int64]]()
        carried = 0
        for number in range(bundles):
            done = Done.read(order.partial / f"{number:06}.json")
            row, file = done.rows[order.parts.index(part)], bundle_file(order, part, number)
            if file.stat().st_size != row.tokens * size:
                raise DataError(f"{file} is not whole; add --force to begin anew")
            with opened(file.with_suffix(".npy")) as its:
                of_documents = np.load(its)
            if len(of_documents):
                of_documents[0] += carried
                carried = 0
            carried += row.open
            lengths.append(of_documents)
            files.append((file, row.tokens))
        documents = np.concatenate([*lengths, [carried] if carried else []])
        return cls(files, documents.astype(np.int64))

    def documents_in(self, places: range) -> NDArray[np.int64]:
        """Number of tokens of each document, of what is in that part of the row."""
        if len(places) == self.tokens:
            return self.documents
        ends = np.cumsum(self.documents)
        begins = np.maximum(ends - self.documents, places.start)
        lengths: NDArray[np.int64] = np.minimum(ends, places.stop) - begins
        return lengths[lengths > 0]

    def copy(self, places: range, file: BinaryIO, size: int) -> None:
        """Copy that part of the row, whose tokens have `size` bytes each."""
        begin = 0
        for path, tokens in self.files:
            mine = range(max(begin, places.start) - begin, min(begin + tokens, places.stop) - begin)
            if mine:
                with opened(path) as source:
                    source.seek(mine.start * size)
                    left = len(mine) * size
                    while left:
                        left -= file.write(source.read(min(left, _COPIED_BYTES)))
            begin += tokens


def rows_of(order: Order, bundles: int, size: int) -> dict[str, tuple[WholeRow, range]]:
    """For each part the row that its tokens are in, and which of them those are.

    The lot may leave a part with nothing: of one document, always. Then the end of all tokens is
    held out, within a document where it must be.

    Args:
        size: bytes of a token.
    Raises:
        DataError: a file of a bundle is not whole.
    """
    rows = {part: WholeRow.of(order, part, bundles, size) for part in order.parts}
    whole = {part: (row, range(row.tokens)) for part, row in rows.items()}
    full = [row for row in rows.values() if row.tokens]
    if len(rows) == 1 or len(full) != 1:
        return whole
    (row,) = full
    cut = row.tokens - int(row.tokens * order.held_out)
    return {TRAINING: (row, range(cut)), HELD_OUT: (row, range(cut, row.tokens))}
