"""What stages, ranks and messages take in a world that varies as real ones do."""

from math import exp
from random import Random
from typing import NamedTuple

_WIDTH = _CONTEXT = 256
_VOCABULARY, _BLOCKS = 8192, 4
# Multiplications a token: those of a block's twelve square products and its attention over a half
# of the context, and those of the head.
_BLOCK = 12 * _WIDTH**2 + _CONTEXT * _WIDTH
HEAD = _VOCABULARY * _WIDTH / (_BLOCKS * _BLOCK)


class World(NamedTuple):
    """How a world differs from one in which every task of a rank takes equally long.

    Args:
        name: of the table.
        head: what the last stage does besides, in forwards of a rank.
        weight: a weight gradient, in forwards.
        slow: factor of rank 1.
        lengths: sigma of a lognormal factor of a microbatch, the same on all stages.
        jitter: sigma of a lognormal factor of each task.
        delay_s: seconds that a message is under way.
    """

    name: str
    head: float = 0.0
    weight: float = 1.0
    slow: float = 1.0
    lengths: float = 0.0
    jitter: float = 0.0
    delay_s: float = 0.0

    def stage(self, kind: str, is_last: bool, chunks: int) -> float:
        """What a task of a stage takes, in forwards of a rank."""
        more = self.head if is_last else 0.0
        return (1 / chunks + more) * (self.weight if kind == "W" else 1.0)

    def rank(self, rank: int) -> float:
        """Factor of a rank."""
        return self.slow if rank == 1 else 1.0

    def microbatches(self, seed: int, count: int) -> list[float]:
        """Factor of each microbatch."""
        stream = Random(f"{seed} lengths")
        return [exp(self.lengths * stream.gauss(0, 1)) for _ in range(count)]


CHUNK_S = 0.005  # a forward of a chunk where a rank has two
WORLDS = {
    world.name: world
    for world in (
        World("even"),
        World("head", head=HEAD),
        World("delay", delay_s=CHUNK_S),
        World("weight", weight=0.5),
        World("slow", slow=1.2),
        World("lengths", lengths=0.5),
    )
}
