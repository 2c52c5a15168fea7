"""What comes to a rank and what leaves it: messages of the brain with their payloads, and
control messages."""

# A parcel has a generation, the number of its session; every rank counts alike. What is of a later
# session than the present one is kept, what is of an earlier one is dead.
#
# A message names a stage of a pipe. Which rank holds that is asked once, and kept with the session.
# A message to this rank itself goes to its own brain without an envelope, and its payload is handed
# over as it is.

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from axrt.device.queues import NOW, Moment, moment_of
from axrt.observe.observer import Audience
from axrt.scheduler.message import Message
from axrt.transport import Parcel, Transport
from axrt.transport.control import ControlMessage, Topic
from axrt.transport.payload import flatten
from axrt.world.mesh import Mesh

from .peers import Peers, Place
from .session import Session
from .waiting import Waiting

Hear = Callable[[int, int, ControlMessage, Any], None]  # source rank, generation, message, payload


class Post:
    """The post of one rank.

    Args:
        hear: function that is called for every control message that is not the loop's own.
        taken: function that puts what a reader has read on the device.
    """

    def __init__(
        self,
        transport: Transport,
        mesh: Mesh,
        hear: Hear,
        taken: Callable[[Any], Any],
        audience: Audience,
        peers: Peers,
        waiting: Waiting,
    ) -> None:
        self._transport, self._mesh = transport, mesh
        self._hear, self._taken = hear, taken
        self._audience, self._peers = audience, peers
        self._waiting, self._activity = waiting, waiting.activity
        self._session: Session | None = None
        self._for_later: dict[int, list[tuple[Message, Any]]] = defaultdict(list)
        self._oldest = 0  # parcels of older generations are dead

    def enter(self, session: Session) -> None:
        """Take in what has come for a session, which is the present one from now on."""
        self._session = session
        for message, payload in self._for_later.pop(session.generation, []):
            self._take(session, message, payload)

    def forget(self, older_than: int) -> None:
        """Drop all parcels, also future ones, of generations before `older_than`."""
        self._session = None
        self._oldest = older_than
        for generation in [g for g in self._for_later if g < older_than]:
            del self._for_later[generation]

    def tell(self, rank: int, control: ControlMessage, payload: Any, generation: int = 0) -> None:
        """Send a control message to a rank; one to this rank itself is heard at once."""
        if rank == self._transport.rank:
            self._hear(rank, generation, control, payload)
        else:
            self.send(rank, Parcel(generation, control, payload), moment_of(flatten(payload)[1]))

    def post(self, session: Session, message: Message, payload: Any = None) -> None:
        """Pass a true message on: to this rank's brain, or to the rank that holds the stage."""
        rank = self._rank_for(session, message)
        if rank is None:
            session.state.deliver(message)
            session.workers.keep(message, payload)
        else:
            self.send(rank, Parcel(session.generation, message, payload))

    def post_read(self, session: Session, message: Message, payload: Any) -> None:
        """Pass on what a reader has read, or is told by one."""
        rank = self._rank_for(session, message)
        if rank is None:
            self._take(session, message, payload)
            return
        # What was read may just be launched.
        after = moment_of(flatten(payload)[1]) if message.is_read else NOW
        self.send(rank, Parcel(session.generation, message, payload), after)

    def _rank_for(self, session: Session, message: Message) -> int | None:
        """The rank of the job that a message is for; None: this one."""
        place = message.pipe, message.stage
        if place not in session.ranks:
            is_here = session.state.is_here(message)
            rank = None if is_here else self._mesh.rank_of(*session.state.place_of(message))
            session.ranks[place] = rank
        return session.ranks[place]

    def send(self, rank: int, parcel: Parcel, after: Moment = NOW) -> None:
        """Send a parcel to another rank, when what it holds is there."""
        for tell in self._audience.sent:  # first: it may arrive before the call that sends it ends
            tell(rank, parcel.message, parcel.payload)
        self._transport.send(rank, parcel, after)

    def hear_all(self, arrived: Sequence[tuple[int, Parcel]]) -> bool:
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
                    self._waiting.go_on()
            if isinstance(message, ControlMessage):
                self._hear_control(source, generation, message, payload)
            elif self._session is not None and generation == self._session.generation:
                self._take(self._session, message, payload)
            elif generation >= self._oldest:
                self._for_later[generation].append((message, payload))
                self._peers.is_elsewhere(source)
        return moves

    def _hear_control(
        self, source: int, generation: int, control: ControlMessage, payload: Any
    ) -> None:
        if control.topic is Topic.LEAVES:
            self._peers.has_left(source, control.number)
        elif control.topic is Topic.WAITS:
            self._peers.waits_for_me(source, Place(control.number, generation))
        else:
            self._hear(source, generation, control, payload)

    def _take(self, session: Session, message: Message, payload: Any) -> None:
        """Take in a message from another rank, or from a reader."""
        session.state.deliver(message)
        session.workers.keep(message, self._taken(payload) if message.is_read else payload)
