"""Schedules by name: the job that a policy's settings give, all schedules that fit, and what each
would do on given costs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from traceback import extract_tb
from typing import Any, NamedTuple

from ..job import Job
from ..order import Order
from ..plural import plural
from ..policies import FIXED, NAMES, AlongPlan, Fixed, is_own, placement_for, policy_by_name
from ..regular_file import read_text
from .bound import least_makespan
from .costs import Costs
from .keeping_bounds import broken_bound
from .simulator import StuckError, order_of, simulate
from .timeline import Timeline

TRIED_STEPS = 2  # of a policy that nobody has proved
STRICTLY, LOOSELY = "strictly", "loosely"  # how a plan is followed
# those that a search tries; 0 is the placement's own, which is 2 where there is a choice
_CHUNKS = (
    0,
    3,
    4,
)


class UnsoundPolicyError(ValueError):
    """A policy of the user's own gets stuck, exceeds its bounds, or raises an error."""


def build_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    placement: str = "",
    chunks: int = 0,
    max_held: int = 0,
    order: str = "",
    along: str = "",
) -> Job:
    """The job of a policy by name: one replica, and of no model yet.

    Args:
        name: name of a policy, or "fixed".
        placement, chunks: name of a placement and number of stages that a rank holds; "" and 0 are
            the policy's own.
        max_held: cap on what a rank has begun, in chunks (microbatches of one stage); 0 is the
            policy's own.
        order: path of a CSV file (see `scheduler.order`), its text, or a policy's name, for
            "fixed"; "" for all other policies.
        along: "strictly" or "loosely": the order is a plan that a policy has followed so, see
            `policies.AlongPlan`; "": it is a fixed order.
    Raises:
        ValueError: the settings do not go together, and the text names the nearest that do; or the
            order cannot be read, or gets stuck.
    """
    if order and name != FIXED:
        raise ValueError(
            f"policy {name} has an order of its own; set policy = {FIXED!r} to follow order = "
            f"{order!r}, or leave order away"
        )
    if name != FIXED:
        policy = policy_by_name(name, max_held)
        where = placement_for(policy, ranks, microbatches, placement, chunks)
        with _own_code() if is_own(name) else nullcontext():
            least = max(policy.bounds(where, rank, microbatches).held for rank in range(ranks))
        if 0 < max_held < least:
            raise ValueError(
                f"policy {name} holds {plural(least, 'chunk')} on {plural(ranks, 'rank')}; set "
                f"max_held = {least} or more, or 0"
            )
        job = Job(where, policy, microbatches)
        if is_own(name):
            _check_own(name, job)
        return job
    if order in NAMES:
        return _as_a_plan(order, ranks, microbatches, placement, chunks, max_held)
    return _from_file(order, ranks, microbatches, placement, chunks, max_held, along)


def _check_own(name: str, job: Job) -> None:
    if fault := fault_of(job, Costs()):
        raise UnsoundPolicyError(f"policy {name!r}: {fault}")


def fault_of(job: Job, costs: Costs) -> str:
    """What is wrong with a policy that nobody has proved: it gets stuck, exceeds its bounds or
    raises an error, in `TRIED_STEPS` steps. "": nothing."""
    try:
        with _own_code():
            return broken_bound(simulate(job, costs, steps=TRIED_STEPS), job)
    except (StuckError, UnsoundPolicyError) as error:
        return str(error)


@contextmanager
def _own_code() -> Iterator[None]:
    """Context in which errors are those of a policy of the user's own; they say where it was."""
    try:
        yield
    except StuckError:
        raise
    except Exception as error:  # of the user's code, whatever it is
        at = extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise UnsoundPolicyError(
            f"{what}, in {at.name}, {at.filename}, line {at.lineno}"
        ) from error


class Option(NamedTuple):
    """A schedule that fits."""

    name: str  # name of the policy
    max_held: int  # cap in chunks; 0 is the policy's own
    job: Job  # the schedule itself


def options(
    ranks: int,
    microbatches: int,
    chunks: Iterable[int] = (0,),
    thorough: bool = False,
    also: Sequence[str] = (),
) -> Iterator[Option]:
    """Every policy that fits the ranks and microbatches; policies that take a cap come with
    several.

    Args:
        chunks: numbers of stages of a rank to try where the placement leaves the choice; 0 is its
            own.
        thorough: True to try the caps of `all_caps_of` in place of those of `caps_of`.
    """
    for name in (*NAMES, *also):
        for cap in all_caps_of(name, ranks) if thorough else caps_of(name, ranks):
            for count in chunks:
                with suppress(ValueError):
                    yield Option(
                        name,
                        cap,
                        build_schedule(name, ranks, microbatches, chunks=count, max_held=cap),
                    )


def caps_of(name: str, ranks: int) -> tuple[int, ...]:
    """The caps of a policy that are worth a try, in chunks; 0 is its own."""
    return (0, 3 * ranks, 4 * ranks) if name in ("adaptive", "dualpipe-v") else (0,)


