"""Policies: which task runs first, and which forward may start. Each family has a small module."""

from difflib import get_close_matches

from ..placement import Placement, placement_by_name
from ..plural import plural
from .axonn import AxoNN
from .bidirectional import Chimera, DualPipe
from .gpipe import GPipe
from .looped import BreadthFirst, Interleaved, InterleavedZeroBubble
from .nested import Nested
from .one_f_one_b import EagerOneForwardOneBackward, OneForwardOneBackward
from .own import is_own, own_policy
from .planned import Adaptive, AlongPlan, Fixed, VMin, ZeroBubbleV
from .policy import Bounds, Policy, View
from .recomputing import Merak, Varuna
from .vee import DualPipeV, VHalf
from .zero_bubble import ZeroBubbleH1, ZeroBubbleH2

__all__ = [
    "CAPPED",
    "FIXED",
    "NAMES",
    "AlongPlan",
    "Bounds",
    "Fixed",
    "Nested",
    "Policy",
    "View",
    "is_own",
    "placement_for",
    "policy_by_name",
]

_PLAIN = (
    OneForwardOneBackward(),
    BreadthFirst(),
    Chimera(),
    DualPipe(),
    EagerOneForwardOneBackward(),
    GPipe(),
    Interleaved(),
    InterleavedZeroBubble(),
    Merak(),
    VHalf(),
    VMin(),
    Varuna(),
    ZeroBubbleH1(),
    ZeroBubbleH2(),
    ZeroBubbleV(),
)
_CAPPED = (Adaptive, AxoNN, DualPipeV)
CAPPED = (*(policy.name for policy in _CAPPED), Fixed.name)  # those that take max_held
NAMES = tuple(sorted([policy.name for policy in _PLAIN] + [policy.name for policy in _CAPPED]))


FIXED = Fixed.name  # follows a given order, see schedules.build_schedule


def policy_by_name(name: str, max_held: int = 0) -> Policy:
    """The policy of that name.

    Args:
        name: one of `NAMES`, or the module and class of a policy of the user's own.
        max_held: cap on what a rank has begun, in chunks (microbatches of one stage); 0 is the
            policy's own cap.
    Raises:
        ValueError: there is no such policy, it does not take a cap, or it is "fixed", which needs
            an order.
    """
    if is_own(name):
        return own_policy(name, max_held)
    for kind in _CAPPED:
        if kind.name == name:
            return kind(max_held)
    for policy in _PLAIN:
        if policy.name == name:
            if max_held:
                takes = " or ".join(CAPPED)
                raise ValueError(
                    f"policy {name} has a bound of its own; max_held = {max_held} needs policy "
                    f"{takes}, or set max_held = 0"
                )
            return policy
    if name == FIXED:
        raise ValueError(
            "policy fixed needs an order; expected the name of a CSV file, or of a policy"
        )
    near = get_close_matches(name.lower(), NAMES, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"there is no policy {name!r}; expected one of {', '.join(NAMES)}{meant}")


def placement_for(
    policy: Policy, ranks: int, microbatches: int, placement: str = "", chunks: int = 0
) -> Placement:
    """The placement that a policy's stages get.

    Args:
        placement: name of a placement; "" is the policy's own.
        chunks: number of stages that a rank holds; 0 is the placement's own.
    Raises:
        ValueError: policy, placement, chunks and microbatches do not go together; the text names
            the nearest that do.
    """
    if placement and placement not in policy.placements:
        raise ValueError(
            f"policy {policy.name} is made for placement {policy.placements[0]}, not {placement}; "
            f"set placement = {policy.placements[0]!r}"
        )
    if policy.name in (Interleaved.name, InterleavedZeroBubble.name) and microbatches % ranks:
        fits = (microbatches // ranks + 1) * ranks
        raise ValueError(
            f"policy {policy.name} takes multiples of {plural(ranks, 'rank')}; set microbatches = "
            f"{fits}, not {microbatches}, or policy breadth-first"
        )
    where = placement_by_name(placement or policy.placements[0], ranks, chunks)
    if microbatches % where.pipes:
        raise ValueError(
            f"placement {where.name} has {where.pipes} pipes, and each takes as many microbatches; "
            f"set microbatches = {microbatches + 1}, "
            f"not {microbatches}"
        )
    return where
