"""What a linear layer was given in a forward and in its backward: the pair of which its weight
gradient is the product. It may be noted in a backward and used later."""

from torch import Tensor


class Pair:
    """The gradient of an output, of shape (rows, outputs), and the input, of shape (..., inputs).

    Args:
        version: version that the input had in the forward; None: the one that it has now.
    """

    _changed = (
        "changed in place after the backward, and the weight gradient that waits needs it; "
        "expected a policy that does not split backwards, such as 1f1b, or a clone of what is "
        "changed"
    )

    def __init__(self, gradient: Tensor, x: Tensor, version: int | None = None) -> None:
        self._gradient, self._x = gradient, x
        self._versions = gradient._version, x._version if version is None else version

    @property
    def reads(self) -> tuple[Tensor, Tensor]:
        return self._gradient, self._x

    def rows(self) -> tuple[Tensor, Tensor]:
        """The gradient, and the input with a row for each of its rows.

        Raises:
            RuntimeError: one of them was changed in place.
        """
        if self._versions != (self._gradient._version, self._x._version):
            raise RuntimeError(
                f"the input of a linear layer, of shape {tuple(self._x.shape)}, or its output's "
                f"gradient was {self._changed}"
            )
        return self._gradient, flat_rows(self._x)


class WeightProduct(Pair):
    """The weight's gradient, of shape (outputs, inputs).

    Not `weight.grad.addmm_`: it would save a pass over memory, and has other bits than a product
    that is added.
    """

    def __call__(self) -> Tensor:
        gradient, x = self.rows()
        return gradient.t().mm(x)


class RightProduct(Pair):
    """The weight's gradient where the weight is of shape (inputs, outputs)."""

    def __call__(self) -> Tensor:
        gradient, x = self.rows()
        return x.t().mm(gradient)


def flat_rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix: all dimensions but the last are its rows."""
    return tensor.reshape(-1, tensor.shape[-1])
