"""A rank computes with its share of the cores."""

import pytest

from axrt.device.threads import crowding, share_of, threads_of, usable_cores


@pytest.mark.parametrize(
    ("usable", "shares"),
    [
        ([[0, 1, 2, 3]], [4]),
        ([[0, 1, 2, 3]] * 2, [2, 2]),
        ([[0, 1, 2, 3]] * 3, [1, 1, 1]),
        ([[0, 1]] * 8, [1] * 8),
        ([[0, 1], [2, 3]], [2, 2]),  # bound by the launcher
        ([[0, 1, 2, 3], [0, 1]], [3, 1]),
    ],
)
def test_a_core_that_several_ranks_may_use_counts_in_parts(
    usable: list[list[int]], shares: list[int]
) -> None:
    assert [share_of(rank, usable) for rank in range(len(usable))] == shares


def test_what_the_environment_says_counts() -> None:
    both = [[0, 1, 2, 3]] * 2
    assert threads_of(4, 0, both, {}) == 2
    assert threads_of(1, 0, both, {}) == 1  # the user's own torch.set_num_threads
    assert threads_of(4, 0, both, {"OMP_NUM_THREADS": "4"}) == 4


def test_this_process_may_use_some_core() -> None:
    assert usable_cores()


def test_ranks_that_share_cores_are_told() -> None:
    own = [("a", [0]), ("a", [1]), ("b", [0, 1]), ("b", [0, 1])]
    assert crowding(own) == ""
    assert crowding([("a", [0, 1])] * 3) == (
        "3 ranks share 2 cores: they take turns, and are slower than with a core each"
    )
    assert "2 ranks share 1 core on b" in crowding([*own[:2], ("b", [4]), ("b", [4])])
