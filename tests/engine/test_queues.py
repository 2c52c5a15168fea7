"""The loop runs several queues: a kind of work that axrt does not have, beside the computation."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from axrt.compute import Compute
from axrt.device import CPU
from axrt.heartbeat import Silence
from axrt.loop import Loop, Session
from axrt.mesh import Mesh
from axrt.model.seeds import BorrowedGenerator
from axrt.observe.observer import Observer
from axrt.queues import Inline
from axrt.reader import BatchReader
from axrt.scheduler.bucket import copies_by_pipe
from axrt.scheduler.job import Job
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.rules import OnDevice
from axrt.scheduler.state import RankState
from axrt.scheduler.task import Kind, Task
from axrt.transport.local import LocalWorld
from axrt.workers.worker import Made, Mail, Worker, Workers, nothing
from tests.scheduler.test_a_new_kind import Beside, Ours, features

from .test_engine import LateEnds

STEPS, MICROBATCHES, BUCKETS = 3, 4, 2


class Notes(Worker):
    """Computes nothing."""

    kinds: Sequence[Any] = (*Kind, *Ours)

    def run(self, task: Task) -> Made:
        return nothing


class Watch(Observer):
    def __init__(self) -> None:
        self.events: list[str] = []

    def started(self, task: Task) -> None:
        self.events.append(f"start {task}")

    def finished(self, task: Task) -> None:
        self.events.append(f"finish {task}")


def test_a_step_waits_for_its_pause_and_other_work_goes_on_beside_it() -> None:
    job = Job(Linear(1), policy_by_name("1f1b"), MICROBATCHES)
    buckets = {0: [copies_by_pipe(0, bucket, 1) for bucket in range(BUCKETS)]}
    state = RankState(job, 0, buckets=buckets, features=features(job))
    watch, mail = Watch(), Mail()
    loop = Loop(
        LocalWorld(1).alone(),
        {OnDevice.COMPUTE: Compute(Inline()), Beside.PAUSES: Compute(LateEnds())},
        Mesh(0, 1, 1),
        lambda *note: None,
        lambda payload: payload,
        Silence(),
        [watch],
    )
    for _ in range(STEPS):
        state.ask_step()
    session = Session(
        0,
        state,
        Workers(mail, [Notes()]),
        BatchReader(repeat((None, None)), job, 0, BorrowedGenerator(0, CPU)),
    )
    loop.run(session, lambda: state.finished)
    at = {event: place for place, event in enumerate(watch.events)}
    for step in range(STEPS):
        for part in ("", "/1"):
            assert at[f"finish pause0.{step}{part}"] < at[f"start step0.{step}{part}"]
        assert at[f"start step0.{step}"] < at[f"finish pause0.{step}/1"], "beside the second pause"
    assert len(watch.events) == 2 * STEPS * (2 * MICROBATCHES + 2 * BUCKETS)
