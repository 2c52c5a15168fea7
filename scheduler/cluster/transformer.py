"""A transformer on a cluster: what its activations take, and how long a step takes.

The forms of Korthikanti et al. 2022 for models like GPT, in 16 bits. Tensor parallelism over t
devices, s tokens a sequence, b sequences a microbatch, width h, a heads. A layer keeps, in bytes:

    nothing runs again                 s b h (10 + 24 / t + 5 a s / (h t))
    with sequence parallelism          s b h (34 + 5 a s / h) / t
    attention runs again (selective)   the same without 5 a s / h
    the layer runs again (full)        2 s b h

A duration is a roofline for each part of a layer. Large products reach the device's share of its
operations. The scores of attention are products that are bound by either limit. All else moves
bytes at the speed of memory. Members of a team exchange 2 s b h bytes twice in a forward and twice
in a backward, and wait for it. With sequence parallelism a reduce-scatter and an all-gather take as
long as an all-reduce without.

A step of m microbatches takes m times as long as the stage with most work, which is the last one,
since it has the logits; then the bubble, (p - 1) / v of a microbatch where a device has v chunks
(Narayanan et al. 2021); then the optimizer. Replicas are left out.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .cluster import Cluster
from .collectives import ring

_NUMBER = 2  # bytes of a number in 16 bits

# Bytes moved for each number beside products: what each operation reads and writes. Norms (8) and
# dropouts with their residual (14) are of all tokens unless the sequence is cut. GeLU on 4 h, the
# copies of queries, keys and values, and of contexts, are the tensor-parallel part. A score goes
# through softmax (4) and dropout (5), and its product writes or reads it (2).
_WHOLE, _CUT, _SOFTMAX, _SCORE = 22, 32, 9, 2
_BACK = 1.5  # a backward moves 6 bytes where a forward moves 4: it reads one more tensor
_LOGITS = 10  # of a logit: it is written, then read and written by loss and gradient
# Of a parameter, by norm and Adam: gradient in float32 (12: read by the norm, scaled, zeroed),
# weight and moments read and written (24), and the narrow weight (2 to 4).
_STEP = 40


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model like GPT.

    Args:
        layers: number of its blocks, 1 or more.
        width: numbers of a token between blocks.
        heads: number of heads of attention.
        context: tokens of a sequence.
        vocabulary: number of different tokens.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Number of parameters; the last layer shares the table of embeddings."""
        of_block = 12 * self.width**2 + 13 * self.width
        return self.layers * of_block + (self.vocabulary + self.context) * self.width


@dataclass(frozen=True, slots=True)
class Layout:
    """How a replica of a model lies on devices.

    Args:
        tensor: number of devices that hold each layer together; they are on one node.
        pipeline: number of stages' ranks, 1 or more.
        chunks: number of stages of a rank, 1 or more.
        samples: sequences of a microbatch.
        microbatches: microbatches of a step.
        sequence: whether norms and dropouts are cut along the sequence (sequence parallelism).
        recompute: what runs again: "none", "selective" (attention), or "full" (each layer).
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    samples: int = 1
    microbatches: int = 1
    sequence: bool = False
    recompute: str = "none"

    def __post_init__(self) -> None:
        if self.recompute not in ("none", "selective", "full"):
            raise ValueError(
                f"recompute = {self.recompute!r}; expected 'none', 'selective' or 'full'"
            )


class LayerSeconds(NamedTuple):
    """Durations of a microbatch on a layer, in seconds."""

    forward: float
    backward: float  # without what runs again
    again: float  # what runs again before or in the backward


def activation_bytes(model: Transformer, layout: Layout) -> float:
    """Bytes that one layer keeps of a microbatch on each device of its team."""
    numbers = model.context * layout.samples * model.width
    if layout.recompute == "full":
        return 2 * numbers / (layout.tensor if layout.sequence else 1)
    scores = 5 * model.heads * model.context / model.width if layout.recompute == "none" else 0.0
    if layout.sequence:
        return numbers * (34 + scores) / layout.tensor
    return numbers * (10 + (24 + scores) / layout.tensor)


def layer_seconds(
    model: Transformer, layout: Layout, cluster: Cluster, kind: str = "bfloat16"
) -> LayerSeconds:
    """Durations of a microbatch on one layer.

    Args:
        model, layout, cluster: the model, how it lies, and where.
        kind: type of its products.
    Raises:
        ValueError: the cluster says no operations a second for that type.
    """
    rate, memory = cluster.device.rate(kind), cluster.device.bandwidth
    tokens, t = model.context * layout.samples, layout.tensor
    products = 24 * tokens * model.width**2 / t / rate
    num_scores = model.heads * model.context * tokens / t
    each = max(2 * tokens * model.context * model.width / t / rate, _SCORE * num_scores / memory)
    attention = 2 * each  # queries with keys, scores with values
    softmax = _SOFTMAX * num_scores / memory
    of_tokens = _WHOLE / (t if layout.sequence else 1) + _CUT / t
    rest = of_tokens * tokens * model.width / memory
    exchanges = 2 * ring(t, _NUMBER * tokens * model.width, cluster.within, t)
    forward = products + attention + softmax + rest + exchanges
    backward = 2 * products + 2 * attention + _BACK * (softmax + rest) + exchanges
    again = {"none": 0.0, "selective": attention + softmax, "full": forward}
    return LayerSeconds(forward, backward, again[layout.recompute])


def step_seconds(
    model: Transformer, layout: Layout, cluster: Cluster, kind: str = "bfloat16"
) -> float:
    """Seconds of a step of one replica, optimizer included; arguments and errors are those of
    `layer_seconds`."""
    stage = sum(layer_seconds(model, layout, cluster, kind)) * model.layers / layout.pipeline
    stage += _sends_seconds(model, layout, cluster)
    last = stage + _logits_seconds(model, layout, cluster, kind)
    bubble = (layout.pipeline - 1) / layout.chunks * stage
    parameters = model.parameters / (layout.tensor * layout.pipeline)
    optimizer = _STEP * parameters / cluster.device.bandwidth
    return layout.microbatches * last + bubble + optimizer


def _sends_seconds(model: Transformer, layout: Layout, cluster: Cluster) -> float:
    """Activations and gradients of a microbatch, which each chunk sends on: each member of the team
    sends its part, at the same time as the others."""
    if layout.pipeline == 1:
        return 0.0
    size = _NUMBER * model.context * layout.samples * model.width / layout.tensor
    is_within = layout.tensor * layout.pipeline <= cluster.devices
    link = cluster.within if is_within else cluster.across
    return 2 * layout.chunks * link.seconds(size, layout.tensor)


def _logits_seconds(model: Transformer, layout: Layout, cluster: Cluster, kind: str) -> float:
    """Logits and loss of a microbatch, forward and backward."""
    logits = model.context * layout.samples * model.vocabulary / layout.tensor
    products = 6 * logits * model.width / cluster.device.rate(kind)
    return products + _LOGITS * logits / cluster.device.bandwidth
