"""What runs on a rank: tasks that have started and not finished."""

from .message import Message
from .table import Entry
from .task import AnyKind, Task

# Its row, the messages that follow once it has finished, and whether more pieces of it come. Plain
# tuples: to make one of a class costs a call.
RunningTask = tuple[Entry, list[Message], bool]


class Running:
    """The tasks that run.

    Attributes:
        tasks: what is known of each, in the order of their starts; a few at most.
        untold: by kind and stage the head that runs and has not been told to be a piece or the
            whole.
    """

    def __init__(self) -> None:
        self.tasks: dict[Task, RunningTask] = {}
        self.untold: dict[tuple[AnyKind, int], Task] = {}

    def may_finish(self, task: Task) -> bool:
        """Of what runs of a kind on a stage, or on a bucket of it, the task has started first, and
        it has been told whether it is a piece."""
        if self.untold and task in self.untold.values():
            return False
        of_a_bucket = task.kind.of_a_bucket
        for one in self.tasks:
            if one[:2] == task[:2] and (not of_a_bucket or one.part == task.part):
                return one == task
        return False
