"""Whether a job is started again."""

import pytest

from axrt.exit_codes import Exit
from axrt.restarts.decision import decide
from axrt.restarts.history import Start

_KILLED = 137


def start(code: int, said: int | None = None, gained: int = 0) -> Start:
    return Start("2026-01-01T00:00:00+00:00", 1.0, 2, (), (), code, said, (), 0, gained)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (Exit.DONE, Exit.DONE),
        (Exit.BAD_INPUT, Exit.BAD_INPUT),
        (Exit.BAD_INPUT, None),  # the launcher's own refusal
        (_KILLED, Exit.BAD_INPUT),  # it has killed the ranks behind the one that said so
        (Exit.INTERRUPTED, Exit.INTERRUPTED),
    ],
)
def test_some_ends_are_never_tried_again(code: int, said: int | None) -> None:
    assert not decide([start(code, said, gained=5)], restarts=100, asked=False).again


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (_KILLED, None),
        (9, None),
        (Exit.LOST_PEER, Exit.LOST_PEER),
        (_KILLED, Exit.LOST_PEER),
        (Exit.DONE, None),  # nobody has said that all is done
        (Exit.SAVED, Exit.SAVED),
        (-9, None),  # the launcher itself was killed
        (Exit.FAILED, Exit.FAILED),
    ],
)
def test_others_are_as_long_as_steps_are_gained(code: int, said: int | None) -> None:
    many = [start(code, said, gained=1)] * 50
    assert decide(many, restarts=100, asked=False) == decide(many[:1], 100, False)
    assert decide(many, restarts=100, asked=False).again
    assert not decide(many, restarts=100, asked=True).again
    assert not decide(many, restarts=49, asked=False).again
    assert decide(many, restarts=50, asked=False).again


@pytest.mark.parametrize(
    ("code", "said", "text"),
    [
        (-9, None, "the launcher was ended by signal 9"),
        (255, Exit.DONE, "all was done, and then a rank was lost"),
        (137, None, "a rank was lost"),
        (1, None, "the launcher ended with 1"),
    ],
)
def test_what_has_happened_is_told(code: int, said: int | None, text: str) -> None:
    assert decide([start(code, said, gained=1)], 100, False).reason == text


def test_pauses_grow_while_nothing_is_gained() -> None:
    lost = start(_KILLED)
    pauses = [decide([lost] * number, 100, False).pause_s for number in (1, 2)]
    assert pauses == [1.0, 2.0]
    assert decide([lost, lost, start(_KILLED, gained=1)], 100, False).pause_s == 0


def test_starts_that_gain_nothing_are_given_up() -> None:
    lost, failed = start(_KILLED), start(Exit.FAILED, Exit.FAILED)
    ended = decide([lost] * 3, 100, False)
    assert (ended.again, "3 starts in a row have gained no step" in ended.reason) == (False, True)
    assert not decide([failed] * 2, 100, False).again
    assert not decide([failed, lost, failed], 100, False).again
    assert decide([lost, failed], 100, False).again
    assert decide([lost, lost, start(_KILLED, gained=1), lost, lost], 100, False).again
