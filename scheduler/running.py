"""What runs on a rank: tasks that have started and not finished."""

from .message import Message
from .table import Entry
from .task import AnyKind, Task

# Its row, the messages that follow once it has finished, and whether more pieces of it come. Plain
# tuples: to make one of a class costs a call.
RunningTask = tuple[Entry, list[Message], bool]


class Running:
    """The tasks that run, and those that stand between two of their pieces.

    Attributes:
        tasks: what is known of each that runs, in the order of their starts; a few at most.
        untold: by kind and stage the head that runs and has not been told to be a piece or the
            whole.
        at_joints: by kind and stage the row whose head is a piece behind a joint.
        apart: kinds and stages of both: their heads are not scanned with all others.
    """

    def __init__(self) -> None:
        self.tasks: dict[Task, RunningTask] = {}
        self.untold: dict[tuple[AnyKind, int], Task] = {}
        self.at_joints: dict[tuple[AnyKind, int], Entry] = {}
        self.apart: set[tuple[AnyKind, int]] = set()

    def run_untold(self, task: Task) -> None:
        """A task runs of which it is not known whether it is a piece."""
        self.untold[task.kind, task.stage] = task
        self.apart.add((task.kind, task.stage))

    def is_told(self, task: Task) -> None:
        """That is known now."""
        del self.untold[task.kind, task.stage]
        self.apart.discard((task.kind, task.stage))

    def pass_joint(self, entry: Entry, whole: bool) -> None:
        """A piece of a task with joints has started; `whole`: it was the last one."""
        where = entry.kind, entry.stage
        if whole:
            del self.at_joints[where]
            self.apart.discard(where)
        else:
            self.at_joints[where] = entry
            self.apart.add(where)

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
