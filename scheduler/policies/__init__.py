"""Which task first, and which forward may start: one small module a family, and their names."""

from .axonn import AxoNN
from .gpipe import GPipe
from .one_f_one_b import EagerOneForwardOneBackward, OneForwardOneBackward
from .policy import Policy, View

__all__ = ["NAMES", "Policy", "View", "named"]

NAMES = ("1f1b", "axonn", "eager-1f1b", "gpipe")


def named(name: str, in_flight: int = 0) -> Policy:
    """The policy of that name.

    Args:
        name: one of `NAMES`.
        in_flight: the cap, for policies that take one (`axonn`); 0 is the policy's own.
    Raises:
        ValueError: no such policy, or one that does not take a cap.
    """
    if name == AxoNN.name:
        return AxoNN(limit=in_flight)
    if in_flight:
        raise ValueError(f"policy {name} has a bound of its own; in_flight = {in_flight} needs policy axonn, or set in_flight = 0")
    for policy in (GPipe, OneForwardOneBackward, EagerOneForwardOneBackward):
        if policy.name == name:
            return policy()
    raise ValueError(f"there is no policy {name!r}; expected one of {', '.join(NAMES)}")
