"""What ranks hold at one time, by simulation of steps that a policy takes."""

from dataclasses import replace

import pytest

from axrt.ledger.activations import StashBytes
from axrt.ledger.occupancy import Occupancies
from axrt.scheduler.simulation.schedules import build_schedule


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zb", "chimera"])
def test_long_steps_are_foretold_from_such_that_a_policy_takes(name: str) -> None:
    """Multiples of the ranks, or of the pipes, also where stashes leave the device."""
    job = replace(build_schedule(name, 4, 64), held_on_device=5)
    sizes = [StashBytes(8, 0, 8, 1, 1)] * job.stages
    held = Occupancies().of_ranks(job, sizes)
    assert all(of.stash > 0 for of in held)
    goes_down = [job.offloads_stash(rank) for rank in range(job.ranks)]
    assert [of.scratch > 0 for of in held] == goes_down
