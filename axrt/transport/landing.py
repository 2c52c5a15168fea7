"""Memory that waits for the tensors of certain messages, so that nothing is copied when they have
come."""

from collections.abc import Sequence

from torch import Tensor

from axrt.device.device import is_on_host

from .control import News
from .wire import Layout


class Landings:
    """The memory that waits for messages on a rank, by generation and message."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, News], tuple[Tensor, ...]] = {}
        self._newest = 0  # generation

    def expect(self, generation: int, message: News, buffers: Sequence[Tensor]) -> None:
        """Let the tensors of a message go into `buffers`, one each, in order; () takes back what
        was said before.

        Messages of older generations are not expected any more.
        """
        if generation > self._newest:
            self._newest = generation
            self._buffers.clear()
        if buffers:
            self._buffers[generation, message] = tuple(buffers)
        else:
            self._buffers.pop((generation, message), None)

    def take(self, generation: int, message: News) -> tuple[Tensor, ...]:
        """The memory for a message that has come; () where none was given."""
        return self._buffers.pop((generation, message), ()) if self._buffers else ()


def fits(buffer: Tensor, layout: Layout) -> bool:
    """MPI may write a tensor of this layout straight into the buffer, which then is as it was
    sent."""
    spec = layout.spec
    return (
        is_on_host(buffer)
        and (buffer.dtype, tuple(buffer.shape), buffer.stride())
        == (spec.dtype, spec.shape, spec.strides)
        and buffer.is_contiguous()
        and not spec.requires_grad
    )
