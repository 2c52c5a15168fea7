"""The event loop of a rank.

    finish   compute says which tasks have ended: hands settle, brain says what follows, parcels leave
    hear     parcels that have arrived: hands keep the payload, brain hears what became true
    read     the reader's microbatch, one for each pipe, when the brain wants one: the same
    start    brain picks and counts, compute starts the hands on it

Everything that has arrived is heard before anything is picked; nothing here decides. Observers are told of
every event and may not change what happens.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from axrt.attendance import Attendance
from axrt.compute import Compute
from axrt.hands import Hands
from axrt.heartbeat import Silence
from axrt.mesh import Mesh
from axrt.observe.observer import Audience, Observer
from axrt.scheduler.linger import LINGER, Linger
from axrt.scheduler.message import TO_A_RANK, Meaning, Message
from axrt.scheduler.rules import OnDevice
from axrt.scheduler.state import INPUT, RankState
from axrt.scheduler.task import Task
from axrt.transport import Parcel, Transport

Reader = Callable[[int], list[tuple[Message, Any]]]


@dataclass(slots=True)
class Session:
    """One brain with its hands: the training, or an evaluation.

    Args:
        generation: tells its parcels from those of other sessions; every rank counts alike.
        state: the brain.
        hands: what runs its tasks.
        reader: what the reader says when microbatch n is wanted: messages with what goes with them.
    """

    generation: int
    state: RankState
    hands: Hands
    reader: Reader


class Loop:
    """Runs sessions on one rank.

    Args:
        transport: to the other ranks.
        compute: the engine of this rank's device.
        mesh: which rank of the job is which of the pipeline.
        hear_rank: called with (source rank, parcel) for what concerns the rank and not a session.
        heartbeat: knows which ranks are alive.
        observers: told of every event.
    """

    def __init__(
        self,
        transport: Transport,
        compute: Compute,
        mesh: Mesh,
        hear_rank: Callable[[int, Parcel], None],
        heartbeat: Silence,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._transport = transport
        self._compute = compute
        self._mesh = mesh
        self._hear_rank = hear_rank
        self._audience = Audience(observers)
        self._session: Session | None = None
        self._for_later: dict[int, list[Parcel]] = defaultdict(list)
        self._oldest = 0  # parcels of older generations are dead
        self._attendance = Attendance(lambda place: mesh.rank_of(*place), heartbeat)
        self._linger = Linger(LINGER if transport.takes_time else 0.0)
        self.task: Task | None = None  # the one that was started last; named when something fails

    def run(self, session: Session, done: Callable[[], bool]) -> None:
        """Run tasks of the session until `done`."""
        with self._compute.current():
            self._enter(session)
            moved = True
            while not done():
                waiting = not moved and not self._compute.busy
                if waiting:
                    self._wait(session.state)
                else:
                    self._attendance.moved()
                wait_s = self._patience_s() if waiting else 0.0
                moved = any([self._finish(session), self._hear(wait_s), self._read(session), self._start(session)])
            self._transport.flush()

    def listen(self, until: Callable[[], bool], what: str, owing: Callable[[], Collection[int]], in_this_call: bool = True) -> None:
        """Hear what comes, and run nothing, until the condition holds.

        Args:
            until: the condition.
            what: is waited for.
            owing: the ranks that have not sent it yet.
            in_this_call: a rank that is in another call will not send it.
        """
        self._attendance.begin_call()
        for tell in self._audience.entered:
            tell()
        with self._compute.current():
            while not until():
                if self._hear(inf):
                    self._attendance.moved()
                    continue
                for tell in self._audience.waiting:
                    tell(lambda: _from(what, owing()), lambda: INPUT)
                self._attendance.check_alive(owing)
                if in_this_call and not self._transport.receiving:
                    self._attendance.check_owing(owing(), what)
        self._attendance.moved()

    def tell(self, rank: int, parcel: Parcel) -> None:
        """Say something that concerns a rank and not a session; what this rank tells itself it hears at once."""
        if rank == self._transport.rank:
            self._hear_rank(rank, parcel)
        else:
            self._send(rank, parcel)

    def leave(self) -> None:
        """Tell every rank that nothing more will come from here, and wait until each has said the same."""
        others = [rank for rank in range(self._transport.size) if rank != self._transport.rank]
        for rank in others:
            self._send(rank, Parcel(0, Message(Meaning.LEAVE, 0, 0)))
        # A goodbye overtakes large tensors that are still coming in, of a dropped step say: their memory must stay until they have.
        self.listen(
            lambda: not self._attendance.still_there(others) and not self._transport.receiving,
            "the end of every engine",
            lambda: self._attendance.still_there(others),
            in_this_call=False,
        )
        self._transport.close()

    def forget(self, older_than: int) -> None:
        """Drop what is under way, and whatever came or still comes for generations before this one."""
        self._compute.drain()
        self._session = None
        self._oldest = older_than
        for generation in [g for g in self._for_later if g < older_than]:
            del self._for_later[generation]

    def post(self, session: Session, message: Message, payload: Any = None) -> None:
        """Say something true: to this rank's brain, or to the rank that holds the stage."""
        if session.state.is_here(message):
            self._take(session, message, payload)
        else:
            rank = self._mesh.rank_of(*session.state.place_of(message))
            self._send(rank, Parcel(session.generation, message, payload))

    def _send(self, rank: int, parcel: Parcel) -> None:
        self._transport.send(rank, parcel)
        for tell in self._audience.sent:
            tell(rank, parcel.message)

    def _enter(self, session: Session) -> None:
        self._session = session
        self._linger.end()
        self._attendance.begin_call()
        for tell in self._audience.entered:
            tell()
        for parcel in self._for_later.pop(session.generation, []):
            self._take(session, parcel.message, parcel.payload)

    def _hear(self, wait_s: float) -> bool:
        arrived = self._transport.poll(wait_s)
        for source, parcel in arrived:
            for tell in self._audience.arrived:
                tell(source, parcel.message)
            if parcel.message.meaning in TO_A_RANK:
                self._hear_for_rank(source, parcel)
            elif self._session is not None and parcel.generation == self._session.generation:
                self._take(self._session, parcel.message, parcel.payload)
            elif parcel.generation >= self._oldest:
                self._for_later[parcel.generation].append(parcel)
                self._attendance.is_elsewhere(source)
        return bool(arrived)

    def _hear_for_rank(self, source: int, parcel: Parcel) -> None:
        if parcel.message.meaning is Meaning.LEAVE:
            self._attendance.has_left(source)
        elif parcel.message.meaning is Meaning.WAITS:
            self._attendance.waits_for_me(source)
        else:
            self._hear_rank(source, parcel)

    def _take(self, session: Session, message: Message, payload: Any) -> None:
        session.state.deliver(message)
        session.hands.put(message, payload)

    def _read(self, session: Session) -> bool:
        """One for each pipe: what starts here next may take long, and the other pipe begins on a rank that may have nothing else."""
        for read in range(session.state.placement.pipes):
            number = session.state.microbatch_to_read()
            if number is None:
                return read > 0
            self._attendance.moved()  # what follows is the user's, and may take long or never end
            for message, payload in session.reader(number):
                self.post(session, message, payload)
        return True

    def _start(self, session: Session) -> bool:
        started = False
        while self._compute.idle and (task := self._pick(session)):
            here = session.state.start(task, session.hands.follows(task))
            self.task = task
            self._attendance.moved()  # no more waiting: a task may take long, or never end
            for tell in self._audience.started:
                tell(task)
            began_s = time.perf_counter()
            made = self._compute.start(task, session.hands.run)
            if task.kind.in_pieces:
                self._linger.took(task, time.perf_counter() - began_s)
            for message in here:
                session.hands.put(message, made(message))
            started = True
        return started

    def _pick(self, session: Session) -> Task | None:
        """What starts now; behind something that still runs on a device nothing is too early."""
        if self._compute.busy:
            self._linger.end()
            return session.state.pick()
        return self._linger.pick(session.state, OnDevice.COMPUTE, time.perf_counter(), session.hands.follows)

    def _patience_s(self) -> float:
        """How long it is worth waiting for a message."""
        until_s = self._linger.until
        return inf if until_s is None else max(until_s - time.perf_counter(), 0.0)

    def _finish(self, session: Session) -> bool:
        finished = self._compute.finished()
        for task in finished:
            made = session.hands.settle(task)
            for tell in self._audience.finished:
                tell(task)
            for message in session.state.finish(task):
                self.post(session, message, made(message))
        return bool(finished)

    def _wait(self, state: RankState) -> None:
        """Nothing has moved and nothing starts here: whoever owes something must still be there."""
        for tell in self._audience.waiting:
            tell(lambda: "; ".join(str(lack) for lack in state.waiting_for()), state.why_idle)
        self._attendance.check_alive(lambda: self._attendance.owing(state.waiting_for))
        if not self._transport.receiving:
            self._attendance.check(state.waiting_for)
        for rank in self._attendance.to_be_told(state.waiting_for):
            self._send(rank, Parcel(0, Message(Meaning.WAITS, 0, 0)))


def _from(what: str, ranks: Collection[int]) -> str:
    """What is waited for, and from whom."""
    if not ranks:
        return what
    return f"{what} from rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
