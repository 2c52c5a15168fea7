"""Text as tokens: bytes, which are built in, and the tokenizers of other libraries, which the extra
`data` brings."""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from axrt.checkpoint.durable import write_durably
from axrt.errors import ConfigError, DataError
from axrt.scheduler.plural import plural
from axrt.scheduler.regular_file import json_of, read_text

BYTES = "bytes"
_TIKTOKEN = "tiktoken:"
_C0_80 = b"\xc0\x80"  # U+0000 where a zero byte means something else, as in Java's files
# Files of a tokenizer of Hugging Face's that say its end, in the order in which they are asked.
_SAY_END = (
    ("tokenizer_config.json", "eos_token"),
    ("generation_config.json", "eos_token_id"),
    ("special_tokens_map.json", "eos_token"),
)
# What models of the field put behind a document, where a tokenizer does not say its own.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
MOST_BYTES = 1 << 28  # of a tokenizer
_KEPT = ".tokenizer.json"  # behind the name of a token file: its tokenizer
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Ids = NDArray[np.int64]


# A special token's name in a document is text. It was that token, which ended documents in their
# middle wherever a text spoke of it. In a prompt it is the token: a person wrote it there.
class Tokenizer(Protocol):
    """The map between text and tokens.

    Attributes:
        vocab: the largest token and one. Fewer may be in use.
        end: token behind each document; None: there is none.
    """

    vocab: int
    end: int | None

    def encode(self, texts: Sequence[str], specials: bool = False) -> list[Ids]:
        """The tokens of each text.

        Args:
            specials: True if the name of a special token, such as "<|endoftext|>", stands for that
                token. It is text like any other by default: no document may hold the token that
                ends documents.
        """
        ...

    def decoder(self) -> Callable[[int], str]:
        """A function that is given token after token, and returns the text to show for each: ""
        where a character is not whole yet."""
        ...


def tokenizer_of(name: str, end: str = "") -> Tokenizer:
    """The tokenizer of that name.

    Args:
        name: "bytes"; the path of a JSON file of Hugging Face's `tokenizers`; or "tiktoken:NAME",
            an encoding that `tiktoken` knows.
        end: token behind each document, by its text; "": the tokenizer's own.
    Raises:
        ConfigError: there is none, it has no such token, or its library is not installed.
    """
    if name == BYTES:
        if end:
            raise ConfigError(
                f"the end of a document {end!r}; expected none with bytes, where it is the byte 0"
            )
        return ByteTokenizer()
    if name.startswith(_TIKTOKEN):
        return Tiktoken(name.removeprefix(_TIKTOKEN), end)
    if name.endswith(".json"):
        return JsonTokenizer(Path(name), end)
    raise ConfigError(
        f"tokenizer {name!r}; expected 'bytes', the path of a tokenizer.json, or 'tiktoken:NAME'"
    )


class ByteTokenizer:
    """A token is a byte of UTF-8. Behind a document is the byte 0; U+0000 in a text is two other
    bytes, which UTF-8 has for nothing else."""

    vocab = 256
    end: int | None = 0

    def encode(self, texts: Sequence[str], specials: bool = False) -> list[Ids]:
        of_texts = (text.encode().replace(b"\0", _C0_80) for text in texts)
        return [np.frombuffer(one, np.uint8).astype(np.int64) for one in of_texts]

    def decoder(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        begun = b""

        def shown(token: int) -> str:
            nonlocal begun
            if token >= self.vocab:  # a model may know more tokens than there are bytes
                return _REPLACEMENT
            row, begun = begun + bytes([token]), b""
            if row == _C0_80:
                return "\0"
            if row[-1:] == _C0_80[:1]:
                row, begun = row[:-1], row[-1:]
            return decoder.decode(row)

        return shown


class JsonTokenizer:
    """A JSON file of Hugging Face's `tokenizers`.

    Args:
        end: token behind each document, by its text; "": the one that the files of its folder name
            as theirs, or the first that it has of those that models of the field put there.
    Raises:
        ConfigError: it or a file that names its end cannot be read, it has no such token, or the
            library is not installed.
    """

    def __init__(self, path: Path, end: str = "") -> None:
        library = _imported("tokenizers")
        try:
            self._tokenizer = library.Tokenizer.from_str(read_text(path, MOST_BYTES))
        except Exception as error:  # the library has no class of its own for them
            made = path.with_suffix(".tokenizer.json")  # beside the token file that it was made for
            there = f", such as {made}" if made.exists() else ""
            raise ConfigError(
                f"{path.absolute()}: {error}; expected a JSON file of Hugging Face's tokenizers"
                f"{there}"
            ) from None
        self._stream = library.decoders.DecodeStream
        self.vocab = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        self.end = self._number_of(path, end) if end else self._own_end(path)

    def _number_of(self, path: Path, end: str) -> int:
        number: int | None = self._tokenizer.token_to_id(end)
        if number is None:
            raise ConfigError(f"{path} has no token {end!r}; expected the text of one of its own")
        return number

    def _own_end(self, path: Path) -> int | None:
        for one in (*_ends_named_beside(path), *_ENDS):
            number: int | None = self._tokenizer.token_to_id(one) if isinstance(one, str) else one
            if number is not None and 0 <= number < self.vocab:
                return number
        return None

    def encode(self, texts: Sequence[str], specials: bool = False) -> list[Ids]:
        self._tokenizer.encode_special_tokens = not specials
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in found]

    def decoder(self) -> Callable[[int], str]:
        stream = self._stream(skip_special_tokens=False)
        return lambda token: str(stream.step(self._tokenizer, token) or "")


