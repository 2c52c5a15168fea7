"""Takes slices of other members of a team out of the mail, and addresses those for them."""

from collections.abc import Callable, Mapping
from typing import Any

from axrt.model.joints import Team
from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning, numbers_of
from axrt.scheduler.numbering import joints_before
from axrt.scheduler.task import Task

from .worker import Made, Mail


class SliceMail:
    """The slices that pieces of tasks on this rank come with, and leave behind.

    Args:
        pipe_of: pipe of each stage of this rank.
        team: this member, and how many hold the stages.
    """

    def __init__(self, job: Job, mail: Mail, pipe_of: Mapping[int, int], team: Team) -> None:
        self._job, self._mail, self._pipe_of, self._team = job, mail, pipe_of, team
        self._others = [member for member in range(team.size) if member != team.member]

    def came(self, meaning: Meaning, task: Task, joints: int) -> dict[int, Any] | None:
        """The slices of the other members that a piece goes on with.

        Args:
            joints: number of joints in the task.
        Returns:
            None where there is no joint before the piece.
        """
        if not (joints and task.part):
            return None
        pipes = self._job.placement.pipes
        joint = joints_before(task.microbatch, task.part, joints, pipes) - 1
        numbers = numbers_of(joint, len(self._others))
        take = self._mail.take
        return {
            member: take(meaning, task.stage, number)
            for member, number in zip(self._others, numbers, strict=True)
        }

    def leaving(self, task: Task, outgoing: Callable[[int], Any]) -> Made:
        """What a piece sends each other member. It is made now: the next piece may run before it
        has left."""
        team = self._job.team_of(self._pipe_of[task.stage])
        made = {team[member]: outgoing(member) for member in self._others}
        return lambda message: made[message.pipe]
