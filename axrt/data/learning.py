"""A tokenizer that is made from the sources of a preparation."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from .documents import Fields, Piece, parts_of
from .tokenizer import train_tokenizer

_LEARNT_FROM_CHARS = 1 << 28  # more takes long, and says little new


def learn(pieces: Sequence[Piece], fields: Fields, vocab: int, path: Path) -> None:
    """Make a tokenizer from text that is all over the sources.

    Args:
        pieces: pieces of all sources, one at least.
        fields: where rows have their text.
    Raises:
        DataError, ConfigError: those of `train_tokenizer`; a source cannot be read.
    """
    most = _LEARNT_FROM_CHARS // len(pieces)
    texts = (text for piece in pieces for text in _first_of(piece, fields, most))
    train_tokenizer(texts, vocab, path)


def _first_of(piece: Piece, fields: Fields, most: int) -> Iterator[str]:
    taken = 0
    for part in parts_of(piece, fields):
        if part is None:
            continue
        yield part.prompt + part.text
        taken += len(part.prompt) + len(part.text)
        if taken >= most:
            return
