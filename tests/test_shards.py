"""The full run in pieces."""

import pytest

from .shards import read_shard, seconds_of, shards_of

CASES = {f"tests/engine/test_{number}.py": number for number in range(1, 30)}
CASES |= {"tests/mpi/test_runs.py": 40, "tests/gpu/test_gpu.py": 30}


def test_every_file_is_in_one_piece_and_no_piece_is_empty() -> None:
    found = shards_of(CASES, 6)
    assert found.keys() == CASES.keys()
    assert set(found.values()) == {1, 2, 3, 4, 5, 6}
    assert found == shards_of(dict(reversed(CASES.items())), 6), "in whatever order they are found"


def test_pieces_take_about_as_long_as_each_other_but_for_a_file_that_is_longer_alone() -> None:
    taken = [0.0] * 4
    for file, shard in shards_of(CASES, 4).items():
        taken[shard - 1] += seconds_of(file, CASES[file])
    longest = max(seconds_of(file, cases) for file, cases in CASES.items())
    assert max(taken) <= max(longest, 4 / 3 * sum(taken) / 4)


def test_a_piece_is_written_as_a_pair() -> None:
    assert read_shard("2/6") == (2, 6)
    for wrong in ("", "2", "0/6", "7/6", "2/", "a/b", "2/6/1"):
        with pytest.raises(ValueError, match="expected a piece and the number of pieces"):
            read_shard(wrong)
