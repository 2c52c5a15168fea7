"""Questions of `axrt inspect` are files, which anybody may have written."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from axrt.errors import ConfigError
from axrt.observe.activity import Activity
from axrt.observe.asking import asked
from axrt.observe.inspection import FOLDER, QUESTION, Inspection


def leaves_its_folder(file: Path) -> None:
    file.write_text(json.dumps({"name": "../../outside", "stacks": False}))


NO_QUESTIONS: list[Callable[[Path], object]] = [
    lambda file: os.mkfifo(file),
    lambda file: file.mkdir(),
    lambda file: file.write_text("[1, 2]"),
    lambda file: file.write_text("[" * 60_000),
    lambda file: file.write_text('{"stacks": ' + "9" * 6000 + "}"),
    lambda file: file.write_bytes(b"\xff\xfe\x00" * 100_000),
    lambda file: file.symlink_to("/dev/zero"),
]


def test_what_is_no_question_ends_nothing_and_the_next_one_is_answered(tmp_path: Path) -> None:
    """A thread once ended at the first, or waited for a pipe, and nobody was answered any more."""
    (tmp_path / "outside").mkdir()
    inspection = Inspection(0, 1, Activity())
    inspection.begin(tmp_path)
    for number, make in enumerate([*NO_QUESTIONS, leaves_its_folder]):
        folder = tmp_path / FOLDER / str(number)
        folder.mkdir(parents=True)
        make(folder / QUESTION)
    try:
        answers = asked(tmp_path, stacks=False, within_s=120.0)
    finally:
        inspection.stop()
    assert answers[0].size == 1
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_rank_that_nobody_closes_is_let_go_of(tmp_path: Path) -> None:
    """One that has failed: its engine, and the memory of that, once stayed until the end."""
    others = set(threading.enumerate())
    inspection = Inspection(0, 1, Activity())
    inspection.begin(tmp_path)
    (thread,) = set(threading.enumerate()) - others
    del inspection
    thread.join(120.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rank": 0, "owing": 3}', "[" * 60_000])
def test_what_is_no_answer_is_passed_over(tmp_path: Path, text: str) -> None:
    def meanwhile() -> None:
        (folder,) = (tmp_path / FOLDER).iterdir()
        (folder / "rank-0000").write_text(text)

    assert asked(tmp_path, stacks=False, within_s=0.2, meanwhile=meanwhile) == {}


@pytest.mark.parametrize("make", [NO_QUESTIONS[0], Path.touch])
def test_where_questions_cannot_lie_their_place_is_named(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / FOLDER)
    with pytest.raises(ConfigError, match=rf"{FOLDER}.*: Not a directory; expected a directory"):
        asked(tmp_path, stacks=False, within_s=0.2)
