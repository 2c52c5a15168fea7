"""Ranks die at any moment on the local transport, and the others go on from copies in memory.

`tests/mpi/test_in_job.py` kills processes.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import axrt
from axrt.device.device import CPU
from axrt.transport import Transport
from axrt.transport.local import Chaos, LocalWorld
from axrt.world.survivors import in_places
from axrt.world.world import World

from ..sweeps import examples
from .models import perceptron
from .reference import Item, adamw, configured, random_batches, train_in_plain_torch
from .test_tensor import language, sentences

STEPS, MOST_LOST = 5, 2
HOSTS = "0,1,0,1,0"


class Trained(NamedTuple):
    """What a run trains, and how it shares that out."""

    model: Callable[[], axrt.PipelineModule]
    batches: Callable[[int], Sequence[Item]]
    layouts: Mapping[int, tuple[int, int, int]]  # stages, members and replicas, by ranks
    near: float  # relative, to the losses of plain torch


STAGES = Trained(
    perceptron,
    random_batches((6, 16), classes=5, microbatches=4),
    {4: (2, 1, 2), 3: (2, 1, 1), 2: (2, 1, 1), 1: (1, 1, 1)},
    1e-6,
)
TEAMS = Trained(language, sentences, {4: (1, 2, 2), 3: (1, 2, 1), 2: (1, 2, 1), 1: (1, 1, 1)}, 1e-5)


class Survivor(World):
    """A rank whose job may go on without others.

    Args:
        launched: number of the rank when the job began.
        has_lost: some are lost.
    """

    survives = True

    def __init__(self, launched: int, has_lost: bool) -> None:
        super().__init__(CPU)
        self._launched, self._has_lost = launched, has_lost

    @property
    def has_lost(self) -> bool:
        return self._has_lost

    def launched_as(self, rank: int) -> int:
        return self._launched


class Run(NamedTuple):
    """A run that goes on in job after job.

    Args:
        of: what it trains.
        folder: folder of its checkpoints, and of copies in memory.
        zero: stage of ZeRO where there are replicas.
        losses: every loss of a step that a first rank has seen, in order.
    """

    of: Trained
    folder: Path
    zero: int
    losses: list[tuple[int, float]]

    def train(self, launched: list[int], seed: int, dies: tuple[int, int] | None) -> bool:
        """Train with some ranks, of which one may die. Returns True where all steps are done."""
        pipe, tensor, data = self.of.layouts[min(len(launched), 4)]
        count = len(self.of.batches(0)) // data
        config = configured(
            count,
            parallel={"pipe": pipe, "tensor": tensor, "data": data},
            memory={"zero": self.zero, "bucket_mb": 0.004},
            checkpoint={"memory_dir": str(self.folder / "shm"), "memory_every": 1},
            run={"host_of": HOSTS},
            schedule={"policy": "1f1b"},
        )

        def rank_main(transport: Transport) -> bool:
            world = Survivor(launched[transport.rank], len(launched) < 5)
            try:
                engine = axrt.initialize(
                    self.of.model(), adamw, config=config, transport=transport, world=world
                )
                engine.load_checkpoint(self.folder / "saved", missing_ok=True)
                mine = slice(engine.data_rank * count, (engine.data_rank + 1) * count)
                while engine.step < STEPS:
                    batch = iter(self.of.batches(engine.step)[mine]) if engine.reads else None
                    loss = engine.train_batch(batch).loss
                    if engine.is_main:
                        self.losses.append((engine.step, loss))
                    engine.keep_in_memory(self.folder / "saved")
                engine.close()
            except axrt.PeerLostError:
                return False
            return True

        ranks = pipe * tensor * data
        dies = dies and (dies[0] % ranks, dies[1])
        world = LocalWorld(ranks, seed, Chaos(dies=dies))
        done = all(world.run(rank_main))
        if world.dead:
            left = [rank for rank in range(len(launched)) if rank not in world.dead]
            order = in_places(left, ranks, min(ranks, len(left)))
            launched[:] = [launched[rank] for rank in order]
        return done


@given(
    st.integers(),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 600)), min_size=1, max_size=4),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([STAGES, TEAMS]),
)
@examples(20, quick=3)
def test_whoever_dies_and_whenever_the_batch_of_each_step_is_that_of_a_quiet_run(
    seed: int, deaths: list[tuple[int, int]], zero: int, of: Trained
) -> None:
    with tempfile.TemporaryDirectory() as name:
        run, launched = Run(of, Path(name), zero, []), list(range(5))
        (run.folder / "shm").mkdir()
        for number, dies in enumerate((*deaths, None)):
            if run.train(launched, seed + number, dies):
                break
        quiet = train_in_plain_torch(of.model(), of.batches, STEPS, adamw).losses
        found = dict(run.losses)
        assert sorted(found) == list(range(1, STEPS + 1))
        assert [found[step] for step in sorted(found)] == pytest.approx(quiet, rel=of.near)
        both_hosts = {HOSTS.split(",")[one] for one in launched} == {"0", "1"}
        if both_hosts and len(launched) > 1:  # else there was nowhere to keep a copy
            lost = len(run.losses) - STEPS
            assert lost <= MOST_LOST * len(deaths), run.losses