def all_caps_of(name: str, ranks: int) -> tuple[int, ...]:
    """The caps of a policy for a thorough search, in chunks: 0, which is its own, and others from
    the least that it can do with to twice its own.

    They are p // 2 apart, of axonn p // 4, and at least 1. A policy without a cap has only 0.
    """
    own = {"adaptive": 2 * ranks, "axonn": ranks, "dualpipe-v": 2 * ranks + 1}.get(name, 0)
    least, apart = (
        1 if name == "axonn" else own,
        max(1, ranks // 4 if name == "axonn" else ranks // 2),
    )
    return (0, *(cap for cap in range(least, 2 * own + 1, apart) if cap != own))


class Outcome(NamedTuple):
    """The figures of a schedule in a simulation, times in the unit of the costs."""

    option: Option  # the schedule
    makespan: float  # duration of all steps
    least: float  # duration that no schedule on its placement can beat
    held: float  # largest amount that a rank holds, in microbatches of all its layers
    utilisation: float  # work of the busiest rank over the makespan

    def as_dict(self) -> dict[str, Any]:
        """The figures and the schedule's settings, for JSON."""
        where = self.option.job.placement
        return {
            "policy": self.option.name,
            "placement": where.name,
            "chunks": where.chunks,
            "max_held": self.option.max_held,
            "copies": where.pipes,
            **{key: getattr(self, key) for key in ("makespan", "least", "held", "utilisation")},
        }


def search(
    ranks: int,
    microbatches: int,
    steps: int,
    most_held: float,
    run: Callable[[Job], tuple[Costs, Timeline] | None],
    also: Sequence[str] = (),
) -> tuple[list[Outcome], float]:
    """Simulate every schedule that fits.

    Args:
        most_held: limit on what a rank holds, in microbatches of all its layers; 0: no limit.
        run: function that simulates a job and returns the costs that it used and the timeline; or
            None, which leaves the job out.
    Returns:
        The schedules within the limit, the fastest first; and the duration that no schedule on any
        of the tried placements can beat, 0 if there is none.
    """
    found = []
    for option in options(ranks, microbatches, _CHUNKS, thorough=True, also=also):
        if (simulated := run(option.job)) is None:
            continue
        costs, line = simulated
        where = option.job.placement
        least = least_makespan(where, costs, microbatches, steps)
        found.append(
            Outcome(option, line.makespan, least, max(line.held) * where.share, line.utilisation)
        )
    fitting = [one for one in found if not most_held or one.held <= most_held + 1e-9]
    return sorted(fitting, key=lambda one: (one.makespan, one.held)), min(
        (one.least for one in found), default=0.0
    )


def _as_a_plan(
    name: str, ranks: int, microbatches: int, placement: str, chunks: int, cap: int
) -> Job:
    """The order of a policy on a steady machine, as a plan: weight gradients float, and the cap
    says how far ahead anything runs."""
    job = build_schedule(name, ranks, microbatches, placement=placement, chunks=chunks)
    order = order_of(job)
    _check_cap(f"the order of {name}", order, cap)
    return replace(job, policy=Fixed(order.without_weights(), order.needs, cap, strict=False))


def _check_cap(what: str, order: Order, cap: int) -> None:
    if 0 < cap < max(order.needs):
        raise ValueError(
            f"{what} holds {plural(max(order.needs), 'chunk')}; set max_held = {max(order.needs)} "
            "or more, or 0"
        )


def _from_file(
    file: str, ranks: int, microbatches: int, placement: str, chunks: int, cap: int, along: str
) -> Job:
    is_text = "\n" in file
    if not file.endswith(".csv") and not is_text:
        raise ValueError(
            f"order = {file!r}; expected a CSV file of tasks, one line a rank, or one of "
            f"{', '.join(NAMES)}"
        )
    try:
        text = file if is_text else read_text(file, encoding="utf-8-sig")
        file = "the order" if is_text else file
        order = Order.parse(text, placement, chunks)
    except OSError as error:
        raise ValueError(
            f"order = {file!r}: {error.strerror}; expected a CSV file of tasks, one line a rank"
        ) from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if (order.placement.ranks, order.microbatches) != (ranks, microbatches):
        raise ValueError(
            f"{file} is an order of {plural(order.placement.ranks, 'rank')} and "
            f"{order.microbatches} microbatches a step; expected {ranks} and {microbatches}, as "
            "the pipeline has"
        )
    if along:  # its cap is the least of all ranks', and each has the room that its order needs
        policy: Fixed = AlongPlan(order, order.needs, cap, strict=along == STRICTLY)
    else:
        _check_cap(file, order, cap)
        policy = Fixed(order, order.needs, cap)
    job = Job(order.placement, policy, microbatches)
    try:
        simulate(job, Costs(pieces=1), steps=2)
    except StuckError as error:
        raise ValueError(
            f"{file}: {error}. Simulated with equal costs; expected an order in which every task "
            "gets what it needs"
        ) from None
    return job
