"""A policy is two questions about a head that has all its inputs: what first, and may it start now.

Why no policy here can get stuck. Say that nothing runs, nothing is on its way, and some task is left.
Take the oldest microbatch n with an unfinished backward, and the deepest stage s that has started it.

* s is not the last: stage s+1 has activation n, and its head is F(s+1).n, because n is the oldest, and
  so everything before it is done there. It was refused; the policies that refuse by a cap admit a
  forward whenever in flight < cap with cap >= 1, and in flight is 0 there. Contradiction.
* s is the last: its backward needs nothing else. Only gpipe refuses backwards, and only until the
  forwards of that step are done here; they are refused by nothing, since in flight < m holds for the
  microbatches of the oldest step, and their activations come from stages of which the same is true.
* No stage has started n: the reader gives it, and F0.n is the first case with s+1 = 0.

So each policy owes two things: its caps are at least 1 wherever a rank holds a stage, and what is refused
besides is given back by tasks that are themselves never refused. (Several stages on a rank want *nested*
caps, strictly increasing with the stage: a flat cap per rank deadlocks there.)
"""

from typing import Protocol

from ..task import Task


class View(Protocol):
    """What a policy may look at: this rank's counters, no clock and no tensors."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def microbatches(self) -> int:
        """Per step."""
        ...

    @property
    def in_flight(self) -> int:
        """Forwards started here whose backward has not started."""
        ...

    def forwards_left(self, task: Task) -> int:
        """How many forwards of the task's step have not started on the task's stage."""
        ...


class Policy(Protocol):
    """Which ready head runs first (least key), and which must wait."""

    @property
    def name(self) -> str: ...

    def key(self, task: Task, view: View) -> tuple[int, ...]: ...
    def admits(self, task: Task, view: View) -> bool: ...

    def stash_bound(self, rank: int, ranks: int, microbatches: int) -> int:
        """At most so many microbatches are in flight on this rank (forward started, backward not)."""
        ...
