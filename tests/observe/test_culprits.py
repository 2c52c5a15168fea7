"""Who everyone waits for."""

from dataclasses import replace

from axrt.observe.culprits import verdicts
from axrt.observe.inspection import Answer


def answer(rank: int, state: str, *owing: int, size: int = 4) -> Answer:
    return Answer(rank, size, "host", 1, state, 3.0, f"F0.{rank}", "something", owing, {})


def said(*answers: Answer) -> list[str]:
    return verdicts({one.rank: one for one in answers}, 4)


def test_a_chain_ends_at_its_culprit() -> None:
    assert said(
        answer(0, "waits", 1), answer(1, "waits", 2), answer(2, "waits", 3), answer(3, "computes")
    ) == ["all others wait in the end for rank 3, which has computed F0.3 for 3.0 s"]


def test_a_rank_that_gives_no_answer_is_one() -> None:
    (text,) = said(answer(0, "waits", 1), answer(1, "waits", 3), answer(2, "computes"))
    assert text.startswith("ranks 0 and 1 wait in the end for rank 3, which has given no answer")


def test_who_holds_up_comes_before_who_waits_as_well() -> None:
    (text,) = said(answer(0, "waits", 1, 2), answer(1, "computes"), answer(2, "outside"))
    assert text == (
        "rank 0 waits in the end for rank 2, which is outside the engine for 3.0 s; its last task "
        "was F0.2"
    )


def test_a_circle_is_a_circle() -> None:
    assert said(
        answer(0, "waits", 1), answer(1, "waits", 2), answer(2, "waits", 1), answer(3, "computes")
    ) == ["a circle: 1 -> 2 -> 1"]


def test_ranks_that_pass_work_on_are_no_circle() -> None:
    passing = [replace(answer(rank, "waits", 1 - rank), since_s=0.1) for rank in (0, 1)]
    assert said(*passing) == []


def test_a_rank_that_lacks_nothing_of_others_ends_a_chain() -> None:
    (text,) = said(answer(0, "waits", 1), answer(1, "waits"))
    assert text == "rank 0 waits in the end for rank 1, which waits for 3.0 s for something"
    assert said(answer(1, "waits")) == ["rank 1 waits for 3.0 s for something"]


def test_nobody_waits() -> None:
    assert said(answer(0, "computes"), answer(1, "outside")) == []
