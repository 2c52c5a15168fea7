"""The event loop of a rank."""

#   finish   compute says which tasks have ended: workers complete them, brain says what follows,
#            parcels leave
#   poll     parcels that have arrived: workers keep the payload, brain hears what became true
#   read     the reader's microbatch, one for each pipe, when the brain wants one
#   start    brain picks and counts, compute starts a worker on it; a task that has ended when it
#            has started, as on a CPU, is finished at once
#
# Coroutines, such as a save under way, go on once a round. All parcels that have arrived are heard
# before a task is picked; nothing here decides. Observers are told of every event and may not
# change what happens.
#
# A task costs microseconds here, and most of them are calls of Python functions. So what happens
# once per task avoids a call where that reads as well, and what is seldom needed is asked for by an
# attribute first. tests/engine/test_calls.py counts.

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from typing import Any

from axrt.observe.activity import Activity
from axrt.observe.observer import Audience, Observer, Wait
from axrt.scheduler.lacks import INPUT
from axrt.scheduler.rules import OnDevice, Queue
from axrt.scheduler.task import Task
from axrt.transport import Parcel, Transport
from axrt.transport.control import ControlMessage, Topic
from axrt.world.heartbeat import Silence
from axrt.world.mesh import Mesh

from .compute import Compute
from .coroutine import Coroutine
from .peers import Peers
from .post import Hear, Post
from .session import Session
from .task_runner import TaskRunner
from .waiting import Waiting

_LOOK_S = 100e-6  # between two looks at work beside the device, such as a collective


