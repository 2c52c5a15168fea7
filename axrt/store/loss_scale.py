"""The dynamic loss scale of float16: small gradients are lifted above the least number of the
type."""

# The loss of a step is multiplied by a scale before its backwards, and gradients are divided by it
# before anything looks at them. Where a gradient has overflowed, no rank steps and the scale falls;
# after a number of good steps in a row it rises. Every rank comes to the same scale, since it
# follows from the norms that all ranks hear.
#
# A scale belongs to a step, since one stage of a rank may hear the vote before another has divided
# by it.

from collections.abc import Mapping
from typing import Any, NamedTuple

from axrt.config import Precision
from axrt.errors import NonFiniteLossError

_GROWTH, _BACKOFF = 2.0, 0.5  # after good steps, after an overflow; as torch's GradScaler has them
MOST = 2.0**32  # more than lifts the least number of float16 to the largest


class _State(NamedTuple):
    """The scale of a step, and the number of good steps in a row before it at that scale."""

    scale: float
    good: int


class LossScale:
    """The scales of the step that is under way and of the one before."""

    def __init__(self, precision: Precision) -> None:
        self._settings, self._start = precision, _State(float(precision.loss_scale), 0)
        self._states = {0: self._start}  # by step

    def of(self, step: int) -> float:
        """The scale of a step; the step before has been judged."""
        return self._states[step].scale

    def judge(self, step: int, overflowed: bool) -> None:
        """Settle the scale of the next step; it may be called again, with the same verdict.

        Raises:
            NonFiniteLossError: there was an overflow at the least scale.
        """
        if step + 1 in self._states:
            return
        scale, good = self._states[step]
        on = self._settings
        moves = on.loss_scale_interval > 0
        if overflowed and moves and scale <= on.loss_scale_floor:
            raise NonFiniteLossError(
                f"a gradient or a loss of step {step} overflowed at the least loss scale, "
                f"precision.loss_scale_floor = {on.loss_scale_floor:g}; expected it to fit "
                "float16. Look at the data, lower optimizer.lr, or set precision.weights = "
                "'bfloat16'"
            )
        if not moves:
            after = _State(scale, 0)
        elif overflowed:
            after = _State(max(scale * _BACKOFF, on.loss_scale_floor), 0)
        elif good + 1 >= on.loss_scale_interval:
            after = _State(min(scale * _GROWTH, MOST), 0)
        else:
            after = _State(scale, good + 1)
        # The step itself stays: other stages of this rank have yet to divide by its scale.
        self._states = {step: self._states[step], step + 1: after}

    def saved(self, step: int) -> dict[str, Any]:
        """The scale of the next step, for a checkpoint after so many steps."""
        return self._states[step]._asdict()

    def restore(self, step: int, saved: Mapping[str, Any] | None) -> None:
        """Take the scale from a checkpoint after so many steps, and raise it to the floor of this
        run; None: begin anew."""
        state = _State(**saved) if saved else self._start
        least = float(self._settings.loss_scale_floor)
        self._states = {step: state._replace(scale=max(float(state.scale), least))}
