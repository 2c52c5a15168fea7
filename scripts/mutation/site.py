"""A place of the code where one fault can be planted, and the key by which it is found again.

The key says what is changed and not where in the file it stands. So the faults that are drawn stay
the same while other code changes.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

FOUND_BY_DIGITS = 12  # of a key: two sites of a thousand meet once in a hundred million draws


@dataclass(frozen=True)
class Edit:
    """A stretch of a file's text, and what takes its place.

    Args:
        start, end: places in the text, in characters.
        text: what stands there instead.
    """

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Site:
    """One fault that can be planted.

    Args:
        key: digest of the file, the function, the statement, the operator, and of the number of
            the site among those for which all of these are equal.
        file: file below the root of the project.
        line: line that it begins in.
        function: qualified name of the function that it stands in.
        operator: kind of the fault.
        before, after: what is changed, in short.
        edit: the change.
        probes: insertions that tell that the place was reached; `PROBE` stands for the call.
    """

    key: str
    file: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    edit: Edit
    probes: tuple[Edit, ...]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def key_of(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:FOUND_BY_DIGITS]


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text after some edits that do not overlap; of two insertions at one place, the first
    given stands first."""
    done, at = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        done += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join(done) + text[at:]
