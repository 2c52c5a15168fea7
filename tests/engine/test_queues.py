"""The loop runs several queues: a kind of work that axrt does not have, beside the computation."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any, cast

from axrt.device.device import CPU
from axrt.device.queues import Inline
from axrt.model.seeds import BorrowedGenerator
from axrt.observe.observer import Observer
from axrt.runtime.compute import Compute
from axrt.runtime.loop import Loop
from axrt.runtime.reader import BatchReader
from axrt.runtime.session import Session
from axrt.scheduler.bucket import copies_by_pipe
from axrt.scheduler.job import Job
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.rules import OnDevice
from axrt.scheduler.task import Kind, Task
from axrt.transport import Parcel, Transport
from axrt.transport.control import ControlMessage, Topic
from axrt.transport.local import LocalWorld
from axrt.workers.worker import Made, Mail, Worker, Workers, nothing
from axrt.world.heartbeat import Silence
from axrt.world.mesh import Mesh
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

    def finished(self, task: Task, began_s: float, ended_s: float) -> None:
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
        lambda *control: None,
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


class Scripted:
    """A transport on which one batch of parcels after the other arrives."""

    rank, takes_time, receiving = 0, False, False

    def __init__(self, *batches: list[tuple[int, Parcel]]) -> None:
        self._batches = list(batches)

    def poll(self, wait_s: float) -> list[tuple[int, Parcel]]:
        return self._batches.pop(0) if self._batches else []


class Counted(Silence):
    moved = 0

    def moves(self) -> None:
        self.moved += 1


def test_that_another_rank_waits_lets_nobody_go_on() -> None:
    """Else two ranks that tell each other so every two seconds would never lose patience."""
    heard: list[Any] = []
    waits = (1, Parcel(0, ControlMessage(Topic.WAITS)))
    real = (1, Parcel(0, ControlMessage(Topic.SAVED)))
    heartbeat = Counted()
    loop = Loop(
        cast(Transport, Scripted([waits], [], [waits, waits], [real], [real, waits])),
        {OnDevice.COMPUTE: Compute(Inline())},
        Mesh(0, 1, 1),
        lambda *control: heard.append(control),
        lambda payload: payload,
        heartbeat,
    )
    loop.listen(lambda: len(heard) == 2, "a note", lambda: {1})
    assert heartbeat.moved == 2, "at the begin, and for the note that ends its wait"
