"""`[precision]`: types of weights, gradients and products."""

from collections.abc import Iterator
from dataclasses import dataclass

from .section import Section, key


@dataclass(frozen=True, slots=True)
class Precision(Section):
    """The types of weights, activations and gradients (mixed precision)."""

    compute: str = key(
        "float32",
        "autocast: bfloat16 = of activations and products, while weights and gradients stay "
        "float32; float32 = off",
        choices=("float32", "bfloat16"),
    )
    weights: str = key(
        "float32",
        "the type in which weights live on the device and layers compute; a narrow one has masters "
        "in float32 beside it, which the optimizer steps",
        choices=("float32", "bfloat16", "float16"),
    )
    gradients: str = key(
        "float32",
        "the type in which gradients of narrow weights add up over microbatches; 'weights' = their "
        "own. Replicas are always added up in float32",
        choices=("float32", "weights"),
    )
    keep: tuple[str, ...] = key(
        (),
        "names of classes whose modules stay float32 where weights are narrow, such as "
        "['RMSNorm']; subclasses count",
    )
    loss_scale: float = key(
        65536.0, "float16: the first factor on the loss", least=2**-24, most=2**32
    )
    loss_scale_interval: int = key(
        2000,
        "float16: good steps in a row before the scale doubles; after an overflow it is halved; 0 "
        "= it stays as it is",
        least=0,
    )
    loss_scale_floor: float = key(
        1.0, "float16: the least scale; an overflow there ends the run", least=2**-24, most=2**32
    )

    @property
    def scales(self) -> bool:
        """The loss is scaled."""
        return self.weights == "float16"

    def _of_all(self) -> Iterator[str]:
        if self.compute != "float32" and self.weights != "float32":
            yield (
                f"precision.compute = {self.compute!r} and precision.weights = {self.weights!r}: "
                "narrow weights are computed with as they are, without autocast; expected "
                "precision.compute = 'float32'"
            )
        if self.loss_scale < self.loss_scale_floor:
            yield (
                f"precision.loss_scale = {self.loss_scale:g} is below "
                f"precision.loss_scale_floor = {self.loss_scale_floor:g}; expected at least that"
            )
