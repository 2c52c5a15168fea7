"""Starts the tasks that the brain picks, and lets follow what follows from their ends."""

# Starting a task and ending it are two events. Where a queue runs what it is given at once, as on a
# CPU, both happen in `_run`, without the calls that only a queue beside the loop needs: this is the
# way of nearly all tasks of a laptop's run, and of every test that counts calls. On a device or a
# thread `_start` puts the task on the queue, and `finish` ends it in a later round.
#
# On a queue that ends tasks at once a single one starts in a round. What has arrived meanwhile is
# heard before the next, for it may be more urgent than what was ready before.
#
# Whether a task was a piece, and more of it come, is known before it starts where it ends at once,
# and when it has run elsewhere. Then the brain is told (`_has_run`), since what it picks next
# depends on that.

import time
from collections.abc import Mapping, Sequence
from functools import partial

from axrt.observe.observer import Audience
from axrt.scheduler.linger import LINGER, WITH_JOINTS, Linger
from axrt.scheduler.message import Message
from axrt.scheduler.rules import OnDevice, Queue
from axrt.scheduler.task import Task
from axrt.workers.worker import Made

from .compute import Compute
from .post import Post
from .session import Session
from .waiting import Waiting


class TaskRunner:
    """Runs tasks of sessions on the queues of a rank.

    Args:
        lingers: messages take time, so that one which is about to come may be worth a wait.
    Attributes:
        linger: how long it is worth waiting for one, and until when it is waited now.
    """

    def __init__(
        self,
        queues: Mapping[Queue, Compute],
        post: Post,
        audience: Audience,
        waiting: Waiting,
        lingers: bool,
    ) -> None:
        self._queues, self._post, self._audience = queues, post, audience
        self._waiting, self._activity = waiting, waiting.activity
        self._lingers = lingers  # else nothing is worth waiting for
        self.linger = Linger(LINGER if lingers else 0.0)

    def start_beside(self, session: Session) -> bool:
        """Start what runs beside the device."""
        started = False
        for queue in session.state.beside:
            started = self.start_on(session, queue) or started
        return started

    def start_on(self, session: Session, queue: Queue) -> bool:
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
            self._waiting.go_on()
        if task.kind in workers.in_pieces:
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
            self.linger.took(task, ended_s - began_s)
        self._end(session, task, made, began_s, ended_s)

    def _start(self, session: Session, task: Task, runs: Compute) -> None:
        """Start a task on a queue where it ends later."""
        state, workers, activity = session.state, session.workers, self._activity
        if task.kind in workers.in_known_pieces:
            here = state.start(task, *workers.piece_of[task.kind](task))
        else:
            here = state.start(task, None)
        if activity.waits:
            self._waiting.go_on()  # a task may take long, or never end
        for tell in self._audience.started:
            tell(task)
        activity.under_way += 1
        activity.since_s = began_s = time.perf_counter()
        runs.start(task, partial(self._work, session, task, here))
        if not runs.queue.apart:
            if task.kind.in_pieces and task.kind not in workers.in_known_pieces:
                self._has_run(session, task)
            if task.kind in state.may_be_early:
                self.linger.took(task, time.perf_counter() - began_s)

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
        state, fills = session.state, session.state.job.fills
        if queue is not OnDevice.COMPUTE or (fills and not state.may_be_early):
            return state.pick(queue)
        if self._queues[queue].running and (fills or not state.is_at_joint(queue)):
            self.linger.end()
            return state.pick(queue)
        now_s = time.perf_counter()
        return self.linger.pick(state, queue, now_s, session.workers.has_more_pieces)

    def finish(self, session: Session, runs: Compute) -> bool:
        """End the tasks of a queue that have ended since the last round."""
        ended = runs.finished()
        if ended and self._activity.waits:
            self._waiting.go_on()
        for task, began_s, ended_s in ended:
            known = session.workers.in_known_pieces
            if runs.queue.apart and task.kind.in_pieces and task.kind not in known:
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
        state = session.state
        if not state.job.fills and task.kind in WITH_JOINTS:
            self.linger.took(task, ended_s - began_s)  # how long a wait for slices is worth
        for message in state.finish(task):
            self._post.post(session, message, made(message))
        if task.kind in session.workers.told_of_posts:
            session.workers.posted(task)
