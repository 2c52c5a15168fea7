"""Runs forwards and backwards on the stages of a rank."""

# A forward takes what has come for it out of the mail, runs the stage, and gives what leaves as a
# function of the message: one task may send several messages, and each asks for its own. So nothing
# is packed that nobody sends.
#
# Where replicas share microbatches, the number of the brain (`slot`) is not that of the microbatch,
# which is in the payload. Seeds, losses and errors go by the microbatch's, so it does not matter
# who computes it. An empty slot computes nothing.
#
# A backward has pieces for three reasons. In a team it has one between two joints, as a forward
# has, and the brain knows how many there are. With split backwards a weight gradient has one for
# each parameter, and other tasks run in between. And on the last microbatch of a run the parts of a
# bucket leave as soon as its own gradient is complete, so that sums travel while the rest of the
# stage computes. Of these two the worker alone knows where a piece ends; the brain is told whether
# more come, and which buckets are complete.

from collections.abc import Callable, Collection, Mapping
from typing import Any

from axrt.model.joints import ALONE, Team
from axrt.model.stage import Stage
from axrt.model.virtual_members import VirtualMembers
from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning
from axrt.scheduler.task import AnyKind, Kind, Task

from .gradients import GradientWorker
from .losses import LossReader
from .slices import SliceMail
from .slot_numbers import SlotNumbers
from .worker import WHOLE, Made, Mail, Piece, Worker, nothing


