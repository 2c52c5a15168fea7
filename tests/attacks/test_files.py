"""A short form of `scripts/storm files`: damage of any file of a run, where other tests damage a
checkpoint."""

from pathlib import Path

import pytest

from ..sweeps import fewer
from .files import attack


@pytest.mark.filterwarnings("ignore")
def test_damage_of_any_file_is_found_or_does_not_matter(tmp_path: Path) -> None:
    tries = fewer(36, 18)
    outcomes = attack(tmp_path, tries=tries, seed=5, say=False)
    assert {
        outcome for (name, outcome) in outcomes if "safetensors" in name or name == "manifest.json"
    } == {"found"}
    assert outcomes.total() == tries
