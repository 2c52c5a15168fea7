"""Whether a job that has ended is started again, and after which pause."""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from axrt.exit_codes import Exit

from .history import Start

_BY_SIGNAL = 128
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0
# So many starts in a row may gain nothing, and so many of them may be failures: one that is no lost
# rank is likely to come again.
_LOST_AT_MOST, _FAILED_AT_MOST = 3, 2


class Decision(NamedTuple):
    """What follows."""

    again: bool  # the job is started again
    reason: str  # why, or why not; the rest of a sentence
    pause_s: float = 0.0  # seconds until then


def decide(starts: Sequence[Start], restarts: int, asked: bool) -> Decision:
    """Decide after the last start has ended.

    Args:
        starts: starts since the command was given, at least one.
        restarts: most times that the job is started again.
        asked: True if a person or the system has asked this command to end.
    """
    last = starts[-1]
    over = _over(last, asked)
    if over:
        return Decision(False, over)
    reason = _cause(last)
    if len(starts) > restarts:
        return Decision(False, f"{reason}, and it was started again {restarts} times (--restarts)")
    vain = list(takewhile(lambda start: start.gained <= 0, reversed(starts)))
    in_vain, failed = len(vain), sum(start.said == Exit.FAILED for start in vain)
    if in_vain >= _LOST_AT_MOST:
        return Decision(False, f"{reason}, and {in_vain} starts in a row have gained no step")
    if failed >= _FAILED_AT_MOST:
        return Decision(False, f"{reason} twice while no step was gained")
    pause_s = _FIRST_PAUSE_S * 2 ** max(0, in_vain - 1) if in_vain else 0.0
    return Decision(True, reason, min(pause_s, _LONGEST_PAUSE_S))


# A script of the user's is done when its launcher says so. Ranks of `axrt train` also leave a code,
# and without one a 0 is doubted; a script leaves none, and was started for ever.
def _over(last: Start, asked: bool) -> str:
    """Why the job is not started again whatever has happened before; "" where nothing says so."""
    ended = last.code if last.said is None else last.said
    if last.code == Exit.DONE and last.said == Exit.DONE:
        return "all that was asked for is done"
    if asked:
        return "it was asked to end"
    if ended == Exit.BAD_INPUT:
        return "the configuration, the data or the model cannot work"
    if ended == Exit.INTERRUPTED:
        return "it was interrupted, with nothing to save to or twice"
    return ""


# A launch does not blame a host for code 69. A rank that ends the job since another was silent lets
# the launcher end all; the first of these deaths said nothing of the cause.
def _cause(last: Start) -> str:
    """Why the job may be started again."""
    if last.said == Exit.SAVED:
        return "it was interrupted, and has saved"
    if last.said == Exit.FAILED:
        return "it has failed"
    if last.code < 0:
        return f"the launcher was ended by signal {-last.code}"
    if last.said == Exit.DONE:
        return "all was done, and then a rank was lost"
    if last.code == Exit.DONE:
        return "nobody has said that all is done"
    if last.said is None and 0 < last.code < _BY_SIGNAL and not last.lost:
        return f"the launcher ended with {last.code}"
    return "a rank was lost"
