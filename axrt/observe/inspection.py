"""Answers to `axrt inspect`: what a rank does, since when, what it lacks and from whom.

Who asks puts a file into the directory of the run, and each rank puts its answer beside it:

    RUN/.inspect/NAME/question       JSON: {"stacks": true} asks for Python stacks, too
    RUN/.inspect/NAME/rank-0003      the answer of rank 3

What is no such question is passed over. A thread looks for a question once a second. The loop
itself says what it lacks, when it waits. A rank that does not wait, or is within one long task, is
answered for by the thread.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from weakref import ref

from axrt.scheduler.regular_file import read_bytes

from .activity import Activity
from .json_lines import (
    Fits,
    are_counts,
    are_named_texts,
    is_count,
    is_number,
    is_text,
    object_of,
)
from .observer import Observer, Wait

_THREAD = "axrt inspection"
FOLDER, QUESTION = ".inspect", "question"
_LOOK_S = 1.0
_MOST_BYTES = 1 << 16  # of a question
_MOST_RANKS = 1 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
STATES = ("waits", "computes", "outside")
_LOOP_S = 1.0  # in which a loop that waits answers by itself
_LOOP_FILE = os.path.join("axrt", "runtime", "loop.py")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says of itself."""

    rank: int  # number of the rank
    size: int  # number of ranks of the job
    # host, pid: where it is
    host: str
    pid: int
    state: str  # one of `STATES`; "outside" is not in a call of the engine
    since_s: float  # seconds since it has waited, or since its last task has started or ended
    task: str  # task that runs or has run last; "" before the first
    lacks: str  # what it lacks, if it waits
    owing: tuple[int, ...]  # ranks that owe that
    stacks: dict[str, str]  # Python stacks of its threads, by name; {} where nobody has asked
    members: int = 1  # number of ranks that hold each stage together, a team

    @classmethod
    def read(cls, file: Path) -> "Answer | None":
        """The answer in a file; None where it is none."""
        try:
            told = object_of(read_bytes(file), _OF_AN_ANSWER)
        except (OSError, ValueError):
            return None
        answer = cls(*(told[key] for key in _OF_AN_ANSWER))
        answer = replace(answer, owing=tuple(answer.owing))
        return answer if file.name == f"rank-{answer.rank:04}" else None


_OF_AN_ANSWER: Fits = {
    "rank": is_count,
    "size": lambda value: is_count(value) and 0 < value <= _MOST_RANKS,
    "host": is_text,
    "pid": is_count,
    "state": lambda value: value in STATES,
    "since_s": is_number,
    "task": is_text,
    "lacks": is_text,
    "owing": are_counts,
    "stacks": are_named_texts,
    "members": lambda value: is_count(value) and 0 < value <= _MOST_RANKS,
}


class _Question(NamedTuple):
    """What somebody has asked."""

    folder: Path  # directory in which the question is, and the answers belong
    stacks: bool  # True to tell Python stacks, too

    @classmethod
    def read(cls, file: Path) -> "_Question | None":
        """The question in a file; None where there is none, or whoever has asked has gone."""
        try:
            told = object_of(read_bytes(file, _MOST_BYTES), {})
        except (OSError, ValueError):
            return None
        return cls(file.parent, bool(told.get("stacks")))


