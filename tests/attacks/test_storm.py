"""A short form of `scripts/storm`: one fault of each kind, in one run. Nothing else lets faults
follow each other; test_runs.py and test_launch.py have each by itself."""

from pathlib import Path

import pytest

from .storm import FAULTS, attack


@pytest.mark.sweep
def test_a_training_in_a_storm_ends_with_the_bits_of_a_quiet_one(tmp_path: Path) -> None:
    storm, steps = attack(tmp_path, kills=len(FAULTS), ranks=2, seed=1, say=False)
    assert set(storm.lives) == set(FAULTS)
    assert steps > 10
