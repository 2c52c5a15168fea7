"""The product that is a linear layer's weight gradient, noted in a backward and computed later."""

from torch import Tensor


class WeightProduct:
    """The weight's gradient, of shape (outputs, inputs), from the output's (rows, outputs) and the
    input (..., inputs).

    Not `weight.grad.addmm_`: it would save a pass over memory, and has other bits than a product
    that is added.
    """

    def __init__(self, gradient: Tensor, x: Tensor) -> None:
        self._gradient, self._x = gradient, x
        self._versions = gradient._version, x._version

    @property
    def reads(self) -> tuple[Tensor, Tensor]:
        return self._gradient, self._x

    def __call__(self) -> Tensor:
        if self._versions != (self._gradient._version, self._x._version):
            raise RuntimeError(
                f"the input of a torch.nn.Linear, of shape {tuple(self._x.shape)}, or its output's "
                "gradient was changed in place after the "
                "backward, and the weight gradient that waits needs it; expected a policy that "
                "does not split backwards, such as "
                "1f1b, or a clone of what is changed"
            )
        return self._gradient.t().mm(flat_rows(self._x))


def flat_rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix: all dimensions but the last are its rows."""
    return tensor.reshape(-1, tensor.shape[-1])
