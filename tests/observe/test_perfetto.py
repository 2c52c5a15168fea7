"""Timelines as traces of Perfetto, read with Perfetto's own definition of the format."""

from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from axrt.observe.perfetto import perfetto
from axrt.scheduler.job import Job
from axrt.scheduler.policies import placement_for, policy_by_name
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.simulation.timeline import Delivery, Pause, Timeline

theirs = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


class Slice(NamedTuple):
    process: str
    track: str
    name: str
    start: float
    end: float
    arrows: tuple[int, ...]


def read(data: bytes) -> list[Slice]:
    """The slices of a trace; a track's end the one that has begun last."""
    trace: Any = theirs.Trace.FromString(data)
    processes, tracks = {}, {}
    open_: dict[int, list[Any]] = defaultdict(list)
    found = []
    for packet in sorted(trace.packet, key=lambda one: one.timestamp):
        track = packet.track_descriptor
        if track.process.process_name:
            processes[track.uuid] = track.process.process_name
        elif track.uuid:
            tracks[track.uuid] = track.parent_uuid, track.name
        event = packet.track_event
        if event.type == theirs.TrackEvent.TYPE_INSTANT:
            process, track = tracks[event.track_uuid]
            at = packet.timestamp / 1e6
            found.append(
                Slice(processes[process], track, event.name, at, at, tuple(event.flow_ids))
            )
        if event.type == theirs.TrackEvent.TYPE_SLICE_BEGIN:
            open_[event.track_uuid].append(packet)
        elif event.type == theirs.TrackEvent.TYPE_SLICE_END:
            begun = open_[event.track_uuid].pop()
            process, track = tracks[event.track_uuid]
            found.append(
                Slice(
                    processes[process],
                    track,
                    begun.track_event.name,
                    begun.timestamp / 1e6,
                    packet.timestamp / 1e6,
                    tuple(begun.track_event.flow_ids),
                )
            )
    assert not any(open_.values())
    return found


@pytest.fixture
def line() -> Timeline:
    policy = policy_by_name("zb-v")
    return simulate(Job(placement_for(policy, 3, 4), policy, 4), Costs(), steps=2)


def test_every_task_is_a_slice_of_its_rank_and_lane(line: Timeline) -> None:
    slices = [one for one in read(perfetto(line)) if one.track != "waits"]
    found = sorted((one.process, one.name, one.start, one.end) for one in slices)
    expected = sorted((f"rank {rank}", str(task), *of) for rank, task, *of in line.spans)
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[2:] == pytest.approx(other[2:])
    tracks = {one.name.rstrip("0123456789./"): one.track for one in slices}
    assert tracks["F"] == tracks["I"] == tracks["W"] == "compute"
    assert tracks["step"] == "optimizer"


def test_an_arrow_leads_from_each_send_to_its_receive(line: Timeline) -> None:
    ends: dict[int, list[Slice]] = defaultdict(list)
    for one in read(perfetto(line)):
        for arrow in one.arrows:
            ends[arrow].append(one)
    pairs = {
        tuple(one.name for one in sorted(two, key=lambda of: of.start)) for two in ends.values()
    }
    last = 5  # six stages: two of each of three ranks
    expected = set()
    for n in range(8):
        for s in range(last):
            if s != 2:  # a rank has both
                expected |= {(f"F{s}.{n}", f"F{s + 1}.{n}"), (f"I{s + 1}.{n}", f"I{s}.{n}")}
    assert pairs == expected
    assert all(two[0].process != two[1].process for two in ends.values())


def test_sums_copies_and_steps_have_lanes_of_their_own() -> None:
    policy = policy_by_name("1f1b")
    job = Job(placement_for(policy, 2, 4), policy, 4, replicas=2, votes=True, slots=1)
    slices = read(perfetto(simulate(job, Costs(reduce=1, step=1, state=1), steps=2)))
    tracks: dict[str, set[str]] = defaultdict(set)
    for one in slices:
        tracks[one.track].add(one.name.rstrip("0123456789./"))
    assert {"compute", "reductions", "optimizer", "waits"} < tracks.keys()
    assert tracks["compute"] == {"F", "B"}
    assert "reduce" in tracks["reductions"]
    copies = tracks.keys() - {"compute", "reductions", "optimizer", "waits"}
    assert copies == {"state brought in", "state taken out"}


def test_an_arrow_leads_from_each_message_sent_to_its_arrival(line: Timeline) -> None:
    whole = Delivery(0, 1, "activation 0 for stage 1", 1.0, 1.5, 4096)
    lost = Delivery(1, 2, "activation 0 for stage 2", 2.0, None, 4096)
    early = Delivery(2, 1, "ready", -1.0, 0.5, 0)  # before all tasks
    found = read(perfetto(replace(line, messages=[whole, lost, early])))
    ends: dict[int, list[Slice]] = defaultdict(list)
    for one in found:
        if one.track == "messages":
            ends[one.arrows[0]].append(one)
    assert [[(of.process, of.name, of.start) for of in two] for two in ends.values()] == [
        [("rank 2", "send ready", 0.0), ("rank 1", "receive ready", 1.5)],
        [
            ("rank 0", "send activation 0 for stage 1, 4,096 bytes", 2.0),
            ("rank 1", "receive activation 0 for stage 1", 2.5),
        ],
    ]
    of_tasks = {arrow for one in found if one.track == "compute" for arrow in one.arrows}
    assert of_tasks
    assert not of_tasks & ends.keys()


def test_pauses_have_their_cause(line: Timeline) -> None:
    waits = [one for one in read(perfetto(line)) if one.track == "waits"]
    assert len(waits) == len(line.pauses)
    assert {one.name for one in waits} == {pause.cause for pause in line.pauses}


def test_a_pause_before_the_first_task_moves_the_beginning(line: Timeline) -> None:
    early = replace(line, pauses=[Pause(0, "input", -2.0, 0.0), *line.pauses])
    assert min(one.start for one in read(perfetto(early))) == 0
