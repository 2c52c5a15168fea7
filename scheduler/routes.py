"""Which route the optimizer's step takes where state is off the device: in slots on the device, on
the host, or on both sides at once.

Each route is simulated by the rows that run, on a rank with buckets of one size. So the choice
knows how copies and steps overlap, and what a step is expected to take.
"""

from typing import NamedTuple

from .job import Job
from .placement import Linear
from .policies import policy_by_name
from .simulator import Costs, Work, simulate
from .task import AnyKind, Kind

_SHARES = (0.25, 0.5, 0.75)  # of the buckets on the host, where both sides step
_MOST_BUCKETS = 64  # of a simulation; more repeat its middle
_STEPS = 3


class StepCosts(NamedTuple):
    """Seconds that a bucket takes.

    Args:
        fetch, step, store: its state to the device, its step there, and its state back.
        unload, host_step, load: its gradient to the host, its step there, and its weights back.
    """

    fetch: float
    step: float
    store: float
    unload: float
    host_step: float
    load: float


class Route(NamedTuple):
    """A way of the optimizer's step.

    Args:
        offload: value of `memory.offload`: "stream", "cpu" or "hybrid".
        host_share: share of the buckets that step on the host.
        seconds: time of the step of all buckets of a rank, by simulation.
    """

    offload: str
    host_share: float
    seconds: float


def routes(costs: StepCosts, buckets: int, rooms: int, votes: bool = False) -> list[Route]:
    """All routes, the fastest first; of equal ones the first of "stream", "cpu" and "hybrid".

    Args:
        costs: what a bucket takes.
        buckets: number of buckets of a rank, at least 1.
        rooms: number of buckets on the device, or of gradients on the host, at a time.
        votes: True if steps wait for the norm of all gradients.
    """
    found = [Route("stream", 0.0, 0.0), Route("cpu", 1.0, 0.0)]
    if buckets > 1:
        found += [Route("hybrid", share, 0.0) for share in _SHARES]
    timed = [
        route._replace(seconds=_seconds(route, costs, buckets, rooms, votes)) for route in found
    ]
    return sorted(timed, key=lambda route: route.seconds)


def _seconds(route: Route, costs: StepCosts, buckets: int, rooms: int, votes: bool) -> float:
    simulated = min(buckets, _MOST_BUCKETS)
    job = Job(
        Linear(1),
        policy_by_name("1f1b"),
        1,
        votes=votes,
        slots=rooms if route.offload != "cpu" else 0,
        host_rooms=rooms if route.offload != "stream" else 0,
        host_share=route.host_share,
    )
    line = simulate(job, _as_costs(costs), steps=_STEPS, buckets=simulated)
    return max(span.end for span in line.spans) / _STEPS * buckets / simulated


def _as_costs(costs: StepCosts) -> Costs:
    others: dict[AnyKind, float] = {
        Kind.FETCH: costs.fetch,
        Kind.STORE: costs.store,
        Kind.UNLOAD: costs.unload,
        Kind.HOST_STEP: costs.host_step,
        Kind.LOAD: costs.load,
    }
    return Costs(Work(0.0, 0.0, 0.0), step=costs.step, others=others)
