"""Text as tokens: bytes, which are built in, and the tokenizers of other libraries, which the extra
`data` brings."""

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from axrt.checkpoint.durable import write_durably
from axrt.errors import ConfigError, DataError

BYTES = "bytes"
_TIKTOKEN = "tiktoken:"
# What models of the field put behind a document, in the order in which it is looked for.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Ids = NDArray[np.int64]


class Tokenizer(Protocol):
    """The map between text and tokens.

    Attributes:
        vocab: number of different tokens.
        end: token behind each document; None: there is none.
    """

    vocab: int
    end: int | None

    def encode(self, texts: Sequence[str], specials: bool = False) -> list[Ids]:
        """The tokens of each text.

        Args:
            texts: the texts.
            specials: True if the name of a special token, such as "<|endoftext|>", stands for that
                token. It is text like any other by default: no document may hold the token that
                ends documents.
        """
        ...

    def decoder(self) -> Callable[[int], str]:
        """A function that is given token after token, and returns the text to show for each: ""
        where a character is not whole yet."""
        ...


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of that name.

    Args:
        name: "bytes"; the path of a JSON file of Hugging Face's `tokenizers`; or "tiktoken:NAME",
            an encoding that `tiktoken` knows.
    Raises:
        ConfigError: there is none, or its library is not installed.
    """
    if name == BYTES:
        return ByteTokenizer()
    if name.startswith(_TIKTOKEN):
        return Tiktoken(name.removeprefix(_TIKTOKEN))
    if name.endswith(".json"):
        return JsonTokenizer(Path(name))
    raise ConfigError(
        f"tokenizer {name!r}; expected 'bytes', the path of a tokenizer.json, or 'tiktoken:NAME'"
    )


class ByteTokenizer:
    """A token is a byte of UTF-8. Behind a document is the byte 0, which text does not have."""

    vocab = 256
    end: int | None = 0

    def encode(self, texts: Sequence[str], specials: bool = False) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decoder(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # a model may know more tokens than there are bytes
        return lambda token: decoder.decode(bytes([token])) if token < 256 else _REPLACEMENT


class JsonTokenizer:
    """A JSON file of Hugging Face's `tokenizers`.

    Args:
        path: path of the file.
    Raises:
        ConfigError: it cannot be read, or the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        library = _imported("tokenizers")
        try:
            self._tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no class of its own for them
            made = path.with_suffix(".tokenizer.json")  # beside the token file that it was made for
            there = f", such as {made}" if made.exists() else ""
            raise ConfigError(
                f"{path.absolute()}: {error}; expected a JSON file of Hugging Face's tokenizers"
                f"{there}"
            ) from None
        self._stream = library.decoders.DecodeStream
        self.vocab = int(self._tokenizer.get_vocab_size())
        known = (self._tokenizer.token_to_id(text) for text in _ENDS)
        self.end: int | None = next((one for one in known if one is not None), None)

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
    Raises:
        ConfigError: there is no such encoding, or the library is not installed.
    """

    def __init__(self, name: str) -> None:
        library = _imported("tiktoken")
        try:
            self._encoding = library.get_encoding(name)
        except Exception as error:  # of the network, of the disk, or of the name
            told = str(error).splitlines() or [type(error).__name__]
            raise ConfigError(f"tiktoken:{name}: {told[0]}") from None
        self.vocab = int(self._encoding.n_vocab)
        self.end: int | None = int(self._encoding.eot_token)

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


def train_tokenizer(texts: Iterable[str], vocab: int, path: Path) -> None:
    """Train byte-pair encoding (Sennrich et al. 2016) on bytes of text, and write its JSON file.

    Args:
        texts: what to train on.
        vocab: number of tokens to come to; text that is short or uniform comes to fewer.
        path: path of the file.
    Raises:
        ConfigError: the library is not installed.
        DataError: there is no text, or `vocab` is less than bytes and the end of a document take.
    """
    library = _imported("tokenizers")
    least = 257
    if vocab < least:
        raise DataError(f"a tokenizer of {vocab} tokens; expected at least {least}")
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