class Tiktoken:
    """An encoding of `tiktoken`, which may fetch it from the internet the first time.

    Args:
        name: name of the encoding, such as "gpt2" or "cl100k_base".
        end: token behind each document, by its text; "": the encoding's own.
    Raises:
        ConfigError: there is no such encoding or token, or the library is not installed.
    """

    def __init__(self, name: str, end: str = "") -> None:
        library = _imported("tiktoken")
        try:
            self._encoding = library.get_encoding(name)
        except Exception as error:  # of the network, of the disk, or of the name
            told = str(error).splitlines() or [type(error).__name__]
            raise ConfigError(f"tiktoken:{name}: {told[0]}") from None
        self.vocab = int(self._encoding.n_vocab)
        self.end: int | None = int(self._encoding.eot_token)
        if end:
            try:
                self.end = int(self._encoding.encode_single_token(end))
            except KeyError:
                raise ConfigError(
                    f"tiktoken:{name} has no token {end!r}; expected the text of one of its own"
                ) from None

    def encode(self, texts: Sequence[str], specials: bool = False) -> list[Ids]:
        found = self._encoding.encode_batch(
            list(texts),
            num_threads=1,
            allowed_special="all" if specials else set(),
            disallowed_special=(),
        )
        return [np.array(one, np.int64) for one in found]

    def decoder(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        single = self._encoding.decode_single_token_bytes
        return lambda token: decoder.decode(single(token))


def _files_that_say_the_end(path: Path) -> Iterator[tuple[Path, str]]:
    """Files beside a tokenizer, and their keys, in the order in which they are asked."""
    if path.name == "tokenizer.json":
        yield from ((path.with_name(name), key) for name, key in _SAY_END)
    elif path.name.endswith(_KEPT):  # what `axrt prepare` tells of the tokens that it made with it
        yield path.with_name(path.name.removesuffix(_KEPT) + ".json"), "end"


def _ends_named_beside(path: Path) -> Iterator[str | int]:
    """The ends of text that the files beside a tokenizer name, as text or number."""
    for file, key in _files_that_say_the_end(path):
        if not file.is_file():
            continue
        try:
            said = json_of(read_text(file)).get(key)
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{file.absolute()}: {error}; expected a JSON object, as Hugging Face has them"
            ) from None
        if isinstance(said, dict):  # with how it is cut from text
            said = said.get("content")
        if isinstance(said, list) and said:
            said = said[0]
        if isinstance(said, str) or type(said) is int:
            yield said


def train_tokenizer(texts: Iterable[str], vocab: int, path: Path) -> None:
    """Train byte-pair encoding (Sennrich et al. 2016) on bytes of text, and write its JSON file.

    Args:
        vocab: number of tokens to come to; text that is short or uniform comes to fewer.
    Raises:
        ConfigError: the library is not installed.
        DataError: there is no text, or `vocab` is less than bytes and the end of a document take.
    """
    library = _imported("tokenizers")
    least = 257
    if vocab < least:
        raise DataError(f"a tokenizer of {plural(vocab, 'token')}; expected at least {least}")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[_ENDS[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    text = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False)
    write_durably(path, text.encode())


def check_installed(name: str) -> None:
    """Check that a library of the extra `data` is there.

    Raises:
        ConfigError: it is not.
    """
    _imported(name)


def _imported(name: str) -> Any:
    try:
        library = __import__(name)
        if name == "tokenizers":
            __import__("tokenizers.decoders")
    except ImportError:
        raise ConfigError(
            f"{name} is not installed; expected it: pip install 'axrt[data]'"
        ) from None
    return library
