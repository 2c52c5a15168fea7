"""Tells what was added to gradients after they were complete, without a call for each addition."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn


# An addition in place counts up the version of a tensor. A hook of autograd's would cost a call for
# each.
class LateGradients:
    """The gradients of some parameters as they were when they were complete."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._complete: list[tuple[Tensor | None, int]] = []

    def remember(self) -> None:
        """Take what each parameter's gradient is now for complete: whatever else is found there
        came too late."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._complete = [(one, 0 if one is None else one._version) for one in gradients]

    def __iter__(self) -> Iterator[int]:
        """The indices of the parameters whose gradient has changed since it was complete."""
        for place, (gradient, version) in enumerate(self._complete):
            now = self._parameters[place].grad
            if now is not gradient or (now is not None and now._version != version):
                yield place
