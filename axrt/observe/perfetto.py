"""A timeline as a trace of Perfetto (ui.perfetto.dev): ranks as processes, and a track for each
queue, for waits and for messages.

Arrows lead from each message's sending to its arrival. Others lead from a task to the one that it
makes ready on another rank: a forward to that of the next stage, and a backward to that of the
stage before. A simulated timeline has these alone.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from axrt.errors import ConfigError
from axrt.scheduler.simulation.timeline import Span, Timeline
from axrt.scheduler.task import AnyKind, Kind

ENDING = ".perfetto-trace"
_SEQUENCE = 1  # whatever writes packets has a number
_SUMS = (Kind.REDUCE, Kind.ACROSS, Kind.JOIN, Kind.NORM, Kind.VOTE)
_WAITS, _MESSAGES = "waits", "messages"
_NS = {"s": 1e9}  # in a unit of the timeline; those of a simulation become milliseconds


def perfetto(line: Timeline) -> bytes:
    """The trace, as its file has it.

    Raises:
        ConfigError: the library that writes it is not installed.
    """
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as theirs
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError:
        raise ConfigError(
            "perfetto is not installed; expected it: pip install 'axrt[track]'"
        ) from None
    builder, event = TraceProtoBuilder(), theirs.TrackEvent
    tracks: dict[tuple[int, str], int] = {}
    for rank, track in sorted({(span.rank, _track(span.task.kind)) for span in line.spans}):
        tracks[rank, track] = len(tracks) + line.ranks + 1
    for rank in range(line.ranks):
        for track in (_WAITS, *([_MESSAGES] if line.messages else [])):
            tracks[rank, track] = len(tracks) + line.ranks + 1
        name = ", ".join(filter(None, [f"rank {rank}", line.member(rank)]))
        _describe(builder, rank + 1, process=rank, name=name)
    for (rank, track), number in tracks.items():
        _describe(builder, number, parent=rank + 1, name=track)
    ns, flows = _NS.get(line.unit, 1e6), _flows(line)
    slices = sorted(_slices(line, flows), key=lambda of: of[3])
    ends = list(_ends(line, 1 + max(chain(*flows.values()), default=0)))
    zero = min([*(of[3] for of in slices), *(end.at for end in ends)], default=0.0)
    for rank, track, name, start, end, arrows in slices:
        begin = (start - zero) * ns
        packet = _packet(builder, begin, event.TYPE_SLICE_BEGIN, tracks[rank, track])
        packet.track_event.name = name
        packet.track_event.flow_ids.extend(arrows)
        _packet(builder, (end - zero) * ns, event.TYPE_SLICE_END, tracks[rank, track])
    for one in ends:
        at = tracks[one.rank, _MESSAGES]
        packet = _packet(builder, (one.at - zero) * ns, event.TYPE_INSTANT, at)
        packet.track_event.name = one.name
        packet.track_event.flow_ids.append(one.arrow)
    return bytes(builder.serialize())


def _slices(
    line: Timeline, flows: dict[Span, list[int]]
) -> Iterator[tuple[int, str, str, float, float, list[int]]]:
    """Rank, track, name, start, end and arrows of all that is shown."""
    for span in line.spans:
        rank, task, start, end = span
        yield rank, _track(task.kind), str(task), start, end, flows.get(span, [])
    for rank, cause, start, end in line.pauses:
        yield rank, _WAITS, cause, start, end, []


class _End(NamedTuple):
    """Where and when a message was sent, or has arrived."""

    rank: int
    name: str
    at: float
    arrow: int


def _ends(line: Timeline, first: int) -> Iterator[_End]:
    """The two ends of each message whose both times are known; arrows are counted from `first`."""
    for arrow, one in enumerate(line.messages, first):
        if one.sent is not None and one.arrived is not None:
            size = f", {one.num_bytes:,} bytes" if one.num_bytes else ""
            yield _End(one.source, f"send {one.what}{size}", one.sent, arrow)
            yield _End(one.to, f"receive {one.what}", one.arrived, arrow)


def _track(kind: AnyKind) -> str:
    """The track of a kind of work: each that runs beside the tasks has its own."""
    if kind.beside:
        return kind.label
    if kind in _SUMS:
        return "reductions"
    return "compute" if kind.of_a_microbatch else "optimizer"


def _flows(line: Timeline) -> dict[Span, list[int]]:
    """The numbers of the arrows that begin or end at each task."""
    a_pipe = int(line.schedule.get("ranks") or line.ranks)
    of = {(span.rank // a_pipe, *span.task[:3]): span for span in line.computing()}
    found: dict[Span, list[int]] = {}
    number = 0
    for (replica, kind, stage, microbatch), sender in of.items():
        to = stage + 1 if kind is Kind.FORWARD else stage - 1
        sends = kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)
        receiver = of.get((replica, kind, to, microbatch)) if sends else None
        if receiver is not None and receiver.rank != sender.rank:
            number += 1
            found.setdefault(sender, []).append(number)
            found.setdefault(receiver, []).append(number)
    return found


def _describe(
    builder: Any, track: int, name: str, parent: int | None = None, process: int | None = None
) -> None:
    described = builder.add_packet().track_descriptor
    described.uuid = track
    if process is not None:
        described.process.pid = process + 1
        described.process.process_name = name
        return
    described.name = name
    if parent is not None:
        described.parent_uuid = parent


def _packet(builder: Any, ns: float, kind: int, track: int) -> Any:
    packet = builder.add_packet()
    packet.timestamp = round(ns)
    packet.trusted_packet_sequence_id = _SEQUENCE
    packet.track_event.type = kind
    packet.track_event.track_uuid = track
    return packet
