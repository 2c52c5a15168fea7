"""What a rank expects of votes: that a step is as it would be without clipping and loss scaling."""

from torch import Tensor

from axrt.store.norms import clip_factor


class Expectation:
    """Says which steps are tried before their vote.

    Args:
        mode: "auto" tries a step where the one before was neither clipped nor skipped; "always"
            tries all; "never" none.
        clip: largest 2-norm of all gradients; 0: no limit.
    """

    def __init__(self, mode: str, clip: float) -> None:
        self._mode, self._clip = mode, clip
        self._plain: dict[int, bool] = {}  # by step; of the newest two

    def hear(self, step: int, norm: Tensor) -> None:
        """Take in the vote of a step, shape (); it may come again for another stage."""
        plain = bool(norm.isfinite()) and (
            not self._clip or bool(clip_factor(norm, self._clip) == 1.0)
        )
        before = {one: of for one, of in self._plain.items() if one == step - 1}
        self._plain = {**before, step: plain}

    def tries(self, step: int) -> bool:
        """The step is tried before its vote; the vote of the step before has been heard, if there
        was one."""
        return self._mode == "always" or (self._mode == "auto" and self._plain.get(step - 1, False))

    def is_plain(self, step: int) -> bool:
        """The vote of a step, which has been heard, changes nothing."""
        return self._plain[step]