class Inspection(Observer):
    """Answers for one rank.

    Args:
        members: number of ranks that hold each stage together.
    """

    def __init__(self, rank: int, size: int, activity: Activity, members: int = 1) -> None:
        self._rank, self._size, self._activity = rank, size, activity
        self._members = members
        self._waits_since_s = 0.0
        self._wait: Wait | None = None
        self._question: _Question | None = None
        self._answered = threading.Event()
        self._folder = Path()
        self._main = threading.get_ident()
        self._stopped = threading.Event()

    def begin(self, run: Path) -> None:
        """Answer from now on."""
        self._folder = run / FOLDER
        # A weak reference: a rank that has failed, and that nobody closes, is let go of.
        asked = ref(self), self._stopped, self._folder
        threading.Thread(target=_look, args=asked, name=_THREAD, daemon=True).start()

    def stop(self) -> None:
        """Answer no more; the thread may end a moment later. What a wait holds is let go of, since
        the user may keep the engine."""
        self._stopped.set()
        self._wait = None

    # What the loop tells.

    def entered(self) -> None:
        self.resumed()

    def waiting(self, wait: Wait) -> None:
        if self._wait is None:
            self._waits_since_s = time.perf_counter()
        self._wait = wait
        self.answer_waiting()

    def answer_waiting(self) -> None:
        """Answer with the last wait, if somebody has asked and it has not ended."""
        if self._question is not None and self._wait is not None:
            wait = self._wait
            self._answer("waits", wait.what(), tuple(sorted(wait.owing())))

    @property
    def run(self) -> Path | None:
        """The directory of the run, where questions are answered; None before `begin`."""
        return self._folder.parent if self._folder.name == FOLDER else None

    def resumed(self) -> None:
        self._wait = None

    # What the thread does.

    def hear(self, question: "_Question") -> None:
        """Answer a question, if the loop does not."""
        self._answered.clear()
        self._question = question
        if not self._answered.wait(_LOOP_S):
            is_busy = self._activity.under_way or self._is_inside()
            state = "computes" if is_busy else "outside"
            self._answer(state, "", ())

    def _is_inside(self) -> bool:
        """The thread that made this rank is within the loop."""
        frame = sys._current_frames().get(self._main)
        return any(file.endswith(_LOOP_FILE) for file in _files_of(frame))

    def _answer(self, state: str, lacks: str, owing: tuple[int, ...]) -> None:
        question, self._question = self._question, None
        if question is None:
            return
        activity = self._activity
        since_s = self._waits_since_s if state == "waits" else activity.since_s
        answer = Answer(
            self._rank,
            self._size,
            socket.gethostname(),
            os.getpid(),
            state,
            round(time.perf_counter() - since_s, 3),
            str(activity.task or ""),
            lacks,
            owing,
            _stacks() if question.stacks else {},
            self._members,
        )
        with suppress(OSError):  # whoever has asked may have gone
            text = json.dumps(asdict(answer)).encode(errors="replace")
            _write_in(question.folder, f"rank-{self._rank:04}", text)
        self._answered.set()


def _look(of: "ref[Inspection]", stopped: threading.Event, folder: Path) -> None:
    """Look for questions in a folder until a rank says that it stops, or is gone."""
    heard: set[Path] = set()
    while not stopped.wait(_LOOK_S) and (inspection := of()):
        asked = set(folder.glob(f"*/{QUESTION}"))
        for file in asked - heard:
            if question := _Question.read(file):
                inspection.hear(question)
        heard = asked
        del inspection  # while it waits it holds nothing


def _write_in(folder: Path, name: str, data: bytes) -> None:
    """Write a file in a folder of questions. Neither the folder nor what it is in may be a link,
    which would lead out of the run. It need not be durable: the loop waits."""
    questions = os.open(folder.parent, _FOLDER)
    try:
        inside = os.open(folder.name, _FOLDER, dir_fd=questions)
    finally:
        os.close(questions)
    try:
        with open(os.open(f"{name}.new", _NEW, 0o666, dir_fd=inside), "wb") as file:
            file.write(data)
        os.rename(f"{name}.new", name, src_dir_fd=inside, dst_dir_fd=inside)
    finally:
        os.close(inside)


def _files_of(frame: FrameType | None) -> list[str]:
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files


def _stacks() -> dict[str, str]:
    """The Python stacks of all threads but that of the inspection, by name; the main thread's comes
    first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {
        names.get(ident, str(ident)): "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
        if names.get(ident) != _THREAD
    }
    return dict(sorted(found.items(), key=lambda one: one[0] != threading.main_thread().name))
