"""Steps on the expectation that the vote changes nothing: no gradient is clipped, none has
overflowed. Then offloaded state need not wait for the vote, and copies go on beside backwards.

    head           needs                                       then
    -------------  ------------------------------------------  ------------------------------------
    fetch s.t/b    as in `offload.py`
    step s.t/b     the same without the vote                   nothing: weights are not open
    store s.t/b    as in `offload.py`, into a second room      nothing
    refetch s.t/b  the vote; store s.t/b; a free slot, which   commit s.t/b may start
                   it takes
    commit s.t/b   refetch s.t/b                               the weights of step t + 1, once all
                                                               buckets of the stage have committed
    restore s.t/b  commit s.t/b                                its slot is free; state is settled

Where the expectation was right, a commit makes the second room the first, and the copies around it
carry nothing. Where it was wrong, they bring the state of before, and the commit steps again. The
brain knows no expectation: the rows are the same, so no two ranks can come to different orders.

Nobody waits in a circle for slots: between a fetch and its store, and between a refetch and its
restore, nothing is needed that another slot would have to bring.
"""

from collections.abc import Iterator

from ..task import Kind
from .offload import stored
from .replicas import new_weights, opened, voted
from .row import Need, OnDevice, Pool, Row, StageHere, urgent


def speculation(here: StageHere) -> Iterator[Row]:
    """The rows of each bucket of a stage that end a step which was taken before its vote."""
    for bucket in range(len(here.buckets)):
        yield Row(
            Kind.REFETCH,
            (*voted(here), Need(Kind.STORE, bucket=bucket)),
            urgent(1),
            bucket=bucket,
            queue=OnDevice.COPIES_IN,
            takes=Pool.SLOTS,
        )
        yield Row(
            Kind.COMMIT,
            (Need(Kind.REFETCH, bucket=bucket),),
            urgent(3),
            new_weights(here),
            bucket=bucket,
            opens=() if here.job.offloads_weights else opened(here),
        )
        yield Row(
            Kind.RESTORE,
            (Need(Kind.COMMIT, bucket=bucket),),
            urgent(4),
            bucket=bucket,
            queue=OnDevice.COPIES_OUT,
            opens=stored(here),
            frees=Pool.SLOTS,
        )