class Loop:
    """Runs sessions on one rank.

    Args:
        queues: engines that run tasks, by the queue of their kind. That of the device computes;
            what starts on others is over in no time on the host.
        hear: function that is called with source rank, generation, message and payload for every
            control message that is not the loop's own.
        taken: function that puts what a reader has read on the device.
    """

    def __init__(
        self,
        transport: Transport,
        queues: Mapping[Queue, Compute],
        mesh: Mesh,
        hear: Hear,
        taken: Callable[[Any], Any],
        heartbeat: Silence,
        observers: Sequence[Observer] = (),
        activity: Activity | None = None,
    ) -> None:
        self._transport = transport
        self._queues, self._compute = queues, queues[OnDevice.COMPUTE]
        # Those on which a task may still run when it has started.
        self._lasting = [runs for runs in queues.values() if not runs.at_once]
        audience = Audience(observers)
        self._peers = Peers(lambda place: mesh.rank_of(*place), heartbeat)
        self._waiting = Waiting(audience, activity or Activity(), self._peers)
        self._post = Post(transport, mesh, hear, taken, audience, self._peers, self._waiting)
        lingers = transport.takes_time
        self._tasks = TaskRunner(queues, self._post, audience, self._waiting, lingers)
        self._coroutines: list[Coroutine[Any]] = []

    @property
    def task(self) -> Task | None:
        """The task that runs or has run last, for the text of a failure; None before the first."""
        return self._waiting.activity.task

    def run(self, session: Session, done: Callable[[], bool]) -> None:
        """Run tasks of the session until `done` is true.

        Args:
            done: function that is asked when nothing moves, and each time once the data has ended.
        Raises:
            PeerLeftError: a rank that owes something has closed its engine or is in another call.
            PeerLostError: a rank that owes something has died or shows no sign of life.
        """
        state, tasks = session.state, self._tasks
        with self._compute.current():
            self._enter(session)
            moved = True
            while True:
                if (not moved or state.end is not None) and done():
                    break
                waits = not moved and not self._compute.running
                if waits:
                    self._wait(session)
                if self._coroutines:
                    self._run_coroutines()
                wait_s = self._patience_s() if waits else 0.0
                moved = False
                for runs in self._lasting:
                    if runs.running and self._tasks.finish(session, runs):
                        moved = True
                if arrived := self._transport.poll(wait_s):
                    moved = self._post.hear_all(arrived) or moved
                if (state.reads or session.reader.serves) and self._read(session):
                    moved = True
                # What follows from work beside the device leaves before a task that may take long.
                if (state.beside and tasks.start_beside(session)) or tasks.start_on(
                    session, OnDevice.COMPUTE
                ):
                    moved = True
            self._transport.flush()

    def computing(self) -> AbstractContextManager[Any]:
        """Context within which work on the device is in order with the tasks."""
        return self._compute.current()

    def listen(
        self,
        until: Callable[[], bool],
        what: str,
        owing: Callable[[], Collection[int]],
        in_this_call: bool = True,
    ) -> None:
        """Hear what comes, and run nothing, until a condition holds.

        Args:
            owing: function that gives the ranks that have not sent it yet.
            in_this_call: True if a rank that is in another call will not send it.
        Raises:
            PeerLeftError: a rank that owes something has closed its engine or is in another call.
            PeerLostError: a rank that owes something has died or shows no sign of life.
        """
        self._peers.begin_call()
        self._waiting.begin_call()
        with self._compute.current():
            moved = True
            while not self._meets(until):
                if not moved:
                    self._waiting.tell(Wait(lambda: _from(what, owing()), lambda: INPUT, owing))
                    self._peers.check_alive(owing)
                    if in_this_call and not self._transport.receiving:
                        self._peers.check_owing(owing(), what)
                arrived = self._transport.poll(0.0 if moved else self._look_s)
                moved = self._post.hear_all(arrived)
        self.moves()

    def tell(self, rank: int, control: ControlMessage, payload: Any, generation: int = 0) -> None:
        """Send a control message to a rank; one to this rank itself is heard at once."""
        self._post.tell(rank, control, payload, generation)

    def begin(self, coroutine: Coroutine[Any]) -> None:
        """Let a coroutine go on beside the tasks, in this call and in those that come."""
        self._coroutines.append(coroutine)

    def moves(self) -> None:
        """Note that this rank goes on: code of the user's runs now, and may take long."""
        if self._waiting.activity.waits:
            self._waiting.go_on()

    def settle(self, session: Session) -> None:
        """Take offloaded state back to where it belongs, and start nothing else."""
        with self._compute.current():
            while not session.state.settled:
                ended = [self._tasks.finish(session, runs) for runs in self._lasting]
                if not any([*ended, self._tasks.start_beside(session)]):
                    time.sleep(_LOOK_S)

    def flush(self) -> None:
        """Let everything leave that was sent: between calls nobody looks after it."""
        self._transport.flush()

    def leave(self, calls: int = 0) -> None:
        """Tell every rank that this one sends nothing more, and wait until each has said the same.

        Raises:
            PeerLeftError: some rank has made another number of calls.
        """
        others = [rank for rank in range(self._transport.size) if rank != self._transport.rank]
        for rank in others:
            self._post.send(rank, Parcel(0, ControlMessage(Topic.LEAVES, 0, calls)))
        # A goodbye overtakes large tensors that are still coming in, of a dropped step say: their
        # memory must stay until they have.
        self.listen(
            lambda: not self._peers.still_there(others) and not self._transport.receiving,
            "the end of every engine",
            lambda: self._peers.still_there(others),
            in_this_call=False,
        )
        self._transport.close()
        self._peers.check_calls(calls)

    def forget(self, older_than: int) -> None:
        """Drop all work under way, and all parcels, also future ones, of generations before
        `older_than`."""
        for queue in self._queues.values():
            queue.drain()
        self._waiting.activity.under_way = 0
        self._post.forget(older_than)

    def _enter(self, session: Session) -> None:
        self._tasks.linger.end()
        self._peers.begin_session(session.generation)
        self._waiting.begin_call()
        self._post.enter(session)

    def _read(self, session: Session) -> bool:
        """Read at most one microbatch for each pipe. The task that starts here next may take long,
        and the other pipe begins on a rank that may have nothing else."""
        if not self._compute.at_once and self._compute.apart:
            return False  # the user's code has the generator that a task uses now
        if session.reader.serves:
            for message, payload in session.reader.serve():
                self._post.post_read(session, message, payload)
        for read in range(session.state.placement.pipes):
            number = session.state.microbatch_to_read()
            if number is None:
                return read > 0
            messages = session.reader(number)
            if messages is None:
                return read > 0
            for message, payload in messages:
                self._post.post_read(session, message, payload)
        return True

    def _patience_s(self) -> float:
        """Seconds that it is worth waiting for a message."""
        until_s = self._tasks.linger.until
        if until_s is not None:
            return max(until_s - time.perf_counter(), 0.0)
        return _LOOK_S if any(one.running for one in self._queues.values()) else self._look_s

    @property
    def _look_s(self) -> float:
        """Seconds between two looks at coroutines; news wake up those that wait for control
        messages."""
        return inf if all(coroutine.owing for coroutine in self._coroutines) else _LOOK_S

    def _meets(self, until: Callable[[], bool]) -> bool:
        self._run_coroutines()  # first: one of them may be what is waited for
        return until()

    def _run_coroutines(self) -> None:
        """Let coroutines go on."""
        for coroutine in self._coroutines:
            coroutine.go_on()
        if any(coroutine.done for coroutine in self._coroutines):
            self._coroutines = [coroutine for coroutine in self._coroutines if not coroutine.done]

    def _wait(self, session: Session) -> None:
        """Check, when nothing has moved or starts here, that the ranks that owe something are still
        there."""
        state, lacks = session.state, session.waiting_for
        owing = partial(self._peers.owing, lacks)
        self._waiting.tell(Wait(lambda: "; ".join(map(str, lacks())), state.why_idle, owing))
        self._peers.check_alive(owing)
        if not self._transport.receiving:
            self._peers.check(lacks)
        entered, generation = self._peers.place
        for rank in self._peers.to_be_told(lacks):
            self._post.send(rank, Parcel(generation, ControlMessage(Topic.WAITS, 0, entered)))


def _from(what: str, ranks: Collection[int]) -> str:
    """The name of what is waited for, and the ranks that owe it."""
    if not ranks:
        return what
    return f"{what} from rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
