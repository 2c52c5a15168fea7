"""`[data]`: what is trained on."""

from dataclasses import dataclass

from .section import Section, key


@dataclass(frozen=True, slots=True)
class Data(Section):
    """The data to train on."""

    source: str | tuple[str, ...] = key(
        "stdlib",
        "a text file, a directory of them, a token file (.bin), or 'stdlib': the "
        "source of Python's own standard library; paths are relative to where the command runs. Or "
        "a list of these",
        is_path=True,
    )
    dtype: str = key(
        "auto",
        "type of the tokens of a .bin without an .idx beside it; 'auto' = as its first numbers and "
        "model.vocab say, uint16 where nothing speaks against it",
        choices=("auto", "uint8", "uint16", "uint32", "int32", "int64"),
    )
    weights: tuple[float, ...] = key(
        (), "how often samples of each source come, where there are several; [] = equally", least=0
    )
    files: str = key("**/*", "which files of a directory, a glob pattern", is_path=True)
    tokenizer: str = key(
        "auto",
        "how text has become tokens, for axrt generate: 'auto' = text as bytes, and token files as "
        "axrt prepare says beside them; else the path of a tokenizer.json, or 'tiktoken:NAME'",
        is_path=True,
    )
    document_end: int = key(
        -1,
        "token that ends a document: attention does not reach back across it, and what comes after "
        "it is not predicted; -1 = documents are not told apart",
        least=-1,
    )
    masked: bool = key(
        False,
        "token files have masked tokens, which are read and not predicted (axrt prepare "
        "--prompt-field)",
    )
    held_out: float = key(
        0.05,
        "share of the files (of one file: of its end) kept for validation; 0 = none",
        least=0,
        most=0.5,
    )
    validation: str | tuple[str, ...] = key(
        "",
        "what to validate on, like source, instead of a share of it; '' = held_out says",
        is_path=True,
    )
    workers: int = key(
        0,
        "processes that prepare microbatches ahead, for each rank that reads; 0 = the rank itself "
        "does",
        least=0,
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of all sources."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def validations(self) -> tuple[str, ...]:
        """The names of all there is to validate on by itself."""
        if isinstance(self.validation, str):
            return (self.validation,) if self.validation else ()
        return self.validation

    @property
    def is_of_tokens(self) -> bool:
        """The sources are token files."""
        return all(source.endswith(".bin") for source in self.sources)

    @property
    def masks(self) -> bool:
        """Some targets do not count in the loss."""
        return self.document_end >= 0 or self.masked

    @property
    def validates(self) -> bool:
        """True if there is data to validate on."""
        return bool(self.validation) or self.held_out > 0
