"""Forwards and backwards of a training."""

#   head   needs                                           then
#   -----  ----------------------------------------------  ---------------------------------------
#   F s.n  activation n; on the last stage target n too;   activation n to stage s+1; the last
#          the weights of step n // m                      stage's last of a step: a loss to every
#                                                          stage of every pipe
#   B s.n  F s.n has started, or R s.n where the stage     gradient n to stage s-1; the last of a
#          recomputes; gradient n but on the last stage    step: a part of each shared bucket to
#                                                          each of its copies
#   I s.n  as B                                            gradient n to stage s-1
#   W s.n  I s.n has started                               as B without the gradient
#
# Where a team holds the stage, F, and B or I, have a piece more than joints. The first needs what
# stands above; every other one the slices of the joint before it, from each other member. A piece
# but the last sends each of them its slices.
#
# B where the policy leaves backwards whole, I and W where it splits them. B and W may come in
# pieces. The parts of a bucket leave with the piece that completes its gradient, all others with
# the last.

from collections.abc import Iterator

from ..counters import Gate, Joints
from ..job import StageCopy
from ..message import Meaning, Message, numbered
from ..policies.policy import View
from ..stash_places import StashMove
from ..task import Kind, Task
from .replicas import parts, reduced
from .row import Leave, Need, Row, Sending, StageHere, always, nothing


def pipeline(here: StageHere) -> Iterator[Row]:
    """The rows of a stage."""

    def completes(task: Task, bucket: int) -> list[Message]:
        return parts(here, task, bucket)

    yield Row(
        Kind.FORWARD,
        (*inputs(here), Need(Gate.WEIGHTS), *whole_weights(here, Gate.FORWARDS)),
        then=(lambda task: losses(here, task)) if here.is_last else nothing,
        level=1,
        sends=sent_on(here),
        admitted=with_room(here),
        in_flight=1,
        held=1,
        joints=joints_of_forwards(here),
        stash=StashMove.MAKES if here.offloads_stash else None,
    )
    if not here.job.splits:
        yield Row(
            Kind.BACKWARD,
            (*gradient(here), *whole_weights(here, Gate.BACKWARDS), *reduced(here)),
            completes=completes,
            level=1,
            sends=sent_back(here),
            in_flight=-1,
            held=-1,
            joints=joints_of_backwards(here),
            stash=StashMove.USES_UP if here.offloads_stash else None,
        )
        return
    yield Row(
        Kind.INPUT,
        (*gradient(here), *whole_weights(here, Gate.BACKWARDS)),
        level=1,
        sends=sent_back(here),
        in_flight=-1,
        joints=joints_of_backwards(here),
    )
    yield Row(
        Kind.WEIGHT,
        (Need(Kind.INPUT),),
        completes=completes,
        level=3,
        early=early_by_policy,
        fills=True,
        held=-1,
        stash=StashMove.USES_UP if here.offloads_stash else None,
    )


def early_by_policy(task: Task, view: View) -> bool:
    """The policy says that a weight gradient had better wait."""
    return view.policy.is_early(task, view)


def joints_of_forwards(here: StageHere) -> Joints | None:
    """The joints of the stage's forwards; None where there are none."""
    number = here.job.joints_of(here.stage_copy.stage).forward
    return Joints(Meaning.SLICE, number, other_members(here)) if number else None


def joints_of_backwards(here: StageHere) -> Joints | None:
    """The joints of the stage's backwards, or input gradients; None where there are none."""
    number = here.job.joints_of(here.stage_copy.stage).back
    return Joints(Meaning.SLICE_BACK, number, other_members(here)) if number else None


def other_members(here: StageHere) -> tuple[StageCopy, ...]:
    """The other members that hold this copy of the stage."""
    pipe, stage = here.stage_copy
    return tuple(StageCopy(other, stage) for other in here.job.team_of(pipe) if other != pipe)


def with_room(here: StageHere) -> Leave:
    """The stash of a forward has room on the device."""
    if not here.offloads_stash:
        return always
    return lambda task, view: view.has_room(StashMove.MAKES, task.stage)


def whole_weights(here: StageHere, gate: Gate) -> tuple[Need, ...]:
    """The weights are whole; needed only where they come for residencies."""
    return (Need(gate),) if here.job.residencies else ()


def inputs(here: StageHere) -> tuple[Need, ...]:
    """The messages that a forward needs."""
    pipe, stage = here.stage_copy
    reader = here.job.reader_of(pipe)
    before = reader if here.is_first else here.stage_copy._replace(stage=stage - 1)
    activation = Need(Meaning.ACTIVATION, (before,))
    return (activation, Need(Meaning.TARGET, (reader,))) if here.is_last else (activation,)


def gradient(here: StageHere) -> tuple[Need, ...]:
    """The counters that a backward needs: its own forward (or recomputation), and on all but the
    last stage the gradient."""
    made: tuple[Need, ...] = (Need(Kind.RECOMPUTE if here.recomputes else Kind.FORWARD),)
    if here.offloads_stash:
        made = (*made, Need(Kind.RELOAD))
    if here.is_last:
        return made
    after = here.stage_copy._replace(stage=here.stage_copy.stage + 1)
    return *made, Need(Meaning.GRADIENT, (after,), after=Kind.FORWARD)


def sent_on(here: StageHere) -> Sending | None:
    """The message to the next stage: its activation is there. The last stage sends none."""
    pipe, stage = here.stage_copy
    return None if here.is_last else Sending(Meaning.ACTIVATION, stage + 1, pipe)


def sent_back(here: StageHere) -> Sending | None:
    """The message to the stage before: its gradient is there. Stage 0 sends none."""
    pipe, stage = here.stage_copy
    return None if here.is_first else Sending(Meaning.GRADIENT, stage - 1, pipe)


def losses(here: StageHere, task: Task) -> list[Message]:
    """After the last forward of a step: a message to every stage of every pipe that the losses are
    known."""
    step, _ = here.job.step_of(task.microbatch)
    number = numbered(step, range(here.job.pipes), here.stage_copy.pipe)
    return [Message(Meaning.LOSS, stage, number, pipe) for pipe, stage in here.job.stage_copies()]
