"""Stashes that leave the device: what a backward that is far needs goes down after its forward, and
comes back ahead of its backward."""

#   head         needs                                      then
#   -----------  -----------------------------------------  ---------------------------------------
#   F s.n        as in `pipeline.py`; a lasting or a        its stash goes down if the place is a
#                passing place, which it takes               passing one
#   offload s.n  F s.n                                      its passing place is free when it ended
#   reload s.n   offload s.n; the returning place of s, or   B s.n or I s.n may start
#                a lasting one if its backward is near,
#                which it takes
#   B s.n        as in `pipeline.py`; reload s.n            frees the place of its stash when it has
#   W s.n                                                   ended; W does where backwards are split
#
# Only microbatches whose stash goes down have an offload and a reload. Places are those of
# `stash_places.py`. Reloads come in the order of their backwards, as early as there is room. A rank
# whose policy holds no more than it has places has none of these rows.
#
# Nobody waits in a circle, under any policy that refuses no weight gradient. An offload wants
# nothing but its forward, and ends. So a passing place becomes free again, and a forward waits for
# no more than copies. A reload needs at most the returning place of its own stage. Say that nothing
# runs, and that the head s.n of the backwards lacks nothing but its reload. The place is taken by
# an earlier microbatch of s, whose backward has started, since s.n is the head, and has ended,
# since nothing runs. So only its weight gradient can be left, which is never refused and would run.
# An order that names weight gradients refuses those that come later; there each must come before
# the next input gradient of its stage (`weights_in_turn`), or `Job` refuses the order. Hence
# forwards and backwards are kept back by their policy and by each other alone, and
# `policies/policy.py` holds.
#
# The device has at most as many stashes as places: each place is taken before memory is, and freed
# when what has used it has ended.

from collections.abc import Iterator

from ..policies.policy import View
from ..stash_places import StashMove
from ..task import Kind, Task
from .row import Need, OnDevice, Row, StageHere

# A backward is near if it is among so many next ones of its stage. More bring stashes back that
# need not have gone down; fewer find the copies of a rank that is ahead of its plan too late.
# Stashes that are back may take lasting places if their backward is near. With places of their own
# alone, which weight gradients keep for long, slack of 3p on 2p was worth 2 % instead of 6 %
# (adaptive, p = 8, m = 16, jitter 0.5).
_NEAR = 4


# Which stash goes down is decided when its forward starts, by the places that are free. A plan from
# a steady run was thought of, as residencies have one: under jitter the forwards that run ahead are
# others each time. To choose at the last moment among all that are held would need heads out of
# order; the newest stash of a stage is needed last anyway.
def stash(here: StageHere) -> Iterator[Row]:
    """The rows of a stage on a rank that has fewer places than its policy holds."""
    if not here.offloads_stash:
        return
    back = here.back

    def next_use(task: Task, view: View) -> tuple[int, ...]:
        return (1, *view.policy.key(Task(back, task.stage, task.microbatch), view))

    def has_room(task: Task, view: View) -> bool:
        ahead = view.started(Kind.RELOAD, task.stage) - view.started(back, task.stage)
        return view.has_room(StashMove.BRINGS_BACK, task.stage, ahead < _NEAR)

    yield Row(
        Kind.OFFLOAD,
        (Need(Kind.FORWARD),),
        lambda task, view: (1, task.microbatch, task.stage),
        queue=OnDevice.COPIES_OUT,
        stash=StashMove.TAKES_DOWN,
    )
    yield Row(
        Kind.RELOAD,
        (Need(Kind.OFFLOAD),),
        next_use,
        queue=OnDevice.COPIES_IN,
        admitted=has_room,
        fills=True,
        stash=StashMove.BRINGS_BACK,
    )
