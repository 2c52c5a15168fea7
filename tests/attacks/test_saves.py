"""A short form of `python -m tests.attacks.saves`, which kills 200 times. Nothing else kills a save
between two system calls."""

from pathlib import Path

import pytest

from .saves import attack, can_trace


@pytest.mark.skipif(not can_trace(), reason="wants strace, and the right to trace")
@pytest.mark.parametrize("beside", [False, True], ids=["waited for", "beside training"])
def test_a_kill_at_any_system_call_of_a_save_loses_nothing_that_was_saved(
    tmp_path: Path, beside: bool
) -> None:
    kills, steps = attack(tmp_path / "checkpoints", kills=25, seed=3, say=False, beside=beside)
    assert kills == 25
    assert steps > 1
