"""A short form of `scripts/storm`: one fault of each kind, in the quick run on one rank."""

from pathlib import Path

from ..sweeps import fewer
from .storm import FAULTS, attack


def test_a_training_in_a_storm_ends_with_the_bits_of_a_quiet_one(tmp_path: Path) -> None:
    storm, steps = attack(tmp_path, kills=len(FAULTS), ranks=fewer(2, quick=1), seed=1, say=False)
    assert set(storm.lives) == set(FAULTS)
    assert steps > 10
