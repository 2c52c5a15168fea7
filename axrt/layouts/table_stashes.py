"""What stages keep of a microbatch, from a table of costs of layers."""

# The ledger runs every stage on tensors without memory, which takes a second for each new cut or
# size. A search tries hundreds, so there a stage keeps what its layers keep, and what is chosen is
# looked at by the ledger again.

from collections.abc import Iterator, Sequence
from itertools import pairwise

from axrt.config import Config
from axrt.ledger.activations import StashBytes
from axrt.scheduler.job import Job
from axrt.scheduler.simulation.cost_table import LayerCosts

from .step_time import LayersOf


class TableStashes:
    """Adds up what the layers of stages keep."""

    def __init__(self, layers_of: LayersOf) -> None:
        self._layers_of = layers_of

    def of_stages(self, config: Config, job: Job) -> list[StashBytes]:
        """The sizes on each stage; see `Stashes`."""
        layers = self._layers_of(config.parallel.tensor, config.schedule.microbatch_size)
        return list(_sizes(job, layers))


def _sizes(job: Job, layers: Sequence[LayerCosts]) -> Iterator[StashBytes]:
    for stage, (first, end) in enumerate(pairwise(job.cuts)):
        count = job.recomputed.get(stage, 0)
        again, rest = layers[first : first + count], layers[first + count : end]
        kept = sum(layer.stash_bytes for layer in rest)
        if again:  # begins with what came in, also at joints
            came_in = layers[first - 1].sent_bytes if first else 0
            kept += came_in + sum(sum(layer.joints) for layer in again)
        made_again = sum(layer.stash_bytes for layer in again)
        sent = layers[end - 1].sent_bytes
        joints = [size for one in layers[first:end] for size in (*one.joints, *one.back_joints)]
        yield StashBytes(kept, made_again, kept, sent, sent, max(joints, default=0))