class StageWorker(Worker):
    """Forwards, backwards in one piece or in several, and recomputation.

    Args:
        stages: stages of this rank, by number.
        pipe_of: pipe of each of them.
        team: this member, and how many hold the stages.
        may_skip: True where an overflow skips a step (loss scaling), which then leaves buffers as
            they were before it.
    """

    kinds = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)

    def __init__(
        self,
        job: Job,
        stages: Mapping[int, Stage | VirtualMembers],
        mail: Mail,
        gradients: GradientWorker,
        slots: SlotNumbers,
        pipe_of: Mapping[int, int],
        team: Team = ALONE,
        may_skip: bool = False,
    ) -> None:
        self._job, self._stages, self._mail, self._gradients = job, stages, mail, gradients
        self._last, self._losses, self._may_skip = job.last_stage, LossReader(may_skip), may_skip
        self._slots, self._team = slots, team
        self._slices = SliceMail(job, mail, pipe_of, team)
        self._splits, self._marks, self._a_step = job.splits, job.marks(), job.microbatches
        self._shares = job.drawn > 0
        self._forwards = 0  # of the last stage, in this step
        self._acts: dict[object, Callable[[Task], Made]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._input,
            Kind.WEIGHT: self._weight,
        }

    @property
    def in_known_pieces(self) -> Collection[AnyKind]:
        has_pieces = any(stage.forward_pieces > 1 for stage in self._stages.values())
        forward = (Kind.FORWARD,) if has_pieces else ()
        return (*forward, Kind.BACKWARD, Kind.INPUT) if self._job.joints else forward

    def run(self, task: Task) -> Made:
        return self._acts[task.kind](task)

    def act_of(self, kind: AnyKind) -> Callable[[Task], Made]:
        return self._acts[kind]

    def piece_of(self, task: Task) -> Piece:
        if task.kind is Kind.FORWARD:
            return Piece(task.part + 1 < self._stages[task.stage].forward_pieces)
        if self._job.joints and task.kind in (Kind.BACKWARD, Kind.INPUT):
            return Piece(task.part < self._job.joints_of(task.stage).back)
        is_weight = task.kind is Kind.WEIGHT
        if not is_weight and task.stage not in self._gradients.leaving_in_parts:
            return WHOLE  # nearly every backward
        in_parts = self._leaves_in_parts(task)
        if not (is_weight or in_parts):
            return WHOLE
        stage, number = self._stages[task.stage], self._slots.number_of(task)
        if number is None:
            return WHOLE
        if is_weight:
            more = stage.deferral.pieces(number) > 1
            if not (in_parts and more):
                return Piece(more)
            assert isinstance(stage, Stage), "virtual members leave no bucket early"
            waiting = stage.deferral.parameters(number)[1:]
            return Piece(more, self._gradients.complete_without(task.stage, waiting))
        assert isinstance(stage, Stage), "virtual members leave no bucket early"
        more = stage.backward_pieces(number) > 1
        return Piece(
            more,
            self._gradients.complete_from(task.stage, stage.next_piece(number)) if more else (),
        )

    def ends(self, kind: AnyKind) -> bool:
        return kind is Kind.FORWARD and self._last in self._stages

    def complete(self, task: Task, made: Made) -> Made:
        """Read the loss of a forward; see `ends`."""
        is_piece = task.part + 1 < self._stages[task.stage].forward_pieces
        if task.stage != self._last or is_piece:
            return made
        number = self._slots.number_of(task)
        if number is not None:
            self._losses.read(number, lambda: self._place_of(task, number))
        self._forwards += 1
        if self._forwards < self._job.microbatches_a_pipe:
            return nothing
        self._forwards = 0
        losses = tuple(self._losses.take(numbered=self._job.drawn > 0))
        return lambda message: losses

    def _place_of(self, task: Task, number: int) -> str:
        shares = self._job.drawn > 0
        step, microbatch = (
            self._job.place_in_batch(number, 0) if shares else self._job.step_of(number)
        )
        return f"step {step}, stage {task.stage}, microbatch {microbatch}"

    def _leaves_in_parts(self, task: Task) -> bool:
        """Some buckets may leave before the task's backward is done."""
        is_stage = task.stage in self._gradients.leaving_in_parts
        return is_stage and self._marks.ends_run[task.microbatch % self._a_step]

    def _forward_piece(self, task: Task) -> Made:
        """A piece of a forward behind the first one."""
        _, stage, slot, _ = task
        number = self._slots.number_of(task)
        piece = self.piece_of(task)
        if number is None:  # an empty slot
            return nothing if piece.more else lambda message: self._slots.pack(stage, slot, None)
        came = self._slices.came(Meaning.SLICE, task, self._job.joints_of(stage).forward)
        outputs = self._stages[stage].forward_piece(number, None, came)
        if piece.more:
            return self._slices.leaving(task, outputs.outgoing) if outputs is not None else nothing
        return self._sent(stage, slot, number, outputs)

    def _forward(self, task: Task) -> Made:
        _, stage, slot, part = task
        if part:
            return self._forward_piece(task)
        inputs = self._mail.take(Meaning.ACTIVATION, stage, slot)
        target = self._mail.take(Meaning.TARGET, stage, slot) if stage == self._last else None
        if self._may_skip and self._job.begins_a_step(slot):
            self._stages[stage].remember_buffers()
        number: int | None = slot
        if self._shares:
            inputs = self._slots.unpack(stage, slot, inputs)
            target = self._slots.unpack(stage, slot, target) if stage == self._last else None
            number = self._slots.number_of(task)
        if self._stages[stage].forward_pieces > 1:
            if number is None:
                return nothing
            joint = self._stages[stage].forward_piece(number, (inputs, target))
            return self._slices.leaving(task, joint.outgoing) if joint is not None else nothing
        if number is None:
            return lambda message: self._slots.pack(stage, slot, None)
        if self._team.size > 1:  # a stage without joints, yet with what members do with its layers
            outputs = self._stages[stage].forward_piece(number, (inputs, target))
            return self._sent(stage, slot, number, outputs)
        may_be = not self._splits and stage in self._gradients.leaving_in_parts
        in_pieces = may_be and self._leaves_in_parts(task)
        outputs = self._stages[stage].forward(number, inputs, target, in_pieces)
        return self._sent(stage, slot, number, outputs)

    def _sent(self, stage: int, slot: int, number: int, outputs: Any) -> Made:
        """What leaves a stage when a forward has ended."""
        if stage == self._last:
            self._losses.start(number, *outputs)
        if self._shares:
            return lambda message: self._slots.pack(stage, slot, outputs)
        return lambda message: outputs

    def _recompute(self, task: Task) -> Made:
        number = self._slots.number_of(task)
        if number is not None:
            self._stages[task.stage].recompute(number)
        return nothing

    def _backward(self, task: Task) -> Made:
        _, stage, slot, _ = task
        piece = self.piece_of(task)
        self._begin(task)
        given, gradients = self._mail.take(Meaning.GRADIENT, stage, slot), None
        number = self._slots.number_of(task) if self._shares else slot
        if number is None:
            pass
        elif piece.more or task.part:
            joints = self._job.joints_of(stage).back
            came = self._slices.came(Meaning.SLICE_BACK, task, joints)
            gradients = self._stages[stage].backward_piece(number, given, came)
        else:
            gradients = self._stages[stage].backward(number, given)
        self._end(task, piece)
        if piece.more and self._job.joints and number is not None:
            return self._slices.leaving(task, self._stages[stage].open(number).outgoing)
        return lambda message: (
            self._gradients.part(message) if message.meaning.of_a_bucket else gradients
        )

    def _input(self, task: Task) -> Made:
        _, stage, slot, part = task
        self._begin(task)
        number, gradients = self._slots.number_of(task) if self._shares else slot, None
        joints = self._job.joints_of(stage).back if self._job.joints else 0
        if number is None:
            return lambda message: None
        given = self._mail.take(Meaning.GRADIENT, stage, slot)
        if not joints:
            gradients = self._stages[stage].input_gradient(number, given)
            return lambda message: gradients
        came = self._slices.came(Meaning.SLICE_BACK, task, joints)
        gradients = self._stages[stage].input_piece(number, given, came)
        if part < joints:
            return self._slices.leaving(task, self._stages[stage].open(number).outgoing)
        return lambda message: gradients

    def _weight(self, task: Task) -> Made:
        piece = self.piece_of(task)
        number = self._slots.number_of(task) if self._shares else task.microbatch
        if number is not None:
            self._stages[task.stage].deferral.run_piece(number)
        self._end(task, piece)
        return self._gradients.part

    def _begin(self, task: Task) -> None:
        """See to it that a backward adds to memory that is the gradient's own."""
        if task.part > 0:
            return
        if self._marks.begins_run[task.microbatch % self._a_step]:
            self._gradients.open(task.stage)
        else:
            self._gradients.keep_open(task.stage)

    def _end(self, task: Task, piece: Piece) -> None:
        """Close the gradients that the last backward of a step, or of a reduction, on a stage has
        completed."""
        slot = task.microbatch
        index = self._kept_as(task) if self._job.in_tree else None
        within = slot % self._a_step
        if self._marks.ends_run[within]:
            step = slot // self._a_step if self._marks.ends_step[within] else None
            self._gradients.close(task.stage, step, piece.completes if piece.more else None, index)
        elif index is not None and not piece.more:
            self._gradients.put_aside(task.stage, index)

    def _kept_as(self, task: Task) -> int | None:
        """The index in its step of a task's microbatch, whose gradient is kept apart; None: its
        slot is empty."""
        number = self._slots.number_of(task)
        if number is None:
            return None
        return self._job.place_in_batch(number, 0)[1]
