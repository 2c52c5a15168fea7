"""`[schedule]`: what runs first, and how much of it."""

from collections.abc import Iterator
from dataclasses import dataclass

from axrt.scheduler.placement import PLACEMENTS
from axrt.scheduler.policies import FIXED, NAMES, is_own, policy_by_name

from .section import Section, key

AUTO = "auto"  # measured and simulated at the start, see axrt.planning.autoschedule
# With no policy named, the first that the model can be cut for, of those on the placement that is
# asked for. Measured: docs/performance.md.
DEFAULTS = {
    "adaptive": "vee",
    "breadth-first": "looped",
    "zb-h1": "linear",
    "dualpipe": "bidirectional",
}


@dataclass(frozen=True, slots=True)
class Schedule(Section):
    """The order in which microbatches run, and their number (gradient accumulation)."""

    policy: str = key(
        "",
        "what runs first, and what may start; '' = the first of "
        f"{', '.join(f'{name} ({of})' for name, of in DEFAULTS.items())} that the "
        "model has layers for, of those on schedule.placement where it is set, and 1f1b on one "
        "rank; adaptive follows a plan where there is a sample; auto = the fastest in a simulation "
        "with measured costs",
        choices=("", *NAMES, FIXED, AUTO),
        takes_own=True,
    )
    also: tuple[str, ...] = key(
        (),
        "policies of your own, 'package.module:Class', that policy auto tries beside the others",
    )
    placement: str = key(
        "", "which rank holds which stage; '' = the policy's own", choices=("", *PLACEMENTS)
    )
    chunks: int = key(
        0,
        "stages a rank, where the placement leaves a choice; 0 = the placement's own, 2 for looped",
        least=0,
    )
    microbatches: int = key(8, "microbatches of a step and replica", least=1)
    microbatch_size: int = key(
        1, "samples in a microbatch; in code only what engine.samples counts by", least=1
    )
    global_batch: int = key(
        0,
        "samples a step, checked: data x microbatches x microbatch_size; 0 = not checked",
        least=0,
    )
    share: bool = key(
        False,
        "replicas share the microbatches of a step: whichever has room takes one, where others "
        "would be waited for",
    )
    fill: str = key(
        "auto",
        "where a team holds a stage, what a rank does while a backward or forward waits for slices "
        "of other members: 'always' = pieces of other tasks, 'never' = it waits for a while; "
        "'auto' = what is faster in a simulation of some microbatches, all pieces alike",
        choices=("auto", "always", "never"),
    )
    max_held: int = key(
        0,
        "cap on what a rank has begun, in chunks (a microbatch of one stage): for axonn on those "
        "in flight, until their backward begins; "
        "for adaptive, dualpipe-v and fixed on those held, until their last weight gradient "
        "begins; 0 = the policy's own",
        least=0,
    )
    order: str = key(
        "",
        "for policy fixed: a CSV file of tasks, one line a rank, or the name of a policy whose "
        "order is the plan",
        is_path=True,
    )
    costs: str = key(
        "",
        "file of costs that axrt profile has written: adaptive, zb-h1 and zb-h2 follow a plan "
        "made from them, and auto simulates on them and measures nothing; '' = no costs are known",
        is_path=True,
    )

    def _of_all(self) -> Iterator[str]:
        if bool(self.order) != (self.policy == FIXED):
            yield (
                f"schedule.policy = {self.policy!r} and schedule.order = {self.order!r}; expected "
                f"an order with policy {FIXED!r} "
                "and schedule.order = '' with any other"
            )
        try:
            if self.policy in NAMES:
                policy_by_name(self.policy, self.max_held)
        except ValueError as error:
            yield f"schedule.max_held: {error}"
        if self.also and self.policy != AUTO:
            yield (
                f"schedule.also = {list(self.also)} and schedule.policy = {self.policy!r}; "
                f"expected schedule.policy = {AUTO!r}, which chooses among them"
            )
        for name in self.also:
            if not is_own(name):
                yield (
                    f"schedule.also: {name!r}; expected 'package.module:Class', since all others "
                    "are tried already"
                )
