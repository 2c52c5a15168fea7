"""What ranks hold of a layout at least, whatever its policy and cuts, before it is predicted."""

# Of thousands of ranks most shapes are too large by far, and a prediction takes a tenth of a
# second. A rank holds at least its share of the weights, of masters and moments, and of what the
# layers keep of one microbatch, and some rank holds no less than the average.

from collections.abc import Sequence

from axrt.ledger.ledger import Purpose
from axrt.ledger.prediction import Prediction
from axrt.scheduler.simulation.cost_table import LayerCosts

from .candidates import Saving, Shape


class LeastHeld:
    """The least that ranks of teams of one size hold.

    Args:
        alone: the prediction of a team that holds the whole model, and saves no memory.
    """

    def __init__(self, alone: Prediction) -> None:
        ledger = alone.ledger_of(0, 0, 0)
        self._weights = ledger.of_purpose(Purpose.WEIGHTS)
        self._state = ledger.of_purpose(Purpose.MASTERS) + ledger.of_purpose(Purpose.MOMENTS)

    def of(self, shape: Shape, layers: Sequence[LayerCosts], zero: int, saving: Saving) -> float:
        """Bytes on the device of a rank, on the average of those of a pipeline."""
        state = self._state / (shape.data if zero else 1)
        kept = sum(layer.stash_bytes for layer in layers)
        away = saving.offload != "none"
        again = saving.recompute != "none"
        return (self._weights + (0 if away else state) + (0 if again else kept)) / shape.pipe
