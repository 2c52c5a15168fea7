"""The event loop of a rank.

    finish   compute says which tasks have ended: workers complete them, brain says what follows,
             parcels leave
    poll     parcels that have arrived: workers keep the payload, brain hears what became true
    read     the reader's microbatch, one for each pipe, when the brain wants one: the same
    start    brain picks and counts, compute starts a worker on it; a task that has ended when it
             has started, as on a CPU, is finished at once

Errands, such as a save under way, go on once a round. All parcels that have arrived are heard
before a task is picked; nothing here decides. Observers are told of every event and may not change
what happens.

A task costs microseconds here, and most of them are calls of Python functions. So what happens
once a task is done without one where that reads as well, and what is seldom needed is asked for by
an attribute first. tests/engine/test_calls.py counts.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Protocol

from axrt.compute import Compute
from axrt.errand import Errand
from axrt.heartbeat import Silence
from axrt.mesh import Mesh
from axrt.note import Note, Topic
from axrt.observe.activity import Activity
from axrt.observe.observer import Audience, Observer, Wait
from axrt.payload import flatten
from axrt.peers import Peers, Place
from axrt.queues import NOW, Moment, moment_of
from axrt.reader import Read
from axrt.scheduler.linger import LINGER, Linger
from axrt.scheduler.message import Message
from axrt.scheduler.rules import OnDevice, Queue
from axrt.scheduler.state import INPUT, Lack, RankState
from axrt.scheduler.task import Task
from axrt.transport import Parcel, Transport
from axrt.workers.worker import Made, Workers

_LOOK_S = 100e-6  # between two looks at work beside the device, such as a collective


class Reader(Protocol):
    """The contract of what reads microbatches for a replica."""

    def __call__(self, number: int) -> Read | None:
        """Read microbatch `number`. Returns messages with their payloads; None: it is not here
        yet."""
        ...

    @property
    def serves(self) -> bool:
        """Other replicas may want something of this reader."""
        ...

    def serve(self) -> Read:
        """Do what other replicas want of this reader. Returns messages with their payloads."""
        ...

    def lacks(self) -> list[Lack]:
        """What this reader waits for."""
        ...


@dataclass(slots=True)
class Session:
    """One brain with its workers: the training, or an evaluation."""

    # number that tells its parcels from those of other sessions; every rank counts alike
    generation: int
    state: RankState  # brain of this rank
    workers: Workers  # workers that run its tasks
    reader: Reader  # reader of the replica, which reads microbatches when they are wanted
    # rank of the job that holds a stage, by pipe and stage; None: this one. The loop fills it
    # as it sends.
    ranks: dict[tuple[int, int], int | None] = field(default_factory=dict)

    def waiting_for(self) -> list[Lack]:
        """What keeps this rank from going on, and which rank owes it."""
        return [*self.state.waiting_for(), *self.reader.lacks()]


class Loop:
    """Runs sessions on one rank.

    Args:
        queues: engines that run tasks, by the queue of their kind. That of the device computes;
            what starts on others is over in no time on the host.
        hear: function that is called with (source rank, generation, note, payload) for every note
            that is not the loop's own.
        taken: function that puts what a reader has read on the device.
    """

    def __init__(
        self,
        transport: Transport,
        queues: Mapping[Queue, Compute],
        mesh: Mesh,
        hear: Callable[[int, int, Note, Any], None],
        taken: Callable[[Any], Any],
        heartbeat: Silence,
        observers: Sequence[Observer] = (),
        activity: Activity | None = None,
    ) -> None:
        self._transport = transport
        self._queues, self._compute = queues, queues[OnDevice.COMPUTE]
        # Those on which a task may still run when it has started.
        self._lasting = [runs for runs in queues.values() if not runs.at_once]
        self._mesh = mesh
        self._hear, self._taken = hear, taken
        self._audience = Audience(observers)
        self._session: Session | None = None
        self._for_later: dict[int, list[tuple[Message, Any]]] = defaultdict(list)
        self._oldest = 0  # parcels of older generations are dead
        self._peers = Peers(lambda place: mesh.rank_of(*place), heartbeat)
        self._errands: list[Errand[Any]] = []
        self._lingers = transport.takes_time  # else nothing is worth waiting for
        self._linger = Linger(LINGER if transport.takes_time else 0.0)
        self._activity = activity or Activity()

    @property
    def task(self) -> Task | None:
        """The task that runs or has run last, for the text of a failure; None before the first."""
        return self._activity.task

    def run(self, session: Session, done: Callable[[], bool]) -> None:
        """Run tasks of the session until `done` is true.

        Args:
            done: function that is asked when nothing moves, and each time once the data has ended.
        Raises:
            PeerLeftError: a rank that owes something has closed its engine or is in another call.
            PeerLostError: a rank that owes something has died or shows no sign of life.
        """
        state = session.state
        with self._compute.current():
            self._enter(session)
            moved = True
            while True:
                if (not moved or state.end is not None) and done():
                    break
                waits = not moved and not self._compute.running
                if waits:
                    self._wait(session)
                if self._errands:
                    self._run_errands()
                wait_s = self._patience_s() if waits else 0.0
                moved = False
                for runs in self._lasting:
                    if runs.running and self._finish(session, runs):
                        moved = True
                if arrived := self._transport.poll(wait_s):
                    moved = self._hear_all(arrived) or moved
                if (state.reads or session.reader.serves) and self._read(session):
                    moved = True
                # What follows from work beside the device leaves before a task that may take long.
                if (state.beside and self._start_beside(session)) or self._start_on(
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
        self._begin_call()
        with self._compute.current():
            moved = True
            while not self._meets(until):
                if not moved:
                    self._tell_waiting(Wait(lambda: _from(what, owing()), lambda: INPUT, owing))
                    self._peers.check_alive(owing)
                    if in_this_call and not self._transport.receiving:
                        self._peers.check_owing(owing(), what)
                arrived = self._transport.poll(0.0 if moved else self._look_s)
                moved = self._hear_all(arrived)
        self.moves()

    def tell(self, rank: int, note: Note, payload: Any, generation: int = 0) -> None:
        """Send a note to a rank; a note to this rank itself is heard at once."""
        if rank == self._transport.rank:
            self._hear(rank, generation, note, payload)
        else:
            self._send(rank, Parcel(generation, note, payload), moment_of(flatten(payload)[1]))

    def begin(self, errand: Errand[Any]) -> None:
        """Let an errand go on beside the tasks, in this call and in those that come."""
        self._errands.append(errand)

    def moves(self) -> None:
        """Note that this rank goes on: code of the user's runs now, and may take long."""
        if self._activity.waits:
            self._go_on()

    def settle(self, session: Session) -> None:
        """Take offloaded state back to where it belongs, and start nothing else."""
        with self._compute.current():
            while not session.state.settled:
                ended = [self._finish(session, runs) for runs in self._lasting]
                if not any([*ended, self._start_beside(session)]):
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
            self._send(rank, Parcel(0, Note(Topic.LEAVES, 0, calls)))
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
        self._session = None
        self._activity.under_way = 0
        self._oldest = older_than
        for generation in [g for g in self._for_later if g < older_than]:
            del self._for_later[generation]

    def post(self, session: Session, message: Message, payload: Any = None) -> None:
        """Pass a true message on: to this rank's brain, or to the rank that holds the stage."""
        rank = self._rank_for(session, message)
        if rank is None:
            session.state.deliver(message)
            session.workers.keep(message, payload)
        else:
            self._send(rank, Parcel(session.generation, message, payload))

    def _post_read(self, session: Session, message: Message, payload: Any) -> None:
        """Pass on what a reader has read, or is told by one."""
        rank = self._rank_for(session, message)
        if rank is None:
            self._take(session, message, payload)
            return
        # What was read may just be launched.
        after = moment_of(flatten(payload)[1]) if message.is_read else NOW
        self._send(rank, Parcel(session.generation, message, payload), after)

    def _rank_for(self, session: Session, message: Message) -> int | None:
        """The rank of the job that a message is for; None: this one."""
        place = message.pipe, message.stage
        if place not in session.ranks:
            is_here = session.state.is_here(message)
            rank = None if is_here else self._mesh.rank_of(*session.state.place_of(message))
            session.ranks[place] = rank
        return session.ranks[place]

    def _send(self, rank: int, parcel: Parcel, after: Moment = NOW) -> None:
        for tell in self._audience.sent:  # first: it may arrive before the call that sends it ends
            tell(rank, parcel.message, parcel.payload)
        self._transport.send(rank, parcel, after)

    def _enter(self, session: Session) -> None:
        self._session = session
        self._linger.end()
        self._peers.begin_session(session.generation)
        self._begin_call()
        for message, payload in self._for_later.pop(session.generation, []):
            self._take(session, message, payload)

    def _hear_all(self, arrived: Sequence[tuple[int, Parcel]]) -> bool:
        """Take in what has come; True if any of it lets this rank go on.

        That a rank waits does not: two that tell each other so would count as alive for ever.
        """
        moves = False
        for source, parcel in arrived:
            generation, message, payload = parcel
            self._activity.heard = source, message
            for tell in self._audience.arrived:
                tell(source, message)
            if message[0] is not Topic.WAITS:
                moves = True
                if self._activity.waits:
                    self._go_on()
            if isinstance(message, Note):
                self._hear_note(source, generation, message, payload)
            elif self._session is not None and generation == self._session.generation:
                self._take(self._session, message, payload)
            elif generation >= self._oldest:
                self._for_later[generation].append((message, payload))
                self._peers.is_elsewhere(source)
        return moves

    def _hear_note(self, source: int, generation: int, note: Note, payload: Any) -> None:
        if note.topic is Topic.LEAVES:
            self._peers.has_left(source, note.number)
        elif note.topic is Topic.WAITS:
            self._peers.waits_for_me(source, Place(note.number, generation))
        else:
            self._hear(source, generation, note, payload)

    def _take(self, session: Session, message: Message, payload: Any) -> None:
        """Take in a message from another rank, or from a reader."""
        session.state.deliver(message)
        session.workers.keep(message, self._taken(payload) if message.is_read else payload)

    def _read(self, session: Session) -> bool:
        """Read at most one microbatch for each pipe. The task that starts here next may take long,
        and the other pipe begins on a rank that may have nothing else."""
        if not self._compute.at_once and self._compute.apart:
            return False  # the user's code has the generator that a task uses now
        if session.reader.serves:
            for message, payload in session.reader.serve():
                self._post_read(session, message, payload)
        for read in range(session.state.placement.pipes):
            number = session.state.microbatch_to_read()
            if number is None:
                return read > 0
            messages = session.reader(number)
            if messages is None:
                return read > 0
            for message, payload in messages:
                self._post_read(session, message, payload)
        return True

    def _start_beside(self, session: Session) -> bool:
        started = False
        for queue in session.state.beside:
            started = self._start_on(session, queue) or started
        return started

    def _start_on(self, session: Session, queue: Queue) -> bool:
        """Start tasks of a queue as long as it has room; one, where a task has ended when it has
        started: what has arrived meanwhile is heard before the next."""
        runs = self._queues[queue]
        if not runs.at_once:
            started = False
            while runs.idle and (task := self._pick(session, queue)):
                self._start(session, task, runs)
                started = True
            return started
        lingers = self._lingers and queue is OnDevice.COMPUTE
        task = self._pick(session, queue) if lingers else session.state.pick(queue)
        if task is None:
            return False
        self._run(session, task)
        return True

    def _run(self, session: Session, task: Task) -> None:
        """Run a task that ends here and now."""
        state, workers, activity = session.state, session.workers, self._activity
        if activity.waits:
            self._go_on()
        if task.kind.in_pieces:
            here = state.start(task, *workers.piece_of[task.kind](task))
        else:
            here = state.start(task)
        for tell in self._audience.started:
            tell(task)
        activity.task = task
        activity.since_s = began_s = time.perf_counter()
        made = workers.run(task, here)
        activity.since_s = ended_s = time.perf_counter()
        if task.kind in state.may_be_early:
            self._linger.took(task, ended_s - began_s)
        self._end(session, task, made, began_s, ended_s)

    def _start(self, session: Session, task: Task, runs: Compute) -> None:
        """Start a task on a queue where it ends later."""
        state, activity = session.state, self._activity
        here = state.start(task, None)
        if activity.waits:
            self._go_on()  # a task may take long, or never end
        for tell in self._audience.started:
            tell(task)
        activity.under_way += 1
        activity.since_s = began_s = time.perf_counter()
        runs.start(task, partial(self._work, session, task, here))
        if not runs.queue.apart:
            if task.kind.in_pieces:
                self._has_run(session, task)
            if task.kind in state.may_be_early:
                self._linger.took(task, time.perf_counter() - began_s)

    def _work(self, session: Session, task: Task, here: Sequence[Message]) -> None:
        """Do a task, where tasks run."""
        self._activity.task = task
        session.workers.begin(task, here)

    def _has_run(self, session: Session, task: Task) -> None:
        """Tell the brain whether a task that has run was a piece, which only then is known."""
        here = session.state.tell(task, *session.workers.piece(task))
        session.workers.keep_made(task, here)

    def _pick(self, session: Session, queue: Queue) -> Task | None:
        """The task to start now; behind work that still runs on its queue no task is too early."""
        if queue is not OnDevice.COMPUTE or not session.state.may_be_early:
            return session.state.pick(queue)
        if self._queues[queue].running:
            self._linger.end()
            return session.state.pick(queue)
        now_s = time.perf_counter()
        return self._linger.pick(session.state, queue, now_s, session.workers.has_more_pieces)

    def _patience_s(self) -> float:
        """Seconds that it is worth waiting for a message."""
        until_s = self._linger.until
        if until_s is not None:
            return max(until_s - time.perf_counter(), 0.0)
        return _LOOK_S if any(one.running for one in self._queues.values()) else self._look_s

    @property
    def _look_s(self) -> float:
        """Seconds between two looks at errands; news wake up those that wait for notes."""
        return inf if all(errand.owing for errand in self._errands) else _LOOK_S

    def _meets(self, until: Callable[[], bool]) -> bool:
        self._run_errands()  # first: one of them may be what is waited for
        return until()

    def _run_errands(self) -> None:
        """Let errands go on."""
        for errand in self._errands:
            errand.go_on()
        if any(errand.done for errand in self._errands):
            self._errands = [errand for errand in self._errands if not errand.done]

    def _finish(self, session: Session, runs: Compute) -> bool:
        """End the tasks of a queue that have ended since the last round."""
        ended = runs.finished()
        if ended and self._activity.waits:
            self._go_on()
        for task, began_s, ended_s in ended:
            if runs.queue.apart and task.kind.in_pieces:
                self._has_run(session, task)
            self._activity.under_way -= 1
            self._activity.since_s = max(self._activity.since_s, ended_s)
            made = session.workers.complete(task)
            self._end(session, task, made, began_s, ended_s)
        return bool(ended)

    def _end(
        self, session: Session, task: Task, made: Made, began_s: float, ended_s: float
    ) -> None:
        """Let follow what follows from a task that has ended."""
        for tell in self._audience.finished:
            tell(task, began_s, ended_s)
        for message in session.state.finish(task):
            self.post(session, message, made(message))
        if task.kind in session.workers.told_of_posts:
            session.workers.posted(task)

    def _wait(self, session: Session) -> None:
        """Check, when nothing has moved or starts here, that the ranks that owe something are still
        there."""
        state, lacks = session.state, session.waiting_for
        owing = partial(self._peers.owing, lacks)
        self._tell_waiting(Wait(lambda: "; ".join(map(str, lacks())), state.why_idle, owing))
        self._peers.check_alive(owing)
        if not self._transport.receiving:
            self._peers.check(lacks)
        entered, generation = self._peers.place
        for rank in self._peers.to_be_told(lacks):
            self._send(rank, Parcel(generation, Note(Topic.WAITS, 0, entered)))

    def _begin_call(self) -> None:
        self._activity.waits, self._activity.since_s = False, time.perf_counter()
        for tell in self._audience.entered:
            tell()

    def _tell_waiting(self, wait: Wait) -> None:
        self._activity.waits = True
        for tell in self._audience.waiting:
            tell(wait)

    def _go_on(self) -> None:
        """Note that this rank has waited, and goes on."""
        self._activity.waits = False
        self._peers.moved()
        for tell in self._audience.resumed:
            tell()


def _from(what: str, ranks: Collection[int]) -> str:
    """The name of what is waited for, and the ranks that owe it."""
    if not ranks:
        return what
    return f"{what} from rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
