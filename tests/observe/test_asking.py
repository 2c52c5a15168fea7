"""What `axrt inspect` shows of the answers."""

from axrt.observe.asking import table
from axrt.observe.inspection import Answer


def test_much_that_is_lacking_is_one_cell() -> None:
    lacks = "; ".join(f"B0.{m} lacks gradient from rank 1" for m in range(40))
    waits = Answer(0, 2, "here", 1, "waits", 2.0, "F0.39", lacks, (1,), {})
    computes = Answer(1, 2, "here", 2, "computes", 2.0, "F1.0", "", (), {})
    _, first, second, *_ = table({0: waits, 1: computes})
    assert first.endswith("B0.0 lacks gradient from rank 1, and 39 more")
    assert second.endswith("F1.0")


def test_members_of_a_team_are_named() -> None:
    lacks = "F1.0/2 lacks a slice from rank 2"
    waits = Answer(3, 4, "here", 1, "waits", 2.0, "F1.0", lacks, (2,), {}, members=2)
    heading, *rows = list(table({3: waits}))[:5]
    assert heading.split() == ["rank", "member", "state", "since", "task", "lacks"]
    assert [row.split()[:2] for row in rows] == [[str(rank), str(rank % 2)] for rank in range(4)]
    assert rows[3].endswith(lacks)
